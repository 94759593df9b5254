"""Rows that are trained where only those of the trained triples are, against a loop over triples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.data.partition_layout import EdgeTable
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions
from dglkge.sampling.triple_order import EdgeSet, TripleOrder
from dglkge.training.building import batches as batch_building
from dglkge.typing import RELATION, Relation

TYPES = ("person", "town", "film")
COUNTS = {"person": 500, "town": 90, "film": 300, RELATION: 40}
NUM_TRIPLES = 100


class Triples:
    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.taken: list[int] = []

    def __getitem__(self, where: object) -> np.ndarray:
        block = self.rows[where]
        self.taken.append(len(block))
        return block


@pytest.mark.parametrize("sets", [[range(100)], [range(10, 30), np.arange(41, 100, 3)]])
def test_marks_are_those_of_a_loop_over_triples_and_each_is_read_once(sets, monkeypatch):
    monkeypatch.setattr(batch_building, "TRIPLES_A_BLOCK", 7, raising=False)
    rng = np.random.default_rng(3)
    relations = [Relation(f"r{n}", TYPES[n % 3], TYPES[n // 3 % 3]) for n in range(COUNTS[RELATION])]
    numbers = rng.integers(0, COUNTS[RELATION] - 5, NUM_TRIPLES)
    rows = np.array(
        [
            (rng.integers(COUNTS[relations[n].lhs] // 2), n, rng.integers(COUNTS[relations[n].rhs]))
            for n in numbers
        ]
    )
    original_ids = {name: rng.permutation(count) for name, count in COUNTS.items()}
    layout = SimpleNamespace(
        num_times=1,
        ntypes=list(COUNTS),
        num_nodes=COUNTS.__getitem__,
        original_ids=original_ids.__getitem__,
        node_ids=lambda name: np.argsort(original_ids[name]),
    )
    triples = Triples(rows)
    dataset = SimpleNamespace(split=lambda name: triples, relations=SimpleNamespace(relations=relations))
    order = TripleOrder([EdgeSet(str(n), ids) for n, ids in enumerate(sets)], seed=1)
    table = EdgeTable(np.arange(NUM_TRIPLES), rows, None)
    options = EdgeOptions(np.zeros(40, np.int64), NUM_TRIPLES, 10, 10, 0, 1, seed=1, order=order)
    batches = EdgeBatches(table, options)
    config = load_config(None, ["dataset=x", "training.rows=touched"])
    job = SimpleNamespace(config=config, dataset=dataset, layout=layout)
    touched = batch_building.touched_rows(job, batches)
    expected = {name: np.zeros(count, bool) for name, count in COUNTS.items()}
    for number in np.concatenate([list(ids) for ids in sets]):
        head, relation, tail = rows[number]
        for name, id_ in (
            (relations[relation].lhs, head),
            (RELATION, relation),
            (relations[relation].rhs, tail),
        ):
            expected[name][np.flatnonzero(original_ids[name] == id_)] = True
    assert list(touched) == list(expected)
    for name, marks in expected.items():
        assert np.array_equal(touched[name], marks) and 0 < marks.sum() < len(marks)
    assert max(triples.taken) <= 7 and sum(triples.taken) == sum(map(len, sets))
    batches = SimpleNamespace(order=order)  # of queries: every row is trained
    assert batch_building.touched_rows(job, batches) is None
