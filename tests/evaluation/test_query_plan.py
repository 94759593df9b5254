"""The plan asks every triple once from each side, and equal queries together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.evaluation.queries import plan_queries
from dglkge.typing import Relation, Side

RELATIONS = [
    Relation("a", "x", "y"),
    Relation("b", "x", "x"),
    Relation("c", "x", "y"),
    Relation("d", "y", "x"),
]

some_triples = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=40
).map(lambda rows: np.array(rows, dtype=np.int64))


@settings(max_examples=60, deadline=None)
@given(triples=some_triples, batch_size=st.integers(1, 7))
def test_every_triple_is_asked_once_from_each_side(triples, batch_size):
    asked = {side: [] for side in Side}
    queries = {side: [] for side in Side}
    for batch in plan_queries(triples, RELATIONS, batch_size):
        assert 1 <= len(batch.anchor_ids) <= len(batch.places) <= batch_size
        assert (np.diff(batch.query_of) >= 0).all()
        assert set(batch.query_of) == set(range(len(batch.anchor_ids)))
        for relation in batch.relation_ids:
            assert RELATIONS[relation].candidate_type(batch.side) == batch.candidate_type
            assert RELATIONS[relation].anchor_type(batch.side) == batch.anchor_type
        found = triples[batch.places]
        assert np.array_equal(found[:, batch.side.anchor_column], batch.anchor_ids[batch.query_of])
        assert np.array_equal(found[:, 1], batch.relation_ids[batch.query_of])
        assert np.array_equal(found[:, batch.side.column], batch.true_ids)
        asked[batch.side].extend(batch.places.tolist())
        queries[batch.side].extend(zip(batch.anchor_ids.tolist(), batch.relation_ids.tolist()))
    for side in Side:
        assert sorted(asked[side]) == list(range(len(triples)))
        # Only a query whose answers do not fit in one batch is asked again, in the next.
        repeated = [pair for pair, again in zip(queries[side], queries[side][1:]) if pair == again]
        assert len(queries[side]) - len(repeated) == len(set(queries[side]))
