"""The loss of groups of edges for every score function and loss, differentiated by torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss
from dglkge.model.regularizers import Regularizer
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.step.computation import Computation
from dglkge.step.contracts import BatchMeasures, Gradients, Objective, Rows
from dglkge.step.objectives.scored_losses import GroupInputs, HostInputs, ScoredLosses
from dglkge.step.planning import EdgePlanner, Group, Plan
from dglkge.typing import Side


class AutogradLoss(Objective):
    """Losses against sampled negatives and their gradients, by autograd.

    Parameters
    ----------
    planner : EdgePlanner
    model : KgeModel
    loss : Loss
    regularizer : Regularizer or None
    own_entity : bool
        Whether the query's own entity is one negative more.
    computation : Computation
        With ``is_reference`` negatives are scored by their definition (:meth:`KgeModel.compare_plainly`), and
        known answers are found in numpy.
    has_measures : bool
        Sum the penalty and count the violators of each batch.
    range_offset : float
        Subtracted from the scores of answers in the range of the query's own entity, in groups with ranges.
    """

    reads_in_place = False
    sent_bytes = 0

    def __init__(
        self,
        planner: EdgePlanner,
        model: KgeModel,
        loss: Loss,
        regularizer: Regularizer | None,
        own_entity: bool,
        computation: Computation,
        has_measures: bool = False,
        range_offset: float = 0.0,
    ) -> None:
        self._planner = planner
        self._model = model
        self._computation = computation
        self._has_measures = has_measures
        self.scored = ScoredLosses(model, loss, computation, has_measures, range_offset)
        self._shares_relations = model.score_function.shares_relations and not computation.is_reference
        self._regularizer = regularizer
        self._own_entity = own_entity

    def plan(self, batch: EdgeBatch) -> Plan:
        return self._planner.plan(batch, self._shares_relations, self._inputs)

    def _inputs(self, group: Group) -> HostInputs:
        """Return what the loss of a group takes besides rows."""
        return HostInputs(group, self._own_entity, self._computation.is_reference)

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        if not self._computation.device.is_staged:
            return lambda: self._queued(plan, rows)()
        return self._queued(plan, rows)

    def _queued(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        """Queue a batch on the device; the function that is returned waits for its loss."""
        clock = self._computation.clock
        measures = BatchMeasures(self._has_measures)
        loss = torch.zeros(())
        clock.enter("score")
        if plan.groups:
            with self._computation.device.computing():
                loss = torch.stack([self._group_loss(group, rows, measures) for group in plan.groups]).sum()
                clock.enter("backward")
                (loss / plan.divisor).backward()

        def finish() -> Gradients:
            clock.enter("backward")
            return Gradients(loss.item(), measures=measures.sums)

        return finish

    def _group_loss(self, group: Group, rows: Rows, measures: BatchMeasures) -> torch.Tensor:
        """Return the summed loss of a group, a scalar."""
        inputs: GroupInputs = group.inputs()
        # Leaves accumulate into views of the request's gradients, so nothing is copied after backward().
        heads, relations, tails = map(rows.leaf, (group.heads, group.relations, group.tails))
        entities = {Side.TAIL: (heads, relations, tails), Side.HEAD: (tails, relations, heads)}
        of_sides = [
            # Both sides may share negatives: their leaves are views of the same gradients, and autograd adds
            # to them in place.
            self._side_losses(group, inputs, side, triples, rows.leaf(group.negatives[side].rows), measures)
            for side, triples in entities.items()
            if side in group.negatives
        ]
        losses = sum(of_sides[1:], of_sides[0])
        return (losses if inputs.weights is None else losses * inputs.weights).sum()

    def _side_losses(
        self,
        group: Group,
        inputs: GroupInputs,
        side: Side,
        triples: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        candidates: torch.Tensor,
        measures: BatchMeasures,
    ) -> torch.Tensor:
        """Return the loss (B,) of the queries for one side; triples are anchors, relations and truths."""
        anchors, relations, truths = triples
        model, places = self._model, inputs.relation_places
        if places is None:
            query = model.query(anchors, relations, side, inputs.relation_ids)
        else:
            query = model.shared_query(anchors, relations, places, side)
        # With two entity types the anchor is no candidate of the answer's type.
        own = anchors if self._own_entity and group.lhs == group.rhs else None
        losses, above = self.scored(
            query, candidates, own, truths, inputs.ignored[side], inputs.labels, inputs.ranges.get(side)
        )
        if above is not None:
            measures.add_violators(side, int(above))
        if self._regularizer is None:
            return losses
        penalty = self._regularizer.of_query(query, truths)
        if penalty is None:
            own_rows = relations if places is None else relations[places]
            penalty = model.penalty(self._regularizer, anchors, own_rows, truths, side)
        if self._has_measures:
            weights = inputs.weights
            weighted = penalty.detach() if weights is None else penalty.detach() * weights
            measures.add_penalty(weighted.sum().item())
        return losses + penalty
