"""Update of the rows of a batch: which rows are trained, and what all trainers learn from the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dglkge.embeddings.table_set import TableSet
from dglkge.optim.links import UpdateResult
from dglkge.step.contracts import RowGradients


class RowUpdates:
    """Merges the gradients of all trainers and updates rows where they are stored; a collective.

    Parameters
    ----------
    tables : TableSet
    optimizer : SparseOptimizer or DeviceTables
        Over the embeddings of all tables.
    frozen : collection of str
        Tables whose rows are not updated.
    touched : mapping of str to (n,) bool array, optional
        Whether a row is updated, by table and node id; without it all are.
    """

    def __init__(
        self,
        tables: TableSet,
        optimizer: Any,
        frozen: Collection[str] = (),
        touched: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._embeddings = {name: table.embedding for name, table in tables.items()}
        self._optimizer = optimizer
        self._frozen = frozenset(frozen)
        self._touched = {} if touched is None else touched

    @property
    def network_bytes(self) -> int:
        """Bytes of gradients that this trainer sent to other machines."""
        return int(self._optimizer.network_bytes)

    def __call__(
        self, gradients: Sequence[RowGradients], number: int, other_squares: float, flags: int
    ) -> UpdateResult:
        """Update all rows of a batch.

        Parameters
        ----------
        gradients : sequence of RowGradients
        number : int
            Of the batch. It keys the rounding of rows of 16 bits: a resumed run rounds as one that was not
            interrupted.
        other_squares : float
            Sum of the squares of gradients of other parameters: a clipped gradient's norm is that of all.
        flags : int
            Summed over the trainers with the gradients: no round of messages of its own.
        """
        result: UpdateResult = self._optimizer.step_rows(
            # Without a gradient neither a row nor its optimizer state changes, and nothing is sent.
            [self._trained(one) for one in gradients if one.table not in self._frozen],
            extra=flags,
            other_squares=other_squares,
            number=number,
        )
        return result

    def _trained(self, gradients: RowGradients) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Return embedding, ids and gradients of the rows that are trained."""
        table, ids, rows = gradients
        if table in self._touched:
            here = torch.from_numpy(self._touched[table][ids.numpy()])
            ids, rows = ids[here], rows[here]
        return self._embeddings[table], ids, rows
