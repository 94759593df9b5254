"""Gradient rows of one table in one step, grouped by row id: compiled chains, and their plain twin."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch

from dglkge.kernels.chains import chain_sources, choose_owners, find_keys, index_keys, merge_chains
from dglkge.optim.links import RuleStep
from dglkge.optim.scratch import Scratch

_ALIGNMENT_BYTES = 8


def padded(num_bytes: int) -> int:
    """The next multiple of eight.

    Examples
    --------
    >>> padded(0), padded(1), padded(8)
    (0, 8, 8)
    """
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class GradientRows(abc.ABC):
    """Gradient rows of one table in one step, grouped by the id of the row that they belong to.

    Parameters
    ----------
    dim : int
        Width of a row.
    dtype : np.dtype
        Float type in which rows are added up; every source has it.

    Attributes
    ----------
    num_keys, num_sources : int
        Number of distinct ids, and of gradient rows.
    """

    def __init__(self, dim: int, dtype: np.dtype) -> None:
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.num_keys = 0
        self.num_sources = 0

    @property
    def row_dtype(self) -> torch.dtype:
        """Type of the rows for torch."""
        return torch.float64 if self.dtype.itemsize == 8 else torch.float32

    @property
    @abc.abstractmethod
    def keys(self) -> np.ndarray:
        """Distinct ids in order of first appearance, "(num_keys,) int64"."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all gradient rows."""

    @abc.abstractmethod
    def add(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """Add gradient rows; ``rows`` is referred to, not copied, and must not change before :meth:`clear`.

        Parameters
        ----------
        ids : np.ndarray
            "(n,) int64" id of each row.
        rows : np.ndarray
            "(n, D)" of this object's dtype, each row contiguous.
        counts : np.ndarray, optional
            "(n,)" number of gradients that each row is the sum of (1 each).
        order : np.ndarray, optional
            "(n,) int64" index into ``rows`` for each id (default: the first n rows in order).
        """

    @abc.abstractmethod
    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id in :attr:`keys`, -1 where it is absent, "(n,) int64"."""

    @abc.abstractmethod
    def merge_into(
        self, selected: np.ndarray, merged: torch.Tensor, merged_counts: np.ndarray, space: Scratch
    ) -> None:
        """Write the sums of the rows of the selected keys.

        Parameters
        ----------
        selected : np.ndarray
            "(n,) int64" positions in :attr:`keys`.
        merged : Tensor
            "(n, D)" sums, written; may be of a narrower type.
        merged_counts : np.ndarray
            "(n,) int64" numbers of gradients, written.
        space : Scratch
            Room for sums that are still to be narrowed.
        """

    @abc.abstractmethod
    def choose_owners(
        self, positions: np.ndarray, ids: np.ndarray, place: int, num_places: int, owners: np.ndarray
    ) -> None:
        """Make the trainer at ``place`` the owner of the rows to which it is nearer than the owner so far.

        The distance of a trainer from a row is (place - id) modulo the number of places. Every trainer that
        has a gradient for the row computes the same minimum, so all agree without a message, and hubs are
        spread evenly over the trainers.

        Parameters
        ----------
        positions : np.ndarray
            "(n,) int64" position in :attr:`keys` of each row that the trainer has a gradient for, -1: skip.
        ids : np.ndarray
            "(n,) int64" their row ids.
        place, num_places : int
            Number of the trainer among those of the machine, and how many these are.
        owners : np.ndarray
            "(num_keys,) int64" places of the owners so far, changed.
        """

    @abc.abstractmethod
    def update(
        self, step: RuleStep, arrays: Sequence[np.ndarray], targets: np.ndarray, selected: np.ndarray
    ) -> int:
        """Apply the rule of a step to the target rows; returns how many were skipped as not finite.

        Parameters
        ----------
        step : RuleStep
            Rule and hyper-parameters.
        arrays : sequence of np.ndarray
            Rows "(N, D)" and state tensors "(N, ...)", written in place.
        targets : np.ndarray
            "(n,) int64" rows of ``arrays`` to update.
        selected : np.ndarray
            "(n,) int64" position in :attr:`keys` of each target.
        """


_SMALLEST_CAPACITY = 1024


class RowChains(GradientRows):
    """Compiled: each key has a linked list of the addresses of its rows.

    Rows stay where they are (autograd's leaf, a receive buffer, another trainer's shared memory) and are read
    once, when they are added up. The arrays are reused from step to step; only a batch larger than any before
    allocates.
    """

    def __init__(self, dim: int, dtype: np.dtype) -> None:
        super().__init__(dim, dtype)
        self._kept: list[np.ndarray] = []
        self._allocate(_SMALLEST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        self._slots = np.full(4 * capacity, -1, np.int32)
        self._keys = np.empty(capacity, np.int64)
        self.heads = np.empty(capacity, np.int64)
        self._tails = np.empty(capacity, np.int64)
        self.links = np.empty(capacity, np.int64)
        self.addresses = np.empty(capacity, np.int64)
        self.counts = np.empty(capacity, np.int64)

    def _reserve(self, num_sources: int) -> None:
        """Grow the arrays to hold so many sources, keeping what they hold."""
        if num_sources <= len(self.links):
            return
        old = (self._keys, self.heads, self._tails, self.links, self.addresses, self.counts)
        self._allocate(1 << (num_sources - 1).bit_length())
        new = (self._keys, self.heads, self._tails, self.links, self.addresses, self.counts)
        for before, after in zip(old, new):
            after[: len(before)] = before
        index_keys(self._slots, self._keys, self.num_keys)

    @property
    def keys(self) -> np.ndarray:
        """Distinct ids in order of first appearance, "(num_keys,) int64"."""
        return self._keys[: self.num_keys]

    @property
    def chain(self) -> tuple:
        """Argument ``chain`` of the compiled loops: heads, links, addresses, counts."""
        return self.heads, self.links, self.addresses, self.counts

    def clear(self) -> None:
        """Remove all gradient rows; the memory is kept."""
        self._slots.fill(-1)
        self._kept.clear()
        self.num_keys = self.num_sources = 0

    def add(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """Add gradient rows; see :meth:`GradientRows.add`."""
        start, end = self.num_sources, self.num_sources + len(ids)
        if start == end:
            return
        self._reserve(end)
        self._kept.append(rows)  # the loops hold bare addresses: numpy must not free the memory
        address = rows.__array_interface__["data"][0]
        np.multiply(
            np.arange(len(ids)) if order is None else order, rows.strides[0], out=self.addresses[start:end]
        )
        self.addresses[start:end] += address
        self.counts[start:end] = 1 if counts is None else counts
        self.num_keys = chain_sources(
            ids, start, self._slots, self._keys, self.heads, self._tails, self.links, self.num_keys
        )
        self.num_sources = end

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id in :attr:`keys`, -1 where it is absent."""
        found = np.empty(len(ids), np.int64)
        find_keys(self._slots, self._keys, ids, found)
        return found

    def merge_into(
        self, selected: np.ndarray, merged: torch.Tensor, merged_counts: np.ndarray, space: Scratch
    ) -> None:
        """Write the sums of the selected keys; see :meth:`GradientRows.merge_into`."""
        narrow = merged.element_size() < self.dtype.itemsize
        sums = space.take("sums", len(merged), self.dim, self.row_dtype) if narrow else merged
        merge_chains(
            selected, self.heads, self.links, self.addresses, self.counts, sums.numpy(), merged_counts
        )
        if narrow:
            merged.copy_(sums)

    def choose_owners(
        self, positions: np.ndarray, ids: np.ndarray, place: int, num_places: int, owners: np.ndarray
    ) -> None:
        """Choose owners by distance; see :meth:`GradientRows.choose_owners`."""
        choose_owners(positions, ids, place, num_places, owners)

    def update(
        self, step: RuleStep, arrays: Sequence[np.ndarray], targets: np.ndarray, selected: np.ndarray
    ) -> int:
        """Apply a rule; see :meth:`GradientRows.update`."""
        return step.update(arrays, targets, selected, self.chain)


class PlainRows(GradientRows):
    """Plain twin of :class:`RowChains`: a dictionary of ids, and ``index_add_`` for the sums."""

    def __init__(self, dim: int, dtype: np.dtype) -> None:
        super().__init__(dim, dtype)
        self.clear()

    @property
    def keys(self) -> np.ndarray:
        """Distinct ids in order of first appearance, "(num_keys,) int64"."""
        return np.fromiter(self._position_of, np.int64, self.num_keys)

    def clear(self) -> None:
        """Remove all gradient rows."""
        self._position_of: dict[int, int] = {}
        self._sources: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.num_keys = self.num_sources = 0

    def add(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """Add gradient rows; see :meth:`GradientRows.add`."""
        for row_id in ids.tolist():
            self._position_of.setdefault(row_id, len(self._position_of))
        chosen = rows[: len(ids)] if order is None else rows[order]
        numbers = np.ones(len(ids), np.int64) if counts is None else counts.astype(np.int64)
        self._sources.append((self.find(ids), chosen, numbers))
        self.num_keys = len(self._position_of)
        self.num_sources += len(ids)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id in :attr:`keys`, -1 where it is absent."""
        return np.array([self._position_of.get(row_id, -1) for row_id in ids.tolist()], np.int64)

    def _sums(self, selected: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum "(n, D)" and number "(n,) int64" of the gradients of each selected key."""
        sums = torch.from_numpy(np.zeros((self.num_keys, self.dim), self.dtype))
        counts = torch.zeros(self.num_keys, dtype=torch.int64)
        for positions, rows, numbers in self._sources:
            index = torch.from_numpy(positions)
            sums.index_add_(0, index, torch.from_numpy(np.array(rows)))
            counts.index_add_(0, index, torch.from_numpy(numbers))
        chosen = torch.from_numpy(np.asarray(selected, np.int64))
        return sums[chosen], counts[chosen]

    def merge_into(
        self, selected: np.ndarray, merged: torch.Tensor, merged_counts: np.ndarray, space: Scratch
    ) -> None:
        """Write the sums of the selected keys; see :meth:`GradientRows.merge_into`."""
        sums, counts = self._sums(selected)
        merged.copy_(sums)
        merged_counts[:] = counts.numpy()

    def choose_owners(
        self, positions: np.ndarray, ids: np.ndarray, place: int, num_places: int, owners: np.ndarray
    ) -> None:
        """Choose owners by distance; see :meth:`GradientRows.choose_owners`."""
        here = positions >= 0
        keys, ids = positions[here], ids[here]
        nearer = (place - ids) % num_places < (owners[keys] - ids) % num_places
        owners[keys[nearer]] = place

    def update(
        self, step: RuleStep, arrays: Sequence[np.ndarray], targets: np.ndarray, selected: np.ndarray
    ) -> int:
        """Apply a rule; see :meth:`GradientRows.update`."""
        tables = [torch.from_numpy(array) for array in arrays]
        return step.update_plain(tables, torch.from_numpy(targets), *self._sums(selected))
