"""Layout of the message that a trainer sends to another.

It holds, table after table, the ids, the numbers of gradients (only where the mean is wanted) and the rows,
each section padded to eight bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dglkge.optim.buffers import padded


class Section(NamedTuple):
    """Place of one table in a message: number of rows, and offsets in bytes of its ids, counts and rows."""

    num_rows: int
    ids: int
    counts: int
    rows: int


@dataclass(frozen=True)
class WireFormat:
    """What a row of each table takes in a message.

    Attributes
    ----------
    row_dtypes : tuple of torch.dtype
        Float type in which the rows of each table travel.
    dims : tuple of int
        Width of the rows of each table.
    id_dtype : np.dtype
        int32 where all ids fit, else int64.
    with_counts : bool
        Whether numbers of gradients travel too.

    Examples
    --------
    >>> wire = WireFormat((torch.bfloat16, torch.float32), (3, 2), np.dtype(np.int32), False)
    >>> sections, num_bytes = wire.plan([3, 1])
    >>> sections[1], num_bytes
    (Section(num_rows=1, ids=40, counts=48, rows=48), 56)
    """

    row_dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, ...]
    id_dtype: np.dtype
    with_counts: bool

    def plan(self, num_rows: Sequence[int]) -> tuple[list[Section], int]:
        """Lay out a message with so many rows of each table; returns its sections and its size in bytes."""
        sections, end = [], 0
        for rows, dim, dtype in zip(num_rows, self.dims, self.row_dtypes):
            counts = end + padded(int(rows) * self.id_dtype.itemsize)
            data = counts + (padded(int(rows) * 4) if self.with_counts else 0)
            sections.append(Section(int(rows), end, counts, data))
            end = data + padded(int(rows) * dim * dtype.itemsize)
        return sections, end

    def ids(self, message: np.ndarray, section: Section) -> np.ndarray:
        """The ids of a section, "(num_rows,)" of ``id_dtype``, a view."""
        return message[section.ids : section.ids + section.num_rows * self.id_dtype.itemsize].view(
            self.id_dtype
        )

    def counts(self, message: np.ndarray, section: Section) -> np.ndarray:
        """The numbers of gradients of a section, "(num_rows,) int32", a view."""
        return message[section.counts : section.counts + section.num_rows * 4].view(np.int32)

    def rows(self, message: np.ndarray, table: int, section: Section) -> torch.Tensor:
        """The rows of a section, "(num_rows, dim)" of the table's type, a view."""
        dim, dtype = self.dims[table], self.row_dtypes[table]
        num_bytes = section.num_rows * dim * dtype.itemsize
        return torch.from_numpy(message[section.rows : section.rows + num_bytes]).view(dtype).view(-1, dim)
