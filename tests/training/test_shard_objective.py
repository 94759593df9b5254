"""Objectives over all candidates, on shards, against torch's own losses over the whole matrix in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from dglkge.model.device import ComputeDevice
from dglkge.model.full_losses import NO_ANSWERS, AnswerScores, FullCrossEntropy, FullSoftmax, Totals
from dglkge.model.kge_model import build_model
from dglkge.model.losses import LOSSES, Loss, PairwiseLoss, PointwiseLoss, build_loss
from dglkge.model.negative_terms import Sum
from dglkge.step.objectives import shard_objective
from dglkge.step.objectives.all_candidates import Candidates, only_answers
from dglkge.step.objectives.shard_objective import (
    Answers,
    AutogradShard,
    FullObjective,
    ProductShard,
    ShardObjective,
)

SOFTMAX, BCE = FullSoftmax(), FullCrossEntropy()
FullForm = FullSoftmax | FullCrossEntropy
NUM_QUERIES, NUM_ROWS, DIM = 37, 101, 8
ONE_SHARD, THREE_SHARDS = [0, NUM_ROWS], [0, 40, 40, NUM_ROWS]


@dataclass
class Problem:
    """Queries, rows, and the shares of rows in the answers of each query, (Q, N): 0 of all other rows."""

    queries: torch.Tensor
    rows: torch.Tensor
    shares: np.ndarray
    factors: np.ndarray

    def labels(self, smoothing: float) -> torch.Tensor:
        return torch.from_numpy((1 - smoothing) * self.shares + smoothing / NUM_ROWS)

    def in_shard(self, start: int, stop: int) -> Answers:
        shares = self.shares[:, start:stop]
        starts = np.cumsum([0, *(shares > 0).sum(1)])
        return Answers(starts, shares.nonzero()[1], shares[shares > 0].astype(np.float32))


def problem(kind: FullForm, most_answers: int, scale: float = 1.0) -> Problem:
    """Draw a problem; with several answers, a query has 1 to ``most_answers`` of them."""
    draw = np.random.default_rng(7)
    queries, rows = (torch.from_numpy(draw.normal(0, scale, (num, DIM))) for num in (NUM_QUERIES, NUM_ROWS))
    shares = np.zeros((NUM_QUERIES, NUM_ROWS))
    for row in shares:
        num = draw.integers(1, most_answers + 1)
        row[draw.choice(NUM_ROWS, num, replace=False)] = 1 / num if kind is SOFTMAX else 1
    factors = draw.uniform(0, 2, NUM_QUERIES).astype(np.float32)
    factors[3] = 0
    return Problem(queries.float(), rows.float(), shares, factors)


def expected(case: Problem, kind: Any, smoothing: float, scores: torch.Tensor) -> torch.Tensor:
    labels = case.labels(smoothing)
    if kind is BCE:
        return functional.binary_cross_entropy_with_logits(scores, labels, reduction="none").sum(1)
    return functional.cross_entropy(scores, labels, reduction="none")


def run(
    case: Problem, objective: FullObjective, shards: Sequence[ShardObjective], bounds: Sequence[int]
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Return losses, gradients of the queries and gradients of the rows, put together from shards."""
    runs = list(zip(bounds, bounds[1:]))
    blocks = [(case.queries, case.rows[start:stop], case.in_shard(start, stop)) for start, stop in runs]
    scores = [NO_ANSWERS] * len(shards)
    if objective.loss.reads_answers:
        parts = [shard.score_answers(*block) for shard, block in zip(shards, blocks)]
        query_of, values = np.concatenate([block[2].query_of for block in blocks]), np.concatenate(parts)
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        scores = [AnswerScores(query_of, values, slice(*ends_here)) for ends_here in zip(ends, ends[1:])]
    parts = [shard.score(*block, answers) for shard, block, answers in zip(shards, blocks, scores)]
    numbers, pulls = (np.stack(arrays) for arrays in zip(*parts))
    totals = objective.loss.totals(numbers, pulls, scores[0])
    query_gradients, row_gradients = torch.zeros(NUM_QUERIES, DIM), torch.full((NUM_ROWS, DIM), torch.nan)
    for shard, (start, stop) in zip(shards, runs):
        part = torch.full((NUM_QUERIES, DIM), torch.nan)
        shard.differentiate(totals, case.factors, part, row_gradients[start:stop])
        query_gradients += part
    return totals.losses, query_gradients, row_gradients


def check(
    case: Problem,
    objective: FullObjective,
    shards: Sequence[ShardObjective],
    bounds: Sequence[int],
    score_function: str = "distmult",
    rtol: float = 2e-5,
    losses_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Compare :func:`run` with the whole matrix in float64, and return what it returns."""
    losses_of = losses_of or functools.partial(expected, case, objective.loss, objective.label_smoothing)
    model, got = build_model(score_function, DIM, True), run(case, objective, shards, bounds)
    queries, rows = (leaf.double().requires_grad_() for leaf in (case.queries, case.rows))
    losses = losses_of(model.compare(queries, rows))
    (losses * torch.from_numpy(case.factors)).sum().backward()
    np.testing.assert_allclose(got[0], losses.detach(), rtol=rtol, atol=rtol)
    for mine, leaf in ((got[1], queries), (got[2], rows)):
        assert (mine - leaf.grad).norm() <= rtol * leaf.grad.norm()
    return got


def twins(objective: FullObjective, score_function: str, bounds: Sequence[int], *options: Any) -> list[Any]:
    compare = build_model(score_function, DIM, True).compare
    return [AutogradShard(objective, compare, *options) for _ in bounds[1:]]


@pytest.mark.parametrize("kind", [SOFTMAX, BCE])
@pytest.mark.parametrize("most_answers", [1, 9])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bounds", [ONE_SHARD, THREE_SHARDS])
def test_products_and_twin_equal_torch_in_float64(kind, most_answers, smoothing, bounds, monkeypatch):
    monkeypatch.setattr(shard_objective, "QUERIES_A_BLOCK", 16)
    monkeypatch.setattr(shard_objective, "TWIN_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    case, objective = problem(kind, most_answers), FullObjective(kind, NUM_ROWS, smoothing)
    products = [ProductShard(objective, torch.float32, rows_a_panel=23) for _ in bounds[1:]]
    check(case, objective, products, bounds)
    check(case, objective, twins(objective, "distmult", bounds), bounds)


def dense(case: Problem, loss: Loss, smoothing: float, scores: torch.Tensor) -> torch.Tensor:
    """Return the loss of each query by the loss's own call over the whole matrix, negatives added."""
    totals, all_labels, all_answers = [], case.labels(smoothing), torch.from_numpy(case.shares > 0)
    for i, is_answer in enumerate(all_answers):
        row_scores, ignored = scores[i : i + 1], is_answer[None]
        if isinstance(loss, PairwiseLoss):
            losses = [loss(score[None], row_scores, ignored) for score in row_scores[ignored]]
            totals.append(torch.cat(losses).mean())
            continue
        assert isinstance(loss, PointwiseLoss)
        terms = loss.labeled(row_scores, all_labels[i : i + 1])
        negatives = loss.reduction(terms.masked_fill(ignored, 0), row_scores, ignored)
        totals.append(terms[ignored].sum() + negatives[0])
    return torch.stack(totals)


class Steep(PointwiseLoss):
    """A user's own: nothing of it is written for candidates."""

    def true(self, scores: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-2 * scores)

    def false(self, scores: torch.Tensor) -> torch.Tensor:
        return functional.softplus(2 * scores)


class Ratio(PairwiseLoss):
    def pairs(self, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        return functional.softplus(negative - positive)


def candidate_losses() -> Iterator[Any]:
    """Yield every loss but softmax with its negatives added, and with adversarial weights."""
    for name in sorted({*LOSSES} - {"softmax"}):
        options = LOSSES.get(name).Settings.model_fields
        adding = {"reduction": "sum"} if "reduction" in options else {}
        yield pytest.param(build_loss(name, **adding), id=name)
        if "adversarial_weights" in options:
            weighing = {"adversarial_weights": True, "adversarial_temperature": 0.7}
            yield pytest.param(build_loss(name, **weighing), id=f"{name}-adversarial")
    for loss in (Steep(), Ratio()):
        loss.reduction = Sum()
        yield pytest.param(loss, id=type(loss).__name__)


@pytest.mark.parametrize("loss", list(candidate_losses()))
@pytest.mark.parametrize(
    ("bounds", "most_answers", "smoothing"),
    [(ONE_SHARD, 1, 0.1), (THREE_SHARDS, 9, 0.0), (THREE_SHARDS, 9, 0.1)],
)
def test_any_loss_equals_its_own_call_in_float64(loss, bounds, most_answers, smoothing, monkeypatch):
    monkeypatch.setattr(shard_objective, "TWIN_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    full = loss.over_candidates()
    # Pairs of answers have no labels that could be smoothed.
    smoothing = 0.0 if isinstance(loss, PairwiseLoss) else smoothing
    case = problem(SOFTMAX if full.splits_labels else BCE, most_answers)
    objective = FullObjective(full, NUM_ROWS, smoothing)
    oracle = functools.partial(dense, case, loss, smoothing)
    for score_function, rtol in (("distmult", 2e-5), ("rotate", 1e-4)):
        shards = twins(objective, score_function, bounds)
        check(case, objective, shards, bounds, score_function, rtol, oracle)


STAGED = ComputeDevice("cpu_staged")


@pytest.mark.parametrize(("score_function", "kind", "kept_bytes"), [
    pytest.param("transe_l1", SOFTMAX, 0, id="none kept"),
    pytest.param("transe_l2", BCE, 4 * DIM * 20, id="some kept"),
    pytest.param("rotate", SOFTMAX, 1 << 20, id="all kept"),
    pytest.param("complex", SOFTMAX, 4 * DIM * 20, id="some of products kept"),
    pytest.param("complex", BCE, 0, id="no products kept"),
])  # fmt: skip
def test_blocks_on_a_device(score_function, kind, kept_bytes, monkeypatch):
    """Copies of queries, answers and blocks of rows, and of the gradients back; the CPU is the device."""
    monkeypatch.setattr(shard_objective, "DEVICE_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    monkeypatch.setattr(shard_objective, "TWIN_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    case, objective = problem(kind, 5), FullObjective(kind, NUM_ROWS, 0.1)
    compare = build_model(score_function, DIM, True).compare_plainly
    staged = {"device": STAGED, "kept_bytes": kept_bytes}
    on_device = [AutogradShard(objective, compare, **staged) for _ in THREE_SHARDS[1:]]
    on_host = [AutogradShard(objective, compare) for _ in THREE_SHARDS[1:]]
    got = check(case, objective, on_device, THREE_SHARDS, score_function, rtol=1e-4)
    assert_same(got, run(case, objective, on_host, THREE_SHARDS))
    # The same shards again: nothing of the step before may be left.
    again = dataclasses.replace(case, rows=case.rows * 0.5)
    check(again, objective, on_device, THREE_SHARDS, score_function, rtol=1e-4)


def assert_same(got: Sequence[Any], other: Sequence[Any]) -> None:
    assert all(np.array_equal(mine, others) for mine, others in zip(got, other, strict=True))


@pytest.mark.parametrize(("kind", "dtype"), [(SOFTMAX, torch.bfloat16), (BCE, torch.float32)])
def test_scores_that_are_not_kept_are_computed_again_alike(kind: FullForm, dtype: torch.dtype) -> None:
    case, objective = problem(kind, 4), FullObjective(kind, NUM_ROWS, 0.1)
    results = []
    for kept_bytes in (1 << 30, 48 * 23 * dtype.itemsize, 0):
        shard = ProductShard(objective, dtype, kept_bytes, rows_a_panel=23)
        results.append(run(case, objective, [shard], ONE_SHARD))
    for again in results[1:]:
        assert_same(results[0], again)


@pytest.mark.parametrize("kind", [SOFTMAX, BCE])
def test_matmuls_in_bfloat16_and_large_scores(kind: FullForm) -> None:
    case, objective, losses = problem(kind, 4), FullObjective(kind, NUM_ROWS, 0.1), []
    for dtype, rtol, device_rtol in ((torch.float32, 2e-5, 2e-5), (torch.bfloat16, 0.01, 0.02)):
        products = [ProductShard(objective, dtype, rows_a_panel=40) for _ in THREE_SHARDS[1:]]
        losses.append(check(case, objective, products, THREE_SHARDS, rtol=rtol)[0])
        on_device = twins(objective, "distmult", THREE_SHARDS, 1, STAGED, dtype)
        losses.append(check(case, objective, on_device, THREE_SHARDS, rtol=device_rtol)[0])
    assert not np.array_equal(losses[0], losses[2]) and not np.array_equal(losses[1], losses[3])
    large, objective = problem(kind, 4, scale=20.0), FullObjective(kind, NUM_ROWS)
    products = [ProductShard(objective, torch.float32, rows_a_panel=40) for _ in THREE_SHARDS[1:]]
    check(large, objective, products, THREE_SHARDS)


@pytest.mark.parametrize(("kind", "poison"), [(SOFTMAX, np.inf), (BCE, np.nan), (SOFTMAX, np.nan)])
def test_what_is_not_finite_stays_so(kind: FullForm, poison: float) -> None:
    case, objective = problem(kind, 4), FullObjective(kind, NUM_ROWS)
    case.queries[5, 2] = poison
    got = run(case, objective, [ProductShard(objective, torch.float32)], ONE_SHARD)
    assert not np.isfinite(got[0][5]) and np.isfinite(np.delete(got[0], 5)).all()
    assert not got[1][5].isfinite().all() and not got[2].isfinite().all(1).any()


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("num_queries", [0, 1])
def test_few_queries_and_a_shard_without_rows(num_queries: int, num_rows: int) -> None:
    shard = ProductShard(FullObjective(SOFTMAX, NUM_ROWS, 0.1), torch.bfloat16)
    answers = Answers(np.zeros(num_queries + 1, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    numbers, _ = shard.score(torch.ones(num_queries, DIM), torch.ones(num_rows, DIM), answers, NO_ANSWERS)
    assert numbers.shape == (3, num_queries)
    query_gradients, row_gradients = (torch.full((num, DIM), torch.nan) for num in (num_queries, num_rows))
    normalizers = np.full(num_queries, DIM, np.float64)
    totals = Totals(normalizers, normalizers, np.empty(0))
    shard.differentiate(totals, np.ones(num_queries, np.float32), query_gradients, row_gradients)
    assert query_gradients.isfinite().all() and row_gradients.isfinite().all()
    assert num_rows or not query_gradients.any()


@pytest.mark.parametrize("num_directions", [1, 2])
def test_candidates_of_a_shard_without_rows(num_directions: int) -> None:
    candidates = Candidates(None, 0, 0, num_directions, None, only_answers(0, 0))
    assert candidates.each(torch.empty(0, 4)).shape == (0, 4 // num_directions)
