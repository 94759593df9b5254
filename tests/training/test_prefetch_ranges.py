"""What leaves memory while a trainer walks over buckets whose tables do not fit."""

from __future__ import annotations

import contextlib
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dglkge.data.edge_buckets import EdgeTable
from dglkge.embeddings.mapped_rows import MappedRows, is_on_disk
from dglkge.training.building import batches as batch_building
from tests.sampling.toy_buckets import NUM_TRIPLES, toy_buckets, toy_trainers


@pytest.mark.parametrize("fits", [False, True])
def test_triples_are_dropped_where_tables_do_not_fit(fits: bool, tmp_path: Path, monkeypatch) -> None:
    if not is_on_disk(str(tmp_path)):
        pytest.skip(f"{tmp_path} is in memory; set TMPDIR to a folder on a disk")
    (machine,) = toy_buckets(1, 4)
    table = machine.table
    columns = {"ids": table.triple_ids, "edges": table.edges, "weights": table.weights}
    maps = {}
    for name, array in columns.items():
        np.save(tmp_path / f"{name}.npy", array)
        maps[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    machine = replace(machine, table=EdgeTable(maps["ids"], maps["edges"], maps["weights"]))
    (batches,) = toy_trainers(1, 1, 4, batch_size=20, machines=[machine])
    rows = torch.from_file(str(tmp_path / "rows"), shared=True, size=300 * 64).view(300, 64)
    embedding = SimpleNamespace(local_rows=rows, embedding=None)
    tables = UserDict(person=embedding, place=embedding)
    tables.entity_types = ["person", "place"]
    closing = contextlib.ExitStack()
    world = SimpleNamespace(is_machine_leader=True)
    cluster = SimpleNamespace(world=world, sum=lambda numbers: numbers, on_exit=closing.callback)
    job = SimpleNamespace(tables=tables, cluster=cluster, optimizer_state=lambda name: {})
    monkeypatch.setattr(batch_building, "available_memory", lambda: 1 << 40 if fits else 0)
    dropped, drop = set(), MappedRows.drop

    def noted(mapped: MappedRows, *piece: int) -> None:
        dropped.update(file.path for file in mapped._files)
        drop(mapped, *piece)

    monkeypatch.setattr(MappedRows, "drop", noted)
    trained = []
    with closing:
        batch_building.prefetch_ranges(job, batches)
        for index in range(len(batches)):
            batches.begin(0, index)
            trained.append(batches.batch(0, index).triple_ids)
    # The files are read as before, and left in memory only where there is room.
    assert sorted(np.concatenate(trained).tolist()) == list(range(NUM_TRIPLES))
    files = {str(tmp_path / f"{name}.npy") for name in columns}
    assert files & dropped == (set() if fits else files)
