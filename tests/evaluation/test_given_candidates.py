"""Candidates that came with the triples, as OGB's: ranked as they are."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol, RankingResult
from dglkge.typing import Side
from tests.evaluation.toy_world import RELATIONS, toy_world

GIVEN = Protocol(filtered=False, given=True, batch_size=3)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_equals_brute_force_with_ties_in_the_middle(num_shards):
    """The formula of OGB's evaluator: half of the sum of the optimistic and the pessimistic rank."""
    world = toy_world("distmult", reciprocal=True, num_people=40, num_towns=25, seed=8, grid=True)
    candidates = np.random.default_rng(1).integers(0, 25, (2, len(world.triples), 9)).astype(np.int32)
    result = world.evaluate(GIVEN, num_shards, candidates=candidates)
    for number, side in enumerate((Side.HEAD, Side.TAIL)):
        for place, triple in enumerate(world.triples):
            greater, equal, num = world.brute_force(side, triple, False, candidates[number, place].tolist())
            assert result.ranks[side][place] == 0.5 * (greater + (greater + equal)) + 1
            assert result.num_negatives[side][place] == num


def test_what_does_not_go_together():
    with pytest.raises(InputError, match="neither filtered nor sampled"):
        Protocol(given=True)
    with pytest.raises(InputError, match="neither filtered nor sampled"):
        Protocol(given=True, filtered=False, num_candidates=3)
    world = toy_world("distmult", reciprocal=False)
    candidates = np.zeros((2, len(world.triples), 2), np.int32)
    with pytest.raises(InputError, match="needs those of each triple, and no other does"):
        world.evaluate(GIVEN)
    known = KnownTriples([world.known], len(RELATIONS))
    with pytest.raises(InputError, match="needs those of each triple, and no other does"):
        world.evaluate(Protocol(), known=known, candidates=candidates)
    with pytest.raises(InputError, match="a given candidate is 99; allowed is 0 to"):
        world.evaluate(GIVEN, candidates=candidates + 99)


def test_the_protocol_says_so():
    assert GIVEN.describe() == "test split, raw, given candidates, realistic ties"
    assert GIVEN.suffix() == "-given" and GIVEN.to_dict()["candidates"] == "given"


def test_what_a_person_sees_of_a_result():
    """Ranks 1 and 2 of the head, 1 and 4 of the tail."""
    ranks = {Side.HEAD: np.array([1.0, 2.0]), Side.TAIL: np.array([1.0, 4.0])}
    counts = {side: np.array([9, 9]) for side in Side}
    result = RankingResult(Protocol(), ["likes"], np.array([0, 0]), ranks, counts)
    assert repr(result) == (
        "RankingResult(test split, filtered, all candidates, realistic ties: 2 triples, "
        "MRR 0.6875, Hits@1 0.5000, Hits@10 1.0000)"
    )
    table = result._repr_html_()
    assert table.startswith("test split, filtered, all candidates, realistic ties<table")
    assert table.count("<tr") == 1 + 3 and "<td>0.6875</td>" in table
