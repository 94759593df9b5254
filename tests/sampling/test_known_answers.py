"""Known answers among negatives, by loops and in numpy, against a search in the list of triples."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.known_triples import KnownTriples
from dglkge.sampling.negatives import KnownAnswers
from dglkge.typing import RELATION, Side

NUM_ENTITIES, NUM_RELATIONS = 7, 3
ENTITY, REL = st.integers(0, NUM_ENTITIES - 1), st.integers(0, NUM_RELATIONS - 1)
ORIGINAL_IDS = {
    "entity": np.random.default_rng(1).permutation(NUM_ENTITIES),
    RELATION: np.random.default_rng(2).permutation(NUM_RELATIONS),
}


@settings(max_examples=150, deadline=None)
@given(
    triples=st.lists(st.tuples(ENTITY, REL, ENTITY), max_size=60),
    queries=st.lists(st.tuples(ENTITY, REL), max_size=12),
    negatives=st.lists(ENTITY, min_size=1, max_size=20),
    side=st.sampled_from(list(Side)),
)
def test_masks_are_those_of_looking_at_every_triple(triples, queries, negatives, side) -> None:
    index = KnownTriples([np.array(triples, np.int64).reshape(-1, 3)], NUM_RELATIONS)
    known = KnownAnswers(index, ORIGINAL_IDS)
    anchors, relations = np.array(queries, np.int64).reshape(-1, 2).T
    found = known.among(side, "entity", anchors, relations, "entity", np.array(negatives))

    def is_known(anchor: int, relation: int, answer: int) -> bool:
        a, b = (int(ORIGINAL_IDS["entity"][node]) for node in (anchor, answer))
        r = int(ORIGINAL_IDS[RELATION][relation])
        return ((a, r, b) if side is Side.TAIL else (b, r, a)) in triples

    expected = np.array([[is_known(*query, answer) for answer in negatives] for query in queries], bool)
    for plainly in (False, True):
        mask = np.zeros((len(queries), len(negatives)), bool)
        found.ignore(mask, plainly)
        assert (mask == expected.reshape(mask.shape)).all()
    scores = np.ones((len(queries), len(negatives)), np.float32)
    found.overwrite(scores, np.float32(-5))
    assert (scores == np.where(expected.reshape(scores.shape), -5, 1)).all()
    assert found.own.tolist() == [is_known(anchor, relation, anchor) for anchor, relation in queries]
