"""Objectives over all candidates, on shards, against torch's own losses over the whole matrix in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
    """Queries, rows, and for each query the rows that are its answers, with their shares."""

    queries: torch.Tensor
    rows: torch.Tensor
    answers: list[np.ndarray]
    shares: list[np.ndarray]
    factors: np.ndarray

    def labels(self, smoothing: float) -> torch.Tensor:
        """Return the labels of all pairs, (Q, N) float64."""
        labels = torch.full((NUM_QUERIES, NUM_ROWS), smoothing / NUM_ROWS, dtype=torch.float64)
        for i, (rows, shares) in enumerate(zip(self.answers, self.shares)):
            for row, share in zip(rows, shares):
                labels[i, row] += (1 - smoothing) * float(share)
        return labels

    def in_shard(self, start: int, stop: int) -> Answers:
        here = [(rows >= start) & (rows < stop) for rows in self.answers]
        counts = [int(mask.sum()) for mask in here]
        places = np.concatenate([rows[mask] - start for rows, mask in zip(self.answers, here)])
        shares = np.concatenate([share[mask] for share, mask in zip(self.shares, here)])
        return Answers(np.cumsum([0, *counts]), places.astype(np.int64), shares.astype(np.float32))


def problem(kind: FullForm, most_answers: int, scale: float = 1.0) -> Problem:
    """Draw a problem; with several answers, a query has 1 to ``most_answers`` of them."""
    draw = np.random.default_rng(7)
    queries, rows = (
        torch.from_numpy(draw.normal(size=(num, DIM)).astype(np.float32) * scale)
        for num in (NUM_QUERIES, NUM_ROWS)
    )
    answers = [
        np.sort(draw.choice(NUM_ROWS, draw.integers(1, most_answers + 1), replace=False))
        for _ in range(NUM_QUERIES)
    ]
    shares = [np.full(len(rows), 1 / len(rows) if kind is SOFTMAX else 1.0) for rows in answers]
    factors = draw.uniform(0, 2, NUM_QUERIES).astype(np.float32)
    factors[3] = 0
    return Problem(queries, rows, answers, shares, factors)


def expected(case: Problem, kind: Any, smoothing: float, scores: torch.Tensor) -> torch.Tensor:
    """Return the loss of each query, (Q,), by torch's own functions."""
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
        ends = np.cumsum([len(part) for part in parts])
        query_of, values = np.concatenate([block[2].query_of for block in blocks]), np.concatenate(parts)
        places = [slice(end - len(part), end) for part, end in zip(parts, ends.tolist())]
        scores = [AnswerScores(query_of, values, answers) for answers in places]
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
    got: tuple[np.ndarray, torch.Tensor, torch.Tensor],
    score_function: str = "distmult",
    rtol: float = 2e-5,
    losses_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Compare with the whole matrix in float64; ``losses_of``: the loss of each query, else torch's own."""
    if losses_of is None:
        losses_of = functools.partial(expected, case, objective.loss, objective.label_smoothing)
    model = build_model(score_function, DIM, True)
    queries, rows = (leaf.double().requires_grad_() for leaf in (case.queries, case.rows))
    losses = losses_of(model.compare(queries, rows))
    (losses * torch.from_numpy(case.factors)).sum().backward()
    np.testing.assert_allclose(got[0], losses.detach(), rtol=rtol, atol=rtol)
    for mine, leaf in ((got[1], queries), (got[2], rows)):
        assert leaf.grad is not None
        assert (mine - leaf.grad).norm() <= rtol * leaf.grad.norm()


@pytest.mark.parametrize(
    ("kind", "most_answers", "smoothing", "bounds"),
    [
        (SOFTMAX, 1, 0.0, THREE_SHARDS),
        (SOFTMAX, 1, 0.1, ONE_SHARD),
        (SOFTMAX, 9, 0.0, ONE_SHARD),
        (SOFTMAX, 9, 0.1, THREE_SHARDS),
        (BCE, 1, 0.1, THREE_SHARDS),
        (BCE, 9, 0.0, THREE_SHARDS),
        (BCE, 9, 0.1, ONE_SHARD),
    ],
)
def test_products_and_twin_equal_torch_in_float64(kind, most_answers, smoothing, bounds, monkeypatch):
    monkeypatch.setattr(shard_objective, "QUERIES_A_BLOCK", 16)
    monkeypatch.setattr(shard_objective, "TWIN_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    case, objective = problem(kind, most_answers), FullObjective(kind, NUM_ROWS, smoothing)
    num = len(bounds) - 1
    products = [ProductShard(objective, torch.float32, rows_a_panel=23) for _ in range(num)]
    check(case, objective, run(case, objective, products, bounds))
    compare = build_model("distmult", DIM, True).compare
    twins = [AutogradShard(objective, compare) for _ in range(num)]
    check(case, objective, run(case, objective, twins, bounds))


@pytest.mark.parametrize(
    ("score_function", "kind"),
    [("transe_l1", SOFTMAX), ("transe_l2", BCE), ("rotate", SOFTMAX), ("complex", BCE)],
)
def test_any_comparison_through_the_twin(score_function: str, kind: FullForm) -> None:
    case, objective = problem(kind, 5), FullObjective(kind, NUM_ROWS, 0.1)
    compare = build_model(score_function, DIM, True).compare
    shards = [AutogradShard(objective, compare) for _ in THREE_SHARDS[1:]]
    got = run(case, objective, shards, THREE_SHARDS)
    check(case, objective, got, score_function, rtol=1e-4)


def dense(case: Problem, loss: Loss, smoothing: float, scores: torch.Tensor) -> torch.Tensor:
    """Return the loss of each query by the loss's own call over the whole matrix, negatives added."""
    is_answer = torch.zeros(NUM_QUERIES, NUM_ROWS, dtype=torch.bool)
    for i, answers in enumerate(case.answers):
        is_answer[i, answers] = True
    totals = []
    for i, answers in enumerate(case.answers):
        row_scores, ignored = scores[i : i + 1], is_answer[i : i + 1]
        if isinstance(loss, PairwiseLoss):
            losses = [loss(row_scores[0, [a]], row_scores, ignored) for a in answers]
            totals.append(sum(losses)[0] / len(answers))
            continue
        assert isinstance(loss, PointwiseLoss)
        labels = case.labels(smoothing)[i : i + 1]
        terms = loss.labeled(row_scores, labels)
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


def candidate_cases() -> list[Any]:
    """Return every loss but softmax with its negatives added, and with adversarial weights."""
    cases = []
    for name in LOSSES:
        options = LOSSES.get(name).Settings.model_fields
        adding = {"reduction": "sum"} if "reduction" in options else {}
        cases += [] if name == "softmax" else [pytest.param(build_loss(name, **adding), id=name)]
        if "adversarial_weights" in options and name != "softmax":
            weighing = {"adversarial_weights": True, "adversarial_temperature": 0.7}
            cases.append(pytest.param(build_loss(name, **weighing), id=f"{name}-adversarial"))
    for loss in (Steep(), Ratio()):
        loss.reduction = Sum()
        cases.append(pytest.param(loss, id=type(loss).__name__))
    return cases


@pytest.mark.parametrize("loss", candidate_cases())
def test_any_loss_equals_its_own_call_in_float64(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_objective, "TWIN_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    for bounds, most_answers, smoothing in (
        (ONE_SHARD, 1, 0.1),
        (THREE_SHARDS, 9, 0.0),
        (THREE_SHARDS, 9, 0.1),
    ):
        # Pairs of answers have no labels that could be smoothed.
        smoothing = 0.0 if isinstance(loss, PairwiseLoss) else smoothing
        full = loss.over_candidates()
        case = problem(SOFTMAX if full.splits_labels else BCE, most_answers)
        objective = FullObjective(full, NUM_ROWS, smoothing)
        for score_function, rtol in (("distmult", 2e-5), ("rotate", 1e-4)):
            compare = build_model(score_function, DIM, True).compare
            shards = [AutogradShard(objective, compare) for _ in bounds[1:]]
            got = run(case, objective, shards, bounds)
            oracle = functools.partial(dense, case, loss, smoothing)
            check(case, objective, got, score_function, rtol, oracle)


STAGED = ComputeDevice("cpu_staged")


@pytest.mark.parametrize(
    ("score_function", "kind", "kept_bytes"),
    [
        pytest.param("transe_l1", SOFTMAX, 0, id="none kept"),
        pytest.param("transe_l1", BCE, 4 * DIM * 20, id="some kept"),
        pytest.param("rotate", SOFTMAX, 1 << 20, id="all kept"),
        pytest.param("complex", SOFTMAX, 4 * DIM * 20, id="some of products kept"),
        pytest.param("complex", BCE, 0, id="no products kept"),
    ],
)
def test_blocks_on_a_device(score_function, kind, kept_bytes, monkeypatch):
    """Copies of queries, answers and blocks of rows, and of the gradients back; the CPU is the device."""
    monkeypatch.setattr(shard_objective, "DEVICE_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    monkeypatch.setattr(shard_objective, "TWIN_BLOCK_NUMBERS", 7 * NUM_QUERIES)
    case, objective = problem(kind, 5), FullObjective(kind, NUM_ROWS, 0.1)
    compare = build_model(score_function, DIM, True).compare_plainly
    options: dict[str, Any] = {"device": STAGED, "kept_bytes": kept_bytes}
    shards = [AutogradShard(objective, compare, **options) for _ in THREE_SHARDS[1:]]
    got = run(case, objective, shards, THREE_SHARDS)
    check(case, objective, got, score_function, rtol=1e-4)
    on_host = [AutogradShard(objective, compare) for _ in THREE_SHARDS[1:]]
    expected_bits = run(case, objective, on_host, THREE_SHARDS)
    assert all(np.array_equal(mine, other) for mine, other in zip(got, expected_bits))
    # The same shards again: nothing of the step before may be left.
    again = dataclasses.replace(case, rows=case.rows * 0.5)
    check(again, objective, run(again, objective, shards, THREE_SHARDS), score_function, rtol=1e-4)


@pytest.mark.parametrize("kind", [SOFTMAX, BCE])
def test_matmuls_on_a_device_in_bfloat16_are_near(kind: FullForm) -> None:
    case, objective = problem(kind, 4), FullObjective(kind, NUM_ROWS, 0.1)
    compare = build_model("distmult", DIM, True).compare
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        shards = [AutogradShard(objective, compare, 1, STAGED, dtype) for _ in THREE_SHARDS[1:]]
        results.append(run(case, objective, shards, THREE_SHARDS))
        check(case, objective, results[-1], rtol=0.02 if dtype == torch.bfloat16 else 2e-5)
    assert not np.array_equal(results[0][0], results[1][0])


@pytest.mark.parametrize(("kind", "dtype"), [(SOFTMAX, torch.bfloat16), (BCE, torch.float32)])
def test_scores_that_are_not_kept_are_computed_again_alike(kind: FullForm, dtype: torch.dtype) -> None:
    case, objective = problem(kind, 4), FullObjective(kind, NUM_ROWS, 0.1)
    results = []
    for kept_bytes in (1 << 30, 48 * 23 * dtype.itemsize, 0):
        shard = ProductShard(objective, dtype, kept_bytes, rows_a_panel=23)
        results.append(run(case, objective, [shard], ONE_SHARD))
    for again in results[1:]:
        assert np.array_equal(results[0][0], again[0])
        assert torch.equal(results[0][1], again[1]) and torch.equal(results[0][2], again[2])


@pytest.mark.parametrize("kind", [SOFTMAX, BCE])
@pytest.mark.parametrize(
    ("dtype", "scale", "rtol"), [(torch.bfloat16, 1.0, 0.01), (torch.float32, 20.0, 2e-5)]
)
def test_products_in_bfloat16_and_large_scores(kind, dtype, scale, rtol):
    case, objective = problem(kind, 4, scale), FullObjective(kind, NUM_ROWS, 0.1 * (scale == 1))
    shards = [ProductShard(objective, dtype, rows_a_panel=40) for _ in THREE_SHARDS[1:]]
    check(case, objective, run(case, objective, shards, THREE_SHARDS), rtol=rtol)


@pytest.mark.parametrize(("kind", "poison"), [(SOFTMAX, np.inf), (BCE, np.nan), (SOFTMAX, np.nan)])
def test_what_is_not_finite_stays_so(kind: FullForm, poison: float) -> None:
    case, objective = problem(kind, 4), FullObjective(kind, NUM_ROWS)
    case.queries[5, 2] = poison
    got = run(case, objective, [ProductShard(objective, torch.float32)], ONE_SHARD)
    assert not np.isfinite(got[0][5]) and np.isfinite(np.delete(got[0], 5)).all()
    assert not got[1][5].isfinite().all() and not got[2].isfinite().all(1).any()


@pytest.mark.parametrize("num_queries", [0, 1])
def test_few_queries_and_a_shard_without_rows(num_queries: int) -> None:
    objective = FullObjective(SOFTMAX, NUM_ROWS, 0.1)
    for num_rows in (0, 3):
        none = np.empty(0, np.int64)
        answers = Answers(np.zeros(num_queries + 1, np.int64), none, none.astype(np.float32))
        shard = ProductShard(objective, torch.bfloat16)
        numbers, _ = shard.score(torch.ones(num_queries, DIM), torch.ones(num_rows, DIM), answers)
        assert numbers.shape == (3, num_queries)
        query_gradients = torch.full((num_queries, DIM), torch.nan)
        row_gradients = torch.full((num_rows, DIM), torch.nan)
        factors = np.ones(num_queries, np.float32)
        normalizers = np.full(num_queries, DIM, np.float64)
        totals = Totals(normalizers, normalizers, np.empty(0))
        shard.differentiate(totals, factors, query_gradients, row_gradients)
        assert query_gradients.isfinite().all() and row_gradients.isfinite().all()
        assert num_rows or not query_gradients.any()
