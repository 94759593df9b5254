"""The exchange of a step: over the network between machines, through shared memory inside one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy import ndarray

from dglkge.optim import network_exchange as network
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.network_exchange import GradientExchange, LaggedExchange
from dglkge.optim.outboxes import Neighbours, Outbox, open_neighbours, usable
from dglkge.optim.row_chains import GradientRows
from dglkge.optim.shared_exchange import SharedExchange, num_fields

logger = logging.getLogger(__name__)


def ignore_phase(phase: str) -> None:
    """Ignore a phase."""


class StepExchange:
    """Exchange of a step between all trainers. Constructing it is a collective.

    With several machines the two exchanges follow one another: rows are first sent over the network to a
    trainer of the machine that stores them; then the trainers of each machine exchange all rows that they
    have by then through shared memory.

    Parameters
    ----------
    group : Alltoall
        All trainers.
    part_id : int
        Partition that this trainer's machine holds.
    starts : sequence of ndarray
        For each table, the boundaries of the partitions' ranges of ids.
    chains, wire
        As for :class:`GradientExchange`.
    synchronous : bool
        False: every trainer updates the rows of its machine that it has gradients for, and a
        :class:`LaggedExchange` sends those of other machines.
    max_lag, apply
        Of the lagged exchange.

    Attributes
    ----------
    place, num_places : int
        Number of this trainer among those of its machine, and how many these are.
    lagged : LaggedExchange or None
        With ``synchronous=False`` and several machines.
    """

    def __init__(
        self,
        group: Alltoall,
        part_id: int,
        starts: Sequence[ndarray],
        chains: Sequence[GradientRows],
        wire: network.WireFormat,
        synchronous: bool = True,
        max_lag: int = 1,
        apply: Callable[[], None] = lambda: None,
    ) -> None:
        self._group, self._chains = group, chains
        self._network: GradientExchange | None = None
        self._neighbours: SharedExchange | None = None
        self.place, self.num_places = 0, 1
        self.lagged: LaggedExchange | None = None
        num_machines = len(starts[0]) - 1
        if group.size == 1:
            return
        outbox = Outbox(num_fields(len(chains))) if synchronous and usable() else None
        everyone = group.gather((part_id, outbox.address if outbox else None))
        machines = network.ranks_by_machine([part for part, _ in everyone], num_machines)
        here = machines[part_id]
        self.place, self.num_places = int(np.flatnonzero(here == group.rank)[0]), len(here)
        if not synchronous:
            if num_machines > 1:
                routes = [network.Route(table_starts, machines) for table_starts in starts]
                self.lagged = LaggedExchange(group, routes, chains, wire, part_id, max_lag, apply)
            return
        neighbours = open_neighbours([(int(rank), everyone[rank][1]) for rank in here if rank != group.rank])
        # All trainers must take the same path: if one cannot share memory, none does.
        if all(group.gather(neighbours is not None)):
            if neighbours and outbox is not None:
                places = [place for place, rank in enumerate(here) if rank != group.rank]
                boxes = Neighbours(outbox, neighbours, group.timeout_seconds)
                self._neighbours = SharedExchange(boxes, self.place, places, chains, wire)
            # The network exchange leaves rows of this machine where they are: shared memory does the rest.
            machines[part_id] = np.array([group.rank])
        else:
            logger.warning(
                "the trainers of a machine cannot share memory: their gradients go through the network"
            )
        if len(machines) > 1 or self._neighbours is None:
            self._network = GradientExchange(
                group, [network.Route(table_starts, machines) for table_starts in starts], chains, wire
            )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this trainer sent to others since the start."""
        return self.network_bytes + (0 if self._neighbours is None else self._neighbours.sent_bytes)

    @property
    def network_bytes(self) -> int:
        """Bytes that this trainer sent over the network since the start."""
        between = self._network or self.lagged
        return 0 if between is None else between.sent_bytes

    def run(
        self, enter: Callable[[str], None] = ignore_phase, extra: int = 0
    ) -> Iterator[tuple[list[ndarray], ndarray]]:
        """Exchange the gradients in the chains, yielding work as it becomes ready.

        ``enter`` is called with the name of each phase that begins; the lagged exchange sends ``extra``.

        Yields
        ------
        selected : list of ndarray
            For each table "(n,) int64": positions of keys whose rows this trainer updates now.
        active : ndarray
            "(num_tables,) bool": whether any trainer has a gradient for the table.
        """
        active = np.array([chains.num_sources > 0 for chains in self._chains])
        owned = [np.arange(chains.num_keys) for chains in self._chains]
        if self._network is not None:
            owned, active = self._network.run()
        if self.lagged is not None:
            owned = self.lagged.post(extra)
        if self._neighbours is None:
            yield owned, active
            return
        for selected in self._neighbours.run(owned, enter):
            yield selected, active if self._network is not None else self._neighbours.active()

    def finish(self, num_bad: ndarray, extra: int = 0) -> tuple[ndarray, int]:
        """Wait until all trainers have finished the step; returns the sums of both arguments over them.

        ``extra`` is not summed with ``synchronous=False`` on one machine; on several its sum is returned by
        one later step, the same on all trainers, and 0 by the others.
        """
        if self.lagged is not None:
            return num_bad, self.lagged.agreed_flags()
        # The barrier at the end of a step carries both numbers: no message more than the step needs anyway.
        if self._network is not None:
            *total, extra_sum = self._group.sum(np.append(num_bad, int(extra))).tolist()
            return np.array(total, np.int64), extra_sum
        if self._neighbours is None:
            return num_bad, int(extra)
        return self._neighbours.finish(num_bad, int(extra))

    def fail(self) -> None:
        """Mark this trainer as failed: the trainers of this machine stop waiting for it."""
        if self._neighbours is not None:
            self._neighbours.fail()
