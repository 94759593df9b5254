"""Exchange of gradients between machines that do not wait for one another: a thread sends and applies them.

The thread of each trainer makes rounds with those of all others: counts, then messages, as
:class:`dglkge.optim.network_exchange.GradientExchange` does, but beside the steps and at a pace of its own. A
round carries the steps of each trainer, so that all know how far the slowest one is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy import ndarray

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.network_exchange import GradientExchange, Route, WireFormat
from dglkge.optim.row_chains import GradientRows

#: A thread with nothing to send waits so long before it joins a round: others may have something for it.
_IDLE_SECONDS = 0.005
#: Columns of the counts of a round.
_BYTES, _STEPS, _DRAINS, _FLAGS = range(4)


class LaggedExchange(GradientExchange):
    """Sends gradient rows to the trainers of other machines while training goes on.

    A trainer is at most ``max_lag`` steps ahead of the slowest one. The thread runs from the first step to
    :meth:`drain`; an error in it is raised by the next step.

    Parameters
    ----------
    group : Alltoall
        All trainers, in a group that nothing else uses.
    routes, chains, wire
        As for :class:`GradientExchange`.
    part_id : int
        Partition on this trainer's machine. Its rows are not sent: the trainer updates them itself.
    max_lag : int
        At least 1.
    apply : callable
        Updates rows from the :attr:`arrived` gradients; called in the thread.
    """

    def __init__(
        self,
        group: Alltoall,
        routes: Sequence[Route],
        chains: Sequence[GradientRows],
        wire: WireFormat,
        part_id: int,
        max_lag: int,
        apply: Callable[[], None],
    ) -> None:
        super().__init__(group, routes, chains, wire)
        self.arrived = [type(one)(one.dim, one.dtype) for one in chains]
        self._receiver = GradientExchange(group, routes, self.arrived, self.wire)
        self._part_id, self.max_lag, self._apply = part_id, max_lag, apply
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
        own, messages = self._pack_step()
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
        return own

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
        size, num_tables = self.group.size, len(self.chains)
        by_rank = [self._by_rank(table) for table in range(num_tables)]
        here = self.routes[0].machines[self._part_id]
        own = [np.sort(np.concatenate([parts[rank] for rank in here])) for parts in by_rank]
        counts = np.array(
            [[0 if rank in here else len(parts[rank]) for parts in by_rank] for rank in range(size)], np.int64
        )
        packed, sizes = self._pack(counts, by_rank)
        ends = np.cumsum(sizes)
        # A message says how many rows of each table it has: several may travel in a round.
        return own, [
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
            counts = arrived[start : start + head].copy().view(np.int64)
            sections, num_bytes = self.wire.plan(counts.tolist())
            start += head
            # Aligned anew: sections are read as numbers of eight bytes.
            self._receiver._unpack(arrived[start : start + num_bytes].copy(), [(sections, num_bytes)])
            start += num_bytes
            self._apply()
            for one in self.arrived:
                one.clear()
