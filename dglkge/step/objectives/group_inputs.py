"""What the loss of a group takes besides rows: ids of relations, weights, and negatives that do not count.

None of it depends on rows, so it can be on the device before the rows are final.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dglkge.sampling.negatives import find_equal
from dglkge.step.planning import Group, Upload
from dglkge.typing import Side

RangeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Those of :class:`dglkge.step.planning.AnswerRanges`: (B,), (B,) and (N,) bool."""


@dataclass(frozen=True)
class GroupInputs:
    """Inputs of a group: tensors on the device of its rows; arrays, or what is being copied, before.

    Attributes
    ----------
    relation_ids : (B,) int64
        Node id of each edge's relation.
    relation_places : (B,) int64 or None
        Place of each edge's relation; see :class:`Group`.
    weights, labels : (B,) or None
        Weight and confidence of each edge.
    ignored : mapping of Side to (B, N) bool
        Which scores of a side are of no negative; own entities are the last column.
    ranges : mapping of Side to three arrays
        Ranges of the queries' entities, of true answers and of negatives; empty where no score depends on
        them.
    """

    relation_ids: Any
    relation_places: Any
    weights: Any
    labels: Any
    ignored: Mapping[Side, Any]
    ranges: Mapping[Side, Any]

    def mapped(self, function: Callable[[Any], Any]) -> GroupInputs:
        """Return the results of a function of each array, tensor or copy."""

        def optional(value: Any) -> Any:
            return None if value is None else function(value)

        return GroupInputs(
            function(self.relation_ids),
            optional(self.relation_places),
            optional(self.weights),
            optional(self.labels),
            {side: function(value) for side, value in self.ignored.items()},
            {side: tuple(map(function, values)) for side, values in self.ranges.items()},
        )


class HostInputs:
    """Inputs in the host's memory, made when they are called for.

    Parameters
    ----------
    group : Group
    own_entity : bool
        Whether the query's own entity is one negative more, if it has the type of the answers.
    plainly : bool
        Find known answers without compiled loops.
    """

    def __init__(self, group: Group, own_entity: bool, plainly: bool) -> None:
        self._group = group
        self._own_entity = own_entity and group.lhs == group.rhs
        self._plainly = plainly

    def __call__(self) -> GroupInputs:
        """Return the tensors."""
        return self._arrays().mapped(torch.from_numpy)

    def staged(self, upload: Upload) -> StagedInputs:
        """Add the inputs to what is copied to a device."""
        arrays = self._arrays()
        # Places of the scores, row by row: fewer bytes to copy than a mask.
        places = {side: np.flatnonzero(mask) for side, mask in arrays.ignored.items()}
        shapes = {side: mask.shape for side, mask in arrays.ignored.items()}
        return StagedInputs(dataclasses.replace(arrays, ignored=places).mapped(upload), shapes)

    def _arrays(self) -> GroupInputs:
        """Return the arrays."""
        group = self._group
        ignored = {side: self._ignored(side) for side in group.negatives}
        ranges = {
            side: (found.anchors, found.truths, found.negatives) for side, found in group.ranges.items()
        }
        places = group.relation_places
        return GroupInputs(group.relation_ids, places, group.weights, group.labels, ignored, ranges)

    def _ignored(self, side: Side) -> npt.NDArray[np.bool_]:
        """Return which scores of a side are of no negative, (B, N)."""
        group, negatives = self._group, self._group.negatives[side]
        anchor_ids, true_ids = (
            (group.head_ids, group.tail_ids) if side is Side.TAIL else (group.tail_ids, group.head_ids)
        )
        ignored = np.zeros((len(group), len(negatives.ids)), bool)
        # Sampled negatives may be the true answer itself; it must not be pushed down as a negative.
        ignored[find_equal(true_ids, negatives.ids)] = True
        known = group.known.get(side)
        if known is not None:
            known.ignore(ignored, self._plainly)
        # With two entity types the anchor is no candidate of the answer's type.
        if self._own_entity:
            is_truth = anchor_ids == true_ids
            is_known = is_truth if known is None else is_truth | known.own
            ignored = np.concatenate([ignored, is_known[:, None]], axis=1)
        return ignored


@dataclass(frozen=True)
class StagedInputs:
    """Inputs that are copied to a device: places in place of masks, whose shapes stand beside them."""

    copied: GroupInputs
    shapes: Mapping[Side, tuple[int, ...]]

    def __call__(self) -> GroupInputs:
        """Return the tensors, once they are there."""
        inputs = self.copied.mapped(lambda copy: copy.tensor)
        masks = {}
        for side, places in inputs.ignored.items():
            mask = torch.zeros(self.shapes[side], dtype=torch.bool, device=places.device)
            mask.view(-1).index_fill_(0, places, True)
            masks[side] = mask
        return dataclasses.replace(inputs, ignored=masks)
