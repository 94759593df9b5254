"""The rows of one table that one batch needs, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.found_rows import FoundRows
from dglkge.training.scratch import Scratch

NodeIds = npt.NDArray[np.int64]


class RowRequest:
    """Collects ids of one table for a batch, finds their rows, and holds their gradients.

    A row has a place for each time that it is asked for; equal ids are merged by the optimizer, which has to
    do it for all trainers' gradients anyway. Memory is kept from batch to batch.

    Parameters
    ----------
    table : EmbeddingTable
    scratch : Scratch, optional
        Memory that is shared with requests that are never open at the same time.
    """

    def __init__(self, table: EmbeddingTable, scratch: Scratch | None = None) -> None:
        self.table = table
        self._scratch = Scratch() if scratch is None else scratch
        self.clear()

    def clear(self) -> None:
        """Forget the batch."""
        self._wanted: list[NodeIds] = []
        self._num_wanted = 0
        self._ids: torch.Tensor | None = None
        self._rows = self._scratch.take("rows", 0, self.table.dim)
        self.gradients = self._scratch.take("gradients", 0, self.table.dim)

    def add(self, node_ids: NodeIds) -> RowPlaces:
        """Ask for the rows of node ids (n,)."""
        start = self._num_wanted
        self._wanted.append(node_ids)
        self._num_wanted += len(node_ids)
        return RowPlaces(self, slice(start, self._num_wanted))

    @property
    def ids(self) -> torch.Tensor:
        """All node ids (n,) that were asked for, as often as they were."""
        if self._ids is None:
            wanted = np.concatenate(self._wanted) if self._wanted else np.empty(0, np.int64)
            self._ids = torch.from_numpy(wanted)
        return self._ids

    def open(self, copy: bool, rows: FoundRows | None = None) -> None:
        """Find all rows that were asked for.

        Parameters
        ----------
        copy : bool
            Copy them, and start with gradients of 0; otherwise they are read where they lie, and gradients
            are undefined until they are written.
        rows : FoundRows, optional
            The rows, where somebody has found them already.
        """
        ids = self.ids.numpy()
        self.gradients = self._scratch.take("gradients", len(ids), self.table.dim)
        if copy:
            self.gradients.zero_()
        if rows is None and not copy and self.table.is_whole:
            self._found = FoundRows.in_array(self.table.local_rows.numpy(), ids)
            return
        if rows is not None and not copy:
            self._found = rows
            return
        room = self._scratch.take("rows", len(ids), self.table.dim)
        self._rows = self.table.gather(self.ids, room) if rows is None else rows.copied(room)
        self._found = FoundRows.in_array(self._rows.numpy())

    def leaf(self, place: slice) -> torch.Tensor:
        """Return some of the copied rows as a leaf whose gradient lands in ``gradients[place]``."""
        leaf = self._rows[place].detach().requires_grad_()
        leaf.grad = self.gradients[place]
        return leaf

    def found(self, place: slice) -> FoundRows:
        """Return the rows of a place where they lie."""
        return self._found.part(place)


@dataclass(frozen=True)
class RowPlaces:
    """Consecutive places (n,) in a request."""

    request: RowRequest
    place: slice

    def leaf(self) -> torch.Tensor:
        """Return the rows (n, D) as a leaf of autograd; see :meth:`RowRequest.leaf`."""
        return self.request.leaf(self.place)

    def found(self) -> FoundRows:
        """Return the rows where they lie."""
        return self.request.found(self.place)

    @property
    def gradients(self) -> torch.Tensor:
        """Gradients of the rows, (n, D) float32."""
        return self.request.gradients[self.place]
