"""Drawn and given candidates, ranked as brute force ranks them; draws are repeatable and even."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol, ranks
from dglkge.evaluation.queries import plan_queries
from dglkge.evaluation.ranking import draw_candidates
from dglkge.typing import Side
from tests.evaluation.toy_world import RELATIONS, assert_same, toy_world

NUM_DRAWS = 12

GIVEN = Protocol(filtered=False, given=True, batch_size=3)
"""Candidates that came with the triples, as OGB's."""


def drawn_by_place(triples: np.ndarray, batch_size: int, num_entities: int, seed: int = 0) -> dict:
    """All draws by side and row of the triples, whatever the batches were."""
    draws = {}
    for batch in plan_queries(triples, RELATIONS, batch_size):
        candidates = draw_candidates(batch, NUM_DRAWS, num_entities, seed)
        draws.update(
            {(batch.side, place): row for place, row in zip(batch.places.tolist(), candidates.tolist())}
        )
    return draws


@pytest.mark.parametrize(
    ("name", "filtered"),
    [("complex", True), ("distmult", False), ("transe_l1", True), ("rotate", False), ("pairre", True),
     ("rescal", False), ("tucker", True)],
)  # fmt: skip
def test_equals_brute_force_over_the_drawn(name, filtered):
    world = toy_world(name, reciprocal=True, num_people=40, num_towns=25, seed=8)
    if name in ("complex", "rotate"):
        world.draw_bonus(seed=1)
    protocol = Protocol(filtered=filtered, num_candidates=NUM_DRAWS, seed=5, batch_size=3)
    known = KnownTriples([world.known], len(RELATIONS)) if filtered else None
    result = world.evaluate(protocol, 3, known)
    drawn = {size: drawn_by_place(world.triples, 100, size, seed=5) for size in (40, 25)}
    for side in Side:
        for place, triple in enumerate(world.triples):
            num_entities = len(world.tables[RELATIONS[triple[1]].candidate_type(side)])
            candidates = drawn[num_entities][side, place]
            greater, equal, negatives = world.brute_force(side, triple, filtered, candidates)
            assert result.num_negatives[side][place] == negatives
            assert result.ranks[side][place] == ranks(np.array(greater), np.array(equal))


def test_draws_do_not_depend_on_batches_or_order_of_questions():
    triples = toy_world("distmult", False, seed=4).triples
    whole = drawn_by_place(triples, 100, 1000)
    assert drawn_by_place(triples, 1, 1000) == whole
    assert drawn_by_place(triples[:5], 2, 1000) == {key: row for key, row in whole.items() if key[1] < 5}


def test_seed_side_and_triple_all_matter():
    triples = np.zeros((30, 3), np.int64)
    draws = [
        *drawn_by_place(triples, 100, 10**6).values(),
        *drawn_by_place(triples, 100, 10**6, seed=1).values(),
    ]
    assert len({tuple(row) for row in draws}) == 2 * 30 * 2


@pytest.mark.parametrize("num_entities", [13, 4_000_000_000])
def test_draws_are_spread_evenly(num_entities):
    triples = np.zeros((3000, 3), np.int64)
    draws = np.array(list(drawn_by_place(triples, 4096, num_entities).values()))
    assert draws.min() >= 0 and draws.max() < num_entities
    share = np.bincount((draws.reshape(-1) * 13) // num_entities, minlength=13) / draws.size
    assert np.abs(share - 1 / 13).max() < 0.004


def test_fewer_entities_than_draws_are_ranked_in_full():
    world = toy_world("complex", reciprocal=False, seed=6)
    known = KnownTriples([world.known], len(RELATIONS))
    full = world.evaluate(Protocol(), 2, known)
    sampled = world.evaluate(replace(Protocol(), num_candidates=23), 2, known)
    assert_same(sampled, full)


@pytest.mark.parametrize("num_entities", [3 * 2**29, 5 * 2**31])
def test_candidates_of_many_entities_are_uniform(num_entities):
    """Spread over the range and, within a few neighbours, over them: 32 random bits do not reach all."""
    (batch, *_) = plan_queries(np.zeros((1000, 3), np.int64), RELATIONS, 1000)
    drawn = draw_candidates(batch, 400, num_entities, 7).numpy().ravel()
    assert drawn.min() >= 0 and drawn.max() < num_entities
    least = 2**32 // num_entities
    share = 2**32 / num_entities - least  # of the numbers that 32 bits hit once more than the others
    some = drawn[:200_000].tolist()
    ends = [[-(-value * 2**32 // num_entities) for value in (number, number + 1)] for number in some]
    hit = np.array([end - start > least for start, end in ends])
    assert abs(hit.mean() - share) < 5 * np.sqrt(share * (1 - share) / len(hit))
    counts = np.bincount(drawn * 10 // num_entities, minlength=10)
    assert ((counts - len(drawn) / 10) ** 2 / (len(drawn) / 10)).sum() < 9 + 5 * np.sqrt(2 * 9)


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


def test_given_candidates_that_do_not_go_with_the_rest():
    world = toy_world("distmult", reciprocal=False)
    candidates = np.zeros((2, len(world.triples), 2), np.int32)
    with pytest.raises(InputError, match="needs those of each triple, and no other does"):
        world.evaluate(GIVEN)
    known = KnownTriples([world.known], len(RELATIONS))
    with pytest.raises(InputError, match="needs those of each triple, and no other does"):
        world.evaluate(Protocol(), known=known, candidates=candidates)
    with pytest.raises(InputError, match="a given candidate is 99; allowed is 0 to"):
        world.evaluate(GIVEN, candidates=candidates + 99)
