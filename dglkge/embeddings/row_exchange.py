"""Exchange of remote rows between trainers: unique ids out, rows back, all tables in one round.

A trainer sends the ids of machine m to a trainer of m, which reads the rows from its machine's shared memory.
Both halves are collectives: every trainer takes part in each, also with no ids to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.narrow_rows import is_narrow
from dglkge.optim.network_exchange import owner_ranks, ranks_by_machine
from dglkge.optim.workspace import Scratch
from dglkge.typing import Ids


@dataclass(frozen=True)
class RowRequests:
    """Requests of every trainer to every other: the result of the first half.

    Attributes
    ----------
    to_get, to_give : (size, T) int64
        Rows of each table that each rank sends, in the order of the ids, and that each rank requests.
    local_rows : list of (n,) int64
        For each rank and, in it, each table: the local rows to read.
    """

    to_get: Ids
    to_give: Ids
    local_rows: list[Ids]


def exchange_counts(group: Alltoall, counts: Ids, batch: int, purpose: str) -> Ids:
    """Exchange the counts of each rank, and in their last column the number of the batch.

    It finds a trainer that lost step before rows mix: RuntimeError if another one is at another batch.
    """
    counts[:, -1] = batch
    received = group.counts(counts)
    ranks = np.flatnonzero(received[:, -1] != batch)
    if len(ranks):
        raise RuntimeError(f"{purpose}: trainers {ranks.tolist()} are at another batch than this one")
    return received


@dataclass
class RowExchange:
    """Exchange of remote rows. Constructed by all trainers together.

    Attributes
    ----------
    group : Alltoall
        All trainers, in a group that nothing else uses.
    part_id : int
        The partition on this trainer's machine.
    tables : sequence of EmbeddingTable
    wire_dtype : torch.dtype
        Type in which float32 rows travel: float32, or bfloat16 for half of the bytes. Rows that are stored in
        16 bits travel as they are.

    sent_bytes : int
        Bytes sent to other machines since the start: counts, ids and rows.
    """

    group: Alltoall
    part_id: int
    tables: Sequence[EmbeddingTable]
    wire_dtype: torch.dtype

    def __post_init__(self) -> None:
        rows = [table.local_rows for table in self.tables]
        self._wire_dtypes = [part.dtype if is_narrow(part) else self.wire_dtype for part in rows]
        sizes = [table.dim * dtype.itemsize for table, dtype in zip(self.tables, self._wire_dtypes)]
        self._row_bytes = np.array(sizes, np.int64)
        # Sections of a message are multiples of it, so that rows of float32 may follow rows of 16 bits.
        self._unit_bytes = max(dtype.itemsize for dtype in self._wire_dtypes)
        # Half the bytes of ids where every node id fits into 32 bits.
        narrow = max(len(table) for table in self.tables) < 2**31
        self._id_dtype = np.dtype(np.int32 if narrow else np.int64)
        num_parts = len(self.tables[0].range_starts) - 1
        self._machines = ranks_by_machine(self.group.gather(self.part_id), num_parts)
        self._num_strangers = self.group.size - len(self._machines[self.part_id])
        self._scratch = Scratch()
        # Two sets: rows of one batch are read while those of the next may already arrive.
        self._sorted, self._spare_sorted = Scratch(), Scratch()
        self.sent_bytes = 0

    def owners(self, table: int, ids: Ids) -> npt.NDArray[np.int32]:
        """Return the rank (n,) of the trainer that serves each node id of a table."""
        return owner_ranks(ids, self.tables[table].range_starts, self._machines)

    def exchange_ids(self, requested_ids: Sequence[Sequence[Ids]], batch: int) -> RowRequests:
        """Send the ids of rows to their owners, and receive the ids that other trainers request.

        Parameters
        ----------
        requested_ids : sequence of sequence of (n,) int64
            For each table and, in it, each rank: distinct node ids.
        batch : int
            Number of the batch, which must be the same on every trainer.
        """
        size, num_tables = self.group.size, len(self.tables)
        counts = np.empty((size, num_tables + 1), np.int64)
        for table, by_rank in enumerate(requested_ids):
            counts[:, table] = [len(ids) for ids in by_rank]
        received = exchange_counts(self.group, counts, batch, "lookup of rows")
        to_get, to_give = counts[:, :num_tables].copy(), received[:, :num_tables].copy()
        width = self._id_dtype.itemsize
        out_bytes, in_bytes = to_get.sum(1) * width, to_give.sum(1) * width
        sent = self._scratch.bytes("sent ids", int(out_bytes.sum()))
        # Rank by rank and, in it, table by table: each rank's message is contiguous, and the counts say how
        # to cut it.
        by_message = [by_rank[rank] for rank in range(size) for by_rank in requested_ids]
        np.concatenate(by_message, out=sent.view(self._id_dtype), casting="same_kind")
        arrived = self._scratch.bytes("arrived ids", int(in_bytes.sum()))
        self.group.messages(sent, out_bytes.tolist(), arrived, in_bytes.tolist())
        # Counts go to every rank; ids only to owners on other machines, as local rows are never requested.
        self.sent_bytes += len(sent) + self._num_strangers * counts[0].nbytes
        ids = np.split(arrived.view(self._id_dtype).astype(np.int64), np.cumsum(to_give.ravel())[:-1])
        firsts = [table.first_node_id for table in self.tables] * size
        return RowRequests(to_get, to_give, [some - first for some, first in zip(ids, firsts)])

    def read(self, requests: RowRequests) -> npt.NDArray[np.uint8]:
        """Copy the rows that others request from shared memory to messages to all ranks; sends nothing yet.

        They stand one after the other, valid until the next call.
        """
        buffer = self._scratch.bytes("sent rows", int(self._section_bytes(requests.to_give).sum()))
        for number, table, space in self._sections(requests.to_give, buffer):
            stored, rows = self.tables[table].local_rows, torch.from_numpy(requests.local_rows[number])
            # One copy from the table into the message; another type needs a gather first, then the
            # conversion.
            if space.dtype == stored.dtype:
                torch.index_select(stored, 0, rows, out=space)
            else:
                space.copy_(stored[rows])
        return buffer

    def send(self, requests: RowRequests, message: npt.NDArray[np.uint8]) -> list[Tensor]:
        """Send the rows that were read, and receive those of this trainer's requests.

        For each table they are (n, D) float32, rank after rank; valid until the next call but one.
        """
        out_bytes = self._section_bytes(requests.to_give).sum(1)
        in_bytes = self._section_bytes(requests.to_get).sum(1)
        arrived = self._scratch.bytes("arrived rows", int(in_bytes.sum()))
        self.group.messages(message, out_bytes.tolist(), arrived, in_bytes.tolist())
        self.sent_bytes += int(out_bytes.sum())
        return self._unpack(requests.to_get, arrived)

    def _section_bytes(self, counts: Ids) -> Ids:
        """Return the bytes of each rank's rows of each table, (size, T)."""
        return -(-counts * self._row_bytes // self._unit_bytes) * self._unit_bytes

    def _sections(self, counts: Ids, message: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield number, table and rows of each section of messages that is not empty, rank after rank.

        The rows are a view of the message, of the type in which they travel.
        """
        sizes = self._section_bytes(counts).ravel()
        ends, num_tables = np.cumsum(sizes).tolist(), len(self.tables)
        for number, (count, end, size) in enumerate(zip(counts.ravel().tolist(), ends, sizes.tolist())):
            if count:
                table = number % num_tables
                section = message[end - size : end][: count * int(self._row_bytes[table])]
                rows = torch.from_numpy(section).view(self._wire_dtypes[table])
                yield number, table, rows.view(count, self.tables[table].dim)

    def _unpack(self, counts: Ids, message: npt.NDArray[np.uint8]) -> list[Tensor]:
        """Sort received rows, rank after rank, by table."""
        # Swapped at each call, so rows of the call before stay valid until the next call but one.
        self._sorted, self._spare_sorted = self._spare_sorted, self._sorted
        numbers = counts.sum(0).tolist()
        rows = [self._sorted.take(i, numbers[i], table.dim) for i, table in enumerate(self.tables)]
        places = [0] * len(rows)
        for _, table, received in self._sections(counts, message):
            rows[table][places[table] : places[table] + len(received)] = received
            places[table] += len(received)
        return rows
