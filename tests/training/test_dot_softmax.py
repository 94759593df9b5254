"""Loss and gradients of whole batches, by loops and by autograd, against the model in float64."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.losses import LOSSES, Logistic, Loss, Softmax
from dglkge.model.negative_terms import Adversarial, Mean, Sum
from dglkge.model.regularizers import N3, Regularizer
from dglkge.model.score_functions import ComplEx
from dglkge.optim.scratch import Scratch
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.step.computation import Computation
from dglkge.step.objectives.autograd_loss import AutogradLoss
from dglkge.step.objectives.dot_softmax import DotSoftmax, is_compiled
from dglkge.step.planning import EdgePlanner, Group
from dglkge.step.rows import HostStore, Transforms
from dglkge.typing import RELATION, Side
from tests.model.regularizer_by_name import build_regularizer
from tests.training.batch_rows import MemoryTables, computed

DIM, GLOBAL_SIZE, NUM_NEGATIVES = 8, 40, 9
PAIRS = [("person", "person"), ("person", "town"), ("town", "person")]
SIZES = {"person": 11, "town": 7, RELATION: 5}
OFFSET = 1.5
MODELS = [("distmult", False), ("distmult", True), ("complex", False), ("complex", True)]
PRODUCTS = [(name, reciprocal) for name in ("keci", "simple", "quate") for reciprocal in (False, True)]
"""Inner products whose queries are differentiated by torch."""


class Table:
    """Rows in this process; ``is_whole`` says whether they may be read in place."""

    def __init__(self, name: str, width: int, is_whole: bool) -> None:
        draw = torch.Generator().manual_seed(len(name))
        self.local_rows = torch.randn(SIZES[name], width, generator=draw) * 0.5
        self.dim = width
        self.is_whole = is_whole

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy rows."""
        return torch.index_select(self.local_rows, 0, ids, out=out)


def sample(entity_type: str, batch: EdgeBatch, chunk: int) -> np.ndarray:
    """Draw negatives; some are true answers, some come twice."""
    return np.random.default_rng((len(entity_type), chunk)).integers(0, SIZES[entity_type], NUM_NEGATIVES)


def batch(weighted: bool) -> EdgeBatch:
    """Return two chunks, the first with three pairs of types, one of them twice."""
    draw = np.random.default_rng(4)
    runs = [(0, 0), (1, 0), (2, 0), (0, 1)]
    bounds = [0, 6, 10, 13, 20]
    heads, tails = (
        np.concatenate(
            [
                draw.integers(0, SIZES[PAIRS[pair][side]], end - start)
                for (pair, _), start, end in zip(runs, bounds, bounds[1:])
            ]
        )
        for side in (0, 1)
    )
    heads[1] = tails[1]
    groups = tuple(
        EdgeGroup(pair, chunk, start, end) for (pair, chunk), start, end in zip(runs, bounds, bounds[1:])
    )
    relations = draw.integers(0, SIZES[RELATION], 20)
    weights = draw.uniform(0, 2, 20).astype(np.float32) if weighted else None
    return EdgeBatch(0, 0, GLOBAL_SIZE, np.arange(20), heads, relations, tails, weights, groups)


def range_of(entity_type: str, node_ids: np.ndarray) -> np.ndarray:
    """Put people of even ids into range 0, and towns of even ids into range 1."""
    return (node_ids + (entity_type == "town")) % 2


class Case:
    """A model, its tables, and a batch whose rows have been asked for."""

    def __init__(
        self,
        score_function: str,
        reciprocal: bool,
        weighted: bool,
        is_whole: bool = True,
        has_ranges: bool = False,
    ) -> None:
        self.offset = OFFSET if has_ranges else 0.0
        self.model = build_model(score_function, DIM, reciprocal)
        self.tables = {name: Table(name, self.model.table_width(name), is_whole) for name in SIZES}
        sampler: Any = SimpleNamespace(sample=sample)
        of_nodes = range_of if has_ranges else None
        self.batch = batch(weighted)
        samplers = dict.fromkeys((Side.HEAD, Side.TAIL), sampler)
        self.planner = EdgePlanner(list(SIZES), PAIRS, samplers, range_of=of_nodes)
        self.groups = self.planner.plan(self.batch).groups

    def run(self, loss: Any) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, and the gradients summed by row."""
        tables: Any = MemoryTables(self.tables)
        store = HostStore(tables, Transforms({}), loss.reads_in_place)
        self.found, gradients = computed(
            loss, store, loss.plan(self.batch), torch.nan if loss.reads_in_place else None
        )
        return self.found.loss, {name: rows.numpy() for name, rows in gradients.items()}


def expected(
    case: Case, regularizer: Regularizer | None, own_entity: bool, loss: Loss | None = None
) -> tuple[float, dict[str, Any]]:
    """The same in float64, group by group and side by side, on the tables themselves."""
    rows = {name: table.local_rows.double().requires_grad_() for name, table in case.tables.items()}
    total = torch.zeros((), dtype=torch.float64)
    relation_ids = batch(False).relations
    start = 0
    for group in case.groups:
        relations = rows[RELATION][relation_ids[start : start + len(group)]]
        start += len(group)
        weights = torch.ones(len(group)) if group.weights is None else torch.from_numpy(group.weights)
        for side, anchor_type, anchors, truth_type, truths in (
            (Side.TAIL, group.lhs, group.head_ids, group.rhs, group.tail_ids),
            (Side.HEAD, group.rhs, group.tail_ids, group.lhs, group.head_ids),
        ):
            given = (relations, rows, anchors, truths, case.offset)
            losses = side_losses(loss or Softmax(), case.model, group, side, own_entity, *given)
            if regularizer is not None:
                of_anchors, of_truths = rows[anchor_type][anchors], rows[truth_type][truths]
                losses = losses + regularizer.of_queries(case.model, of_anchors, relations, of_truths, side)
            total = total + (losses * weights).sum()
    (total / GLOBAL_SIZE).backward()
    return total.item(), {name: leaf.grad for name, leaf in rows.items()}


def side_losses(
    loss: Loss,
    model: KgeModel,
    group: Group,
    side: Side,
    own_entity: bool,
    relations: torch.Tensor,
    rows: dict[str, torch.Tensor],
    anchors: np.ndarray,
    truths: np.ndarray,
    offset: float,
) -> torch.Tensor:
    """Loss of each truth and its negatives; the offset lowers answers in the range of the anchor."""
    anchor_type, truth_type = (group.lhs, group.rhs) if side is Side.TAIL else (group.rhs, group.lhs)
    query = model.query(rows[anchor_type][anchors], relations, side)
    ids = group.negatives[side].ids
    range_of_anchors = range_of(anchor_type, anchors)
    scores = model.compare(query, rows[truth_type][ids])
    scores = scores - offset * torch.from_numpy(range_of_anchors[:, None] == range_of(truth_type, ids))
    positive = model.compare_pairs(query, rows[truth_type][truths])
    positive = positive - offset * torch.from_numpy(range_of_anchors == range_of(truth_type, truths))
    ignored = torch.from_numpy(truths[:, None] == ids[None, :])
    if own_entity and anchor_type == truth_type:
        own = model.compare_pairs(query, rows[anchor_type][anchors]) - offset
        scores = torch.cat([scores, own[:, None]], dim=1)
        ignored = torch.cat([ignored, torch.from_numpy(anchors == truths)[:, None]], dim=1)
    return loss(positive, scores, ignored)


def regularizer_of(name: str, model: KgeModel) -> Regularizer | None:
    """Return a regularizer, strong enough to be seen."""
    if name == "none":
        return None
    return build_regularizer(name, 0.3, 2.5, model.score_function.complex_valued)


def assert_close(got: tuple[float, dict], wanted: tuple[float, dict], rtol: float, atol: float) -> None:
    """Hold losses and gradients near each other."""
    assert got[0] == pytest.approx(wanted[0], rel=rtol)
    for name, rows in wanted[1].items():
        np.testing.assert_allclose(got[1][name], rows, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("score_function", "reciprocal", "regularizer"),
    [
        (*model, regularizer)
        for model in MODELS + PRODUCTS
        for regularizer in ("none", "n3", "lp", "f2", "dura", "ivr")
        # It has no form that ivr takes.
        if (model[0], regularizer) != ("quate", "ivr")
    ],
)
def test_loops_and_autograd_equal_the_model_in_float64(
    score_function: str, reciprocal: bool, regularizer: str
) -> None:
    for own_entity, weighted in itertools.product([False, True], [False, True]):
        case = Case(score_function, reciprocal, weighted)
        penalty = regularizer_of(regularizer, case.model)
        wanted = expected(case, penalty, own_entity)
        for loss in (
            DotSoftmax(case.planner, case.model, Softmax(), penalty, own_entity, Computation()),
            AutogradLoss(case.planner, case.model, Softmax(), penalty, own_entity, Computation()),
        ):
            assert_close(case.run(loss), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_equals_the_model_in_float64(name: str) -> None:
    for own_entity, reduction in itertools.product([False, True], [Mean(), Sum(), Adversarial(0.7)]):
        case, loss = Case("complex", True, weighted=True), LOSSES.get(name)()
        loss.reduction = Mean() if name == "softmax" and isinstance(reduction, Sum) else reduction
        penalty = regularizer_of("n3", case.model)
        wanted = expected(case, penalty, own_entity, loss)
        for kind in (DotSoftmax, AutogradLoss):
            objective = kind(case.planner, case.model, loss, penalty, own_entity, Computation())
            assert_close(case.run(objective), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own_entity", [False, True], ids=["others", "own"])
@pytest.mark.parametrize(("score_function", "reciprocal"), MODELS + PRODUCTS)
def test_offset_within_ranges_equals_the_model_in_float64(
    score_function: str, reciprocal: bool, own_entity: bool
) -> None:
    case = Case(score_function, reciprocal, weighted=True, has_ranges=True)
    plain, twin = Computation(), Computation(is_reference=True)
    penalty = regularizer_of("n3", case.model)
    wanted = expected(case, penalty, own_entity)
    assert abs(wanted[0] - expected(Case(score_function, reciprocal, True), penalty, own_entity)[0]) > 1e-3
    for loss in (
        DotSoftmax(case.planner, case.model, Softmax(), penalty, own_entity, plain, range_offset=OFFSET),
        AutogradLoss(case.planner, case.model, Softmax(), penalty, own_entity, plain, range_offset=OFFSET),
        AutogradLoss(case.planner, case.model, Softmax(), penalty, own_entity, twin, range_offset=OFFSET),
    ):
        assert_close(case.run(loss), wanted, rtol=1e-5, atol=1e-6)


def count_violators(case: Case, own_entity: bool) -> dict[Side, int]:
    """Count negatives above the true answer in float64, one by one."""
    rows = {name: table.local_rows.double() for name, table in case.tables.items()}
    relation_ids, start, found = batch(False).relations, 0, dict.fromkeys(Side, 0)
    for group in case.groups:
        for place in range(len(group)):
            relation = rows[RELATION][relation_ids[start + place]][None]
            head, tail = int(group.head_ids[place]), int(group.tail_ids[place])
            for side, anchor_type, anchor, truth_type, truth in (
                (Side.TAIL, group.lhs, head, group.rhs, tail),
                (Side.HEAD, group.rhs, tail, group.lhs, head),
            ):
                query = case.model.query(rows[anchor_type][[anchor]], relation, side)
                scores = case.model.compare(query, rows[truth_type])[0]
                candidates = group.negatives[side].ids.tolist()
                candidates += [anchor] if own_entity and anchor_type == truth_type else []
                found[side] += sum(bool(scores[one] > scores[truth]) for one in candidates if one != truth)
        start += len(group)
    return found


@pytest.mark.parametrize("regularizer", ["none", "n3", "lp", "dura"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("own_entity", [False, True], ids=["others", "own"])
def test_penalty_and_violators_of_loops_and_autograd(
    own_entity: bool, weighted: bool, regularizer: str
) -> None:
    case = Case("complex", True, weighted)
    penalty = regularizer_of(regularizer, case.model)
    wanted = expected(case, penalty, own_entity)[0] - expected(case, None, own_entity)[0]
    above = count_violators(case, own_entity)
    assert all(above.values())
    for loss in (
        DotSoftmax(
            case.planner, case.model, Softmax(), penalty, own_entity, Computation(), has_measures=True
        ),
        AutogradLoss(
            case.planner, case.model, Softmax(), penalty, own_entity, Computation(), has_measures=True
        ),
    ):
        case.run(loss)
        reg, lhs, rhs = case.found.measures
        assert reg == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert (lhs, rhs) == (above[Side.HEAD], above[Side.TAIL])


@pytest.mark.parametrize("has_ranges", [False, True], ids=["whole", "ranges"])
@pytest.mark.parametrize("by_autograd", [False, True], ids=["loops", "autograd"])
@pytest.mark.parametrize(("score_function", "reciprocal"), MODELS + PRODUCTS)
def test_products_in_bfloat16_are_near(
    score_function: str, reciprocal: bool, by_autograd: bool, has_ranges: bool
) -> None:
    case = Case(score_function, reciprocal, weighted=True, has_ranges=has_ranges)
    penalty = regularizer_of("n3", case.model)
    wanted = expected(case, penalty, own_entity=True)
    narrow = Computation(matmul_dtype=torch.bfloat16)
    loss: AutogradLoss | DotSoftmax
    if by_autograd:
        loss = AutogradLoss(
            case.planner, case.model, Softmax(), penalty, True, narrow, range_offset=case.offset
        )
    else:
        loss = DotSoftmax(
            case.planner, case.model, Softmax(), penalty, True, narrow, range_offset=case.offset
        )
    got = case.run(loss)
    assert got[0] == pytest.approx(wanted[0], rel=2e-3)
    for name, rows in wanted[1].items():
        # Not equal: the products are in bfloat16 indeed.
        assert 1e-6 * rows.norm() < np.linalg.norm(got[1][name] - rows.numpy()) < 0.01 * rows.norm()


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_what_memory_held_before_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, products: torch.dtype
) -> None:
    case = Case("complex", True, weighted=True)
    first = case.run(
        DotSoftmax(case.planner, case.model, Softmax(), None, True, Computation(matmul_dtype=products))
    )
    take = Scratch.take

    def spoilt(*arguments: Any) -> torch.Tensor:
        piece = take(*arguments)
        return piece.fill_(torch.nan) if piece.is_floating_point() else piece.fill_(-7)

    monkeypatch.setattr(Scratch, "take", spoilt)
    again = case.run(
        DotSoftmax(case.planner, case.model, Softmax(), None, True, Computation(matmul_dtype=products))
    )
    assert again[0] == first[0]
    assert all(np.array_equal(rows, again[1][name]) for name, rows in first[1].items())


def test_rows_that_are_copied_first_give_the_same() -> None:
    in_place, copied = (Case("complex", True, weighted=True, is_whole=whole) for whole in (True, False))
    results = []
    for case in (in_place, copied):
        penalty = regularizer_of("n3", case.model)
        results.append(
            case.run(DotSoftmax(case.planner, case.model, Softmax(), penalty, True, Computation()))
        )
    assert results[0][0] == results[1][0]
    assert all(np.array_equal(rows, results[1][1][name]) for name, rows in results[0][1].items())


def test_a_trainer_without_triples_has_no_loss_and_no_gradient() -> None:
    case = Case("complex", True, weighted=False)
    for loss in (
        DotSoftmax(case.planner, case.model, Softmax(), None, True, Computation()),
        AutogradLoss(case.planner, case.model, Softmax(), None, True, Computation()),
    ):
        plan = dataclasses.replace(loss.plan(case.batch), groups=[])
        rows: Any = None
        assert loss.gradients(plan, rows)().loss == 0


def test_other_models_and_losses_are_left_to_autograd() -> None:
    class Tuned(Softmax):
        """A loss of the user's."""

    class Shifted(KgeModel):
        """A model of the user's."""

    class Bilinear(ComplEx):
        """A score function of the user's."""

    class Doubled(ComplEx):
        """A score function of the user's that compares otherwise."""

        def compare_pairs(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
            """Return twice the product."""
            return 2 * super().compare_pairs(query, candidates)

    names = ("complex", "keci", "rotate", "transe_l2", "tucker", "affine_cos", "rescal")
    known = [is_compiled(build_model(name, 4, True), Softmax()) for name in names]
    assert known == [True, True, False, False, False, False, False]
    assert is_compiled(build_model("complex", 4, True), Logistic())
    assert not is_compiled(build_model("complex", 4, True), Tuned())
    assert not is_compiled(Shifted(ComplEx(), 4, True), Softmax())
    assert not is_compiled(KgeModel(Doubled(), 4, True), Softmax())
    # Compared by the inner product all the same: its queries are differentiated.
    assert is_compiled(KgeModel(Bilinear(), 4, True), Softmax()) and not Bilinear.compiled


@pytest.mark.parametrize(("score_function", "reciprocal"), MODELS)
def test_a_subclass_of_a_regularizer_keeps_its_own_penalty(score_function: str, reciprocal: bool) -> None:
    class Quartic(N3):
        """Fourth powers."""

        def penalty(self, rows: torch.Tensor) -> torch.Tensor:
            """Return the sum of the fourth powers of each row's numbers."""
            return rows.pow(4).sum(-1)

    case = Case(score_function, reciprocal, weighted=True)
    penalty = Quartic(0.3, complex_valued=case.model.score_function.complex_valued)
    wanted = expected(case, penalty, own_entity=True)
    loss = DotSoftmax(case.planner, case.model, Softmax(), penalty, True, Computation())
    assert_close(case.run(loss), wanted, rtol=1e-5, atol=1e-6)
