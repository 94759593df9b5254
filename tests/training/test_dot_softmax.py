"""Loss and gradients of whole batches, by loops and by autograd, against the model in float64."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.embeddings.row_lookup import FoundRows
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.losses import LOSSES, Logistic, Loss, Softmax
from dglkge.model.negative_terms import Adversarial, Mean, Sum
from dglkge.model.regularizers import N3, Regularizer
from dglkge.model.score_functions import ComplEx
from dglkge.optim import workspace
from dglkge.optim.workspace import Scratch
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.step.contracts import Computation
from dglkge.step.objectives.dot_softmax import DotSoftmax, is_compiled
from dglkge.step.objectives.scored_losses import AutogradLoss
from dglkge.step.planning import EdgePlanner
from dglkge.step.rows import HostStore, Transforms
from dglkge.typing import RELATION, Side
from tests.model.regularizer_by_name import build_regularizer
from tests.training.batch_rows import MemoryTables, computed
from tests.training.live import assert_same_tables

DIM, GLOBAL_SIZE, NUM_NEGATIVES = 8, 40, 9
PAIRS = [("person", "person"), ("person", "town"), ("town", "person")]
SIZES = {"person": 11, "town": 7, RELATION: 5}
OFFSET = 1.5


class Table:
    """Rows in this process; ``is_whole`` says whether they may be read in place."""

    def __init__(self, name: str, width: int, is_whole: bool) -> None:
        draw = torch.Generator().manual_seed(len(name))
        self.local_rows = torch.randn(SIZES[name], width, generator=draw) * 0.5
        if name == "person":
            self.local_rows[2] = 0  # N3 has a gradient there too
        self.dim = width
        self.is_whole = is_whole

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.index_select(self.local_rows, 0, ids, out=out)


class ScatteredTables(MemoryTables):
    """Tables of which a third of the rows have come from elsewhere."""

    @property
    def lookup(self) -> Any:
        return SimpleNamespace(rows=self._located)

    def _located(self, number: int, table_ids: dict[str, torch.Tensor]) -> dict[str, FoundRows]:
        located = {}
        for name, ids in table_ids.items():
            rows = self[name].local_rows.numpy()
            is_local = np.arange(len(rows)) % 3 > 0
            places = np.where(is_local, np.cumsum(is_local) - 1, -np.cumsum(~is_local))
            located[name] = FoundRows.in_either(rows[is_local], rows[~is_local], places[ids.numpy()])
        return located


def sample(entity_type: str, batch: EdgeBatch, chunk: int) -> np.ndarray:
    """Draw negatives; some are true answers, some come twice."""
    return np.random.default_rng((len(entity_type), chunk)).integers(0, SIZES[entity_type], NUM_NEGATIVES)


def batch(weighted: bool) -> EdgeBatch:
    """Return two chunks, the first with three pairs of types, one of them twice."""
    draw = np.random.default_rng(4)
    groups = EdgeGroup(0, 0, 0, 6), EdgeGroup(1, 0, 6, 10), EdgeGroup(2, 0, 10, 13), EdgeGroup(0, 1, 13, 20)
    heads, tails = np.empty((2, 20), np.int64)
    for side, ids in enumerate((heads, tails)):
        for group in groups:
            size = SIZES[PAIRS[group.pair][side]]
            ids[group.start : group.end] = draw.integers(0, size, group.end - group.start)
    heads[1] = tails[1]
    relations = draw.integers(0, SIZES[RELATION], 20)
    weights = draw.uniform(0, 2, 20).astype(np.float32) if weighted else None
    return EdgeBatch(0, 0, GLOBAL_SIZE, np.arange(20), heads, relations, tails, weights, groups)


def range_of(entity_type: str, node_ids: np.ndarray) -> np.ndarray:
    """Put people of even ids into range 0, and towns of even ids into range 1."""
    return (node_ids + (entity_type == "town")) % 2


class Case:
    """A model, its tables, and a batch whose rows have been asked for."""

    def __init__(
        self, score_function: str, reciprocal: bool, weighted: bool, is_whole: bool = True, has_ranges=False
    ) -> None:
        self.offset = OFFSET if has_ranges else 0.0
        self.model = build_model(score_function, DIM, reciprocal)
        self.tables = {name: Table(name, self.model.table_width(name), is_whole) for name in SIZES}
        self.batch = batch(weighted)
        samplers: Any = dict.fromkeys((Side.HEAD, Side.TAIL), SimpleNamespace(sample=sample))
        ranges = range_of if has_ranges else None
        self.planner = EdgePlanner(list(SIZES), PAIRS, samplers, range_of=ranges)
        self.groups = self.planner.plan(self.batch).groups

    def run(self, loss: Any, kind: type[MemoryTables] = MemoryTables) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, and the gradients summed by row."""
        tables: Any = kind(self.tables)
        store = HostStore(tables, Transforms([]), loss.reads_in_place)
        fill = torch.nan if loss.reads_in_place else None
        self.outcome, gradients = computed(loss, store, loss.plan(self.batch), fill)
        return self.outcome.loss, {name: rows.numpy() for name, rows in gradients.items()}


def expected(
    case: Case, regularizer: Regularizer | None, own_entity: bool, loss: Loss | None = None
) -> tuple[float, dict[str, Any], dict[Side, int]]:
    """The same in float64, group by group and side by side, on the tables themselves; and the violators."""
    rows = {name: table.local_rows.double().requires_grad_() for name, table in case.tables.items()}
    total, violators = torch.zeros((), dtype=torch.float64), dict.fromkeys(Side, 0)
    start = 0
    for group in case.groups:
        relations = rows[RELATION][case.batch.relations[start : start + len(group)]]
        start += len(group)
        weights = torch.ones(len(group)) if group.weights is None else torch.from_numpy(group.weights)
        for side, anchor_type, anchors, truth_type, truths in (
            (Side.TAIL, group.lhs, group.head_ids, group.rhs, group.tail_ids),
            (Side.HEAD, group.rhs, group.tail_ids, group.lhs, group.head_ids),
        ):
            anchor_rows, true_rows = rows[anchor_type][anchors], rows[truth_type][truths]
            ids = group.negatives[side].ids
            query = case.model.query(anchor_rows, relations, side)
            # The offset lowers answers in the range of the anchor.
            ranges = torch.from_numpy(range_of(anchor_type, anchors))
            same_range = ranges[:, None] == torch.from_numpy(range_of(truth_type, ids))
            scores = case.model.compare(query, rows[truth_type][ids]) - case.offset * same_range
            same_range = ranges == torch.from_numpy(range_of(truth_type, truths))
            positive = case.model.compare_pairs(query, true_rows) - case.offset * same_range
            ignored = torch.from_numpy(truths[:, None] == ids[None, :])
            if own_entity and anchor_type == truth_type:
                own_scores = case.model.compare_pairs(query, anchor_rows) - case.offset
                scores = torch.cat([scores, own_scores[:, None]], dim=1)
                ignored = torch.cat([ignored, torch.from_numpy(anchors == truths)[:, None]], dim=1)
            losses = (loss or Softmax())(positive, scores, ignored)
            violators[side] += int(((scores > positive[:, None]) & ~ignored).sum())
            if regularizer is not None:
                triple = (anchor_rows, relations, true_rows)
                losses = losses + regularizer.query_penalties(case.model, *triple, side)
            total = total + (losses * weights).sum()
    (total / GLOBAL_SIZE).backward()
    return total.item(), {name: leaf.grad for name, leaf in rows.items()}, violators


def regularizer_of(name: str, model: KgeModel) -> Regularizer | None:
    """Return a regularizer, strong enough to be seen."""
    if name == "none":
        return None
    return build_regularizer(name, 0.3, 2.5, model.score_function.complex_valued)


def both(
    case: Case, penalty: Regularizer | None, own_entity: bool, loss: Loss | None = None, **more: Any
) -> Any:
    """Return the objectives by loops and by autograd."""
    options: dict[str, Any] = {"computation": Computation(), **more}
    return [
        kind(case.planner, case.model, loss or Softmax(), penalty, own_entity, **options)
        for kind in (DotSoftmax, AutogradLoss)
    ]


def check(
    case: Case, penalty: Regularizer | None, own_entity: bool, loss: Loss | None = None, **more: Any
) -> float:
    """Compare loops and autograd with the model in float64; return the loss."""
    total, gradients, _ = expected(case, penalty, own_entity, loss)
    for objective in both(case, penalty, own_entity, loss, **more):
        got = case.run(objective)
        assert got[0] == pytest.approx(total, rel=1e-5)
        for name, rows in gradients.items():
            np.testing.assert_allclose(got[1][name], rows, rtol=1e-5, atol=1e-6, err_msg=name)
    return total


# Loops have models of their own, torch differentiates those of others; no pair of a model and a regularizer
# has code of its own but for that difference.
@pytest.mark.parametrize(
    ("score_function", "reciprocal", "regularizer"),
    [
        *(("distmult", False, "n3"), ("distmult", True, "ivr"), ("distmult", True, "lp")),
        *(("complex", False, "dura"), ("complex", False, "f2"), ("complex", True, "none")),
        *(("complex", True, "ivr"), ("complex", True, "dura"), ("keci", False, "dura"), ("keci", True, "n3")),
        *(("simple", False, "lp"), ("simple", True, "ivr"), ("quate", False, "f2"), ("quate", True, "dura")),
    ],
)
def test_loops_and_autograd_equal_the_model_in_float64(score_function, reciprocal, regularizer):
    for own_entity, weighted in ((False, True), (True, False), (True, True)):
        case = Case(score_function, reciprocal, weighted)
        check(case, regularizer_of(regularizer, case.model), own_entity)


@pytest.mark.parametrize("score_function", ["complex", "keci"])
def test_threads_equal_the_model_in_float64(score_function, monkeypatch):
    """With parts and tiles as small as they can be."""
    monkeypatch.setattr(workspace, "NUMBERS_A_PART", 1)
    monkeypatch.setattr(workspace, "PRODUCTS_A_TILE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    case = Case(score_function, True, weighted=True)
    check(case, regularizer_of("n3", case.model), own_entity=True)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_equals_the_model_in_float64(name: str) -> None:
    for own_entity, reduction in itertools.product([False, True], [Mean(), Sum(), Adversarial(0.7)]):
        case, loss = Case("complex", True, weighted=True), LOSSES.get(name)()
        loss.reduction = Mean() if name == "softmax" and isinstance(reduction, Sum) else reduction
        check(case, regularizer_of("n3", case.model), own_entity, loss)


@pytest.mark.parametrize(
    ("score_function", "reciprocal", "own_entity"),
    [("distmult", False, True), ("complex", True, False), ("complex", False, True), ("keci", True, True),
     ("quate", False, False)],
)  # fmt: skip
def test_offset_within_ranges_equals_the_model_in_float64(score_function, reciprocal, own_entity):
    case = Case(score_function, reciprocal, weighted=True, has_ranges=True)
    penalty = regularizer_of("n3", case.model)
    without = expected(Case(score_function, reciprocal, True), penalty, own_entity)[0]
    for is_reference in (False, True):
        computation = Computation(is_reference=is_reference)
        loss = check(case, penalty, own_entity, range_offset=OFFSET, computation=computation)
        assert abs(loss - without) > 1e-3


@pytest.mark.parametrize(
    ("own_entity", "weighted", "regularizer"),
    [(False, True, "none"), (True, False, "n3"), (True, True, "lp"), (False, False, "dura")],
)
def test_penalty_and_violators_of_loops_and_autograd(own_entity, weighted, regularizer):
    case = Case("complex", True, weighted)
    penalty = regularizer_of(regularizer, case.model)
    without, _, violators = expected(case, None, own_entity)
    expected_penalty = expected(case, penalty, own_entity)[0] - without
    assert all(violators.values())
    for objective in both(case, penalty, own_entity, has_measures=True):
        case.run(objective)
        reg, *counts = case.outcome.measures
        assert reg == pytest.approx(expected_penalty, rel=1e-4, abs=1e-5)
        assert counts == [violators[Side.HEAD], violators[Side.TAIL]]


@pytest.mark.parametrize(
    ("score_function", "reciprocal", "has_ranges"),
    [("distmult", False, True), ("complex", True, False), ("keci", True, True), ("quate", False, False)],
)
def test_products_in_bfloat16_are_near(score_function, reciprocal, has_ranges):
    case = Case(score_function, reciprocal, weighted=True, has_ranges=has_ranges)
    penalty = regularizer_of("n3", case.model)
    total, gradients, _ = expected(case, penalty, own_entity=True)
    narrow = Computation(matmul_dtype=torch.bfloat16)
    for objective in both(case, penalty, True, computation=narrow, range_offset=case.offset):
        loss, got = case.run(objective)
        assert loss == pytest.approx(total, rel=2e-3)
        for name, rows in gradients.items():
            # Not equal: the products are in bfloat16 indeed.
            assert 1e-6 * rows.norm() < np.linalg.norm(got[name] - rows.numpy()) < 0.01 * rows.norm()


@pytest.mark.parametrize("matmul_dtype", [torch.float32, torch.bfloat16])
def test_what_memory_held_before_has_no_effect(monkeypatch, matmul_dtype):
    case = Case("complex", True, weighted=True)
    computation = Computation(matmul_dtype=matmul_dtype)
    first = case.run(both(case, None, True, computation=computation)[0])
    take = Scratch.take

    def spoilt(*arguments: Any) -> torch.Tensor:
        piece = take(*arguments)
        return piece.fill_(torch.nan if piece.is_floating_point() else -7)

    monkeypatch.setattr(Scratch, "take", spoilt)
    assert_same_run(case.run(both(case, None, True, computation=computation)[0]), first)


def assert_same_run(got: tuple[float, dict], other: tuple[float, dict]) -> None:
    assert got[0] == other[0]
    assert_same_tables(got[1], other[1])


def test_rows_give_the_same_wherever_they_are() -> None:
    """In place, copied first, and in two arrays, as if some had come from another machine."""
    results = []
    for is_whole, tables in ((True, MemoryTables), (False, MemoryTables), (True, ScatteredTables)):
        case = Case("complex", True, weighted=True, is_whole=is_whole)
        loops, _ = both(case, regularizer_of("n3", case.model), True)
        results.append(case.run(loops, tables))
    for result in results[1:]:
        assert_same_run(result, results[0])


def test_a_trainer_without_triples_has_no_loss_and_no_gradient() -> None:
    case = Case("complex", True, weighted=False)
    for objective in both(case, None, True):
        plan = dataclasses.replace(objective.plan(case.batch), groups=[])
        rows: Any = None
        assert objective.gradients(plan, rows)().loss == 0


def test_other_models_and_losses_are_left_to_autograd() -> None:
    class Doubled(ComplEx):
        def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
            return 2 * super().compare_pairs(query, candidates)

    own_loss, own_model, own_function = (type("Own", (kind,), {}) for kind in (Softmax, KgeModel, ComplEx))
    names = ("complex", "keci", "rotate", "transe_l2", "tucker", "affine_cos", "rescal")
    known = [is_compiled(build_model(name, 4, True), Softmax()) for name in names]
    assert known == [True, True, False, False, False, False, False]
    assert is_compiled(build_model("complex", 4, True), Logistic())
    assert not is_compiled(build_model("complex", 4, True), own_loss())
    assert not is_compiled(own_model(ComplEx(), 4, True), Softmax())
    assert not is_compiled(KgeModel(Doubled(), 4, True), Softmax())
    # Compared by the inner product all the same: its queries are differentiated.
    assert is_compiled(KgeModel(own_function(), 4, True), Softmax()) and not own_function.compiled


@pytest.mark.parametrize(("score_function", "reciprocal"), [("distmult", False), ("complex", True)])
def test_a_subclass_of_a_regularizer_keeps_its_own_penalty(score_function: str, reciprocal: bool) -> None:
    class Quartic(N3):
        def penalty(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.pow(4).sum(-1)

    case = Case(score_function, reciprocal, weighted=True)
    check(case, Quartic(0.3, complex_valued=case.model.score_function.complex_valued), own_entity=True)
