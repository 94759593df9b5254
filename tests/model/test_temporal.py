"""TComplEx and TNTComplEx: scores, gradients and penalties against complex numbers of torch in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dglkge.model.kge_model import KgeModel, build_model
from dglkge.typing import Side
from tests.model.regularizer_by_name import build_regularizer

DIM, NUM_TIMES = 6, 4
NAMES = ("tcomplex", "tntcomplex")


def draw(name: str, reciprocal: bool, **options: float) -> tuple[KgeModel, dict[str, torch.Tensor]]:
    """Return a model with large rows of times, and rows of triples at times that repeat."""
    model = build_model(name, DIM, reciprocal, {"num_times": NUM_TIMES, **options}, seed=3)
    random = torch.Generator().manual_seed(8)
    assert model.module is not None
    with torch.no_grad():
        model.module.rows.copy_(torch.randn(model.module.rows.shape, generator=random))
    widths = {"head": DIM, "relation": model.relation_width, "tail": DIM}
    rows = {role: torch.randn(7, width, generator=random).double() for role, width in widths.items()}
    model.set_times(rows["relation"], torch.tensor([0, 3, 1, 3, 2, 0, 1]))
    return model, {role: row.requires_grad_() for role, row in rows.items()}


def as_complex(row: torch.Tensor) -> torch.Tensor:
    return torch.complex(*row.chunk(2, dim=-1))


def factors(model: KgeModel, relation: torch.Tensor, times: torch.Tensor, side: Side) -> list[torch.Tensor]:
    """Return r u, and r' of TNTComplEx, of the direction that serves a side."""
    if model.reciprocal:
        relation = relation.chunk(2, dim=1)[0 if side is Side.TAIL else 1]
    product = as_complex(relation[:, :DIM]) * as_complex(times)[relation[:, -1].long()]
    return [product] if relation.shape[1] == DIM + 1 else [product, as_complex(relation[:, DIM:-1])]


def oracle(model: KgeModel, rows: dict[str, torch.Tensor], times: torch.Tensor, side: Side) -> torch.Tensor:
    """Return the scores; a reciprocal relation acts forwards on the entity given."""
    q = sum(factors(model, rows["relation"], times, side))
    head, tail = as_complex(rows["head"]), as_complex(rows["tail"])
    if model.reciprocal and side is Side.HEAD:
        head, tail = tail, head
    return (head * q * tail.conj()).real.sum(-1)


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_and_penalties(name, reciprocal, side):
    model, rows = draw(name, reciprocal)
    scores = model.score(rows["head"], rows["relation"], rows["tail"], side)
    times = model.module.rows.detach().double().requires_grad_()
    expected = oracle(model, rows, times, side)
    torch.testing.assert_close(scores, expected)
    weights = torch.linspace(-1, 2, len(scores), dtype=torch.float64)
    leaves = list(rows.values())
    grads = torch.autograd.grad((scores * weights).sum(), [*leaves, model.module.rows])
    expected_grads = torch.autograd.grad((expected * weights).sum(), [*leaves, times])
    for gradient, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=1e-6, atol=1e-6)
    if reciprocal:
        # Lacroix et al. 2020, eq. 6: |h|^3 + |r u|^3 + |r'|^3 + |t|^3 over complex moduli.
        regularizer = build_regularizer("n3", 0.1, complex_valued=True)
        anchors, answer = (rows["head"], rows["tail"]) if side is Side.TAIL else (rows["tail"], rows["head"])
        penalties = regularizer.query_penalties(model, anchors, rows["relation"], answer, side)
        parts = [as_complex(anchors), as_complex(answer), *factors(model, rows["relation"], times, side)]
        torch.testing.assert_close(penalties, 0.1 * sum(part.abs().pow(3).sum(-1) for part in parts))
    # The number of a time has no gradient.
    width = rows["relation"].shape[1] // (2 if reciprocal else 1)
    assert (grads[1][:, width - 1 :: width] == 0).all()


@pytest.mark.parametrize("name", [*NAMES, "de_simple"])
def test_relations_at_a_time_are_scored_by_one_product(name):
    """(h, ?, t) at a time: the score of every relation there, whatever time its row has."""
    model = build_model(name, 8, True, {"num_times": NUM_TIMES}, seed=3)
    random = torch.Generator().manual_seed(8)
    heads, tails = (torch.randn(3, 8, generator=random, dtype=torch.float64) for _ in range(2))
    relations = torch.randn(5, model.relation_width, generator=random).double()
    times = torch.tensor([2, 0, 3])
    if model.module is not None:
        model.module.rows.data.normal_(generator=random)
    for side, columns in zip((Side.TAIL, Side.HEAD), relations.chunk(2, dim=1)):
        anchors, answer = (heads, tails) if side is Side.TAIL else (tails, heads)
        query = model.relation_query(anchors, answer, 4 * torch.tensor([1, 7, 0]) + times)
        assert query.shape[1] == model.score_function.relation_query_dim(8)
        scores = model.score_function.compare_relations(query, columns)
        for place, time in enumerate(times):
            timed = model.set_times(relations.clone(), time.expand(5))
            pairs = (rows[place].expand(5, -1) for rows in (heads, tails))
            expected = model.score(next(pairs), timed, next(pairs), side)
            torch.testing.assert_close(scores[place], expected)


@pytest.mark.parametrize("power", [2.0, 3.0, 4.0])
def test_smoothness(power):
    """Lacroix et al. 2020, eq. 7: the mean of |u_(t+1) - u_t|_p^p."""
    model, _ = draw("tcomplex", False, smoothness=0.5, smoothness_power=power)
    penalty = model.score_function.module_penalty()
    times = as_complex(model.module.rows.detach())
    expected = sum((b - a).abs().pow(power).sum() for a, b in pairwise(times)) / (NUM_TIMES - 1)
    torch.testing.assert_close(penalty, 0.5 * expected)
    # Equal times: a gradient of 0 and none that is not finite.
    with torch.no_grad():
        model.module.rows.copy_(model.module.rows[:1].expand(NUM_TIMES, DIM))
    (gradient,) = torch.autograd.grad(model.score_function.module_penalty(), model.module.parameters())
    assert (gradient == 0).all()
    assert draw("tcomplex", False)[0].score_function.module_penalty() is None
    assert draw("tcomplex", False, smoothness=1.0, num_times=1)[0].score_function.module_penalty() is None


@pytest.mark.parametrize("name", NAMES)
def test_rows_hold_the_number_of_a_time(name):
    model = build_model(name, DIM, True, {"num_times": NUM_TIMES})
    rows = model.initial_rows("relation", torch.arange(5), 1, 1.0)
    half = model.relation_width // 2
    assert (rows[:, [half - 1, -1]] == 0).all() and (rows[:, : half - 1] != 0).all()
    timed = model.set_times(rows.clone(), torch.tensor([3, 0, 1, 2, 3]))
    assert timed[:, half - 1].tolist() == timed[:, -1].tolist() == [3, 0, 1, 2, 3]
    timed[:, [half - 1, -1]] = 0
    assert torch.equal(timed, rows)
    assert model.score_function.module_numbers(DIM) == NUM_TIMES * DIM == model.module.rows.numel()
