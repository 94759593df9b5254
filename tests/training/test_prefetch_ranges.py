"""What leaves memory while a trainer walks over buckets whose tables do not fit."""

from __future__ import annotations

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


def mapped(array: np.ndarray, path: Path) -> np.ndarray:
    """Write an array, and map it read-only."""
    np.save(path, array)
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize("fits", [False, True])
def test_triples_are_dropped_where_tables_do_not_fit(fits: bool, tmp_path: Path, monkeypatch) -> None:
    if not is_on_disk(str(tmp_path)):
        pytest.skip(f"{tmp_path} is in memory; set TMPDIR to a folder on a disk")
    (machine,) = toy_buckets(1, 4)
    table = machine.table
    columns = {"ids": table.triple_ids, "edges": table.edges, "weights": table.weights}
    maps = {name: mapped(array, tmp_path / f"{name}.npy") for name, array in columns.items()}
    machine = replace(machine, table=EdgeTable(maps["ids"], maps["edges"], maps["weights"]))
    (batches,) = toy_trainers(1, 1, 4, batch_size=20, machines=[machine])
    rows = torch.from_file(str(tmp_path / "rows"), shared=True, size=300 * 64).view(300, 64)
    embedding = SimpleNamespace(local_rows=rows, embedding=None)
    tables = type("Tables", (dict,), {"entity_types": ["person", "place"]})(person=embedding, place=embedding)
    closing: list = []
    cluster = SimpleNamespace(
        world=SimpleNamespace(is_machine_leader=True), sum=lambda numbers: numbers, on_exit=closing.append
    )
    job = SimpleNamespace(tables=tables, cluster=cluster, optimizer_state=lambda name: {})
    monkeypatch.setattr(batch_building, "available_memory", lambda: 1 << 40 if fits else 0)
    dropped = set()
    drop = MappedRows.drop
    monkeypatch.setattr(
        MappedRows, "drop", lambda self, *piece: (dropped.add(self._file.path), drop(self, *piece))[1]
    )
    batch_building.prefetch_ranges(job, batches)
    try:
        trained = []
        for index in range(len(batches)):
            batches.begin(0, index)
            trained.append(batches.batch(0, index).triple_ids)
    finally:
        for close in closing:
            close()
    # The files are read as before, and left in memory only where there is room.
    assert sorted(np.concatenate(trained).tolist()) == list(range(NUM_TRIPLES))
    files = {str(tmp_path / f"{name}.npy") for name in columns}
    assert files & dropped == (set() if fits else files)
