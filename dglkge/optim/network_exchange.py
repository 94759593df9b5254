"""Exchange of gradients between machines: merge equal ids, route each row to its owner, merge what arrives.

A message holds, table after table, the ids, the numbers of gradients (only for ``duplicates="mean"``) and the
rows, each section padded to eight bytes. One all-to-all carries the sizes, a second one the messages.

A machine is a partition id. DGL gives partition k one contiguous range of the ids of every node or edge type,
so a table is described by the boundaries of those ranges. The trainers report on which machine they run:
ranks need not be in the order of machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.row_chains import GradientRows, padded
from dglkge.optim.scratch import Scratch


class Section(NamedTuple):
    """Place of one table in a message: number of rows, and offsets in bytes of its ids, counts and rows."""

    num_rows: int
    ids: int
    counts: int
    rows: int


@dataclass(frozen=True)
class WireFormat:
    """Layout of the messages: types and widths of ids, counts and rows of each table.

    Attributes
    ----------
    row_dtypes, dims : tuple
        Float type in which the rows of each table are sent, and their width.
    id_dtype : np.dtype
        int32 where all ids fit, else int64.
    with_counts : bool
        Whether numbers of gradients are sent too.

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

    def ids(self, message: ndarray, section: Section) -> ndarray:
        """The ids of a section, "(num_rows,)" of ``id_dtype``, a view."""
        return message[section.ids : section.ids + section.num_rows * self.id_dtype.itemsize].view(
            self.id_dtype
        )

    def counts(self, message: ndarray, section: Section) -> ndarray:
        """The numbers of gradients of a section, "(num_rows,) int32", a view."""
        return message[section.counts : section.counts + section.num_rows * 4].view(np.int32)

    def rows(self, message: ndarray, table: int, section: Section) -> torch.Tensor:
        """The rows of a section, "(num_rows, dim)" of the table's type, a view."""
        dim, dtype = self.dims[table], self.row_dtypes[table]
        num_bytes = section.num_rows * dim * dtype.itemsize
        return torch.from_numpy(message[section.rows : section.rows + num_bytes]).view(dtype).view(-1, dim)


def ranks_by_machine(part_ids: Sequence[int], num_parts: int) -> list[ndarray]:
    """Ranks of the trainers on each machine, from the partition id that each rank reported.

    A ValueError if a machine has no trainer (DGL cannot place distributed tensors there either).

    Examples
    --------
    >>> [ranks.tolist() for ranks in ranks_by_machine([1, 0, 1], 2)]
    [[1], [0, 2]]
    """
    reported = np.asarray(part_ids)
    machines = [np.flatnonzero(reported == part) for part in range(num_parts)]
    empty = [part for part, ranks in enumerate(machines) if len(ranks) == 0]
    if empty:
        raise ValueError(f"no trainer runs on the machines of partitions {empty}: every machine needs one")
    return machines


def owner_ranks(ids: ndarray, starts: ndarray, machines: Sequence[ndarray]) -> ndarray:
    """Rank of the trainer that updates each row, "(n,) int32", when rows are sent over the network.

    It is a trainer of the row's machine, chosen by the row's place in that machine's range; ``starts`` are
    the boundaries of the machines' ranges, ``machines`` the ranks on each machine, none empty.

    Examples
    --------
    >>> machines = [np.array([0, 2]), np.array([1])]
    >>> owner_ranks(np.array([0, 1, 2, 5, 6]), np.array([0, 5, 9]), machines).tolist()
    [0, 2, 0, 1, 1]
    """
    owners = np.empty(len(ids), np.int32)
    for part, ranks in enumerate(machines):
        here: Any = slice(None)
        if len(machines) > 1:
            here = np.flatnonzero((ids >= starts[part]) & (ids < starts[part + 1]))
        owners[here] = ranks[(ids[here] - starts[part]) % len(ranks)]
    return owners


class Route(NamedTuple):
    """Owners of the rows of a table: boundaries of the machines' ranges, ranks on each machine."""

    starts: ndarray
    machines: Sequence[ndarray]


@dataclass
class GradientExchange:
    """Sends the gradient rows of all trainers to the trainers that own the rows.

    Attributes
    ----------
    group : Alltoall
    routes : sequence of Route
        One for each table.
    chains : sequence of GradientRows
        One for each table, holding this trainer's own gradients when :meth:`run` is called.
    wire : WireFormat
    sent_bytes : int
        Bytes sent to other trainers since the start.
    """

    group: Alltoall
    routes: Sequence[Route]
    chains: Sequence[GradientRows]
    wire: WireFormat

    def __post_init__(self) -> None:
        self._scratch = Scratch()
        self.sent_bytes = 0

    def run(self) -> tuple[list[ndarray], ndarray]:
        """Exchange; a collective. The chains then also hold the rows that other trainers sent.

        Returns
        -------
        owned : list of ndarray
            For each table "(n,) int64": positions of the keys that this trainer must update.
        active : ndarray
            "(num_tables,) bool": whether any trainer had a gradient for the table.
        """
        num_tables, size = len(self.chains), self.group.size
        totals = np.array([chains.num_sources for chains in self.chains], np.int64)
        by_rank = [self._by_rank(table) for table in range(num_tables)]
        # To each rank: its number of rows of each table, and whether this trainer has any gradient at all.
        # Every trainer then knows which tables are active, which the global bias correction of Adam counts.
        counts = np.empty((size, 2 * num_tables), np.int64)
        counts[:, num_tables:] = totals
        for table, parts in enumerate(by_rank):
            counts[:, table] = [
                0 if rank == self.group.rank else len(part) for rank, part in enumerate(parts)
            ]
        received_counts = self.group.counts(counts)
        sent, sent_bytes = self._pack(counts[:, :num_tables], by_rank)
        plans = [self.wire.plan(row) for row in received_counts[:, :num_tables]]
        received_bytes = [num_bytes for _, num_bytes in plans]
        received = self._scratch.bytes("received", sum(received_bytes))
        self.group.messages(sent, sent_bytes, received, received_bytes)
        self.sent_bytes += sum(sent_bytes) + counts.nbytes
        # Received ids that are new here become keys after the own ones; all received rows are this trainer's.
        num_own = [chains.num_keys for chains in self.chains]
        self._unpack(received, plans)
        owned = [
            np.concatenate([parts[self.group.rank], np.arange(before, chains.num_keys)])
            for parts, before, chains in zip(by_rank, num_own, self.chains)
        ]
        return owned, np.any(received_counts[:, num_tables:], axis=0)

    def _by_rank(self, table: int) -> list[ndarray]:
        """Positions of a table's keys for each owner's rank."""
        owners = owner_ranks(self.chains[table].keys, *self.routes[table])
        order = np.argsort(owners, kind="stable")
        return np.split(order, np.cumsum(np.bincount(owners, minlength=self.group.size))[:-1])

    def _pack(self, counts: ndarray, by_rank: list[list[ndarray]]) -> tuple[ndarray, list[int]]:
        """Write the messages to all ranks one after the other; returns them and their sizes in bytes."""
        plans = [self.wire.plan(row) for row in counts]
        sizes = [num_bytes for _, num_bytes in plans]
        sent = self._scratch.bytes("sent", sum(sizes))
        start = 0
        for rank, (sections, num_bytes) in enumerate(plans):
            message = sent[start : start + num_bytes]
            for table, section in enumerate(sections):
                if section.num_rows:
                    self._pack_section(table, section, by_rank[table][rank], message)
            start += num_bytes
        return sent, sizes

    def _pack_section(self, table: int, section: Section, selected: ndarray, message: ndarray) -> None:
        """Write the merged rows of the selected keys of one table into a message."""
        chains, wire = self.chains[table], self.wire
        wire.ids(message, section)[:] = chains.keys[selected]
        counts = np.empty(section.num_rows, np.int64)
        chains.merge_into(selected, wire.rows(message, table, section), counts, self._scratch)
        if wire.with_counts:
            wire.counts(message, section)[:] = counts

    def _unpack(self, received: ndarray, plans: list[tuple[list[Section], int]]) -> None:
        """Add all received rows to the chains."""
        start = 0
        for rank, (sections, num_bytes) in enumerate(plans):
            message = received[start : start + num_bytes]
            start += num_bytes
            for table, section in enumerate(sections):
                if section.num_rows:
                    self._unpack_section(rank, table, section, message)

    def _unpack_section(self, rank: int, table: int, section: Section, message: ndarray) -> None:
        """Add the rows of one section to the table's chains, widened if they were sent in a narrower type."""
        chains, wire = self.chains[table], self.wire
        rows = wire.rows(message, table, section)
        if rows.element_size() < chains.dtype.itemsize:
            rows = self._scratch.take((rank, table), len(rows), chains.dim, chains.row_dtype).copy_(rows)
        counts = wire.counts(message, section) if wire.with_counts else None
        chains.add(wire.ids(message, section).astype(np.int64), rows.numpy(), counts)
