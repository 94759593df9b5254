"""What the loss of a group takes besides rows: ids of relations, weights, and negatives that do not count.

None of it depends on rows, so it can be on the device before the rows are final.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dglkge.sampling.negatives import find_equal
from dglkge.step.planning import Group, Upload
from dglkge.typing import Side

RangeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Those of :class:`dglkge.step.planning.AnswerRanges`: (B,), (B,) and (N,) bool."""


class GroupInputs(Protocol):
    """Tensors of a group on the device of its rows; None where the group has none."""

    @property
    def relation_ids(self) -> torch.Tensor:
        """Node id of each edge's relation, (B,) int64."""
        ...

    @property
    def relation_places(self) -> torch.Tensor | None:
        """Place of each edge's relation, (B,) int64; see :class:`Group`."""
        ...

    @property
    def weights(self) -> torch.Tensor | None:
        """Weight of each edge, (B,)."""
        ...

    @property
    def labels(self) -> torch.Tensor | None:
        """Confidence of each edge, (B,)."""
        ...

    def ignored(self, side: Side) -> torch.Tensor:
        """Return which scores of a side are of no negative, (B, N) bool; own entities are the last column."""
        ...

    def ranges(self, side: Side) -> RangeTensors | None:
        """Return the ranges of the queries' entities, of true answers and of negatives of a side."""
        ...


class HostInputs:
    """Inputs in the host's memory, where the group has them.

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

    @property
    def relation_ids(self) -> torch.Tensor:
        """Node id of each edge's relation, (B,)."""
        return torch.from_numpy(self._group.relation_ids)

    @property
    def relation_places(self) -> torch.Tensor | None:
        """Place of each edge's relation, (B,)."""
        return _tensor(self._group.relation_places)

    @property
    def weights(self) -> torch.Tensor | None:
        """Weight of each edge, (B,)."""
        return _tensor(self._group.weights)

    @property
    def labels(self) -> torch.Tensor | None:
        """Confidence of each edge, (B,)."""
        return _tensor(self._group.labels)

    def ignored(self, side: Side) -> torch.Tensor:
        """Return which scores of a side are of no negative, (B, N); see :class:`GroupInputs`."""
        group, negatives = self._group, self._group.negatives[side]
        anchor_ids, true_ids = (
            (group.head_ids, group.tail_ids) if side is Side.TAIL else (group.tail_ids, group.head_ids)
        )
        ignored = torch.zeros(len(group), len(negatives.ids), dtype=torch.bool)
        # Sampled negatives may be the true answer itself; it must not be pushed down as a negative.
        rows, columns = find_equal(true_ids, negatives.ids)
        ignored[torch.from_numpy(rows), torch.from_numpy(columns)] = True
        known = group.known.get(side)
        if known is not None:
            known.ignore(ignored.numpy(), self._plainly)
        # With two entity types the anchor is no candidate of the answer's type.
        if self._own_entity:
            is_truth = anchor_ids == true_ids
            is_known = is_truth if known is None else is_truth | known.own
            ignored = torch.cat([ignored, torch.from_numpy(is_known)[:, None]], dim=1)
        return ignored

    def ranges(self, side: Side) -> RangeTensors | None:
        """Return the ranges of a side, where scores depend on them; see :class:`GroupInputs`."""
        found = self._group.ranges.get(side)
        if found is None:
            return None
        return (
            torch.from_numpy(found.anchors),
            torch.from_numpy(found.truths),
            torch.from_numpy(found.negatives),
        )

    def staged(self, upload: Upload) -> StagedInputs:
        """Add the inputs to what is copied to a device."""

        def optional(array: npt.NDArray[Any] | None) -> Any:
            return None if array is None else upload(array)

        group = self._group
        masks: dict[Side, tuple[_Tensor, tuple[int, int]]] = {}
        for side in group.negatives:
            ignored = self.ignored(side).numpy()
            masks[side] = (upload(np.flatnonzero(ignored)), (ignored.shape[0], ignored.shape[1]))
        return StagedInputs(
            upload(group.relation_ids),
            optional(group.relation_places),
            optional(group.weights),
            optional(group.labels),
            masks,
            {
                side: (upload(ranges.anchors), upload(ranges.truths), upload(ranges.negatives))
                for side, ranges in group.ranges.items()
            },
        )


def _tensor(array: npt.NDArray[Any] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)


class _Tensor(Protocol):
    """Something that has its tensor once that is copied."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        ...


@dataclass(frozen=True)
class StagedInputs:
    """Inputs on a device.

    Attributes
    ----------
    of_relation_ids, of_relation_places, of_weights, of_labels : copied tensor, or None
    ignored_places : mapping of Side to (copied tensor, (int, int))
        Places of the scores that are of no negative, row by row, and the shape of the scores: fewer bytes to
        copy than a mask.
    of_ranges : mapping of Side to three copied tensors
        Ranges of queries' entities, true answers and negatives; empty where no score depends on them.
    """

    of_relation_ids: _Tensor
    of_relation_places: _Tensor | None
    of_weights: _Tensor | None
    of_labels: _Tensor | None
    ignored_places: Mapping[Side, tuple[_Tensor, tuple[int, int]]]
    of_ranges: Mapping[Side, tuple[_Tensor, _Tensor, _Tensor]]

    @property
    def relation_ids(self) -> torch.Tensor:
        """Node id of each edge's relation, (B,)."""
        return self.of_relation_ids.tensor

    @property
    def relation_places(self) -> torch.Tensor | None:
        """Place of each edge's relation, (B,)."""
        return None if self.of_relation_places is None else self.of_relation_places.tensor

    @property
    def weights(self) -> torch.Tensor | None:
        """Weight of each edge, (B,)."""
        return None if self.of_weights is None else self.of_weights.tensor

    @property
    def labels(self) -> torch.Tensor | None:
        """Confidence of each edge, (B,)."""
        return None if self.of_labels is None else self.of_labels.tensor

    def ignored(self, side: Side) -> torch.Tensor:
        """Return which scores of a side are of no negative, (B, N); see :class:`GroupInputs`."""
        copied, (num_rows, num_columns) = self.ignored_places[side]
        places = copied.tensor
        ignored = torch.zeros(num_rows * num_columns, dtype=torch.bool, device=places.device)
        return ignored.index_fill_(0, places, True).view(num_rows, num_columns)

    def ranges(self, side: Side) -> RangeTensors | None:
        """Return the ranges of a side, where scores depend on them; see :class:`GroupInputs`."""
        if side not in self.of_ranges:
            return None
        anchors, truths, negatives = self.of_ranges[side]
        return anchors.tensor, truths.tensor, negatives.tensor
