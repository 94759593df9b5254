"""Losses of queries from the rows that they are compared with: by torch, compiled by it, or by our own loops.

:class:`AutogradLoss` is the objective of groups of edges for every score function and loss, differentiated by
torch. A loop of ours computes a loss and its gradients in one pass over the scores, instead of ten of
autograd.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dglkge.data.sorted_arrays import equal_pairs
from dglkge.model.functions.autograd import may_use_loops
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss
from dglkge.model.negative_terms import IGNORED_SCORE
from dglkge.model.regularizers import Regularizer
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.step.contracts import BatchMeasures, Computation, Gradients, Objective, Rows
from dglkge.step.planning import EdgePlanner, Group, Plan
from dglkge.typing import Mask, Side

LossFunction = Callable[..., Tensor]
"""Takes what a :class:`Loss` takes, and returns the same."""


def with_loops(loss: Loss) -> LossFunction:
    """Return a function that computes a loss by its compiled loop where it has one, else the loss itself.

    Scores that are not float32 on a CPU go to the loss.
    """
    if not loss.compiled:
        return loss
    loop, call = loss.loop(), cast(LossFunction, loss)

    def compute(positive: Tensor, negative: Tensor, ignored: Tensor | None = None, *labels: Tensor) -> Tensor:
        """Return the loss of each query."""
        if may_use_loops() and negative.device.type == "cpu" and negative.dtype == torch.float32:
            return _ByLoop.apply(positive, negative, ignored, labels[0] if labels else None, loop)
        return call(positive, negative, ignored, *labels)

    return compute


class _ByLoop(torch.autograd.Function):
    """Loss of each query; the forward pass computes the gradients too."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tensor:
        positive, negative, ignored, labels, loop = operands
        gradients = negative.detach().clone(memory_format=torch.contiguous_format)
        if ignored is not None:
            gradients.masked_fill_(ignored, IGNORED_SCORE)
        queries = torch.ones(7, len(negative))
        queries[0], queries[1] = positive.detach(), IGNORED_SCORE
        if labels is not None:
            queries[5] = labels
        loop(gradients.numpy(), tuple(queries.numpy()))
        ctx.save_for_backward(gradients, queries[3].clone())
        return queries[6].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients, missing = ctx.saved_tensors
        return missing * grads[0], gradients * grads[0].unsqueeze(1), None, None, None


RangeTensors = tuple[Tensor, Tensor, Tensor]
"""Those of :class:`dglkge.step.planning.AnswerRanges`: (B,), (B,) and (N,) bool."""


@dataclass
class SampledLoss(Objective):
    """Losses of edges against sampled negatives.

    Attributes
    ----------
    planner : EdgePlanner
    model : KgeModel
    loss : Loss
    regularizer : Regularizer or None
    own_entity : bool
        Whether the query's own entity is one negative more.
    computation : Computation
    has_measures : bool
        Sum the penalty and count the violators of each batch.
    range_offset : float
        Subtracted from the scores of answers in the range of the query's own entity, in groups with ranges.
    """

    planner: EdgePlanner
    model: KgeModel
    loss: Loss
    regularizer: Regularizer | None
    own_entity: bool
    computation: Computation
    has_measures: bool = False
    range_offset: float = 0.0

    sent_bytes = 0


@dataclass(frozen=True)
class GroupInputs:
    """What the losses of a group take besides rows: arrays, copies of them on their way to a device, tensors.

    Attributes
    ----------
    relation_ids : (B,) int64
        Node id of each edge's relation.
    relation_places : (B,) int64 or None
        Place of each edge's relation; see :class:`Group`.
    weights, labels : (B,) or None
        Weight and confidence of each edge.
    ignored : mapping of Side to (B, N) bool
        Which scores of a side are of no negative; own entities are the last column. On the way to a device:
        the places of these scores, row by row, which are fewer bytes.
    ranges : mapping of Side to three arrays
        Those of :class:`AnswerRanges`; empty where no score depends on them.
    """

    relation_ids: Any
    relation_places: Any
    weights: Any
    labels: Any
    ignored: Mapping[Side, Any]
    ranges: Mapping[Side, Any]

    def mapped(self, function: Callable[[Any], Any]) -> GroupInputs:
        """Return the results of a function of each array, tensor or copy."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {side: mapped(item) for side, item in value.items()}
            if isinstance(value, tuple):
                return tuple(map(function, value))
            return None if value is None else function(value)

        return GroupInputs(*map(mapped, vars(self).values()))


LEAST_COMPILED = 2
"""Queries, and negatives, from which the compiled function is used: torch.compile makes code of its own for 0
and for 1."""


def _columns(is_first: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 in the first column (n, 2) of what is in the first range, and in the second of the others."""
    return torch.stack([is_first, ~is_first], dim=1).to(dtype)


@dataclass
class AutogradLoss(SampledLoss):
    """Losses against sampled negatives and their gradients, by autograd.

    Scores and losses are a function of tensors only, so that ``torch.compile`` can fuse it: scores, masks and
    losses then go through memory once, and the terms of a distance never do.

    With ``computation.is_reference`` negatives are scored by their definition
    (:meth:`KgeModel.compare_plainly`), and known answers are found in numpy.
    """

    reads_in_place = False

    def __post_init__(self) -> None:
        model, is_reference = self.model, self.computation.is_reference
        self._compare = model.compare_plainly if is_reference else model.compare
        self._loss_of: LossFunction = self.loss if is_reference else with_loops(self.loss)
        self._run: Callable[..., tuple[Tensor, Tensor | None]] = self._compute
        if self.computation.is_compiled:
            from torch._inductor import config

            # Otherwise each trainer starts a process for each core to compile a few small graphs.
            config.compile_threads = 1
            self._compare, self._loss_of = model.compare_fused, self.loss
            # One graph where terms of all pairs would be in memory without it.
            self._run = torch.compile(self._compute, dynamic=True, fullgraph=model.score_function.fuses_pairs)

    def plan(self, batch: EdgeBatch) -> Plan:
        shares_relations = self.model.score_function.shares_relations and not self.computation.is_reference
        inputs_of = self._staged_inputs if self.computation.device.is_staged else None
        return self.planner.plan(batch, shares_relations, inputs_of)

    def _staged_inputs(self, group: Group) -> GroupInputs:
        """Return the arrays that are copied to a device before the batch computes."""
        arrays = self._arrays(group)
        places = {side: np.flatnonzero(mask) for side, mask in arrays.ignored.items()}
        return dataclasses.replace(arrays, ignored=places)

    def _arrays(self, group: Group) -> GroupInputs:
        """Return the inputs of a group in the host's memory."""
        ignored = {side: self._ignored(group, side) for side in group.negatives}
        places = group.relation_places
        return GroupInputs(group.relation_ids, places, group.weights, group.labels, ignored, group.ranges)

    def _ignored(self, group: Group, side: Side) -> Mask:
        """Return which scores of a side are of no negative, (B, N)."""
        negative_ids, known = group.negatives[side].ids, group.known.get(side)
        true_ids = group.tail_ids if side is Side.TAIL else group.head_ids
        ignored = np.zeros((len(group), len(negative_ids)), bool)
        # Sampled negatives may be the true answer itself; it must not be pushed down as a negative.
        ignored[equal_pairs(true_ids, negative_ids)] = True
        if known is not None:
            known.ignore(ignored, self.computation.is_reference)
        if self._scores_own(group):
            is_known = group.head_ids == group.tail_ids
            is_known = is_known if known is None else is_known | known.is_own_known
            ignored = np.concatenate([ignored, is_known[:, None]], axis=1)
        return ignored

    def _scores_own(self, group: Group) -> bool:
        """Return whether the own entities are negatives: of two entity types they are no candidates."""
        return self.own_entity and group.lhs == group.rhs

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        if not self.computation.device.is_staged:
            return lambda: self._queued(plan, rows)()
        return self._queued(plan, rows)

    def _queued(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        """Queue a batch on the device; the function that is returned waits for its loss."""
        clock = self.computation.clock
        measures = BatchMeasures(self.has_measures)
        loss = torch.zeros(())
        clock.enter("score")
        if plan.groups:
            with self.computation.device.computing():
                loss = torch.stack([self._group_loss(group, rows, measures) for group in plan.groups]).sum()
                clock.enter("backward")
                (loss / plan.divisor).backward()

        def finish() -> Gradients:
            clock.enter("backward")
            return Gradients(loss.item(), measures=measures.sums)

        return finish

    def _group_loss(self, group: Group, rows: Rows, measures: BatchMeasures) -> Tensor:
        """Return the summed loss of a group, a scalar."""
        if group.inputs is None:
            inputs = self._arrays(group).mapped(torch.from_numpy)
        else:
            inputs = group.inputs.mapped(lambda copy: copy.tensor)
        # Leaves accumulate into views of the request's gradients, so nothing is copied after backward().
        heads, relations, tails = map(rows.leaf, (group.heads, group.relations, group.tails))
        entities = {Side.TAIL: (heads, relations, tails), Side.HEAD: (tails, relations, heads)}
        side_losses = [
            # Both sides may share negatives: their leaves are views of the same gradients, and autograd adds
            # to them in place.
            self._side_losses(group, inputs, side, measures, *triples, rows.leaf(group.negatives[side]))
            for side, triples in entities.items()
            if side in group.negatives
        ]
        losses = sum(side_losses[1:], side_losses[0])
        return (losses if inputs.weights is None else losses * inputs.weights).sum()

    def _side_losses(
        self, group: Group, inputs: GroupInputs, side: Side, measures: BatchMeasures, *leaves: Tensor
    ) -> Tensor:
        """Return the loss (B,) of the queries for one side."""
        anchors, relations, truths, candidates = leaves
        places = inputs.relation_places
        query = self.model.query(anchors, relations, side, inputs.relation_ids, places)
        own_rows = anchors if self._scores_own(group) else None
        ignored = inputs.ignored[side]
        if group.inputs is not None:
            shape = (len(group), len(candidates) + self._scores_own(group))
            mask = torch.zeros(shape, dtype=torch.bool, device=ignored.device)
            mask.view(-1).index_fill_(0, ignored, True)
            ignored = mask
        masks = (ignored, inputs.labels, inputs.ranges.get(side))
        losses, above = self._losses(query, candidates, own_rows, truths, *masks)
        if above is not None:
            measures.add_violators(side, int(above))
        if self.regularizer is None:
            return losses
        penalty = self.regularizer.penalties(self.model, anchors, relations, truths, side, query, places)
        if self.has_measures:
            weights = inputs.weights
            weighted = penalty.detach() if weights is None else penalty.detach() * weights
            measures.add_penalty(weighted.sum().item())
        return losses + penalty

    def _losses(
        self, query: Tensor, candidates: Tensor, own_rows: Tensor | None, truths: Tensor, *masks: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the losses of queries.

        Parameters
        ----------
        query : (B, query_dim) tensor
        candidates : (N, D) tensor
            Rows of the negatives.
        own_rows : (B, D) tensor, optional
            Row of one negative more for each query.
        truths : (B, D) tensor
        ignored : (B, N) or (B, N + 1) bool tensor
            Which scores are of no negative; the last column is that of ``own_rows``.
        labels : (B,) tensor, optional
            Confidences, where the loss takes them.
        ranges : three bool tensors, optional
            In which of two ranges the queries' entities, the true answers and the negatives are.

        Returns
        -------
        losses : (B,) tensor
        above : () int64 tensor or None
            Negatives that score above the true answer, of all queries; None unless they are counted.
        """
        if self._run == self._compute or min(len(query), len(candidates)) < LEAST_COMPILED:
            return self._compute(query, candidates, own_rows, truths, *masks)
        # Copies: torch.compile makes further code for rows that begin within a larger tensor.
        own_rows = None if own_rows is None else own_rows.clone()
        return self._run(query, candidates.clone(), own_rows, truths.clone(), *masks)

    def try_out(self, dim: int, own_entity: bool) -> None:
        """Compute losses and gradients of made-up rows of width ``dim``; the compiler runs in the first
        call.
        """
        query_dim, device = self.model.query_dim, self.computation.device.device
        # Sizes that are equal in the first call would be taken to be always equal.
        num_queries, num_negatives = [size for size in (37, 41, 43, 47) if size not in (dim, query_dim)][:2]

        def rows(number: int, width: int) -> Tensor:
            return torch.linspace(-1, 1, number * width, device=device).view(number, width).requires_grad_()

        leaves = [rows(num_queries, query_dim), rows(num_negatives, dim), rows(num_queries, dim)]
        query, candidates, truths = leaves
        own_rows = rows(num_queries, dim) if own_entity else None
        ignored = torch.zeros(num_queries, num_negatives + own_entity, dtype=torch.bool, device=device)
        ranges: RangeTensors | None = None
        if self.range_offset:
            query_ranges, negative_ranges = (
                torch.arange(number, device=device) % 2 == 0 for number in (num_queries, num_negatives)
            )
            ranges = query_ranges, query_ranges.flip(0), negative_ranges
        # As queries are in training: results of a function of the rows.
        losses, _ = self._losses(query * 1, candidates, own_rows, truths, ignored, None, ranges)
        torch.autograd.grad(losses.sum(), leaves if own_rows is None else [*leaves, own_rows])

    def _compute(
        self, query: Tensor, candidates: Tensor, own_rows: Tensor | None, truths: Tensor, *masks: Any
    ) -> tuple[Tensor, Tensor | None]:
        ignored, labels, ranges = masks
        with self.computation.device.autocast(self.computation.matmul_dtype):
            scores = self._compare(query, candidates).to(query.dtype)
        positive = self.model.compare_pairs(query, truths)
        own_scores = None if own_rows is None else self.model.compare_pairs(query, own_rows)
        if ranges is not None:
            anchors, true_ranges, negative_ranges = ranges
            # 1 where both are in the same of two ranges: the product goes through the scores once, where a
            # mask of their size takes three passes.
            same = _columns(anchors, scores.dtype), _columns(negative_ranges, scores.dtype).T
            scores = torch.addmm(scores, *same, alpha=-self.range_offset)
            positive = positive - self.range_offset * (anchors == true_ranges)
            own_scores = None if own_scores is None else own_scores - self.range_offset
        if own_scores is not None:
            scores = torch.cat([scores, own_scores[:, None]], dim=1)
        above = None
        if self.has_measures:
            above = ((scores.detach() > positive.detach()[:, None]) & ~ignored).sum()
        # Only a loss that declares confidences gets labels, and has the parameter.
        return self._loss_of(positive, scores, ignored, *([] if labels is None else [labels])), above
