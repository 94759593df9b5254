"""Rows that are trained where only those of the trained triples are, against a loop over triples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import EdgeTable
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions
from dglkge.sampling.triple_order import EdgeSet, TripleOrder
from dglkge.training.building import batches as batch_building
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset


class Triples:
    """Triples that note how many are taken at a time."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.taken: list[int] = []

    def __getitem__(self, where: object) -> np.ndarray:
        block = self.rows[where]
        self.taken.append(len(block))
        return block


@pytest.mark.parametrize("sets", [[range(40)], [range(10, 30), np.arange(41, 110, 9)]])
def test_marks_are_those_of_a_loop_over_triples_and_each_is_read_once(sets, monkeypatch):
    monkeypatch.setattr(batch_building, "TRIPLES_A_BLOCK", 7)
    dataset = Dataset.open(toy_dataset(typed=True))
    layout, relations, rows = dataset.layout(), dataset.relations.relations, dataset.split("train")
    order = TripleOrder([EdgeSet(str(n), ids) for n, ids in enumerate(sets)], seed=1)
    options = EdgeOptions(np.zeros(len(relations), np.int64), len(rows), 10, 10, 0, 1, seed=1, order=order)
    triples = Triples(rows)
    job: Any = SimpleNamespace(
        config=load_config(None, ["dataset=x", "training.rows=touched"]),
        dataset=SimpleNamespace(split=lambda name: triples, relations=dataset.relations),
        layout=layout,
    )
    edges = EdgeTable(np.arange(len(rows)), np.array(rows), None)
    touched = batch_building.touched_rows(job, EdgeBatches(edges, options))
    expected = {name: np.zeros(layout.num_nodes(name), bool) for name in layout.ntypes}
    for head, number, tail in rows[np.concatenate([list(ids) for ids in sets])].tolist():
        relation = relations[number]
        for name, id_ in ((relation.lhs, head), (RELATION, number), (relation.rhs, tail)):
            expected[name][np.asarray(layout.original_ids(name)) == id_] = True
    assert touched is not None and list(touched) == list(expected)
    for name, marks in expected.items():
        assert np.array_equal(touched[name], marks)
    assert 0 < sum(map(np.sum, expected.values())) < sum(map(len, expected.values()))
    assert max(triples.taken) <= 7 and sum(triples.taken) == sum(map(len, sets))
    queries: Any = SimpleNamespace(order=order)  # every row is trained
    assert batch_building.touched_rows(job, queries) is None
