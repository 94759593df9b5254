"""Ranks are exactly those of a brute force over single triples, however rows and queries are divided."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation import ranking as full_ranking
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, ranks
from dglkge.evaluation.queries import plan_queries
from dglkge.evaluation.ranking import count_greater, count_greater_plainly, draw_candidates
from dglkge.kernels.full_scores import STRIP_COLUMNS
from dglkge.model.device import ComputeDevice
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Side
from tests.evaluation.toy_world import RELATIONS, MemoryRows, World, assert_same, split_rows, toy_world
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.score_oracle import NOT_ON_A_GRID, ORACLES
from tests.optim.test_shared_messages import in_processes

ON_DEVICE = {"device": ComputeDevice("cpu_staged")}
NOT_KEPT = {**ON_DEVICE, "kept_bytes": 0}
"""Options of an evaluator that takes the way of a GPU: rows are copied once, or for each batch of queries."""

NUM_DRAWS = 12
GIVEN = Protocol(filtered=False, given=True, batch_size=3)
BONUS: dict[str, Any] = {"bonus": True}
"""No options: a number is added to scores."""


def known_of(world: World) -> KnownTriples:
    return KnownTriples([world.known], len(RELATIONS))


def check_against_brute_force(world, protocol, num_shards, candidates_of=None, **more):
    """Compare with counting; the candidates of a query may be given by side and place of its triple."""
    result = world.evaluate(protocol, num_shards, known_of(world) if protocol.filtered else None, **more)
    for side in Side:
        counts = [
            world.brute_force(side, triple, protocol.filtered, candidates_of and candidates_of[side, place])
            for place, triple in enumerate(world.triples)
        ]
        greater, equal, negatives = np.array(counts).T
        assert result.ranks[side].tolist() == ranks(greater, equal, protocol.ties).tolist()
        assert result.num_negatives[side].tolist() == negatives.tolist()


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(ORACLES)),
    reciprocal=st.booleans(),
    seed=st.integers(0, 10_000),
    dim=st.sampled_from([2, 4, 10]),
    num_towns=st.integers(1, 9),
    grid=st.booleans(),
    filtered=st.booleans(),
    ties=st.sampled_from(["realistic", "optimistic", "pessimistic"]),
    num_shards=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    tiles=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    has_bonus=st.booleans(),
)
def test_equals_brute_force(
    name, reciprocal, seed, dim, num_towns, grid, filtered, ties, num_shards, batch_size, tiles, has_bonus
):
    # Turns of a grid are no integers: equal scores would then be a matter of rounding.
    grid = grid and name not in NOT_ON_A_GRID
    world = toy_world(
        name, reciprocal or name in FORWARD_ONLY, dim, num_towns=num_towns, seed=seed, grid=grid
    )
    if has_bonus:
        world.draw_bonus(seed)
    protocol = Protocol(filtered=filtered, ties=ties, batch_size=batch_size)
    with mock.patch.multiple(full_ranking, QUERY_TILE=tiles[0], CANDIDATE_TILE=tiles[1]):
        check_against_brute_force(world, protocol, num_shards)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=name) for name in sorted(ORACLES)),
        *(pytest.param(name, BONUS, id=f"{name}, bonus") for name in ("complex", "transe_l1", "transe_l2")),
        pytest.param("complex", ON_DEVICE, id="complex, device"),
        pytest.param("transe_l1", NOT_KEPT, id="transe_l1, device, rows copied"),
        pytest.param("pairre", ON_DEVICE, id="pairre, device"),
        pytest.param("tucker", NOT_KEPT, id="tucker, device, rows copied"),
    ],
)
def test_near_ties_are_decided_in_float64(name, options, monkeypatch):
    """Candidates that differ from the true answer by one unit in the last place of one number."""
    monkeypatch.setattr(full_ranking, "DEVICE_CANDIDATE_TILE", 23)
    # A scalar convolution in Python is slow.
    dim, num_people = (12, 24) if name in ("conve", "conex") else (40, 60)
    world = toy_world(name, reciprocal=True, dim=dim, num_people=num_people, seed=5)
    people = world.tables["person"]
    # Scalings of 0 would make all scores equal.
    if name in ("pairre", "triplere"):
        world.tables[RELATION][0] = torch.linspace(-1, 1, world.model.relation_width)
    base = people[3].clone()
    people[:] = base
    for row in range(1, num_people - 10):
        column = row % dim
        people[row, column] = torch.nextafter(base[column], torch.tensor(float(row % 2) * 200 - 100))
    if options is BONUS:
        world.draw_bonus(0)
        world.bonus = dict.fromkeys(world.bonus, 3e3)  # its rounding hides the differences in float32
    else:
        world.options = options
    check_against_brute_force(world, Protocol(), num_shards=2)
    scores = {world.score(np.array([0, 0, row]), Side.TAIL) for row in range(num_people)}
    assert len(scores) > 5, "the case must hold scores that only float64 tells apart"


@pytest.mark.parametrize("name", sorted(SCORE_FUNCTIONS))  # each has an oracle
def test_zero_tiny_and_huge_rows(name):
    # Products of three rows, summed, and squares of products of two: float32 ends earlier.
    huge = {"rescal": 1e11, "tucker": 1e11, "tntcomplex": 1e11, "transr": 1e8}.get(name, 1e12)
    for scale in (0, 1e-12, huge):
        world = toy_world(name, reciprocal=name in FORWARD_ONLY, num_people=15, seed=2)
        for table in world.tables.values():
            table *= scale
        check_against_brute_force(world, Protocol(), num_shards=2)


def test_products_are_float32_whatever_training_allowed():
    """And training has its precision back, also after an error."""
    world = toy_world("complex", reciprocal=True)
    compared = set()

    def look_and_fail(query, candidates):
        compared.add((query.dtype, torch.get_float32_matmul_precision()))
        raise ZeroDivisionError

    torch.set_float32_matmul_precision("medium")
    try:
        with mock.patch.object(world.model, "compare", look_and_fail), pytest.raises(ZeroDivisionError):
            world.evaluate(Protocol(), known=known_of(world))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert compared == {(torch.float32, "highest")}


@pytest.mark.parametrize(("num_candidates", "options"), [(None, ON_DEVICE), (None, NOT_KEPT), (50, NOT_KEPT)])
def test_ranks_on_a_device_are_those_of_the_cpu(num_candidates, options, monkeypatch):
    monkeypatch.setattr(full_ranking, "COPIED_PAIRS", 1024)
    world = toy_world("complex", reciprocal=True, num_people=200, seed=3)
    protocol = Protocol(num_candidates=num_candidates, batch_size=40)
    expected = world.evaluate(protocol, 3, known_of(world))
    world.options = options
    # Compiled loops are the CPU's own way.
    with mock.patch.object(full_ranking, "count_scores", side_effect=AssertionError):
        result = world.evaluate(protocol, 3, known_of(world))
    assert_same(result, expected)


@pytest.mark.parametrize("num_candidates", [None, 5])
def test_the_module_of_a_model_computes_where_the_rows_are(num_candidates):
    world = toy_world("distmult", reciprocal=False, num_people=30, seed=3)
    world.model = build_model("conve", 16, True, seed=2)
    sizes = {"person": (30, 16), "town": (7, 16), RELATION: (2, 30)}
    world.tables = {name: torch.randn(size, generator=torch.manual_seed(4)) for name, size in sizes.items()}
    protocol = Protocol(num_candidates=num_candidates, batch_size=8)
    for scale in (1.0, -0.5):
        with torch.no_grad():
            for parameter in world.model.module.parameters():
                parameter *= scale
        results = []
        for options in ({}, ON_DEVICE):  # the stand-in of a device is a CPU too
            world.options = options
            results.append(world.evaluate(protocol, 2, known_of(world)))
        assert_same(*results)
    moved = world.model.on_device(torch.device("meta"))
    assert {parameter.device.type for parameter in moved.module.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in world.model.module.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda world: world.triples.resize((0, 3), refcheck=False), "the test split has no triples to rank"),
        (lambda world: world.tables["person"][2:4].fill_(float("nan")), "a score is not finite"),
        (lambda world: world.tables["person"][5].fill_(float("inf")), "a score is not finite"),
        (lambda world: world.tables["person"].fill_(1e30), "the training diverged"),
    ],
)
def test_bad_rows_and_triples_are_errors(spoil, message):
    world = toy_world("distmult", reciprocal=False)
    spoil(world)
    with pytest.raises(InputError, match=message):
        world.evaluate(Protocol(), known=known_of(world))


def test_missing_rows_are_an_error():
    world = toy_world("distmult", reciprocal=False)
    sums = [[22, 22 * 11], [7, 21], [0, 0]]
    with mock.patch("tests.evaluation.toy_world.split_rows", lambda table, *_, **__: []):
        with pytest.raises(InputError, match="the rows of type 'person' are not complete: 22 rows were give"):
            world.evaluate(Protocol(), known=known_of(world), reduce=lambda array: array + sums[: len(array)])
    with pytest.raises(InputError, match="filtered ranking needs the known triples"):
        world.evaluate(Protocol())


@settings(max_examples=40)
@given(
    num_rows=st.integers(1, 5),
    num_columns=st.sampled_from([0, 1, 7, STRIP_COLUMNS - 1, STRIP_COLUMNS, 2 * STRIP_COLUMNS + 3]),
    num_answers=st.integers(0, 9),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.05, 3.0]),
)
def test_counts_are_those_by_hand(num_rows, num_columns, num_answers, seed, spread):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_columns, num_rows, generator=random).mul(4).round().div(4).T
    scores = scores.contiguous() if seed % 2 else scores
    scores[torch.rand(scores.shape, generator=random) < 0.1] = -torch.inf
    row_of = torch.randint(num_rows, (num_answers,), generator=random).sort().values
    middle = torch.randn(num_answers, generator=random).mul(4).round().div(4)
    low, high, rows = middle - spread, middle + spread, scores[row_of]
    expected_greater = (rows > high[:, None]).sum(dim=1).tolist()
    expected_close = ((low[:, None] <= rows) & (rows <= high[:, None])).nonzero().tolist()
    for count in (count_greater, count_greater_plainly):
        num_greater, close, column = count(scores, row_of, low, high)
        assert num_greater.tolist() == expected_greater
        assert torch.stack([close, column], dim=1).tolist() == expected_close


def drawn_by_place(triples: np.ndarray, batch_size: int, num_entities: int, seed: int = 0) -> dict:
    """All draws by side and row of the triples, whatever the batches were."""
    draws = {}
    for batch in plan_queries(triples, RELATIONS, batch_size):
        candidates = draw_candidates(batch, NUM_DRAWS, num_entities, seed).tolist()
        draws.update({(batch.side, place): row for place, row in zip(batch.places.tolist(), candidates)})
    return draws


@pytest.mark.parametrize("name", "complex distmult transe_l1 rotate pairre rescal tucker".split())
def test_equals_brute_force_over_the_drawn(name):
    world = toy_world(name, reciprocal=True, num_people=40, num_towns=25, seed=8)
    if name in ("complex", "rotate"):
        world.draw_bonus(seed=1)
    draws = {size: drawn_by_place(world.triples, 100, size, seed=5) for size in (40, 25)}
    candidates_of = {}
    for side, place in draws[40]:
        candidate_type = RELATIONS[world.triples[place, 1]].candidate_type(side)
        candidates_of[side, place] = draws[len(world.tables[candidate_type])][side, place]
    is_filtered = name not in ("distmult", "rotate", "rescal")
    protocol = Protocol(filtered=is_filtered, num_candidates=NUM_DRAWS, seed=5, batch_size=3)
    check_against_brute_force(world, protocol, 3, candidates_of)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_equals_brute_force_over_the_given(num_shards):
    """With ties in the middle, as in OGB's evaluator."""
    world = toy_world("distmult", reciprocal=True, num_people=40, num_towns=25, seed=8, grid=True)
    candidates = np.random.default_rng(1).integers(0, 25, (2, len(world.triples), 9)).astype(np.int32)
    sides = dict(zip((Side.HEAD, Side.TAIL), candidates.tolist()))
    candidates_of = {(side, place): row for side, rows in sides.items() for place, row in enumerate(rows)}
    check_against_brute_force(world, GIVEN, num_shards, candidates_of, candidates=candidates)


def test_draws_depend_on_seed_side_and_triple_alone():
    triples = toy_world("distmult", False, seed=4).triples
    whole = drawn_by_place(triples, 100, 1000)
    assert drawn_by_place(triples, 1, 1000) == whole
    assert drawn_by_place(triples[:5], 2, 1000) == {key: row for key, row in whole.items() if key[1] < 5}
    triples = np.zeros((30, 3), np.int64)
    draws = [row for seed in (0, 1) for row in drawn_by_place(triples, 100, 10**6, seed).values()]
    assert len({tuple(row) for row in draws}) == 2 * 30 * 2


@pytest.mark.parametrize("num_entities", [13, 3 * 2**29, 5 * 2**31])
def test_draws_are_uniform(num_entities):
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
    assert chisquare(np.bincount(drawn * 13 // num_entities, minlength=13)).pvalue > 0.003


def test_fewer_entities_than_draws_are_ranked_in_full():
    world = toy_world("complex", reciprocal=False, seed=6)
    known = known_of(world)
    full = world.evaluate(Protocol(), 2, known)
    assert_same(world.evaluate(Protocol(num_candidates=23), 2, known), full)


def test_given_candidates_that_do_not_go_with_the_rest():
    world = toy_world("distmult", reciprocal=False)
    candidates = np.zeros((2, len(world.triples), 2), np.int32)
    for protocol, more in ((GIVEN, {}), (Protocol(), {"known": known_of(world), "candidates": candidates})):
        with pytest.raises(InputError, match="needs those of each triple, and no other does"):
            world.evaluate(protocol, **more)
    with pytest.raises(InputError, match="a given candidate is 99; allowed is 0 to"):
        world.evaluate(GIVEN, candidates=candidates + 99)
    with pytest.raises(InputError, match="a given candidate is -1; allowed is 0 to"):
        world.evaluate(GIVEN, candidates=candidates - 1)


def sum_over_processes(array):
    summed = torch.from_numpy(array.copy())
    dist.all_reduce(summed)
    return summed.numpy()


def evaluate_on(rank):
    """Rank with this process's rows or queries only; rank 1 has no towns at all."""
    world = toy_world("complex", reciprocal=True, num_people=50, num_towns=11, seed=9)
    known, rows = known_of(world), MemoryRows(world.tables)
    whole = {name: split_rows(world.tables[name], 1) for name in ("person", "town")}
    mine = {"person": [split_rows(world.tables["person"], 2)[rank]]}
    if rank == 0:
        mine["town"] = whole["town"]
    for protocol in (Protocol(batch_size=7), Protocol(num_candidates=9, batch_size=5)):
        expected, steps = world.evaluate(protocol, 1, known), []
        evaluator = RankingEvaluator(world.model, RELATIONS, protocol)
        for shards, turns in ((mine, ()), (whole, (steps.append, (rank, 2)))):
            result = evaluator.evaluate(world.triples, known, rows, shards, sum_over_processes, *turns)
            assert_same(result, expected)
        assert sum(steps) == 2 * len(world.triples)


def test_two_processes_find_what_one_finds(tmp_path):
    assert in_processes(tmp_path, evaluate_on, 2) == [None, None]
