"""What a batch of queries looks up, and how it knows its known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.data.known_triples import KnownTriples
from dglkge.evaluation.metrics import Protocol
from dglkge.evaluation.queries import full_float32_matmuls, plan_queries, score_queries
from dglkge.typing import RELATION, Side
from tests.evaluation.memory_rows import MemoryRows
from tests.evaluation.toy_world import RELATIONS, toy_world

CPU = torch.device("cpu")


class CountingRows(MemoryRows):
    def __init__(self, tables) -> None:
        super().__init__(tables)
        self.asked: list[tuple[str, list[int]]] = []

    def gather(self, table, ids):
        self.asked.append((table, ids.tolist()))
        return super().gather(table, ids)


@pytest.mark.parametrize("reciprocal", [False, True])
def test_true_scores_and_known_answers(reciprocal):
    world = toy_world("complex", reciprocal, seed=12)
    known = KnownTriples([world.known], len(RELATIONS))
    known_set = {tuple(row) for row in world.known.tolist()}
    for batch in plan_queries(world.triples, RELATIONS, 5):
        queries = score_queries(world.model, batch, MemoryRows(world.tables), known, CPU)
        expected = [world.score(world.triples[place], batch.side) for place in batch.places]
        assert queries.true_scores.tolist() == pytest.approx(expected, rel=1e-12)
        for query in range(len(batch.anchor_ids)):
            for entity in range(len(world.tables[batch.candidate_type])):
                triple = [0, int(batch.relation_ids[query]), 0]
                triple[batch.side.anchor_column] = int(batch.anchor_ids[query])
                triple[batch.side.column] = entity
                found = queries.known_among(torch.tensor([query]), torch.tensor([entity]))
                assert bool(found) == (tuple(triple) in known_set)


def test_raw_queries_know_nothing():
    world = toy_world("distmult", False)
    batch = next(plan_queries(world.triples, RELATIONS, 100))
    queries = score_queries(world.model, batch, MemoryRows(world.tables), None, CPU)
    assert not queries.known_among(torch.zeros(3, dtype=torch.long), torch.arange(3)).any()
    assert len(queries.added.ids) == 0


def test_rows_are_looked_up_once_each_and_only_those_asked_for():
    world = toy_world("distmult", False, num_people=500)
    rows = CountingRows(world.tables)
    for batch in plan_queries(world.triples, RELATIONS, 100):
        rows.asked.clear()
        score_queries(world.model, batch, rows, None, CPU)
        assert [table for table, _ in rows.asked] == [batch.anchor_type, RELATION, batch.candidate_type]
        for _, ids in rows.asked:
            assert len(ids) == len(set(ids))
        assert set(rows.asked[0][1]) == set(batch.anchor_ids.tolist())
        assert set(rows.asked[2][1]) == set(batch.true_ids.tolist())


def test_precision_is_given_back_after_an_error():
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError), full_float32_matmuls():
            assert torch.get_float32_matmul_precision() == "highest"
            raise RuntimeError
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_larger_case_against_float64_products():
    """More entities than a tile, and the whole matrix in float64 as the oracle."""
    world = toy_world("distmult", False, dim=32, num_people=2500, seed=20)
    world.tables["person"] = torch.randn(2500, 32, generator=torch.Generator().manual_seed(0))
    result = world.evaluate(Protocol(filtered=False), num_shards=3)
    people = world.tables["person"].double()
    for place, (head, relation, tail) in enumerate(world.triples.tolist()):
        row = world.tables[RELATION][relation].double()
        other = (people if relation == 0 else world.tables["town"].double())[tail]
        scores = people @ (row * other)
        greater = int((scores > scores[head] + 1e-9).sum())
        equal = int(((scores - scores[head]).abs() <= 1e-9).sum()) - 1
        assert result.ranks[Side.HEAD][place] == 1 + greater + equal / 2
    assert np.all(result.num_negatives[Side.HEAD] == 2499)
