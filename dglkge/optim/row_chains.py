"""Gradient rows of one table, chained by row id, in memory that is kept from step to step."""

from __future__ import annotations

import numpy as np
import torch

from dglkge.kernels import chains as kernels

_ALIGNMENT_BYTES = 8


def padded(num_bytes: int) -> int:
    """The next multiple of eight.

    Examples
    --------
    >>> padded(0), padded(1), padded(8)
    (0, 8, 8)
    """
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Buffer:
    """Bytes that only grow."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """The first ``num_bytes`` bytes, "(num_bytes,) uint8", contents undefined."""
        if num_bytes > len(self._bytes):
            self._bytes = np.empty(num_bytes + num_bytes // 4, np.uint8)
        return self._bytes[:num_bytes]

    def rows(self, num_rows: int, dim: int, dtype: np.dtype) -> np.ndarray:
        """Room for rows, "(num_rows, dim)" of ``dtype``, contents undefined."""
        return self.take(num_rows * dim * dtype.itemsize).view(dtype).reshape(num_rows, dim)


_SMALLEST_CAPACITY = 1024


class RowChains:
    """Sources (gradient rows in any memory) grouped by the id of the row that they belong to.

    The arrays are kept and reused from step to step; only a larger batch than ever before allocates.

    Parameters
    ----------
    dim : int
        Width of a row.
    dtype : np.dtype
        Float type in which rows are added up; every source has it.

    Attributes
    ----------
    num_keys, num_sources : int
        Number of distinct ids, and of rows.
    """

    def __init__(self, dim: int, dtype: np.dtype) -> None:
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.num_keys = 0
        self.num_sources = 0
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
        kernels.index_keys(self._slots, self._keys, self.num_keys)

    @property
    def keys(self) -> np.ndarray:
        """Distinct ids in order of first appearance, "(num_keys,) int64"."""
        return self._keys[: self.num_keys]

    @property
    def chain(self) -> tuple:
        """What the compiled loops take: heads, links, addresses, counts."""
        return self.heads, self.links, self.addresses, self.counts

    def clear(self) -> None:
        """Forget all sources."""
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
        """Add gradient rows; ``rows`` is referred to, not copied, and must not change before :meth:`clear`.

        Parameters
        ----------
        ids : np.ndarray
            "(n,) int64" id of each row.
        rows : np.ndarray
            "(n, D)" of this object's dtype, each row contiguous.
        counts : np.ndarray, optional
            "(n,)" how many gradients each row stands for (1 each).
        order : np.ndarray, optional
            "(n,) int64" which of ``rows`` belongs to each id (the first n in order).
        """
        start, end = self.num_sources, self.num_sources + len(ids)
        if start == end:
            return
        self._reserve(end)
        self._kept.append(rows)
        address = rows.__array_interface__["data"][0]
        np.multiply(
            np.arange(len(ids)) if order is None else order, rows.strides[0], out=self.addresses[start:end]
        )
        self.addresses[start:end] += address
        self.counts[start:end] = 1 if counts is None else counts
        self.num_keys = kernels.chain_sources(
            ids, start, self._slots, self._keys, self.heads, self._tails, self.links, self.num_keys
        )
        self.num_sources = end

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Position of each id in :attr:`keys`, -1 where it is absent, "(n,) int64"."""
        found = np.empty(len(ids), np.int64)
        kernels.find_keys(self._slots, self._keys, ids, found)
        return found

    def merge_into(
        self, selected: np.ndarray, merged: torch.Tensor, merged_counts: np.ndarray, space: Buffer
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
        space : Buffer
            Room for sums that are still to be narrowed.
        """
        narrow = merged.element_size() < self.dtype.itemsize
        sums = space.rows(len(selected), self.dim, self.dtype) if narrow else merged.numpy()
        kernels.merge_chains(
            selected, self.heads, self.links, self.addresses, self.counts, sums, merged_counts
        )
        if narrow:
            merged.copy_(torch.from_numpy(sums))
