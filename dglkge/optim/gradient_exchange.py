"""Exchange over the network, one for all tables: merge equal ids, route each row to its owner, merge what
arrives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.buffers import Buffer
from dglkge.optim.ownership import owner_ranks
from dglkge.optim.row_chains import RowChains
from dglkge.optim.wire_format import Section, WireFormat


class Route(NamedTuple):
    """Where the rows of a table live: boundaries of the machines' ranges, ranks on each machine."""

    starts: np.ndarray
    machines: Sequence[np.ndarray]


class GradientExchange:
    """Brings the gradient rows of all trainers to the trainers that own the rows.

    Parameters
    ----------
    group : Alltoall
        The trainers.
    routes : sequence of Route
        One for each table.
    chains : sequence of RowChains
        One for each table, holding this trainer's own gradients when :meth:`run` is called.
    wire : WireFormat
        Layout of messages.

    Attributes
    ----------
    sent_bytes : int
        Bytes sent to other trainers since the start.
    """

    def __init__(
        self, group: Alltoall, routes: Sequence[Route], chains: Sequence[RowChains], wire: WireFormat
    ) -> None:
        self._group = group
        self._routes = routes
        self._chains = chains
        self._wire = wire
        self._outgoing, self._incoming = Buffer(), Buffer()
        self._decoded: defaultdict[tuple[int, int], Buffer] = defaultdict(Buffer)
        self._merged = Buffer()
        self.sent_bytes = 0

    def run(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Exchange; the chains then also hold the rows that other trainers sent.

        Returns
        -------
        owned : list of np.ndarray
            For each table "(n,) int64": positions of the keys that this trainer must update.
        active : np.ndarray
            "(num_tables,) bool": whether any trainer had a gradient for the table.
        """
        num_tables, size = len(self._chains), self._group.size
        totals = np.array([chains.num_sources for chains in self._chains], np.int64)
        by_rank = [self._by_rank(table) for table in range(num_tables)]
        counts = np.empty((size, 2 * num_tables), np.int64)
        counts[:, num_tables:] = totals
        for table, parts in enumerate(by_rank):
            counts[:, table] = [
                0 if rank == self._group.rank else len(part) for rank, part in enumerate(parts)
            ]
        received_counts = self._group.counts(counts)
        sent, sent_bytes = self._pack(counts[:, :num_tables], by_rank)
        plans = [self._wire.plan(row) for row in received_counts[:, :num_tables]]
        received_bytes = [num_bytes for _, num_bytes in plans]
        received = self._incoming.take(sum(received_bytes))
        self._group.messages(sent, sent_bytes, received, received_bytes)
        self.sent_bytes += sum(sent_bytes) + counts.nbytes
        num_own = [chains.num_keys for chains in self._chains]
        self._unpack(received, plans)
        owned = [
            np.concatenate([parts[self._group.rank], np.arange(before, chains.num_keys)])
            for parts, before, chains in zip(by_rank, num_own, self._chains)
        ]
        return owned, np.any(received_counts[:, num_tables:], axis=0)

    def _by_rank(self, table: int) -> list[np.ndarray]:
        """Positions of a table's keys for each owner's rank."""
        owners = owner_ranks(self._chains[table].keys, *self._routes[table])
        order = np.argsort(owners, kind="stable")
        return np.split(order, np.cumsum(np.bincount(owners, minlength=self._group.size))[:-1])

    def _pack(self, counts: np.ndarray, by_rank: list[list[np.ndarray]]) -> tuple[np.ndarray, list[int]]:
        """Write the messages to all ranks one after the other; returns them and their sizes in bytes."""
        plans = [self._wire.plan(row) for row in counts]
        sizes = [num_bytes for _, num_bytes in plans]
        sent = self._outgoing.take(sum(sizes))
        start = 0
        for rank, (sections, num_bytes) in enumerate(plans):
            message = sent[start : start + num_bytes]
            for table, section in enumerate(sections):
                if section.num_rows:
                    self._pack_section(table, section, by_rank[table][rank], message)
            start += num_bytes
        return sent, sizes

    def _pack_section(self, table: int, section: Section, selected: np.ndarray, message: np.ndarray) -> None:
        """Write the merged rows of the selected keys of one table into a message."""
        chains, wire = self._chains[table], self._wire
        wire.ids(message, section)[:] = chains.keys[selected]
        counts = np.empty(section.num_rows, np.int64)
        chains.merge_into(selected, wire.rows(message, table, section), counts, self._merged)
        if wire.with_counts:
            wire.counts(message, section)[:] = counts

    def _unpack(self, received: np.ndarray, plans: list[tuple[list[Section], int]]) -> None:
        """Add all received rows to the chains."""
        start = 0
        for rank, (sections, num_bytes) in enumerate(plans):
            message = received[start : start + num_bytes]
            start += num_bytes
            for table, section in enumerate(sections):
                if section.num_rows:
                    self._unpack_section(rank, table, section, message)

    def _unpack_section(self, rank: int, table: int, section: Section, message: np.ndarray) -> None:
        """Add the rows of one section to the table's chains, widened where they travelled in a narrower
        type."""
        chains, wire = self._chains[table], self._wire
        rows = wire.rows(message, table, section)
        if rows.element_size() < chains.dtype.itemsize:
            space = self._decoded[rank, table].rows(section.num_rows, chains.dim, chains.dtype)
            rows = torch.from_numpy(space).copy_(rows)
        counts = wire.counts(message, section) if wire.with_counts else None
        chains.add(wire.ids(message, section).astype(np.int64), rows.numpy(), counts)
