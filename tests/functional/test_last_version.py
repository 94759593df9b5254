"""The last version is not lost, whatever comes after the last batch; other settings make another run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dglkge.checkpoint import open_checkpoint
from tests import warm
from tests.functional import job as commands
from tests.functional.test_training_job import settings
from tests.toy_kg import partition, ring_triples, toy_dataset, write_splits

SCRIPT = str(Path(__file__).with_name("failing_train.py"))


def run_script(
    folder: Path, num_trainers: int, ending: str, *changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with plain python (0 trainers) or under the launcher."""
    options = settings(toy_dataset(), folder / "run", "evaluation.split=none", *changes)
    words = (SCRIPT, ending)
    command = [*warm.python(), *words, *commands.sets(options)]
    if num_trainers:
        command = commands.launch_command(folder, num_trainers, options, script=words)
    return commands.run(command, status=1 if ending == "fail" else 0)


@pytest.mark.parametrize("num_trainers", [0, 2])
def test_an_exception_after_the_last_batch(tmp_path: Path, num_trainers: int) -> None:
    """With plain python (0), and under the launcher, where trainers skip the interpreter's shutdown."""
    done = run_script(tmp_path, num_trainers, "fail", "training.num_epochs=1")
    text = done.stdout + done.stderr
    assert "ValueError: a mistake of the script's own" in text
    assert "cannot schedule new futures" not in text and "was not written" not in text
    checkpoint = open_checkpoint(tmp_path / "run")
    checkpoint.verify()
    assert checkpoint.progress["finished_epochs"] == 1


def test_trainers_that_leave_an_epoch_by_break_commit_and_validate_it_together(tmp_path: Path) -> None:
    """Nothing follows the loop in their script: it is done before they leave."""
    run_script(tmp_path, 2, "break", "checkpoint.every_epochs=0", "evaluation.valid_every_epochs=2")
    checkpoint = open_checkpoint(tmp_path / "run")
    checkpoint.verify()
    assert (checkpoint.progress["finished_epochs"], checkpoint.progress["batches_done"]) == (2, 0)
    validation = json.loads((tmp_path / "run" / "validation.json").read_text())
    assert validation == {"finished_epochs": 2}


@pytest.mark.parametrize(
    ("missing", "changes", "words"),
    [
        ("test", (), "evaluation.split is test, and {} has no test triples to rank; allowed is none"),
        (
            "valid",
            ("evaluation.valid_every_epochs=2",),
            "evaluation.valid_every_epochs is 2, and {} has no valid triples to rank; allowed is 0",
        ),
    ],
)
def test_a_split_that_is_not_there_is_refused_before_training(tmp_path, missing, changes, words):
    source = write_splits(tmp_path / "source", ring_triples())
    (source / f"{missing}.tsv").unlink()
    dataset = partition(source, tmp_path / "dataset", "--num-parts", "1")
    done = commands.train_alone(*settings(dataset, tmp_path / "run", *changes), status=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert words.format(dataset) in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_started_with_other_settings_is_refused_and_stays_what_it_was(tmp_path: Path) -> None:
    """config.json and the metrics too, and with them the type of matmuls that auto has chosen."""
    run = tmp_path / "run"
    options = settings(toy_dataset(), run, "training.num_epochs=1")
    commands.train_alone(*options)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert json.loads(before["config.json"])["training"]["matmul_dtype"] == "float32"
    done = commands.train_alone(*options, "loss.name=logistic", "training.matmul_dtype=bfloat16", status=2)
    assert "Traceback" not in done.stderr, done.stderr
    words = "loss.name was 'softmax', is 'logistic'; training.matmul_dtype was 'float32', is 'bfloat16'; take"
    assert f"{run}/checkpoint is of a run with other settings: {words} another output" in done.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    commands.train_alone(*options, "training.num_epochs=2")
    config = json.loads((run / "config.json").read_text())
    assert (config["training"]["num_epochs"], config["training"]["matmul_dtype"]) == (2, "float32")
    assert open_checkpoint(run).config["training"]["num_epochs"] == 2
