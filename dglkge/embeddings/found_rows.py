"""Rows of a batch in place: in this machine's shared memory, or in a receive buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from dglkge.kernels.rows import copy_rows

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FoundRows:
    """Rows of one table, one for each time that a batch has the id.

    Compiled loops take their addresses: a choice between two arrays for every row costs them as much as
    reading it.

    Attributes
    ----------
    addresses : (n,) int64
        Address of the first float32 number of each row.
    dim : int
        Numbers of a row.
    arrays : tuple of arrays
        The memory of the rows, kept alive.
    """

    addresses: Ids
    dim: int
    arrays: tuple[Rows, ...]

    @classmethod
    def in_array(cls, rows: Rows, places: Ids | None = None) -> FoundRows:
        """Find rows (N, D) of one array: those at some places (n,), or all in their order."""
        chosen = np.arange(len(rows)) if places is None else places
        return cls(_addresses(rows, chosen), rows.shape[1], (rows,))

    @classmethod
    def in_either(cls, local: Rows, remote: Rows, places: Ids) -> FoundRows:
        """Find rows of two arrays, (N, D) and (U, D).

        Parameters
        ----------
        local, remote : arrays
        places : (n,) int64
            A row of ``local``, or -1 - i for the i-th of ``remote``.
        """
        # Both are computed for all places; addresses are only numbers until a loop reads the chosen ones.
        addresses = np.where(places >= 0, _addresses(local, places), _addresses(remote, -1 - places))
        return cls(addresses, local.shape[1], (local, remote))

    def part(self, place: slice) -> FoundRows:
        """Return some of the rows."""
        return replace(self, addresses=self.addresses[place])

    def found(self, room: object) -> FoundRows:
        """Return the rows themselves: they are readable where they are."""
        return self

    def copied(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy (n, D) float32, in ``out`` if given."""
        rows = torch.empty(len(self.addresses), self.dim) if out is None else out
        copy_rows(self.addresses, rows.numpy())
        return rows


def _addresses(rows: Rows, places: Ids) -> Ids:
    """Return the addresses of rows of an array."""
    # Addresses stay valid only as long as the array: FoundRows.arrays holds a reference.
    base: int = rows.__array_interface__["data"][0]
    return base + places * rows.strides[0]
