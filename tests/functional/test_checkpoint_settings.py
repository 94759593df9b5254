"""The checkpoint's settings in real jobs: kept versions, the best one and fallback."""

from __future__ import annotations

import json
from pathlib import Path

from dglkge.checkpoint.reader import open_checkpoint
from tests.functional import job as commands
from tests.functional.results import assert_near, records, tables
from tests.functional.test_training_job import settings
from tests.toy_kg import toy_dataset


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
    assert [(line["epoch_idx"], line["stats"]["count"]) for line in records(run)] == [
        (epoch, 192) for epoch in range(4)
    ]

    (folder / "checkpoint_version.txt").write_text("", encoding="utf-8")
    words = settings(toy_dataset(), run, "evaluation.split=none")
    done = commands.train_alone(*words, status=2)
    assert "checkpoint_version.txt is empty" in done.stderr
    assert f"newest good version is {newest}:" in done.stderr
    done = commands.train_alone(*words, "checkpoint.fallback=true")
    assert f"going on from version {newest}\n" in done.stdout + done.stderr
    assert "resumed: 4 epochs" in done.stdout + done.stderr
    assert_near(tables(run), before, 0, 0)
