"""The rows of one table that one batch needs, pulled in one piece, and their gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.embedding_table import EmbeddingTable


class RowRequest:
    """Collects ids of one table, pulls all rows at once, and holds their gradients.

    Rows are pulled once for each time that they are asked for; equal ids are merged by the optimizer,
    which has to do it for all trainers' gradients anyway.

    Parameters
    ----------
    table : EmbeddingTable
    """

    def __init__(self, table: EmbeddingTable) -> None:
        self.table = table
        self._wanted: list[npt.NDArray[np.int64]] = []
        self._num_wanted = 0
        self.ids = torch.empty(0, dtype=torch.int64)
        self.gradients = torch.empty(0)
        self._rows = torch.empty(0)

    def add(self, node_ids: npt.NDArray[np.int64]) -> slice:
        """Ask for the rows of node ids (n,); returns their place, for :meth:`rows`."""
        start = self._num_wanted
        self._wanted.append(node_ids)
        self._num_wanted += len(node_ids)
        return slice(start, self._num_wanted)

    def pull(self) -> None:
        """Copy all rows that were asked for."""
        if self._wanted:
            self.ids = torch.from_numpy(np.concatenate(self._wanted))
        self._rows = self.table.gather(self.ids)
        self.gradients = torch.zeros_like(self._rows)

    def rows(self, place: slice) -> torch.Tensor:
        """Return some of the pulled rows as a leaf whose gradient lands in ``gradients[place]``."""
        leaf = self._rows[place].requires_grad_()
        leaf.grad = self.gradients[place]
        return leaf
