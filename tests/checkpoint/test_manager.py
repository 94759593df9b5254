"""Who writes what when several processes save together."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch

from dglkge.checkpoint import CheckpointManager, TrainerGroup, hdf5_format, open_checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import (
    TWO_PAIRS,
    blank,
    cut,
    flip,
    in_threads,
    same,
    save_toy,
    saved_toy,
    toy_meta,
    toy_names,
    toy_tables,
)


def test_processes_that_do_not_write_only_wait(tmp_path):
    """Two machines of two trainers each: the second of each hands in the same parts and writes none."""
    meta = toy_meta()
    tables = toy_tables(meta)
    parts = cut("person", tables["person"], 2)
    barrier = threading.Barrier(4, timeout=60)
    waits = [0] * 4
    versions = {}

    def trainer(rank):
        def wait():
            waits[rank] += 1
            barrier.wait()

        machine, is_writer = rank // 2, rank % 2 == 0
        manager = CheckpointManager(
            tmp_path, TrainerGroup(rank, is_writer, wait), toy_names(meta), num_parts=2
        )
        relations = cut(RELATION, tables[RELATION], 1)[0] if rank == 0 else None
        versions[rank] = manager.save([parts[machine]], relations, meta)

    in_threads(4, trainer)
    assert versions == {0: 1, 1: 1, 2: 1, 3: 1}
    assert len(set(waits)) == 1
    checkpoint = open_checkpoint(tmp_path)
    assert same(checkpoint["person"][:], tables["person"].rows)
    assert len(checkpoint.shards("person")) == 2


def test_a_file_that_is_not_needed_is_not_read(tmp_path):
    """A machine reads and checks only the tables that it restores."""
    meta, tables = saved_toy(tmp_path, relations=TWO_PAIRS)
    flip(tmp_path / "v1" / "embeddings_film_0.v1.h5", -1)
    manager = CheckpointManager(tmp_path)
    manager.restore([blank(cut("person", tables["person"], 1)[0])])
    with pytest.raises(CheckpointError, match="embeddings_film_0.v1.h5 is damaged: its checksum"):
        manager.restore([blank(cut("film", tables["film"], 1)[0])])


def test_without_names_the_ids_stand_in(tmp_path):
    meta = toy_meta(num_people=3)
    tables = toy_tables(meta)
    manager = CheckpointManager(tmp_path)
    manager.save([cut("person", tables["person"], 1)[0]], cut(RELATION, tables[RELATION], 1)[0], meta)
    assert (
        tmp_path / "latest" / "entity_names_person_0.json"
    ).read_text() == '[\n    "0",\n    "1",\n    "2"\n]'
    assert not (tmp_path / "latest" / "vocabulary_person.txt").exists()
    assert open_checkpoint(tmp_path).vocabulary("person")[2] == "2"
    assert torch.equal(open_checkpoint(tmp_path)["person"]["1"], tables["person"].rows[1])
    # Names in any script.
    people = Vocabulary(["Zoë", 'say "hi"', "東京\\"], "entity")
    manager = CheckpointManager(tmp_path / "named", TrainerGroup(), {"person": people})
    manager.save([cut("person", tables["person"], 1)[0]], cut(RELATION, tables[RELATION], 1)[0], meta)
    assert list(open_checkpoint(tmp_path / "named").vocabulary("person").names) == people.names
    assert (
        json.loads((tmp_path / "named" / "latest" / "entity_names_person_0.json").read_text()) == people.names
    )


def test_tables_are_never_held_twice(tmp_path, monkeypatch):
    """Rows reach the file in blocks: no larger piece of the table is ever gathered."""
    meta = toy_meta(num_people=1000)
    tables = toy_tables(meta)
    largest = 0
    real = hdf5_format.row_blocks

    def blocks(shape, item_bytes, block_bytes=2400):
        nonlocal largest
        for start, stop in real(shape, item_bytes, block_bytes):
            largest = max(largest, (stop - start) * math.prod(shape[1:]) * item_bytes)
            yield start, stop

    monkeypatch.setattr(hdf5_format, "row_blocks", blocks)
    save_toy(tmp_path, meta, tables)
    live = blank(cut("person", tables["person"], 1)[0])
    CheckpointManager(tmp_path).restore([live])
    assert largest == 2400
    assert same(open_checkpoint(tmp_path)["person"][:], tables["person"].rows)
