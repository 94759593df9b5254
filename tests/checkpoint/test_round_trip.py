"""What is saved comes back bit for bit, whatever the parts and processes, also in the background."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import runpy
import subprocess
import sys
import threading

import h5py
import pytest
import torch

from dglkge.checkpoint import hdf5_format, part_files
from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError, JobError, StorageError
from dglkge.typing import RELATION, TablePart
from tests import warm
from tests.checkpoint import toy_checkpoint as toy
from tests.checkpoint.toy_checkpoint import META
from tests.toy_kg import REPOSITORY


def alone(path):
    return CheckpointManager(path, TrainerGroup(limit_seconds=0.1))


def check_restored(path, *parts):
    """Check that parts come back, rows and state."""
    for part in parts:
        live = toy.blank(part)
        alone(path).restore([live])
        assert toy.same(live.rows, part.rows)
        for name, values in part.state.items():
            assert toy.same(live.state[name], values), name


@pytest.mark.parametrize(("optimizer", "num_parts", "num_new_parts", "num_people", "model"), [
    ("sparse_adagrad", 1, 1, 23, ("complex", toy.ONE_PAIR, True)),
    ("row_adagrad", 1, 3, 23, ("complex", toy.TWO_PAIRS, True)),
    ("sparse_adam", 3, 1, 23, ("rescal", toy.ONE_PAIR, False)),
    ("sparse_adagrad", 3, 2, 2, ("rotate", toy.TWO_PAIRS, True)),  # a part without rows
    ("row_adagrad", 2, 5, 23, ("transe_l1", toy.TWO_PAIRS, False)),
])  # fmt: skip
def test_any_parts_into_any_parts(tmp_path, optimizer, num_parts, num_new_parts, num_people, model):
    meta, tables = toy.saved_toy(tmp_path, num_parts, *model, num_people=num_people, optimizer=optimizer)
    assert alone(tmp_path).restore([]) == meta and open_checkpoint(tmp_path).version == 1
    for table, whole in tables.items():
        check_restored(tmp_path, *toy.cut(table, whole, num_new_parts, seed=9))
        assert toy.same(open_checkpoint(tmp_path)[table][:], whole.rows)


def test_state_that_is_missing_or_left_over_is_told(tmp_path, caplog):
    toy.saved_toy(tmp_path)
    caplog.set_level(logging.WARNING)
    ids, rows = torch.arange(23), torch.zeros(23, 6)
    state = {"exp_avg": torch.full((23, 6), 5.0), "sum": torch.full((23,), 5.0)}
    for live_state in (state, {}):
        alone(tmp_path).restore([TablePart("person", 0, ids, rows, live_state)])
    assert "has no optimizer state 'exp_avg'; it starts anew" in caplog.text
    assert "'sum' is float32 of row shape (6,), this run's is float32 of (); it starts anew" in caplog.text
    assert (state["exp_avg"] == 5).all() and (state["sum"] == 5).all()
    assert "optimizer state 'sum' is not used by this run's optimizer" in caplog.text


def test_rows_that_are_not_there_or_have_another_width(tmp_path):
    toy.saved_toy(tmp_path, 2)
    for table, part, ids, width, words in [
        ("person", 4, torch.tensor([3, 99, 5]), 6, "v1 has 2 of the 3 rows of table 'person', part 4"),
        ("person", 0, torch.arange(23), 8, "rows of table 'person' are 6 wide, this run's are 8"),
        (RELATION, 0, torch.arange(2), 6, "rows of table 'relation' are 12 wide, this run's are 6"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            alone(tmp_path).restore([TablePart(table, part, ids, torch.zeros(len(ids), width))])


def test_another_run_is_not_written_over(tmp_path):
    keci = {"score_function": "keci", "score_options": {"p": 2, "q": 3}}
    _, tables = toy.saved_toy(tmp_path, **keci)
    for changes, text in (
        ({"dataset_fingerprint": "beef"}, "has dataset_fingerprint 'f00d', this run has 'beef'"),
        ({"score_function": "distmult"}, "has score_function 'keci', this run has 'distmult'"),
        ({"score_options": {"p": 1, "q": 3}}, r"has score_options \{'p': 2, 'q': 3\}, this run has \{'p': 1"),
        ({"dim": 8}, "has dim 6, this run has 8"),
    ):
        other = toy.toy_meta(**{**keci, **changes})
        with pytest.raises(CheckpointError, match=text):
            toy.save_toy(tmp_path, other, toy.toy_tables(other))
    toy.holds(tmp_path, {1: tables})


def test_parts_that_do_not_fit_are_refused_and_nothing_is_published(tmp_path):
    _, tables = toy.saved_toy(tmp_path)
    whole, relations = toy.whole_part(tables, "person"), toy.whole_part(tables, RELATION)

    def changed(**fields):
        return dataclasses.replace(whole, **{"state": {}, **fields})

    half = changed(original_ids=whole.original_ids[:9], rows=whole.rows[:9])
    twice = changed(original_ids=torch.zeros(23, dtype=torch.int64))
    narrow = changed(rows=whole.rows[:, :5])
    short_state = changed(state={"sum": torch.zeros(3)})
    first = TablePart(RELATION, 0, relations.original_ids[:1], relations.rows[:1])
    no_receipt = "embeddings_person_0.v2.h5.receipt.json is missing: no part has come to"
    planet = "table 'planet' is none of the run's: 'person', 'relation'"
    # Rows that are not there may be another machine's, which is no bad input.
    for kind, part, more, text in [
        (JobError, half, relations, "table 'person': 9 rows were written, expected 23"),
        (JobError, changed(part=1), relations, no_receipt),
        (CheckpointError, twice, relations, "original ids must be distinct and in 0..22; got 0..0"),
        (CheckpointError, narrow, relations, r"rows have shape \(23, 5\), expected \(23, 6\)"),
        (CheckpointError, short_state, relations, r"'sum' of shape \(3,\) cannot be stored for 23 rows"),
        (CheckpointError, changed(table="planet"), relations, planet),
        (CheckpointError, whole, first, "1 relations were handed in, expected 2"),
        (CheckpointError, whole, None, "rank 0 was handed no relations"),
    ]:
        with pytest.raises(kind, match=text):
            alone(tmp_path).save([part], more, META)
    assert open_checkpoint(tmp_path).version == 1
    assert alone(tmp_path).save([whole], relations, META) == 2
    assert not list(tmp_path.glob("*.receipt.json")) and not list(tmp_path.glob("*.tmp"))


def test_files_that_are_not_needed_are_not_read(tmp_path):
    """Of another machine's part it looks at the ids."""
    _, tables = toy.saved_toy(tmp_path, 2, relations=toy.TWO_PAIRS, num_people=40)
    for name in ("film_0", "person_1"):
        toy.flip(tmp_path / "v1" / f"embeddings_{name}.v1.h5", -1)
    check_restored(tmp_path, toy.cut("person", tables["person"], 2)[0])
    for part in (toy.cut("person", tables["person"], 2)[1], toy.whole_part(tables, "film")):
        with pytest.raises(CheckpointError, match=rf"embeddings_{part.table}_\d.v1.h5 is damaged: its che"):
            check_restored(tmp_path, part)


@pytest.mark.parametrize("reading", [0, 1])
def test_damaged_ids_are_found_by_whoever_needs_their_rows(tmp_path, reading):
    """A file whose ids are another's must not pass for one that a machine does not need."""
    _, tables = toy.saved_toy(tmp_path, 2, num_people=40)
    parts = toy.cut("person", tables["person"], 2)
    ids = parts[reading].original_ids.sort().values[: len(parts[1].original_ids)]
    with h5py.File(tmp_path / "v1" / "embeddings_person_1.v1.h5", "r+") as file:
        kept = file[hdf5_format.ORIGINAL_IDS]
        kept[: len(ids)] = ids.numpy() if reading == 0 else ids.numpy() + 1_000
    with pytest.raises(CheckpointError, match=r"embeddings_person_1.v1.h5 is damaged: its checksum is not"):
        check_restored(tmp_path, parts[reading])


def test_processes_that_do_not_write_only_wait(tmp_path):
    """Two machines of two trainers each: the second of each hands in the same parts and writes none."""
    tables = toy.toy_tables(META)
    parts = toy.cut("person", tables["person"], 2)
    barrier, waits, versions = threading.Barrier(4, timeout=60), [0] * 4, {}

    def trainer(rank):
        def wait():
            waits[rank] += 1
            barrier.wait()

        group = TrainerGroup(rank, rank % 2 == 0, wait)
        manager = CheckpointManager(tmp_path, group, toy.toy_names(META), num_parts=2)
        relations = toy.whole_part(tables, RELATION) if rank == 0 else None
        versions[rank] = manager.save([parts[rank // 2]], relations, META)

    toy.in_threads(4, trainer)
    assert versions == {0: 1, 1: 1, 2: 1, 3: 1}
    assert len(set(waits)) == 1
    toy.holds(tmp_path, {1: tables})
    assert len(open_checkpoint(tmp_path).shards("person")) == 2


def test_without_names_the_ids_stand_in(tmp_path):
    meta = toy.toy_meta(num_people=3)
    tables = toy.toy_tables(meta)
    toy.save_toy(tmp_path, meta, tables, names={"planet": Vocabulary(["Mars"], "entity")})
    listed = (tmp_path / "latest" / "entity_names_person_0.json").read_text()
    assert listed == '[\n    "0",\n    "1",\n    "2"\n]'
    assert not (tmp_path / "latest" / "vocabulary_person.txt").exists()
    assert open_checkpoint(tmp_path).vocabulary("person")[2] == "2"
    assert torch.equal(open_checkpoint(tmp_path)["person"]["1"], tables["person"].rows[1])
    # Names in any script.
    people = Vocabulary(["Zoë", 'say "hi"', "東京\\"], "entity")
    toy.save_toy(tmp_path / "named", meta, tables, names={"person": people})
    assert list(open_checkpoint(tmp_path / "named").vocabulary("person").names) == people.names
    listed = (tmp_path / "named" / "latest" / "entity_names_person_0.json").read_text()
    assert json.loads(listed) == people.names


def test_tables_are_never_held_twice(tmp_path, monkeypatch):
    """Rows reach the file in blocks: no larger piece of the table is ever gathered."""
    largest, real = 0, hdf5_format.row_blocks

    def blocks(shape, item_bytes, block_bytes=2400):
        nonlocal largest
        for start, stop in real(shape, item_bytes, block_bytes):
            largest = max(largest, (stop - start) * math.prod(shape[1:]) * item_bytes)
            yield start, stop

    monkeypatch.setattr(hdf5_format, "row_blocks", blocks)
    _, tables = toy.saved_toy(tmp_path, num_people=1000)
    check_restored(tmp_path, toy.whole_part(tables, "person"))
    assert largest == 2400


@pytest.fixture
def held(monkeypatch):
    """Hold the writing of rows until the test lets it go."""
    gate = threading.Event()
    real = part_files.fill_rows

    def wait_and_fill(*arguments):
        if not gate.wait(60):
            raise TimeoutError("nobody opened the gate")
        return real(*arguments)

    monkeypatch.setattr(part_files, "fill_rows", wait_and_fill)
    yield gate
    gate.set()


@pytest.fixture
def manager(tmp_path):
    return CheckpointManager(tmp_path, TrainerGroup(limit_seconds=0.1), toy.toy_names(META))


def start(manager, seed):
    """Start to save the tables of a seed; return the live part of the people."""
    tables = toy.toy_tables(META, seed)
    part = toy.whole_part(tables, "person")
    manager.start([part], toy.whole_part(tables, RELATION), META)
    return part


def test_rows_may_change_while_they_are_written(tmp_path, manager, held):
    part = start(manager, 1)
    part.rows.fill_(7)
    part.state["sum"].fill_(7)
    manager.check()  # does not wait
    assert manager.latest() is None
    held.set()
    manager.finish()
    toy.holds(tmp_path, {1: toy.toy_tables(META, 1)})
    check_restored(tmp_path, toy.whole_part(toy.toy_tables(META, 1), "person"))


AT_EXIT = """
import sys, time
from pathlib import Path
from dglkge.checkpoint import part_files
from dglkge.checkpoint.manager import CheckpointManager
from tests.checkpoint.test_round_trip import start

def wait_and_fill(*arguments, real=part_files.fill_rows):
    time.sleep(1)  # until the interpreter shuts down
    return real(*arguments)

part_files.fill_rows = wait_and_fill
start(CheckpointManager(Path(sys.argv[1])), 1)
raise ValueError("too late")
"""


def test_a_write_outlives_the_script(tmp_path):
    """Nobody called finish: the interpreter waits for the thread, and starts no other one any more."""
    command = [*warm.python(), "-c", AT_EXIT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert done.returncode == 1 and "too late" in done.stderr, done.stderr
    assert "cannot schedule new futures" not in done.stderr and "was not written" not in done.stderr
    toy.holds(tmp_path, {1: toy.toy_tables(META, 1)})


def test_the_next_save_waits_for_the_one_before_and_copies_to_the_same_memory(tmp_path, manager, held):
    start(manager, 1)
    threading.Timer(0.05, held.set).start()
    for seed in (2, 3):
        start(manager, seed)
        assert manager.row_copy.num_bytes == 2 * 4 * 23 * 6  # rows and Adagrad's sums
    manager.finish()
    toy.holds(tmp_path, {3: toy.toy_tables(META, 3)})


@pytest.mark.parametrize("block", [0, 3])
def test_a_write_that_fails_keeps_the_version_before(tmp_path, manager, monkeypatch, caplog, block):
    toy.save_seed(tmp_path, 0)
    monkeypatch.setattr(hdf5_format.row_blocks, "__defaults__", (100,))
    real, places, threads = os.pwrite, [], set(threading.enumerate())

    def full(*arguments):
        places.append(arguments[2])
        if len(places) > block:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    start(manager, 1)
    with pytest.raises(StorageError, match="cannot write .*person_0.v2.h5: No space left on device"):
        for _ in range(6000):
            manager.check()
            threading.Event().wait(0.01)
    assert "checkpoint version 2 was not written" in caplog.text
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()
    assert toy.holds(tmp_path, {1: toy.toy_tables(META)}) == 1 and not list(tmp_path.rglob("*.tmp"))


def test_training_stats_come_with_the_version(tmp_path, manager):
    lines = []
    for epoch in (0, 1, 1):  # epoch 1 is trained again after a crash
        manager.add_stats({"epoch_idx": epoch, "stats": {"count": len(lines), "metrics": {"loss": 0.5}}})
        start(manager, epoch)
        manager.finish()
        lines = (tmp_path / "latest" / "training_stats.json").read_text().splitlines()
    assert [line for line in lines if '"epoch_idx": 1' in line] == [lines[-1]]
    assert len(lines) == 2 and '"count": 2' in lines[1]


def test_the_benchmark_runs(monkeypatch, tmp_path, capsys):
    script, output = REPOSITORY / "benchmarks" / "checkpoint.py", tmp_path / "figures.json"
    arguments = ["--folder", tmp_path, "--num-rows", "3000", "--dim", "8", "--num-repeats", "1"]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments), "--output", str(output)])
    runpy.run_path(str(script))["main"]()
    figures, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert all(f"{name:46} {value}" in shown for name, value in figures.items())
    assert 0 < figures["stall_share_of_write"] <= 1 and list(tmp_path.iterdir()) == [output]
