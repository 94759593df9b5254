"""Queries of triples: their plan, the rows they look up, known answers, and exact scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.errors import InputError
from dglkge.evaluation import queries as queries_module
from dglkge.evaluation.queries import exact_scores, pairs_per_block, plan_queries, score_triples
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import Relation, Side
from tests.evaluation.toy_world import RELATIONS, MemoryRows, toy_world
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.score_oracle import ORACLES, fitting_dim

FOUR = [Relation("a", "x", "y"), Relation("b", "x", "x"), Relation("c", "x", "y"), Relation("d", "y", "x")]
A_TRIPLE = st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4))
some_triples = st.lists(A_TRIPLE, min_size=1, max_size=40).map(lambda rows: np.array(rows, dtype=np.int64))


@settings(max_examples=60)
@given(triples=some_triples, batch_size=st.integers(1, 7))
def test_every_query_is_asked_once(triples, batch_size):
    """From each side; only one whose answers do not fit in one batch is asked again, in the next."""
    queries = {side: [] for side in Side}
    for batch in plan_queries(triples, FOUR, batch_size):
        assert 1 <= len(batch.anchor_ids) <= len(batch.places) <= batch_size
        assert (np.diff(batch.query_of) >= 0).all()
        assert set(batch.query_of) == set(range(len(batch.anchor_ids)))
        for relation in batch.relation_ids:
            assert FOUR[relation].candidate_type(batch.side) == batch.candidate_type
            assert FOUR[relation].anchor_type(batch.side) == batch.anchor_type
        queries[batch.side].extend(zip(batch.anchor_ids.tolist(), batch.relation_ids.tolist()))
    for side in Side:
        repeated = [pair for pair, again in zip(queries[side], queries[side][1:]) if pair == again]
        distinct = {(row[side.anchor_column], row[1]) for row in triples.tolist()}
        assert len(queries[side]) - len(repeated) == len(distinct)
        assert set(queries[side]) == distinct


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_scores_of_triples_equal_the_formula(name, monkeypatch):
    monkeypatch.setattr(queries_module, "TRIPLES_AT_A_TIME", 7)
    for reciprocal in (True,) if name in FORWARD_ONLY else (False, True):
        world = toy_world(name, reciprocal, seed=4)
        scores = score_triples(world.model, world.known, RELATIONS, MemoryRows(world.tables))
        for side in Side:
            expected = [world.score(triple, side) for triple in world.known]
            assert scores[side].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_scores_of_no_triples_and_not_finite_ones():
    world = toy_world("distmult", False)
    rows = MemoryRows(world.tables)
    none = score_triples(world.model, np.zeros((0, 3), np.int64), RELATIONS, rows)
    assert [len(scores) for scores in none.values()] == [0, 0]
    world.tables["person"].fill_(torch.inf)
    with pytest.raises(InputError, match="a score is not finite"):
        score_triples(world.model, world.known, RELATIONS, rows)


@pytest.mark.parametrize("name", sorted(SCORE_FUNCTIONS))
def test_place_and_company_of_a_pair_do_not_matter(name):
    """A pair's float64 score depends on its two rows only, bit by bit."""
    for dim in [2, 6, 50, 400]:
        dim = fitting_dim(name, dim)
        model = build_model(name, dim, name in FORWARD_ONLY)
        random, width = torch.Generator().manual_seed(0), model.query_dim
        query = torch.randn(5, width, generator=random, dtype=torch.float64)
        rows = torch.randn(8, dim, generator=random)
        rows[6] = rows[1]
        num_pairs = 2 * pairs_per_block(width) + 37
        queries, places = (torch.randint(num, (num_pairs,), generator=random) for num in (5, 8))
        together = exact_scores(model, query, queries, rows, places)
        table = torch.empty(5, 8, dtype=torch.float64)
        for q in range(5):
            for r in range(8):
                table[q, r] = exact_scores(model, query, torch.tensor([q]), rows, torch.tensor([r]))[0]
        assert torch.equal(together, table[queries, places])
        assert torch.equal(table[:, 6], table[:, 1])
        assert together.dtype == torch.float64
        assert exact_scores(model, query, queries[:0], rows, places[:0]).shape == (0,)
        torch.testing.assert_close(together, model.compare_pairs(query[queries], rows[places].double()))


def test_exact_scores_are_equal_with_any_number_of_threads():
    model = build_model("complex", 400, False)
    random = torch.Generator().manual_seed(1)
    query, rows = torch.randn(9, 400, generator=random).double(), torch.randn(9, 400, generator=random)
    index, scores = torch.arange(9).repeat(100), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)  # tests/conftest.py gives the number back
        scores.append(exact_scores(model, query, index, rows, index.flip(0)))
    assert torch.equal(*scores)
