"""Clipping of the merged gradient of a step: by value, and by the norm over all rows of all tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from dglkge.optim.row_chains import GradientRows
from dglkge.optim.scratch import Scratch

#: Added to the norm, as ``torch.nn.utils.clip_grad_norm_`` has it.
NORM_EPS = 1e-6


class Clipping:
    """Limits of a step's gradient, and memory for it.

    Every gradient has to be merged before the first row is updated: by value, because the limit is one of a
    row's sum; by norm, because the norm is that of all rows. So the merged rows are copied once.

    Parameters
    ----------
    norm : float, optional
        Limit of the 2-norm of the gradient of all tables. If it is longer, every row is multiplied by
        norm / (length + 1e-6): Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
        networks", ICML 2013, algorithm 1, with the term of ``torch.nn.utils.clip_grad_norm_``.
    value : float, optional
        Limit of the size of each number, as in ``torch.nn.utils.clip_grad_value_``; applied before the norm
        is taken.
    mean : bool
        Divide the sum of a row's gradients by their number first.

    Raises
    ------
    ValueError
        If a limit is not a positive finite number.
    """

    def __init__(self, norm: float | None, value: float | None, mean: bool) -> None:
        for name, limit in (("norm", norm), ("value", value)):
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"clip_gradients: {name} must be a positive finite number, got {limit}")
        self.norm, self.value, self._mean = norm, value, mean
        self._scratch: list[Scratch] = []

    def merge(self, chains: Sequence[GradientRows], selected: Sequence[np.ndarray]) -> list[MergedRows]:
        """Merge the gradients of some rows of each table, and clip them by value.

        Parameters
        ----------
        chains : sequence of GradientRows
            The gradients of each table.
        selected : sequence of np.ndarray
            For each table "(n,) int64" positions of the keys that this trainer updates.
        """
        while len(self._scratch) < len(chains):
            self._scratch.append(Scratch())
        return [
            MergedRows(of_table, keys, scratch, self.value, self._mean)
            for of_table, keys, scratch in zip(chains, selected, self._scratch)
        ]

    def factor(self, squares: float) -> float:
        """Factor on the whole gradient, given the sum of its squares over all trainers; at most 1."""
        return 1.0 if self.norm is None else min(1.0, self.norm / (math.sqrt(squares) + NORM_EPS))


def clipped_squares(rows: torch.Tensor, value: float | None) -> float:
    """Clip rows "(n, D)" by value in place, and return the sum of their squares in float64.

    Rows with a NaN or an infinity stay as they are and are left out: the update skips and counts them.
    """
    finite = torch.isfinite(rows).all(dim=1)
    if value is not None:
        rows[finite] = rows[finite].clamp(-value, value)
    norm = torch.linalg.vector_norm(rows[finite], dtype=torch.float64)
    return float(norm) ** 2


class MergedRows:
    """Merged gradients of the rows of one table that this trainer updates.

    Attributes
    ----------
    ids : np.ndarray
        "(n,) int64" ids of the rows.
    squares : float
        Sum of the squares of all rows without a NaN or an infinity, in float64. The other rows are skipped by
        the update, and clipping does not hide them.
    """

    def __init__(
        self,
        chains: GradientRows,
        selected: np.ndarray,
        scratch: Scratch,
        value: float | None,
        mean: bool,
    ) -> None:
        self._kind = type(chains)
        self.ids = chains.keys[selected]
        self._rows = scratch.take("merged", len(selected), chains.dim, chains.row_dtype)
        counts = np.empty(len(selected), np.int64)
        chains.merge_into(selected, self._rows, counts, scratch)
        if mean:
            self._rows /= torch.from_numpy(counts).to(self._rows.dtype)[:, None]
        self.squares = clipped_squares(self._rows, value)

    def scaled(self, factor: float) -> GradientRows:
        """Return the gradients, each the only one of its row, times a factor."""
        if factor != 1:
            self._rows *= factor
        gradients = self._kind(self._rows.shape[1], self._rows.numpy().dtype)
        gradients.add(self.ids, self._rows.numpy())
        return gradients
