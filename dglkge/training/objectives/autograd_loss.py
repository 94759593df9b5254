"""The loss of groups of edges for every score function and loss, differentiated by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dglkge.model.device import HOST, ComputeDevice
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss
from dglkge.model.regularizers import Regularizer
from dglkge.training.objectives.group_inputs import GroupInputs, HostInputs
from dglkge.training.objectives.measures import BatchMeasures
from dglkge.training.objectives.rows import Group
from dglkge.training.objectives.scored_losses import ScoredLosses
from dglkge.training.stats import PhaseClock
from dglkge.typing import Side


class AutogradLoss:
    """Losses and gradients of groups, by autograd.

    Parameters
    ----------
    model : KgeModel
    loss : Loss
    regularizer : Regularizer or None
    own_entity : bool
        Whether the query's own entity is one negative more.
    clock : PhaseClock
    is_reference : bool
        Score negatives by their definition (:meth:`KgeModel.compare_plainly`), without the distances whose
        gradient is written by hand, compute the loss by autograd, and find known answers in numpy.
    matmul_dtype : torch.dtype
        Type of the matmuls that score negatives: ``torch.float32`` or ``torch.bfloat16``. Queries and the
        scores of true answers are float32 in any case.
    measures : BatchMeasures, optional
        Gets the penalty and the violators of each batch.
    device : ComputeDevice
        Device of the leaves of the groups' rows.
    is_compiled : bool
        Compile scores and losses by ``torch.compile``.
    range_offset : float
        Subtracted from the scores of answers in the range of the query's own entity, in groups with ranges.
    """

    reads_in_place = False

    def __init__(
        self,
        model: KgeModel,
        loss: Loss,
        regularizer: Regularizer | None,
        own_entity: bool,
        clock: PhaseClock,
        is_reference: bool = False,
        matmul_dtype: torch.dtype = torch.float32,
        measures: BatchMeasures | None = None,
        device: ComputeDevice = HOST,
        is_compiled: bool = False,
        range_offset: float = 0.0,
    ) -> None:
        self._measures = measures
        self._model = model
        self._device = device
        self._is_reference = is_reference
        self.scored = ScoredLosses(
            model, loss, is_reference, matmul_dtype, device, is_compiled, measures is not None, range_offset
        )
        #: Whether groups hold the row of each relation once.
        self.shares_relations = model.score_function.shares_relations and not is_reference
        self._regularizer = regularizer
        self._own_entity = own_entity
        self._clock = clock

    def __call__(self, groups: Sequence[Group], global_size: int) -> float:
        """Return the summed loss; leaves the gradients, divided by ``global_size``, with the rows."""
        return self.start(groups, global_size).item()

    def start(self, groups: Sequence[Group], global_size: int) -> torch.Tensor:
        """Queue the same on the device; return the loss, a scalar, without waiting for it."""
        if not groups:
            return torch.zeros(())
        self._clock.enter("score")
        with self._device.computing():
            loss = torch.stack([self._of_group(group) for group in groups]).sum()
            self._clock.enter("backward")
            (loss / global_size).backward()
        return loss.detach()

    def inputs(self, group: Group) -> HostInputs:
        """Return what the loss of a group takes besides rows."""
        return HostInputs(group, self._own_entity, self._is_reference)

    def _of_group(self, group: Group) -> torch.Tensor:
        """Return the summed loss of a group, a scalar."""
        inputs: GroupInputs = self.inputs(group) if group.inputs is None else group.inputs
        # Leaves accumulate into views of the request's gradients, so nothing is copied after backward().
        heads, relations, tails = group.heads.leaf(), group.relations.leaf(), group.tails.leaf()
        entities = {Side.TAIL: (heads, tails), Side.HEAD: (tails, heads)}
        of_sides = [
            self._of_side(group, inputs, side, anchors, relations, truths)
            for side, (anchors, truths) in entities.items()
            if side in group.negatives
        ]
        losses = sum(of_sides[1:], of_sides[0])
        return (losses if inputs.weights is None else losses * inputs.weights).sum()

    def _of_side(
        self,
        group: Group,
        inputs: GroupInputs,
        side: Side,
        anchors: torch.Tensor,
        relations: torch.Tensor,
        truths: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss (B,) of the queries for one side."""
        model, places = self._model, inputs.relation_places
        if places is None:
            query = model.query(anchors, relations, side, inputs.relation_ids)
        else:
            query = model.shared_query(anchors, relations, places, side)
        # Both sides may share negatives: their leaves are views of the same gradients, and autograd adds to
        # them in place.
        candidates = group.negatives[side].rows.leaf()
        # With two entity types the anchor is no candidate of the answer's type.
        own = anchors if self._own_entity and group.lhs == group.rhs else None
        losses, above = self.scored(
            query, candidates, own, truths, inputs.ignored(side), inputs.labels, inputs.ranges(side)
        )
        if self._measures is not None and above is not None:
            self._measures.add_violators(side, int(above))
        if self._regularizer is None:
            return losses
        penalty = self._regularizer.of_query(query, truths)
        if penalty is None:
            own_rows = relations if places is None else relations[places]
            penalty = model.penalty(self._regularizer, anchors, own_rows, truths, side)
        if self._measures is not None:
            of_triples = penalty.detach()
            weights = inputs.weights
            self._measures.add_penalty((of_triples if weights is None else of_triples * weights).sum().item())
        return losses + penalty
