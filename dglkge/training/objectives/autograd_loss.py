"""The loss of groups of edges for every score function and loss, differentiated by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dglkge.model.compiled_losses import with_loops
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss
from dglkge.model.regularizers import Regularizer
from dglkge.sampling.negatives import find_equal
from dglkge.training.objectives.measures import BatchMeasures
from dglkge.training.objectives.rows import Group
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
    ) -> None:
        self._measures = measures
        self._model = model
        self._is_reference = is_reference
        self._compare = model.compare_plainly if is_reference else model.compare
        self._loss = loss if is_reference else with_loops(loss)
        self._is_narrow = matmul_dtype == torch.bfloat16
        #: Whether groups hold the row of each relation once.
        self.shares_relations = model.score_function.shares_relations and not is_reference
        self._regularizer = regularizer
        self._own_entity = own_entity
        self._clock = clock

    def __call__(self, groups: Sequence[Group], global_size: int) -> float:
        """Return the summed loss; leaves the gradients, divided by ``global_size``, with the rows."""
        if not groups:
            return 0.0
        self._clock.enter("score")
        loss = torch.stack([self._of_group(group) for group in groups]).sum()
        self._clock.enter("backward")
        (loss / global_size).backward()
        return loss.item()

    def _of_group(self, group: Group) -> torch.Tensor:
        """Return the summed loss of a group, a scalar."""
        # Leaves accumulate into views of the request's gradients, so nothing is copied after backward().
        heads, relations, tails = group.heads.leaf(), group.relations.leaf(), group.tails.leaf()
        entities = {Side.TAIL: (heads, tails), Side.HEAD: (tails, heads)}
        of_sides = [
            self._of_side(group, side, anchors, relations, truths)
            for side, (anchors, truths) in entities.items()
            if side in group.negatives
        ]
        losses = sum(of_sides[1:], of_sides[0])
        return (losses if group.weights is None else losses * torch.from_numpy(group.weights)).sum()

    def _of_side(
        self,
        group: Group,
        side: Side,
        anchors: torch.Tensor,
        relations: torch.Tensor,
        truths: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss (B,) of the queries for one side."""
        model, negatives = self._model, group.negatives[side]
        anchor_ids, true_ids = (
            (group.head_ids, group.tail_ids) if side is Side.TAIL else (group.tail_ids, group.head_ids)
        )
        places = group.relation_places
        if places is None:
            query = model.query(anchors, relations, side, torch.from_numpy(group.relation_ids))
        else:
            query = model.shared_query(anchors, relations, torch.from_numpy(places), side)
        # Both sides may share negatives: their leaves are views of the same gradients, and autograd adds to
        # them in place.
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_narrow):
            scores = self._compare(query, negatives.rows.leaf()).to(query.dtype)
        ignored = torch.zeros(scores.shape, dtype=torch.bool)
        # Sampled negatives may be the true answer itself; it must not be pushed down as a negative.
        rows, columns = find_equal(true_ids, negatives.ids)
        ignored[torch.from_numpy(rows), torch.from_numpy(columns)] = True
        known = group.known.get(side)
        if known is not None:
            known.ignore(ignored.numpy(), self._is_reference)
        # With two entity types the anchor is no candidate of the answer's type.
        if self._own_entity and group.lhs == group.rhs:
            scores = torch.cat([scores, model.compare_pairs(query, anchors)[:, None]], dim=1)
            is_truth = anchor_ids == true_ids
            is_known = is_truth if known is None else is_truth | known.own
            ignored = torch.cat([ignored, torch.from_numpy(is_known)[:, None]], dim=1)
        positive = model.compare_pairs(query, truths)
        if self._measures is not None:
            above = (scores.detach() > positive.detach()[:, None]) & ~ignored
            self._measures.add_violators(side, int(above.sum()))
        if group.labels is None:
            losses = self._loss(positive, scores, ignored)
        else:
            # Only a loss that declares confidences gets labels, and has the parameter.
            labeled: Any = self._loss
            losses = labeled(positive, scores, ignored, labels=torch.from_numpy(group.labels))
        if self._regularizer is None:
            return losses
        penalty = self._regularizer.of_query(query, truths)
        if penalty is None:
            own_rows = relations if places is None else relations[torch.from_numpy(places)]
            penalty = model.penalty(self._regularizer, anchors, own_rows, truths, side)
        if self._measures is not None:
            of_triples = penalty.detach()
            weights = None if group.weights is None else torch.from_numpy(group.weights)
            self._measures.add_penalty((of_triples if weights is None else of_triples * weights).sum().item())
        return losses + penalty
