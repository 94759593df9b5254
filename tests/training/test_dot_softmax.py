"""Loss and gradients of whole batches, by loops and by autograd, against the model in float64."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.embeddings.row_lookup import DirectLookup
from dglkge.model.device import HOST, ComputeDevice
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.losses import LOSSES, Logistic, Loss, Softmax
from dglkge.model.negative_terms import Adversarial, Mean, Sum
from dglkge.model.regularizers import N3
from dglkge.model.score_functions import ComplEx
from dglkge.optim import workspace
from dglkge.optim.workspace import Scratch
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.step.contracts import Computation
from dglkge.step.objectives.dot_softmax import DotSoftmax, is_compiled
from dglkge.step.objectives.scored_losses import AutogradLoss
from dglkge.step.planning import EdgePlanner
from dglkge.step.rows import HostStore, StagedStore, Transforms
from dglkge.typing import RELATION, Side
from tests.model.regularizer_by_name import build_regularizer
from tests.training.live import assert_same_tables

DIM, GLOBAL_SIZE, NUM_NEGATIVES = 8, 40, 9
PAIRS = [("person", "person"), ("person", "town"), ("town", "person")]
SIZES = {"person": 11, "town": 7, RELATION: 5}
OFFSET = 1.5


class MemoryTables(dict[str, Any]):
    @property
    def lookup(self) -> DirectLookup:
        return DirectLookup(self)

    def row_ids(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return ids


class Table:
    is_whole = True

    def __init__(self, name: str, width: int) -> None:
        draw = torch.Generator().manual_seed(len(name))
        self.local_rows = torch.randn(SIZES[name], width, generator=draw) * 0.5
        if name == "person":
            self.local_rows[2] = 0  # N3 has a gradient there too
        self.dim = width

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.index_select(self.local_rows, 0, ids, out=out)


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


@dataclass
class Case:
    """A model, its tables, a batch, and what the objective adds."""

    score_function: str
    reciprocal: bool = True
    regularizer: Any = None
    own_entity: bool = True
    weighted: bool = True
    has_ranges: bool = False
    loss: Loss = field(default_factory=Softmax)

    def __post_init__(self) -> None:
        self.offset = OFFSET if self.has_ranges else 0.0
        self.model = build_model(self.score_function, DIM, self.reciprocal)
        self.tables = MemoryTables({name: Table(name, self.model.table_width(name)) for name in SIZES})
        self.batch = batch(self.weighted)
        samplers: Any = dict.fromkeys((Side.HEAD, Side.TAIL), SimpleNamespace(sample=sample))
        ranges = range_of if self.has_ranges else None
        self.planner = EdgePlanner(list(SIZES), PAIRS, samplers, range_of=ranges)
        if isinstance(self.regularizer, str):  # strong enough to be seen
            is_complex = self.model.score_function.complex_valued
            self.regularizer = build_regularizer(self.regularizer, 0.3, 2.5, is_complex)

    def objective(self, kind: Any, **options: Any) -> Any:
        """Return an objective, on the host in float32 by default."""
        options = {"computation": Computation(), "range_offset": self.offset, **options}
        return kind(self.planner, self.model, self.loss, self.regularizer, self.own_entity, **options)

    def run(self, objective: Any, device: ComputeDevice = HOST) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss, and the gradients summed by row; their memory has held no numbers before."""
        tables: Any = self.tables
        store: Any = HostStore(tables, Transforms([]), objective.reads_in_place)
        if device.is_staged:
            store = StagedStore(tables, Transforms([]), device)
        plan = store.prepare(objective.plan(self.batch))
        rows = store.rows(plan)
        for part in rows.collect() if objective.reads_in_place else ():
            part.rows.fill_(torch.nan)
        self.outcome = objective.gradients(plan, rows)()
        sums = {name: torch.zeros_like(table.local_rows) for name, table in self.tables.items()}
        for part in rows.collect():
            sums[part.table].index_add_(0, part.ids, part.rows)
        return self.outcome.loss, sums


def expected(case: Case) -> tuple[float, dict[str, Any], dict[Side, int]]:
    """The same in float64, group by group and side by side, on the tables themselves; and the violators."""
    rows = {name: table.local_rows.double().requires_grad_() for name, table in case.tables.items()}
    total, violators = torch.zeros((), dtype=torch.float64), dict.fromkeys(Side, 0)
    start = 0
    for group in case.planner.plan(case.batch).groups:
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
            if case.own_entity and anchor_type == truth_type:
                own_scores = case.model.compare_pairs(query, anchor_rows) - case.offset
                scores = torch.cat([scores, own_scores[:, None]], dim=1)
                ignored = torch.cat([ignored, torch.from_numpy(anchors == truths)[:, None]], dim=1)
            losses = case.loss(positive, scores, ignored)
            violators[side] += int(((scores > positive[:, None]) & ~ignored).sum())
            if case.regularizer is not None:
                triple = (anchor_rows, relations, true_rows)
                losses = losses + case.regularizer.query_penalties(case.model, *triple, side)
            total = total + (losses * weights).sum()
    (total / GLOBAL_SIZE).backward()
    return total.item(), {name: leaf.grad for name, leaf in rows.items()}, violators


KINDS = (DotSoftmax, AutogradLoss)


def check(case: Case, **options: Any) -> None:
    total, gradients, _ = expected(case)
    for kind in KINDS:
        loss, sums = case.run(case.objective(kind, **options))
        assert loss == pytest.approx(total, rel=1e-5)
        assert_same_tables(sums, gradients, 1e-5, 1e-6)


# Loops have models of their own, torch differentiates those of others; no pair of a model and a regularizer
# has code of its own but for that difference.
@pytest.mark.parametrize(("score_function", "reciprocal", "regularizer"), [
    *(("distmult", False, "n3"), ("distmult", True, "ivr"), ("distmult", True, "lp")),
    *(("complex", False, "dura"), ("complex", False, "f2"), ("complex", True, None)),
    *(("complex", True, "ivr"), ("complex", True, "dura"), ("keci", False, "dura"), ("keci", True, "n3")),
    *(("simple", False, "lp"), ("simple", True, "ivr"), ("quate", False, "f2"), ("quate", True, "dura")),
])  # fmt: skip
def test_loops_and_autograd_equal_the_model_in_float64(score_function, reciprocal, regularizer):
    for own_entity, weighted in ((False, True), (True, False), (True, True)):
        check(Case(score_function, reciprocal, regularizer, own_entity, weighted))


@pytest.mark.parametrize("score_function", ["complex", "keci"])
def test_threads_equal_the_model_in_float64(score_function, monkeypatch):
    """With parts and tiles as small as they can be."""
    monkeypatch.setattr(workspace, "NUMBERS_A_PART", 1)
    monkeypatch.setattr(workspace, "PRODUCTS_A_TILE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    check(Case(score_function, True, "n3"))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_equals_the_model_in_float64(name: str) -> None:
    for own_entity, reduction in itertools.product([False, True], [Mean(), Sum(), Adversarial(0.7)]):
        loss = LOSSES.get(name)()
        loss.reduction = Mean() if name == "softmax" and isinstance(reduction, Sum) else reduction
        check(Case("complex", True, "n3", own_entity, loss=loss))


@pytest.mark.parametrize(
    ("score_function", "reciprocal", "own_entity"),
    [("distmult", False, True), ("complex", True, False), ("complex", False, True), ("keci", True, True),
     ("quate", False, False)],
)  # fmt: skip
def test_offset_within_ranges_equals_the_model_in_float64(score_function, reciprocal, own_entity):
    without, case = (
        Case(score_function, reciprocal, "n3", own_entity, has_ranges=has_ranges)
        for has_ranges in (False, True)
    )
    check(case)
    check(case, computation=Computation(is_reference=True))
    assert abs(expected(case)[0] - expected(without)[0]) > 1e-3


@pytest.mark.parametrize(
    ("own_entity", "weighted", "regularizer"),
    [(False, True, None), (True, False, "n3"), (True, True, "lp"), (False, False, "dura")],
)
def test_penalty_and_violators_of_loops_and_autograd(own_entity, weighted, regularizer):
    case = Case("complex", True, regularizer, own_entity, weighted)
    without, _, violators = expected(dataclasses.replace(case, regularizer=None))
    assert all(violators.values())
    for kind in KINDS:
        case.run(case.objective(kind, has_measures=True))
        penalty, *counts = case.outcome.measures
        assert penalty == pytest.approx(expected(case)[0] - without, rel=1e-4, abs=1e-5)
        assert counts == [violators[Side.HEAD], violators[Side.TAIL]]


@pytest.mark.parametrize(
    ("score_function", "reciprocal", "has_ranges"),
    [("distmult", False, True), ("complex", True, False), ("keci", True, True), ("quate", False, False)],
)
def test_products_in_bfloat16_are_near(score_function, reciprocal, has_ranges):
    case = Case(score_function, reciprocal, "n3", has_ranges=has_ranges)
    total, gradients, _ = expected(case)
    for kind in KINDS:
        loss, sums = case.run(case.objective(kind, computation=Computation(matmul_dtype=torch.bfloat16)))
        assert loss == pytest.approx(total, rel=2e-3)
        for name, rows in gradients.items():
            # Not equal: the products are in bfloat16 indeed.
            assert 1e-6 * rows.norm() < (sums[name] - rows).norm() < 0.01 * rows.norm()


@pytest.mark.parametrize("matmul_dtype", [torch.float32, torch.bfloat16])
def test_neither_copies_nor_what_memory_held_before_has_an_effect(monkeypatch, matmul_dtype):
    case, computation = Case("complex"), Computation(matmul_dtype=matmul_dtype)
    loss, gradients = case.run(case.objective(DotSoftmax, computation=computation))
    take = Scratch.take

    def spoilt(*arguments: Any) -> torch.Tensor:
        piece = take(*arguments)
        return piece.fill_(torch.nan if piece.is_floating_point() else -7)

    monkeypatch.setattr(Scratch, "take", spoilt)
    for is_whole in (True, False):  # rows in place, and copied first
        monkeypatch.setattr(Table, "is_whole", is_whole)
        again, sums = case.run(case.objective(DotSoftmax, computation=computation))
        assert again == loss
        assert_same_tables(sums, gradients)


def test_a_trainer_without_triples_has_no_loss_and_no_gradient() -> None:
    case = Case("complex")
    for kind in KINDS:
        objective, rows = case.objective(kind), None
        plan = dataclasses.replace(objective.plan(case.batch), groups=[])
        assert objective.gradients(plan, rows)().loss == 0


class Doubled(ComplEx):
    """A score function of the user's that compares and operates in other ways."""

    def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        return 2 * super().compare_pairs(query, candidates)

    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        return super().operate(entity, relation) + entity


def test_other_models_and_losses_are_left_to_autograd() -> None:
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
    assert ComplEx().has_relation_product and not Doubled().has_relation_product


@pytest.mark.parametrize(("score_function", "reciprocal"), [("distmult", False), ("complex", True)])
def test_a_subclass_of_a_regularizer_keeps_its_own_penalty(score_function: str, reciprocal: bool) -> None:
    class Quartic(N3):
        def penalty(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.pow(4).sum(-1)

    is_complex = build_model(score_function, DIM, reciprocal).score_function.complex_valued
    check(Case(score_function, reciprocal, Quartic(0.3, complex_valued=is_complex)))
