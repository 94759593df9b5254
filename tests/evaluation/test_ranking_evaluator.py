"""Ranks are exactly those of a brute force over single triples, however rows and queries are divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation import ranking as full_ranking
from dglkge.evaluation.metrics import Protocol, ranks
from dglkge.evaluation.ranking import count_greater, count_greater_plainly
from dglkge.kernels.full_scores import STRIP_COLUMNS
from dglkge.model.device import ComputeDevice
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Side
from tests.evaluation.toy_world import RELATIONS, World, assert_same, toy_world
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.score_oracle import NOT_ON_A_GRID, ORACLES

ON_DEVICE = {"device": ComputeDevice("cpu_staged")}
NOT_KEPT = {**ON_DEVICE, "kept_bytes": 0}
"""Options of an evaluator that takes the way of a GPU: rows are copied once, or for each batch of queries."""

BONUS: dict[str, Any] = {"bonus": True}
"""No options: a number is added to scores."""


def known_of(world: World) -> KnownTriples:
    return KnownTriples([world.known], len(RELATIONS))


def check_against_brute_force(world: World, protocol: Protocol, num_shards: int) -> None:
    result = world.evaluate(protocol, num_shards, known_of(world) if protocol.filtered else None)
    for side in Side:
        counts = [world.brute_force(side, triple, protocol.filtered) for triple in world.triples]
        greater, equal, negatives = np.array(counts).T
        assert result.ranks[side].tolist() == ranks(greater, equal, protocol.ties).tolist()
        assert result.num_negatives[side].tolist() == negatives.tolist()


@settings(max_examples=60, deadline=None)
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


def test_every_score_function_has_an_oracle():
    assert set(SCORE_FUNCTIONS) == set(ORACLES)


@pytest.mark.parametrize("name", ["complex", "transe_l2", "pairre", "conve"])
def test_all_rows_zero_is_one_great_tie(name):
    world = toy_world(name, reciprocal=name in FORWARD_ONLY)
    for table in ("person", "town"):
        world.tables[table].zero_()
    if name.startswith("transe"):
        world.tables[RELATION].zero_()
    result = world.evaluate(Protocol(filtered=False), num_shards=3)
    for side in Side:
        assert result.ranks[side].tolist() == (1 + result.num_negatives[side] / 2).tolist()


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


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_tiny_and_huge_rows(name):
    # Products of three rows, summed, and squares of products of two: float32 ends earlier.
    huge = {"rescal": 1e11, "tucker": 1e11, "tntcomplex": 1e11, "transr": 1e8}.get(name, 1e12)
    for scale in (1e-12, huge):
        world = toy_world(name, reciprocal=name in FORWARD_ONLY, num_people=15, seed=2)
        for table in world.tables.values():
            table *= scale
        check_against_brute_force(world, Protocol(), num_shards=2)


def test_products_are_float32_whatever_training_allowed():
    world = toy_world("complex", reciprocal=True)
    compare, compared = world.model.compare, set()

    def compare_and_look(query, candidates):
        compared.add((query.dtype, torch.get_float32_matmul_precision()))
        return compare(query, candidates)

    torch.set_float32_matmul_precision("medium")
    try:
        with mock.patch.object(world.model, "compare", compare_and_look):
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
def test_the_module_of_a_model_computes_where_the_rows_are(num_candidates, monkeypatch):
    """The model's own where it is there already, as in training; otherwise a copy of the moment."""
    world = toy_world("distmult", reciprocal=False, num_people=30, seed=3)
    world.model = build_model("conve", 16, True, seed=2)
    sizes = {"person": (30, 16), "town": (7, 16), RELATION: (2, 30)}
    world.tables = {name: torch.randn(size, generator=torch.manual_seed(4)) for name, size in sizes.items()}
    protocol = Protocol(num_candidates=num_candidates, batch_size=8)
    used = []
    query = KgeModel.query

    def noted(self, *arguments):
        used.append(self.module)
        return query(self, *arguments)

    monkeypatch.setattr(KgeModel, "query", noted)
    for scale in (1.0, -0.5):
        with torch.no_grad():
            for parameter in world.model.module.parameters():
                parameter *= scale
        world.options = {}
        expected = world.evaluate(protocol, 2, known_of(world))
        assert used and all(module is world.model.module for module in used)
        used.clear()
        world.options = ON_DEVICE
        result = world.evaluate(protocol, 2, known_of(world))
        assert used and all(module is world.model.module for module in used)  # the stand-in is a CPU too
        used.clear()
        assert_same(result, expected)
    moved = world.model.on_device(torch.device("meta"))
    assert {parameter.device.type for parameter in moved.module.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in world.model.module.parameters()} == {"cpu"}


@pytest.mark.parametrize("options", [{}, NOT_KEPT], ids=["cpu", "device, rows copied"])
def test_norms_of_candidates_are_computed_once_a_ranking(options, monkeypatch):
    world = toy_world("complex", reciprocal=True, num_people=200, seed=3)
    world.options = options
    lengths = []
    norm = torch.Tensor.norm

    def noted(self, *arguments, **named):
        lengths.append(len(self))
        return norm(self, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "norm", noted)
    monkeypatch.setattr(full_ranking, "CANDIDATE_TILE", 190)
    # Tables in one shard, whose first tile has a number of rows that no batch of queries has.
    world.evaluate(Protocol(batch_size=4), 1, known_of(world))
    assert lengths.count(190) == 1 and len(lengths) > 10


def test_sampled_ranks_do_not_depend_on_shards_and_batches():
    world = toy_world("distmult", reciprocal=False, num_people=200, seed=3)
    protocol = Protocol(num_candidates=50, seed=11)
    alone = world.evaluate(protocol, 1, known_of(world))
    many = world.evaluate(replace(protocol, batch_size=3), 4, known_of(world))
    other = world.evaluate(replace(protocol, seed=12), 1, known_of(world))
    full = world.evaluate(Protocol(), 1, known_of(world))
    visits = world.triples[:, 1] == 1
    assert_same(many, alone)
    assert alone.ranks[Side.HEAD].tolist() != other.ranks[Side.HEAD].tolist()
    # Towns are fewer than the draws, so that all of them compete.
    assert alone.ranks[Side.TAIL][visits].tolist() == full.ranks[Side.TAIL][visits].tolist()
    assert alone.num_negatives[Side.HEAD].max() <= 50
    assert 0.4 < alone.both.auc / full.both.auc < 2.5


def test_progress_counts_every_query():
    world = toy_world("distmult", reciprocal=False)
    steps = []
    world.evaluate(Protocol(batch_size=4), known=known_of(world), progress=steps.append)
    assert sum(steps) == 2 * len(world.triples)


def test_reduce_is_called_twice_with_the_same_shapes():
    """On processes that own other rows, or none, the calls must match."""
    world = toy_world("distmult", reciprocal=False)
    shapes = []

    def reduce(array):
        assert array.dtype == np.int64
        shapes.append(array.shape)
        return array

    for num_shards in (1, 4):
        world.evaluate(Protocol(), num_shards, known_of(world), reduce=reduce)
    assert len(shapes) == 4 and shapes[:2] == shapes[2:]


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
    world.tables["person"] = world.tables["person"][:-1]
    whole = world.evaluate
    with pytest.raises(InputError, match="the rows of type 'person' are not complete: 22 rows were given"):
        with mock.patch("tests.evaluation.toy_world.split_rows", lambda table, *_, **__: []):
            whole(
                Protocol(),
                known=known_of(world),
                reduce=lambda sums: sums + [[22, 22 * 11], [7, 21], [0, 0]][: len(sums)],
            )


def test_filtered_without_known_triples_is_an_error():
    with pytest.raises(InputError, match="filtered ranking needs the known triples"):
        toy_world("distmult", reciprocal=False).evaluate(Protocol(), known=None)


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


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    num_columns=st.sampled_from([0, 1, 7, STRIP_COLUMNS - 1, STRIP_COLUMNS, 2 * STRIP_COLUMNS + 3]),
    num_answers=st.integers(0, 9),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.05, 3.0]),
)
def test_counts_are_those_by_hand(num_rows, num_columns, num_answers, seed, spread):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, num_columns, generator=random).mul(4).round().div(4)
    scores[torch.rand(scores.shape, generator=random) < 0.1] = -torch.inf
    row_of = torch.randint(num_rows, (num_answers,), generator=random).sort().values
    middle = torch.randn(num_answers, generator=random).mul(4).round().div(4)
    low, high = middle - spread, middle + spread
    expected_greater = [sum(s > h for s in scores[r].tolist()) for r, h in zip(row_of, high.tolist())]
    expected_close = [
        (k, column)
        for k in range(num_answers)
        for column, score in enumerate(scores[row_of[k]].tolist())
        if low[k] <= score <= high[k]
    ]
    for count in (count_greater, count_greater_plainly):
        num_greater, close, column = count(scores, row_of, low, high)
        assert num_greater.tolist() == expected_greater
        assert list(zip(close.tolist(), column.tolist())) == expected_close


@pytest.mark.parametrize("count", [count_greater, count_greater_plainly])
def test_limits_belong_to_the_close(count):
    scores = torch.tensor([[0.0, 1.0, 2.0, 3.0, -torch.inf]])
    greater, close, column = count(scores, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([2.0]))
    assert (greater.tolist(), close.tolist(), column.tolist()) == ([1], [0, 0], [1, 2])


def test_scores_need_not_be_contiguous():
    scores = torch.randn(6, 4).T
    row_of, low, high = torch.tensor([0, 3]), torch.tensor([-0.5, 0.0]), torch.tensor([0.5, 0.2])
    for counts, expected in zip(
        count_greater(scores, row_of, low, high), count_greater(scores.clone(), row_of, low, high)
    ):
        assert counts.tolist() == expected.tolist()
