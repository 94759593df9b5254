"""What is saved comes back bit for bit, whatever the parts."""

from __future__ import annotations

import dataclasses
import logging

import h5py
import pytest
import torch

from dglkge.checkpoint import CheckpointManager, TrainerGroup, hdf5_format, open_checkpoint, part_files
from dglkge.errors import CheckpointError, JobError
from dglkge.typing import RELATION, TablePart
from tests.checkpoint.toy_checkpoint import (
    ONE_PAIR,
    TWO_PAIRS,
    blank,
    cut,
    same,
    save_toy,
    saved_toy,
    toy_meta,
    toy_names,
    toy_tables,
)


def alone(path):
    return CheckpointManager(path, TrainerGroup(limit_seconds=0.1))


@pytest.mark.parametrize(
    ("optimizer", "num_parts", "num_new_parts", "num_people"),
    [
        ("sparse_adagrad", 1, 1, 23),
        ("row_adagrad", 1, 3, 23),
        ("sparse_adam", 3, 1, 23),
        ("sparse_adagrad", 3, 2, 2),  # a part without rows
        ("row_adagrad", 2, 5, 23),
    ],
)
def test_any_parts_into_any_parts(tmp_path, optimizer, num_parts, num_new_parts, num_people):
    meta = toy_meta(optimizer=optimizer, relations=TWO_PAIRS, num_people=num_people)
    tables = toy_tables(meta)
    assert save_toy(tmp_path, meta, tables, num_parts) == 1
    for table, whole in tables.items():
        for part in cut(table, whole, num_new_parts, seed=9):
            live = blank(part)
            restored = alone(tmp_path).restore([live])
            assert restored == meta
            assert same(live.rows, part.rows)
            for name, values in part.state.items():
                assert same(live.state[name], values), name
        assert same(open_checkpoint(tmp_path)[table][:], whole.rows)


@pytest.mark.parametrize(
    ("score_function", "relations", "reciprocal"),
    [
        ("complex", ONE_PAIR, True),
        ("rescal", ONE_PAIR, False),
        ("rotate", TWO_PAIRS, True),
        ("transe_l1", TWO_PAIRS, False),
    ],
)
def test_relations_of_every_layout(tmp_path, score_function, relations, reciprocal):
    meta, tables = saved_toy(tmp_path, 1, score_function, relations, reciprocal)
    saved = cut(RELATION, tables[RELATION], 1)[0]
    live = blank(saved)
    alone(tmp_path).restore([], live)
    assert same(live.rows, saved.rows)
    assert same(live.state["sum"], saved.state["sum"])
    assert same(open_checkpoint(tmp_path)[RELATION][:], tables[RELATION].rows)


def test_views_on_shared_memory_are_filled_in_place(tmp_path):
    meta, tables = saved_toy(tmp_path, 2)
    memory = torch.full((40, meta.dim), 7.0)
    part = TablePart("person", 0, torch.arange(4, 20), memory[10:26], {})
    alone(tmp_path).restore([part])
    assert same(memory[10:26], tables["person"].rows[4:20])
    assert (memory[:10] == 7).all() and (memory[26:] == 7).all()


def test_blocks_cover_every_row_once():
    blocks = list(hdf5_format.row_blocks((10, 4), 4, block_bytes=48))
    assert blocks == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert list(hdf5_format.row_blocks((2, 1000), 4, block_bytes=48)) == [(0, 1), (1, 2)]
    assert list(hdf5_format.row_blocks((0, 4), 4)) == []
    assert list(hdf5_format.row_blocks((3,), 8)) == [(0, 3)]


def test_state_that_is_missing_or_left_over_is_told(tmp_path, caplog):
    meta, tables = saved_toy(tmp_path)
    ids = torch.arange(23)
    state = {"exp_avg": torch.full((23, 6), 5.0), "sum": torch.full((23,), 5.0)}
    part = TablePart("person", 0, ids, torch.zeros(23, 6), state)
    with caplog.at_level(logging.WARNING):
        alone(tmp_path).restore([part])
    assert "has no optimizer state 'exp_avg'; it starts anew" in caplog.text
    assert (
        "optimizer state 'sum' is float32 of row shape (6,), this run's is float32 of (); it starts anew"
        in caplog.text
    )
    assert (state["exp_avg"] == 5).all() and (state["sum"] == 5).all()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        alone(tmp_path).restore([TablePart("person", 0, ids, torch.zeros(23, 6))])
    assert "optimizer state 'sum' is not used by this run's optimizer" in caplog.text


def test_rows_that_are_not_there_or_have_another_width(tmp_path):
    saved_toy(tmp_path, 2)
    part = TablePart("person", 4, torch.tensor([3, 99, 5]), torch.zeros(3, 6))
    with pytest.raises(CheckpointError, match="v1 has 2 of the 3 rows of table 'person', part 4"):
        alone(tmp_path).restore([part])
    with pytest.raises(CheckpointError, match="rows of table 'person' are 6 wide, this run's are 8"):
        alone(tmp_path).restore([TablePart("person", 0, torch.arange(23), torch.zeros(23, 8))])
    with pytest.raises(CheckpointError, match="rows of table 'relation' are 12 wide, this run's are 6"):
        alone(tmp_path).restore([], TablePart(RELATION, 0, torch.arange(2), torch.zeros(2, 6)))


def test_another_run_is_not_written_over(tmp_path):
    meta, tables = saved_toy(tmp_path)
    for changes, text in (
        ({"dataset_fingerprint": "beef"}, "has dataset_fingerprint 'f00d', this run has 'beef'"),
        ({"score_function": "distmult"}, "has score_function 'complex', this run has 'distmult'"),
        ({"dim": 8}, "has dim 6, this run has 8"),
    ):
        other = toy_meta(**changes)
        with pytest.raises(CheckpointError, match=text):
            save_toy(tmp_path, other, toy_tables(other))
    assert same(open_checkpoint(tmp_path)["person"][:], tables["person"].rows)


def test_parts_that_do_not_fit_are_refused_and_nothing_is_published(tmp_path):
    meta, tables = saved_toy(tmp_path)
    whole = cut("person", tables["person"], 1)[0]
    relations = cut(RELATION, tables[RELATION], 1)[0]
    half = TablePart("person", 0, whole.original_ids[:9], whole.rows[:9])
    twice = TablePart("person", 0, torch.zeros(23, dtype=torch.int64), whole.rows)
    narrow = TablePart("person", 0, whole.original_ids, whole.rows[:, :5])
    short_state = TablePart("person", 0, whole.original_ids, whole.rows, {"sum": torch.zeros(3)})
    stranger = TablePart("planet", 0, whole.original_ids, whole.rows)
    second = TablePart("person", 1, whole.original_ids, whole.rows)
    for part, text in [
        (
            half,
            "table 'person': 9 rows were written, expected 23",
        ),
        (twice, r"original ids must be distinct and in 0..22; got 0..0"),
        (narrow, r"rows have shape \(23, 5\), expected \(23, 6\)"),
        (short_state, r"optimizer state 'sum' of shape \(3,\) cannot be stored for 23 rows"),
        (stranger, "table 'planet' is none of the run's: 'person', 'relation'"),
        (second, "embeddings_person_0.v2.h5.receipt.json is missing: no part has come to"),
    ]:
        # rows that are not there may be another machine's, which is no bad input
        kind = JobError if part is half or part is second else CheckpointError
        with pytest.raises(kind, match=text):
            alone(tmp_path).save([part], relations, meta)
    first = TablePart(RELATION, 0, relations.original_ids[:1], relations.rows[:1])
    with pytest.raises(CheckpointError, match="1 relations were handed in, expected 2"):
        alone(tmp_path).save([whole], first, meta)
    with pytest.raises(CheckpointError, match="rank 0 was handed no relations"):
        alone(tmp_path).save([whole], None, meta)
    assert open_checkpoint(tmp_path).version == 1
    assert alone(tmp_path).save([whole], relations, meta) == 2
    assert not list(tmp_path.glob("*.receipt.json")) and not list(tmp_path.glob("*.tmp"))


def test_a_folder_without_a_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path / "new", TrainerGroup(), toy_names(toy_meta()))
    assert manager.latest() is None
    with pytest.raises(CheckpointError, match="new holds no checkpoint"):
        manager.restore([])


def test_each_machine_reads_its_own_files_only(tmp_path, monkeypatch):
    """Where the parts are the checkpoint's; of the others' files it looks at the ids."""
    meta, tables = saved_toy(tmp_path, 3, num_people=40)
    read = []
    real = part_files.file_crc32
    monkeypatch.setattr(part_files, "file_crc32", lambda path: read.append(path.name) or real(path))
    for part in cut("person", tables["person"], 3):
        live = blank(part)
        alone(tmp_path).restore([live])
        assert same(live.rows, part.rows)
    assert read == [f"embeddings_person_{part}.v1.h5" for part in range(3)]


@pytest.mark.parametrize("reading", [0, 1])
def test_damaged_ids_are_found_by_whoever_needs_their_rows(tmp_path, reading):
    """A file whose ids are another's must not pass for one that a machine does not need."""
    meta, tables = saved_toy(tmp_path, 2, num_people=40)
    parts = cut("person", tables["person"], 2)
    path = tmp_path / "v1" / "embeddings_person_1.v1.h5"
    ids = parts[reading].original_ids.sort().values[: len(parts[1].original_ids)]
    with h5py.File(path, "r+") as file:
        kept = file[hdf5_format.ORIGINAL_IDS]
        kept[: len(ids)] = ids.numpy() if reading == 0 else ids.numpy() + 1_000
    with pytest.raises(CheckpointError, match=r"embeddings_person_1.v1.h5 is damaged: its checksum is not"):
        alone(tmp_path).restore([blank(parts[reading])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_written_as_float32_and_read_bit_for_bit(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(hdf5_format.row_blocks, "__defaults__", (100,))
    meta = toy_meta()
    tables = toy_tables(meta)
    wide = tables["person"]
    tables["person"] = dataclasses.replace(wide, rows=wide.rows.to(dtype))
    save_toy(tmp_path, meta, tables, 2)
    written = open_checkpoint(tmp_path, verify=True)["person"][:]
    assert written.dtype == torch.float32
    torch.testing.assert_close(written, tables["person"].rows.float(), rtol=0, atol=0, equal_nan=True)
    part = cut("person", tables["person"], 1, seed=3)[0]
    live = blank(part)
    assert live.rows.dtype == dtype
    alone(tmp_path).restore([live])
    bits, expected = live.rows.view(torch.int16), part.rows.view(torch.int16)
    assert bool(((bits == expected) | part.rows.isnan() & live.rows.isnan()).all())
    assert same(live.state["sum"], part.state["sum"])
    # A checkpoint of float32 is rounded to the nearest.
    tables["person"] = wide
    save_toy(tmp_path / "wide", meta, tables, 2)
    live = blank(part)
    alone(tmp_path / "wide").restore([live])
    torch.testing.assert_close(live.rows, part.rows, rtol=0, atol=0, equal_nan=True)
