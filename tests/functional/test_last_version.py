"""Versions of real jobs: the last one is not lost, kept ones, a fallback, and runs that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dglkge.checkpoint.reader import open_checkpoint
from tests import warm
from tests.functional import job as commands
from tests.functional.results import assert_near, records, tables
from tests.functional.test_training_job import settings
from tests.toy_kg import partition, ring_triples, toy_dataset, write_splits

SCRIPT = str(Path(__file__).with_name("elastic_train.py"))


@pytest.mark.parametrize("num_trainers", [0, 2])
def test_an_exception_after_the_last_batch(tmp_path: Path, num_trainers: int) -> None:
    """With plain python (0), and under the launcher, where trainers skip the interpreter's shutdown."""
    words = settings(toy_dataset(), tmp_path / "run", "evaluation.split=none", "training.num_epochs=1")
    script = (SCRIPT, "--ending", "fail")
    command = [*warm.python(), *script, *commands.sets(words)]
    if num_trainers:
        command = commands.launch_command(tmp_path, num_trainers, words, script=script)
    done = commands.run(command, status=1)
    text = done.stdout + done.stderr
    assert "ValueError: a mistake of the script's own" in text
    assert "cannot schedule new futures" not in text and "was not written" not in text
    assert open_checkpoint(tmp_path / "run", verify=True).progress["finished_epochs"] == 1


def test_trainers_that_leave_an_epoch_by_break_commit_and_validate_it_together(tmp_path: Path) -> None:
    """Nothing follows the loop in their script: it is done before they leave."""
    more = ("evaluation.split=none", "checkpoint.every_epochs=0", "evaluation.valid_every_epochs=2")
    words = settings(toy_dataset(), tmp_path / "run", *more)
    commands.train(tmp_path, 2, *words, script=(SCRIPT, "--ending", "break"))
    progress = open_checkpoint(tmp_path / "run", verify=True).progress
    assert (progress["finished_epochs"], progress["batches_done"]) == (2, 0)
    validation = json.loads((tmp_path / "run" / "validation.json").read_text())
    assert validation == {"finished_epochs": 2}


@pytest.fixture(scope="module")
def train_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set without valid and test triples."""
    folder = tmp_path_factory.mktemp("train-only")
    source = write_splits(folder / "source", ring_triples()) / "train.tsv"
    return partition(source, folder / "dataset", "--num-parts", "1", "--method", "random", "--split", "1,0,0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("evaluation.split=test", "evaluation.split is test, and {} has no test triples to rank; allowed is"),
        ("evaluation.valid_every_epochs=2", "2, and {} has no valid triples to rank; allowed is 0"),
        ("training.edge_sets=[trian]", "unknown edge set 'trian'; did you mean 'train'"),
        ("checkpoint.storage=s4://line/run", "checkpoint.storage: unknown scheme of a URL 's4'; known:"),
        ("output=s3://line/run", "checkpoint.storage takes the URL"),
    ],
)
def test_what_does_not_fit_is_one_line_before_training(train_only, tmp_path, change, message):
    options = settings(train_only, tmp_path / "run", "evaluation.split=none", change)
    done = commands.train_alone(*options, status=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert message.format(train_only) in done.stderr
    assert not (tmp_path / "run" / "checkpoint").exists()


def files_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


def test_a_run_that_is_started_with_other_settings_is_refused_and_stays_what_it_was(tmp_path: Path) -> None:
    """config.json and the metrics too, and with them the type of matmuls that auto has chosen."""
    run = tmp_path / "run"
    options = settings(toy_dataset(), run, "training.num_epochs=1")
    commands.train_alone(*options)
    before = files_of(run)
    assert json.loads(before["config.json"])["training"]["matmul_dtype"] == "float32"
    done = commands.train_alone(*options, "loss.name=logistic", "training.matmul_dtype=bfloat16", status=2)
    assert "Traceback" not in done.stderr, done.stderr
    words = "loss.name was 'softmax', is 'logistic'; training.matmul_dtype was 'float32', is 'bfloat16'; take"
    assert f"{run}/checkpoint is of a run with other settings: {words} another output" in done.stderr
    assert files_of(run) == before
    commands.train_alone(*options, "training.num_epochs=2")
    config = json.loads((run / "config.json").read_text())
    assert (config["training"]["num_epochs"], config["training"]["matmul_dtype"]) == (2, "float32")
    assert open_checkpoint(run).config["training"]["num_epochs"] == 2


def test_epochs_and_the_best_are_kept_and_a_damaged_newest_version_falls_back(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoint"
    kept = ("checkpoint.keep_every_epochs=2", "checkpoint.every_minutes=0.0001", "checkpoint.keep_best=true")
    commands.train(tmp_path, 2, *settings(toy_dataset(), run, *kept, "evaluation.valid_every_epochs=1"))
    for name, epochs in (("", 4), ("epoch_2", 2), ("epoch_4", 4)):
        progress = open_checkpoint(folder / name, verify=True).progress
        assert progress["finished_epochs"] == epochs and progress["batches_done"] == 0
    best = json.loads((folder / "best").read_text(encoding="utf-8"))
    assert open_checkpoint(folder / "best").progress["finished_epochs"] == best["finished_epochs"]
    # At the end of each of 4 epochs, and after those of its first 3 batches before which 6 ms have passed.
    newest, before = open_checkpoint(run).version, tables(run)
    assert 4 <= newest <= 4 * 4
    counts = [(line["epoch_idx"], line["stats"]["count"]) for line in records(run)]
    assert counts == [(epoch, 192) for epoch in range(4)]

    (folder / "checkpoint_version.txt").write_text("", encoding="utf-8")
    words = settings(toy_dataset(), run, "evaluation.split=none")
    done = commands.train_alone(*words, status=2)
    assert "checkpoint_version.txt is empty" in done.stderr
    assert f"newest good version is {newest}:" in done.stderr
    done = commands.train_alone(*words, "checkpoint.fallback=true")
    assert f"going on from version {newest}\n" in done.stdout + done.stderr
    assert "resumed: 4 epochs" in done.stdout + done.stderr
    assert_near(tables(run), before, 0, 0)
