"""Gradient rows of one table in one step, grouped by row id: compiled chains, a plain twin, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from dglkge.kernels.chains import chain_delivered, chain_sources, index_keys, match_keys, merge_chains
from dglkge.optim.links import RuleStep
from dglkge.optim.workspace import Scratch, split

#: Of a neighbour's rows: place of each key's sum, and number of gradients in each sum.
Delivered = tuple[ndarray, ndarray]


def padded(num_bytes: int) -> int:
    """The next multiple of eight.

    Examples
    --------
    >>> padded(0), padded(1), padded(8)
    (0, 8, 8)
    """
    return -(-num_bytes // 8) * 8


class GradientRows:
    """Gradient rows of one table in one step, grouped by the id of the row that they belong to.

    Compiled: each id has a linked list of the addresses of its rows. Rows stay where they are (autograd's
    leaf, a receive buffer, another trainer's shared memory) and are read once, when they are added up. The
    arrays are reused from step to step; only a batch larger than any before allocates.

    Attributes
    ----------
    dim : int
    dtype : np.dtype
        Float type in which rows are added up; every source has it.
    num_keys, num_sources : int
        Number of distinct ids, and of gradient rows.
    """

    def __init__(self, dim: int, dtype: np.dtype) -> None:
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.num_keys = self.num_sources = 0
        self._kept: list[ndarray] = []
        self._allocate(1024)

    @property
    def row_dtype(self) -> torch.dtype:
        """Type of the rows for torch."""
        return torch.float64 if self.dtype.itemsize == 8 else torch.float32

    def _allocate(self, capacity: int) -> None:
        self._slots = np.full(4 * capacity, -1, np.int32)
        self._arrays = np.empty((6, capacity), np.int64)
        self._keys, self._heads, self._tails, self._links, self._addresses, self._counts = self._arrays

    def _reserve(self, num_sources: int) -> None:
        """Grow the arrays to hold so many sources, keeping what they hold."""
        old = self._arrays
        if num_sources > old.shape[1]:
            self._allocate(1 << (num_sources - 1).bit_length())
            self._arrays[:, : old.shape[1]] = old
            index_keys(self._slots, self._keys, self.num_keys)

    @property
    def keys(self) -> ndarray:
        """Distinct ids in order of first appearance, "(num_keys,) int64"."""
        return self._keys[: self.num_keys]

    @property
    def chain(self) -> tuple[Any, ...]:
        """Argument ``chain`` of the compiled loops: heads, links, addresses, counts."""
        return self._heads, self._links, self._addresses, self._counts

    def clear(self) -> None:
        """Remove all gradient rows."""
        self._slots.fill(-1)
        self._kept.clear()
        self.num_keys = self.num_sources = 0

    def add(self, ids: ndarray, rows: ndarray, counts: ndarray | None = None) -> None:
        """Add gradient rows "(n, D)", each the sum of ``counts`` gradients (1 each), for ids "(n,) int64".

        The rows are referred to, not copied, and must not change before :meth:`clear`; each is contiguous.
        """
        start, end = self.num_sources, self.num_sources + len(ids)
        if start == end:
            return
        self._reserve(end)
        self._kept.append(rows)  # the loops hold bare addresses: numpy must not free the memory
        np.multiply(np.arange(len(ids)), rows.strides[0], out=self._addresses[start:end])
        self._addresses[start:end] += rows.__array_interface__["data"][0]
        self._counts[start:end] = 1 if counts is None else counts
        table, chain = (self._slots, self._keys), (self._heads, self._tails, self._links)
        self.num_keys = chain_sources(ids, start, table, chain, self.num_keys)
        self.num_sources = end

    def merge_into(self, selected: ndarray, merged: Tensor, merged_counts: ndarray, space: Scratch) -> None:
        """Write the sums "(n, D)" of the rows of the selected keys, and the numbers of gradients "(n,)
        int64".

        The sums may be of a narrower type: ``space`` has room for those that are still to be narrowed.
        """
        narrow = merged.element_size() < self.dtype.itemsize
        sums = space.take("sums", len(merged), self.dim, self.row_dtype) if narrow else merged
        rows = sums.numpy()

        def merge(part: slice) -> None:
            merge_chains(selected[part], self.chain, rows[part], merged_counts[part])

        split(len(selected), self.dim, merge)
        if narrow:
            merged.copy_(sums)

    def match(self, ids: ndarray, place: int, num_places: int, owners: ndarray, shared: ndarray) -> ndarray:
        """Find the rows that the trainer at ``place`` has too; it owns those that it is nearer to.

        The distance of a trainer from a row is (place - id) modulo the number of places. Every trainer that
        has a gradient for the row computes the same minimum, so all agree without a message, and hubs are
        spread evenly over the trainers.

        Parameters
        ----------
        ids : ndarray
            "(n,) int64" rows that the trainer has a gradient for, each once.
        place, num_places : int
            Number of the trainer among those of the machine, and how many these are.
        owners, shared : ndarray
            "(num_keys,) int64" places of the owners so far, and "(num_keys,) bool" whether another trainer
            has a gradient for the row; changed.

        Returns
        -------
        ndarray
            "(n,) int64" position of each id in :attr:`keys`, -1 where it is absent.
        """
        positions = np.empty(len(ids), np.int64)
        match_keys((self._slots, self._keys), ids, place, num_places, owners, shared, positions)
        return positions

    def add_delivered(
        self, positions: ndarray, owners: ndarray, place: int, delivered: Delivered, rows: ndarray
    ) -> None:
        """Add the rows that another trainer delivered for the keys of the trainer at ``place``.

        Parameters
        ----------
        positions, owners : ndarray
            Of its ids, as :meth:`match` returned them and left them.
        place : int
        delivered : tuple of ndarray
            "(n,) int32" number of the row of each id, and "(r,) int32" number of gradients in each row.
        rows : ndarray
            "(r, D)", referred to as by :meth:`add`.
        """
        self._reserve(self.num_sources + len(positions))
        self._kept.append(rows)
        where = rows.__array_interface__["data"][0], rows.strides[0]
        chain = self._tails, self._links, self._addresses, self._counts
        self.num_sources = chain_delivered(
            positions, owners, place, delivered, where, chain, self.num_sources
        )

    def update(self, step: RuleStep, arrays: Sequence[ndarray], targets: ndarray, selected: ndarray) -> int:
        """Apply the rule of a step to target rows; see :meth:`RuleStep.update`."""

        def update(part: slice) -> int:
            return step.update(arrays, targets[part], selected[part], self.chain)

        return sum(split(len(targets), self.dim, update))


class PlainRows(GradientRows):
    """Plain twin of :class:`GradientRows`: a dictionary of ids, and ``index_add_`` for the sums."""

    def _allocate(self, capacity: int) -> None:
        self.clear()

    @property
    def keys(self) -> ndarray:
        return np.fromiter(self._position_of, np.int64, self.num_keys)

    def clear(self) -> None:
        self._position_of: dict[int, int] = {}
        self._sources: list[tuple[ndarray, ndarray, ndarray]] = []
        self.num_keys = self.num_sources = 0

    def add(self, ids: ndarray, rows: ndarray, counts: ndarray | None = None) -> None:
        for row_id in ids.tolist():
            self._position_of.setdefault(row_id, len(self._position_of))
        numbers = np.ones(len(ids), np.int64) if counts is None else counts.astype(np.int64)
        self._sources.append((self._find(ids), rows, numbers))
        self.num_keys = len(self._position_of)
        self.num_sources += len(ids)

    def _find(self, ids: ndarray) -> ndarray:
        return np.array([self._position_of.get(row_id, -1) for row_id in ids.tolist()], np.int64)

    def _sums(self, selected: ndarray) -> tuple[Tensor, Tensor]:
        """Sum "(n, D)" and number "(n,) int64" of the gradients of each selected key."""
        sums = torch.from_numpy(np.zeros((self.num_keys, self.dim), self.dtype))
        counts = torch.zeros(self.num_keys, dtype=torch.int64)
        for positions, rows, numbers in self._sources:
            index = torch.from_numpy(positions)
            sums.index_add_(0, index, torch.from_numpy(np.array(rows)))
            counts.index_add_(0, index, torch.from_numpy(numbers))
        index = torch.from_numpy(np.asarray(selected, np.int64))
        return sums[index], counts[index]

    def merge_into(self, selected: ndarray, merged: Tensor, merged_counts: ndarray, space: Scratch) -> None:
        sums, counts = self._sums(selected)
        merged.copy_(sums)
        merged_counts[:] = counts.numpy()

    def match(self, ids: ndarray, place: int, num_places: int, owners: ndarray, shared: ndarray) -> ndarray:
        positions = self._find(ids)
        keys, ids = positions[positions >= 0], ids[positions >= 0]
        nearer = (place - ids) % num_places < (owners[keys] - ids) % num_places
        owners[keys[nearer]] = place
        shared[keys] = True
        return positions

    def add_delivered(
        self, positions: ndarray, owners: ndarray, place: int, delivered: Delivered, rows: ndarray
    ) -> None:
        taken = np.flatnonzero(positions >= 0)
        taken = taken[owners[positions[taken]] == place]
        row_of, count_of = delivered[0][taken], delivered[1].astype(np.int64)
        self._sources.append((positions[taken], rows[row_of], count_of[row_of]))
        self.num_sources += len(taken)

    def update(self, step: RuleStep, arrays: Sequence[ndarray], targets: ndarray, selected: ndarray) -> int:
        tables = [torch.from_numpy(array) for array in arrays]
        gradient, counts = self._sums(selected)
        if step.mean:
            gradient = gradient / counts[:, None]
        return int(step.update_there(tables, torch.from_numpy(targets), gradient))


#: Added to the norm, as ``torch.nn.utils.clip_grad_norm_`` has it.
NORM_EPS = 1e-6


class Clipping:
    """Limits of a step's gradient, and memory for it; see :meth:`SparseOptimizer.clip_gradients`.

    Every gradient has to be merged before the first row is updated: by value, because the limit is one of a
    row's sum; by norm, because the norm is that of all rows. So the merged rows are copied once. If the norm
    is beyond its limit, every row is multiplied by limit / (norm + 1e-6): Pascanu, Mikolov and Bengio, "On
    the difficulty of training recurrent neural networks", ICML 2013, algorithm 1, with the term of
    ``torch.nn.utils.clip_grad_norm_``. With ``mean`` a row's sum is divided by its number of gradients first.
    """

    def __init__(self, norm: float | None, value: float | None, mean: bool) -> None:
        for name, limit in (("norm", norm), ("value", value)):
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"clip_gradients: {name} must be a positive finite number, got {limit}")
        self.norm, self.value, self._mean = norm, value, mean
        self._scratch = Scratch()

    def merge(
        self, chains: Sequence[GradientRows], selected: Sequence[ndarray]
    ) -> tuple[list[Tensor], float]:
        """Merge the gradients of the selected keys of each table, and clip them by value.

        Returns the sums "(n, D)" of each table, valid until the next call, and the sum of the squares of all
        rows without a NaN or an infinity. The other rows are skipped by the update, and clipping does not
        hide them.
        """
        merged, squares = [], 0.0
        for number, (table_chains, keys) in enumerate(zip(chains, selected)):
            rows = self._scratch.take(number, len(keys), table_chains.dim, table_chains.row_dtype)
            counts = np.empty(len(keys), np.int64)
            table_chains.merge_into(keys, rows, counts, self._scratch)
            if self._mean:
                rows /= torch.from_numpy(counts).to(rows.dtype)[:, None]
            squares += clipped_squares(rows, self.value)
            merged.append(rows)
        return merged, squares

    def scale(
        self, merged: Sequence[Tensor], squares: float, others: float, total: Callable[[ndarray], ndarray]
    ) -> float:
        """Multiply the rows of all tables that this trainer updates by one factor, at most 1; returns it.

        A collective if the norm is limited. ``squares`` are those of the rows, ``others`` those of parameters
        that are no rows, the same on every trainer; ``total`` sums numbers (1,) over all trainers.
        """
        if self.norm is None:
            return 1.0
        length = math.sqrt(float(total(np.array([squares], np.float64))[0]) + others)
        factor = min(1.0, self.norm / (length + NORM_EPS))
        if factor != 1:
            for rows in merged:
                rows *= factor
        return factor


def clipped_squares(rows: Tensor, value: float | None) -> float:
    """Clip rows "(n, D)" by value in place, and return the sum of their squares in float64.

    Rows with a NaN or an infinity stay as they are and are left out: the update skips and counts them.
    """
    finite = torch.isfinite(rows).all(dim=1)
    if value is not None:
        rows[finite] = rows[finite].clamp(-value, value)
    return float(torch.linalg.vector_norm(rows[finite], dtype=torch.float64)) ** 2
