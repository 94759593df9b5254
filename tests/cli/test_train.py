"""What ``dglkge train`` says and refuses before it launches a job."""

from __future__ import annotations

import logging

import pytest

from dglkge.cli import launch
from dglkge.launch.arguments import script_config
from tests.toy_kg import partition, ring_triples


@pytest.fixture(autouse=True)
def log_level():
    yield
    logging.getLogger("dglkge").setLevel(logging.NOTSET)


@pytest.fixture
def launched(monkeypatch):
    """The command lines of the launcher, which launches nothing."""
    calls: list[list[str]] = []
    monkeypatch.setattr(launch, "main", lambda words: calls.append(words) or 0)
    return calls


def test_a_split_without_triples_is_not_ranked(shown, launched, tmp_path):
    (tmp_path / "source").mkdir()
    ring_triples().to_csv(tmp_path / "source" / "train.tsv", sep="\t", header=False, index=False)
    data = partition(tmp_path / "source", tmp_path / "data", "--split", "1")
    words = ["train", f"dataset={data}", f"output={tmp_path}/run", "--num-trainers", "1"]
    first, *further = shown(*words).splitlines()
    assert first.startswith("chosen for this data set (docs/quality.md): training.num_epochs=")
    assert further == [
        f"nothing is ranked: {data} has no test triples",
        f"next: dglkge predict {tmp_path}/run --head NAME --relation NAME; dglkge serve {tmp_path}/run; "
        f"dglkge report {tmp_path}/run",
    ]
    assert "evaluation.split=none" in launched[0]
    assert "nothing is ranked" not in shown(*words, "evaluation.split=train")
    assert "evaluation.split=none" not in launched[1]


def test_a_small_training_is_one_process(call, launched, dataset, tmp_path):
    words = ("train", f"dataset={dataset.path}", f"output={tmp_path}/run", "training.num_epochs=2")
    status, out, _ = call(*words)
    assert status == 0 and launched == [] and "\ntest split, filtered" in out
    stats = (tmp_path / "run" / "stats.jsonl").read_text().splitlines()
    assert (
        len([line for line in stats if '"epoch"' in line]) == 2 and not (tmp_path / "run" / "logs").exists()
    )
    # Of more than 200,000 triples in all epochs, or with an option of a job, it is a job.
    num_epochs = 200_000 // len(dataset.split("train")) + 1
    assert call(*words[:3], f"training.num_epochs={num_epochs}")[0] == 0
    assert call(*words, "--num-trainers", "2")[0] == 0 and len(launched) == 2


def test_what_is_refused_before_the_launch(refusal, launched, dataset, tmp_path):
    line = refusal("train", f"dataset={tmp_path}/nowhere")
    assert line == f"{tmp_path}/nowhere is no dataset folder: there is no such folder"
    (tmp_path / "file").write_text("")
    line = refusal("train", f"dataset={dataset.path}", f"output={tmp_path}/file")
    assert line == f"output is {tmp_path}/file, which is a file; expected a folder"
    assert launched == []


def test_the_launcher_reads_overrides_too(tmp_path):
    config = script_config(["train.py", "dataset=d", "--num", "3", "seed=4"], tmp_path)
    assert config is not None and (config.dataset, config.seed) == ("d", 4)
    assert script_config(["train.py", "seed=4"], tmp_path) is None
