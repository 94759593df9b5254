"""The loss of groups of edges for every score function and loss, differentiated by torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.step.contracts import BatchMeasures, Gradients, Rows
from dglkge.step.objectives.scored_losses import GroupInputs, HostInputs, SampledLoss, ScoredLosses
from dglkge.step.planning import Group, Plan
from dglkge.typing import Side


@dataclass
class AutogradLoss(SampledLoss):
    """Losses against sampled negatives and their gradients, by autograd.

    With ``computation.is_reference`` negatives are scored by their definition
    (:meth:`KgeModel.compare_plainly`), and known answers are found in numpy.
    """

    reads_in_place = False

    def __post_init__(self) -> None:
        scored = (self.model, self.loss, self.computation, self.has_measures, self.range_offset)
        self.scored = ScoredLosses(*scored)

    def plan(self, batch: EdgeBatch) -> Plan:
        is_reference = self.computation.is_reference
        shares_relations = self.model.score_function.shares_relations and not is_reference
        inputs_of = functools.partial(HostInputs, own_entity=self.own_entity, plainly=is_reference)
        return self.planner.plan(batch, shares_relations, inputs_of)

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
        inputs: GroupInputs = group.inputs()
        # Leaves accumulate into views of the request's gradients, so nothing is copied after backward().
        heads, relations, tails = map(rows.leaf, (group.heads, group.relations, group.tails))
        entities = {Side.TAIL: (heads, relations, tails), Side.HEAD: (tails, relations, heads)}
        side_losses = [
            # Both sides may share negatives: their leaves are views of the same gradients, and autograd adds
            # to them in place.
            self._side_losses(group, inputs, side, triples, rows.leaf(group.negatives[side].rows), measures)
            for side, triples in entities.items()
            if side in group.negatives
        ]
        losses = sum(side_losses[1:], side_losses[0])
        return (losses if inputs.weights is None else losses * inputs.weights).sum()

    def _side_losses(
        self,
        group: Group,
        inputs: GroupInputs,
        side: Side,
        triples: tuple[Tensor, Tensor, Tensor],
        candidates: Tensor,
        measures: BatchMeasures,
    ) -> Tensor:
        """Return the loss (B,) of the queries for one side; triples are anchors, relations and truths."""
        anchors, relations, truths = triples
        places = inputs.relation_places
        query = self.model.query(anchors, relations, side, inputs.relation_ids, places)
        # With two entity types the anchor is no candidate of the answer's type.
        own = anchors if self.own_entity and group.lhs == group.rhs else None
        losses, above = self.scored(
            query, candidates, own, truths, inputs.ignored[side], inputs.labels, inputs.ranges.get(side)
        )
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
