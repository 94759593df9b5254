"""Exchange of gradients between machines: merge equal ids, route each row to its owner, merge what arrives.

A message holds, table after table, the ids, the numbers of gradients (only for ``duplicates="mean"``) and the
rows, each section padded to eight bytes. One all-to-all carries the sizes, a second one the messages.

A machine is a partition id. DGL gives partition k one contiguous range of the ids of every node or edge type,
so a table is described by the boundaries of those ranges. The trainers report on which machine they run:
ranks need not be in the order of machines.

Machines that do not wait for one another have a :class:`LaggedExchange`: the thread of each trainer makes
rounds with those of all others, the same two messages beside the steps and at a pace of its own. A round
carries the steps of each trainer, so that all know how far the slowest one is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.row_chains import GradientRows, padded
from dglkge.optim.workspace import Scratch


def view(memory: ndarray, offset: int, num_elements: int, dtype: np.dtype) -> ndarray:
    """Elements of some bytes as an array of another type, a view."""
    return memory[offset : offset + int(num_elements) * dtype.itemsize].view(dtype)


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

    def contents(
        self, messages: ndarray, plans: list[tuple[list[Section], int]]
    ) -> Iterator[tuple[int, int, ndarray, ndarray | None, torch.Tensor]]:
        """Yield the contents of each section with rows, views on messages that stand one after the other.

        They are rank, table, ids "(n,)" of ``id_dtype``, numbers of gradients "(n,) int32" or None, and rows
        "(n, dim)" of the table's type.
        """
        start = 0
        for rank, (sections, num_bytes) in enumerate(plans):
            message = messages[start : start + num_bytes]
            start += num_bytes
            for table, (num_rows, ids, counts, rows) in enumerate(sections):
                if num_rows == 0:
                    continue
                dim, dtype = self.dims[table], self.row_dtypes[table]
                data = torch.from_numpy(message[rows : rows + num_rows * dim * dtype.itemsize])
                numbers = view(message, counts, num_rows, np.dtype(np.int32)) if self.with_counts else None
                own_ids = view(message, ids, num_rows, self.id_dtype)
                yield rank, table, own_ids, numbers, data.view(dtype).view(-1, dim)


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


@dataclass
class GradientExchange:
    """Sends the gradient rows of all trainers to the trainers that own the rows.

    Attributes
    ----------
    group : Alltoall
    starts : sequence of ndarray
        For each table, the boundaries of the machines' ranges of ids.
    machines : sequence of ndarray
        Ranks on each machine.
    chains : sequence of GradientRows
        One for each table, holding this trainer's own gradients when :meth:`run` is called.
    wire : WireFormat
    sent_bytes : int
        Bytes sent to other trainers since the start.
    """

    group: Alltoall
    starts: Sequence[ndarray]
    machines: Sequence[ndarray]
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
        num_tables = len(self.chains)
        totals = np.array([chains.num_sources for chains in self.chains], np.int64)
        by_rank, row_counts = self._by_rank([self.group.rank])
        # To each rank: its number of rows of each table, and whether this trainer has any gradient at all.
        # Every trainer then knows which tables are active, which the global bias correction of Adam counts.
        counts = np.hstack([row_counts, np.tile(totals, (self.group.size, 1))])
        received_counts = self.group.counts(counts)
        sent, sent_bytes = self._pack(row_counts, by_rank)
        plans = [self.wire.plan(row) for row in received_counts[:, :num_tables]]
        received_bytes = [num_bytes for _, num_bytes in plans]
        received = self._scratch.bytes("received", sum(received_bytes))
        self.group.messages(sent, sent_bytes, received, received_bytes)
        self.sent_bytes += sum(sent_bytes) + counts.nbytes
        # Received ids that are new here become keys after the own ones; all received rows are this trainer's.
        num_own = [chains.num_keys for chains in self.chains]
        self._unpack(received, plans, self.chains)
        owned = [
            np.concatenate([parts[self.group.rank], np.arange(before, chains.num_keys)])
            for parts, before, chains in zip(by_rank, num_own, self.chains)
        ]
        return owned, np.any(received_counts[:, num_tables:], axis=0)

    def _by_rank(self, here: Collection[int]) -> tuple[list[list[ndarray]], ndarray]:
        """Positions of each table's keys for each owner's rank, and their numbers "(size, num_tables) int64",
        0 for the ranks to which nothing is sent.
        """
        size, by_rank = self.group.size, []
        for chains, starts in zip(self.chains, self.starts):
            owners = owner_ranks(chains.keys, starts, self.machines)
            order = np.argsort(owners, kind="stable")
            by_rank.append(np.split(order, np.cumsum(np.bincount(owners, minlength=size))[:-1]))
        counts = [[0 if rank in here else len(parts[rank]) for parts in by_rank] for rank in range(size)]
        return by_rank, np.array(counts, np.int64)

    def _pack(self, num_rows: ndarray, by_rank: list[list[ndarray]]) -> tuple[ndarray, list[int]]:
        """Write the messages to all ranks one after the other; returns them and their sizes in bytes."""
        plans = [self.wire.plan(row) for row in num_rows]
        sizes = [num_bytes for _, num_bytes in plans]
        sent = self._scratch.bytes("sent", sum(sizes))
        for rank, table, ids, sent_counts, rows in self.wire.contents(sent, plans):
            chains, selected = self.chains[table], by_rank[table][rank]
            ids[:] = chains.keys[selected]
            counts = np.empty(len(ids), np.int64)
            chains.merge_into(selected, rows, counts, self._scratch)
            if sent_counts is not None:
                sent_counts[:] = counts
        return sent, sizes

    def _unpack(
        self, received: ndarray, plans: list[tuple[list[Section], int]], targets: Sequence[GradientRows]
    ) -> None:
        """Add all received rows to the tables' chains, widened if they were sent in a narrower type."""
        for rank, table, ids, counts, rows in self.wire.contents(received, plans):
            chains = targets[table]
            if rows.element_size() < chains.dtype.itemsize:
                rows = self._scratch.take((rank, table), len(rows), chains.dim, chains.row_dtype).copy_(rows)
            chains.add(ids.astype(np.int64), rows.numpy(), counts)


#: A thread with nothing to send waits so long before it joins a round: others may have something for it.
_IDLE_SECONDS = 0.005
#: Columns of the counts of a round.
_BYTES, _STEPS, _DRAINS, _FLAGS = range(4)


@dataclass
class LaggedExchange(GradientExchange):
    """Sends gradient rows to the trainers of other machines while training goes on.

    A trainer is at most ``max_lag`` steps ahead of the slowest one. The thread runs from the first step to
    :meth:`drain`; an error in it is raised by the next step.

    Parameters
    ----------
    group : Alltoall
        All trainers, in a group that nothing else uses.
    starts, machines, chains, wire
        As for :class:`GradientExchange`.
    part_id : int
        Partition on this trainer's machine. Its rows are not sent: the trainer updates them itself.
    max_lag : int
        At least 1.
    apply : callable
        Updates rows from the :attr:`arrived` gradients; called in the thread.
    """

    part_id: int
    max_lag: int
    apply: Callable[[], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arrived = [type(chains)(chains.dim, chains.dtype) for chains in self.chains]
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._queue: list[list[bytes]] = []
        self._drains = False
        # Steps posted here, and by the slowest trainer as far as is known.
        self._num_posted, self._slowest, self._flags = 0, 0, 0
        # The step after which all trainers act on a sum of flags.
        self._agreed: tuple[int, int] | None = None

    def post(self, flags: int) -> list[ndarray]:
        """Hand the gradients of a step to the thread, once the slowest trainer is near enough.

        Returns for each table the positions of the keys whose rows are on this machine; ``flags`` are this
        trainer's, see :meth:`agreed_flags`.

        Raises
        ------
        TimeoutError
            If the slowest trainer stays behind for as long as a collective may take.
        """
        own_keys, messages = self._pack_step()
        with self._changed:
            self._check()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="dglkge-lagged")
                self._thread.start()
            near = self._changed.wait_for(
                lambda: self._error or self._num_posted < self._slowest + self.max_lag,
                self.group.timeout_seconds,
            )
            self._check()
            if not near:
                raise TimeoutError(
                    f"optimizer step: the slowest trainer has made {self._slowest} steps, this one "
                    f"{self._num_posted}, and none more within {self.group.timeout_seconds:g} s"
                )
            self._queue.append(messages)
            self._num_posted += 1
            self._flags |= flags
            self._changed.notify_all()
        return own_keys

    def agreed_flags(self) -> int:
        """Return the sum of all trainers' flags at the one step after which all act on them, else 0.

        The step is the same on all trainers: the first that none of them can have passed when the sum
        arrives. :meth:`drain` must follow.
        """
        with self._changed:
            step, flags = self._agreed or (0, 0)
            return flags if step == self._num_posted else 0

    def drain(self) -> None:
        """Wait until the gradients of all trainers have been applied; a collective at equal steps."""
        with self._changed:
            if self._thread is None:
                self._check()
                return
            self._drains = True
            self._changed.notify_all()
            thread = self._thread
        # The thread's collectives have timeouts, so it ends.
        thread.join()
        self._thread, self._drains = None, False
        self._check()
        # All trainers are at the same step.
        self._num_posted = self._slowest = self._flags = 0
        self._agreed = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _pack_step(self) -> tuple[list[ndarray], list[bytes]]:
        """Merge the rows of a step; returns the positions of this machine's, and a message to each rank."""
        here = self.machines[self.part_id]
        by_rank, counts = self._by_rank(here)
        own_keys = [np.sort(np.concatenate([parts[rank] for rank in here])) for parts in by_rank]
        packed, sizes = self._pack(counts, by_rank)
        ends = np.cumsum(sizes)
        # A message says how many rows of each table it has: several may travel in a round.
        return own_keys, [
            counts[rank].tobytes() + packed[end - num : end].tobytes() if counts[rank].any() else b""
            for rank, (end, num) in enumerate(zip(ends, sizes))
        ]

    def _work(self) -> None:
        """Make rounds until all trainers drain."""
        try:
            while not self._round():
                pass
            # Nobody may read rows before their last gradients are applied everywhere.
            self.group.sum(np.zeros(1, np.int64))
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _round(self) -> bool:
        """Send what was posted, apply what arrives; returns whether all trainers drain."""
        size = self.group.size
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._drains, _IDLE_SECONDS)
            posted, self._queue = self._queue, []
            state = [self._num_posted, int(self._drains), self._flags]
            self._flags = 0
        texts = [b"".join(messages[rank] for messages in posted) for rank in range(size)]
        counts = np.array([[len(text), *state] for text in texts], np.int64)
        received = self.group.counts(counts)
        sizes = received[:, _BYTES].tolist()
        arrived = np.empty(sum(sizes), np.uint8)
        sent = np.frombuffer(b"".join(texts), np.uint8)
        # A writable copy: torch warns about others.
        self.group.messages(sent.copy(), counts[:, _BYTES].tolist(), arrived, sizes)
        self.sent_bytes += len(sent) + counts.nbytes
        self._take(arrived)
        slowest, flags = int(received[:, _STEPS].min()), int(received[:, _FLAGS].sum())
        with self._changed:
            self._slowest = slowest
            if flags and self._agreed is None:
                # No trainer knows a larger minimum before this one answers, so none is beyond it.
                self._agreed = (slowest + self.max_lag + 1, flags)
            self._changed.notify_all()
        return bool(received[:, _DRAINS].all())

    def _take(self, arrived: ndarray) -> None:
        """Apply the messages of a round, one step after the other."""
        start, head = 0, 8 * len(self.chains)
        while start < len(arrived):
            plan = self.wire.plan(arrived[start : start + head].copy().view(np.int64).tolist())
            start, end = start + head, start + head + plan[1]
            # Aligned anew: sections are read as numbers of eight bytes.
            self._unpack(arrived[start:end].copy(), [plan], self.arrived)
            start = end
            self.apply()
            for table_chains in self.arrived:
                table_chains.clear()
