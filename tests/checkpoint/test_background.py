"""Saving while training goes on: a consistent copy, failures that are told, nothing lost at the end."""

from __future__ import annotations

import subprocess
import threading

import pytest

from dglkge.checkpoint import CheckpointManager, TrainerGroup, open_checkpoint
from dglkge.checkpoint import part_files as row_stream
from dglkge.errors import StorageError
from dglkge.typing import RELATION
from tests import warm
from tests.checkpoint.toy_checkpoint import cut, holds, same, toy_meta, toy_names, toy_tables
from tests.toy_kg import REPOSITORY


@pytest.fixture
def held(monkeypatch):
    """Hold the writing of rows until the test lets it go."""
    gate = threading.Event()
    real = row_stream.fill_rows

    def wait_and_fill(*arguments):
        if not gate.wait(60):
            raise TimeoutError("nobody opened the gate")
        return real(*arguments)

    monkeypatch.setattr(row_stream, "fill_rows", wait_and_fill)
    yield gate
    gate.set()


def start(manager, meta, tables, **options):
    """Start a save of the whole tables; return the live part of the people."""
    part = cut("person", tables["person"], 1)[0]
    manager.start([part], cut(RELATION, tables[RELATION], 1)[0], meta, **options)
    return part


def manager_of(path, meta):
    return CheckpointManager(path, TrainerGroup(limit_seconds=0.1), toy_names(meta))


def test_rows_may_change_while_they_are_written(tmp_path, held):
    meta, manager = toy_meta(), manager_of(tmp_path, toy_meta())
    tables = toy_tables(meta)
    saved = tables["person"].rows.clone(), tables["person"].state["sum"].clone()
    part = start(manager, meta, tables)
    part.rows.fill_(7)
    part.state["sum"].fill_(7)
    manager.check()  # does not wait
    assert manager.latest() is None
    held.set()
    manager.finish()
    assert open_checkpoint(tmp_path).version == 1
    assert same(open_checkpoint(tmp_path)["person"][:], saved[0])
    again = cut("person", toy_tables(meta, 5)["person"], 1)[0]
    manager.restore([again])
    assert again.state["sum"].equal(saved[1][again.original_ids])


AT_EXIT = """
import sys, time
from pathlib import Path
from dglkge.checkpoint import CheckpointManager, TrainerGroup, part_files as row_stream
from tests.checkpoint.toy_checkpoint import cut, toy_meta, toy_names, toy_tables

def wait_and_fill(*arguments, real=row_stream.fill_rows):
    time.sleep(1)  # until the interpreter shuts down
    return real(*arguments)

row_stream.fill_rows = wait_and_fill
meta, tables = toy_meta(), toy_tables(toy_meta())
manager = CheckpointManager(Path(sys.argv[1]), TrainerGroup(), toy_names(meta))
manager.start([cut("person", tables["person"], 1)[0]], cut("relation", tables["relation"], 1)[0], meta)
"""


def test_a_write_outlives_the_script(tmp_path):
    """Nobody called finish: the interpreter waits for the thread, and starts no other one any more."""
    done = subprocess.run(
        [*warm.python(), "-c", AT_EXIT + "raise ValueError('too late')", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "cannot schedule new futures" not in done.stderr and "was not written" not in done.stderr
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.verify()
    assert checkpoint.version == 1


def test_the_next_save_waits_for_the_one_before(tmp_path, held):
    meta, manager = toy_meta(), manager_of(tmp_path, toy_meta())
    start(manager, meta, toy_tables(meta, 1))
    threading.Timer(0.05, held.set).start()
    start(manager, meta, toy_tables(meta, 2))
    manager.finish()
    assert open_checkpoint(tmp_path).version == 2


def test_the_copy_takes_the_same_memory_every_time(tmp_path):
    meta, manager = toy_meta(), manager_of(tmp_path, toy_meta())
    for seed in range(3):
        start(manager, meta, toy_tables(meta, seed))
        manager.finish()
        assert manager.row_copy.num_bytes == 2 * 4 * 23 * 6  # rows and Adagrad's sums
    assert same(open_checkpoint(tmp_path)["person"][:], toy_tables(meta, 2)["person"].rows)


def test_a_write_that_fails_is_told_and_keeps_the_version_before(tmp_path, monkeypatch, caplog):
    meta, manager = toy_meta(), manager_of(tmp_path, toy_meta())
    start(manager, meta, toy_tables(meta))
    manager.finish()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_stream, "fill_rows", full)
    start(manager, meta, toy_tables(meta, 1))
    with pytest.raises(StorageError, match="cannot write .*person_0.v2.h5: No space left on device"):
        for _ in range(6000):
            manager.check()
            threading.Event().wait(0.01)
    assert "checkpoint version 2 was not written" in caplog.text
    assert holds(tmp_path, meta, {1: toy_tables(meta)}) == 1 and not list(tmp_path.rglob("*.tmp"))


def test_training_stats_come_with_the_version(tmp_path):
    meta, manager = toy_meta(), manager_of(tmp_path, toy_meta())
    lines = []
    for epoch in (0, 1, 1):  # epoch 1 is trained again after a crash
        manager.add_stats({"epoch_idx": epoch, "stats": {"count": len(lines), "metrics": {"loss": 0.5}}})
        start(manager, meta, toy_tables(meta))
        manager.finish()
        lines = (tmp_path / "latest" / "training_stats.json").read_text().splitlines()
    assert [line for line in lines if '"epoch_idx": 1' in line] == [lines[-1]]
    assert len(lines) == 2 and '"count": 2' in lines[1]
