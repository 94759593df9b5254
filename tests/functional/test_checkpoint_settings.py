"""The checkpoint's settings in real jobs: kept versions, the best one, fallback and warm start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from tests.functional import job as commands
from tests.functional.results import records
from tests.functional.test_training_job import settings
from tests.toy_kg import partition, ring_triples, toy_dataset, write_splits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dataset and a finished run of two trainers that keeps versions."""
    folder = tmp_path_factory.mktemp("kept")
    dataset = toy_dataset()
    kept = ("checkpoint.keep_every_epochs=2", "checkpoint.every_minutes=0.0001", "checkpoint.keep_best=true")
    commands.train(folder, 2, *settings(dataset, folder / "run", *kept, "evaluation.valid_every_epochs=1"))
    return dataset, folder / "run"


def test_epochs_and_the_best_are_kept(run: tuple[Path, Path]) -> None:
    folder = run[1] / "checkpoint"
    for name, epochs in (("", 4), ("epoch_2", 2), ("epoch_4", 4)):
        checkpoint = open_checkpoint(folder / name)
        checkpoint.verify()
        assert checkpoint.progress["finished_epochs"] == epochs and checkpoint.progress["batches_done"] == 0
    best = json.loads((folder / "best").read_text(encoding="utf-8"))
    assert open_checkpoint(folder / "best").progress["finished_epochs"] == best["finished_epochs"]
    # At the end of each of 4 epochs, and after those of its first 3 batches before which 6 ms have passed.
    assert 4 <= open_checkpoint(folder).version <= 4 * 4
    assert [(record["epoch_idx"], record["stats"]["count"]) for record in records(run[1])] == [
        (e, 192) for e in range(4)
    ]


def test_warm_start_with_entities_and_relations_added(run: tuple[Path, Path], tmp_path: Path) -> None:
    larger = ring_triples(64)
    larger["relation"] = larger["relation"].replace("turn_22", "turn_back")
    dataset = partition(write_splits(tmp_path / "source", larger), tmp_path / "larger", "--num-parts", "1")
    words = settings(dataset, tmp_path / "run", f"checkpoint.init_path={run[1]}", "training.num_epochs=0")
    done = commands.train_alone(*words, "evaluation.split=none")
    text = done.stdout + done.stderr
    assert "entity: 60 rows taken over, 4 new" in text and "relation: 3 rows taken over, 1 new" in text
    done = commands.train_alone(*words, "model.dimension=18", status=2)
    assert "has dim 16, this run has 18" in done.stderr


def test_fallback_goes_on_from_the_newest_good_version(run: tuple[Path, Path]) -> None:
    dataset, folder = run
    newest = open_checkpoint(folder)
    before = newest["entity"][:]
    (folder / "checkpoint" / "checkpoint_version.txt").write_text("", encoding="utf-8")
    words = settings(dataset, folder, "evaluation.split=none")
    done = commands.train_alone(*words, status=2)
    assert "checkpoint_version.txt is empty" in done.stderr
    assert f"newest good version is {newest.version}:" in done.stderr
    done = commands.train_alone(*words, "checkpoint.fallback=true")
    assert f"going on from version {newest.version}\n" in done.stdout + done.stderr
    assert "resumed: 4 epochs" in done.stdout + done.stderr
    assert torch.equal(open_checkpoint(folder)["entity"][:], before)
