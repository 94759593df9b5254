"""The exchange of a step: over the network between machines, through shared memory inside one.

That over the network is in :mod:`dglkge.optim.network_exchange`. Inside a machine each trainer writes to an
outbox of its own, see :mod:`dglkge.optim.outboxes`, instead of the loopback network:

1. Every trainer publishes the ids of the rows that it has gradients for.
2. A row that only one trainer has is updated by that trainer: its gradient is not copied. For a row that
   several have, one of them, chosen by the id, is the owner; the others write their merged gradients to their
   outboxes.
3. Once these are delivered, each owner adds them to its own and updates the rows.

While a trainer waits for the others' rows it updates those that no other trainer has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.network_exchange import GradientExchange, LaggedExchange, WireFormat, ranks_by_machine, view
from dglkge.optim.outboxes import NeighbourOutbox, Neighbours, Outbox, open_neighbours, usable
from dglkge.optim.row_chains import GradientRows, padded
from dglkge.optim.workspace import Scratch

logger = logging.getLogger(__name__)

_PUBLISHED, _DELIVERED, _FINISHED, _EXTRA, _FIRST_COUNT = range(5)

#: Header fields of each table: number of keys and gradients; offsets in the body of ids, slots, counts and
#: rows; number of rows that were not finite, and of those that were delivered.
_FIELDS_A_TABLE = 8
_INT32 = np.dtype(np.int32)


def num_fields(num_tables: int) -> int:
    """Header fields that an outbox needs for so many tables."""
    return _FIRST_COUNT + _FIELDS_A_TABLE * num_tables


@dataclass
class SharedExchange:
    """Exchange of gradients between the trainers of this machine.

    Parameters
    ----------
    boxes : Neighbours
        Outboxes of this trainer and of the others.
    place, places : int, sequence of int
        Number of this trainer and of each neighbour among the machine's trainers.
    chains : sequence of GradientRows
        The gradients of each table.
    wire : WireFormat
        Types in which ids and rows are written.

    Attributes
    ----------
    sent_bytes : int
        Bytes written for the others since the start.
    """

    boxes: Neighbours
    place: int
    places: Sequence[int]
    chains: Sequence[GradientRows]
    wire: WireFormat

    def __post_init__(self) -> None:
        self._outbox, self._neighbours = self.boxes.outbox, self.boxes.others
        self._step = self.sent_bytes = 0
        self._scratch = Scratch()

    def _of_tables(self, box: Any) -> ndarray:
        """Header fields of all tables, "(num_tables, 8)"."""
        return box.fields[_FIRST_COUNT : num_fields(len(self.chains))].reshape(-1, _FIELDS_A_TABLE)

    def run(self, owned: Sequence[ndarray], enter: Callable[[str], None]) -> Iterator[list[ndarray]]:
        """Exchange, yielding twice: the keys that only this trainer has, then those that it owns among
        several.

        The caller updates the rows of the yielded keys before it resumes the generator.

        Parameters
        ----------
        owned : sequence of ndarray
            For each table "(n,) int64": positions of the keys whose rows this machine holds.
        enter : callable
            Called with the name of each phase that begins.
        """
        self._step += 1
        self._publish(owned)
        enter("waiting")
        self.boxes.wait(_PUBLISHED, self._step)
        enter("exchange")
        owners, positions, is_shared = self._choose()
        mine = [key_owners[keys] == self.place for key_owners, keys in zip(owners, owned)]
        shared = [table_shared[keys] for table_shared, keys in zip(is_shared, owned)]
        self._deliver(owned, mine)
        yield [keys[~also] for keys, also in zip(owned, shared)]
        enter("waiting")
        self.boxes.wait(_DELIVERED, self._step)
        enter("exchange")
        self._collect(owners, positions)
        yield [keys[is_mine & also] for keys, is_mine, also in zip(owned, mine, shared)]

    def active(self) -> ndarray:
        """Whether any trainer of this machine has a gradient, for each table "(num_tables,) bool"; within a
        run.
        """
        return np.any([self._of_tables(box)[:, 1] for box in (self._outbox, *self._neighbours)], axis=0)

    def finish(self, num_bad: ndarray, extra: int) -> tuple[ndarray, int]:
        """Wait until every trainer of the machine has finished the step; returns the sums of both
        arguments.
        """
        # No trainer reads these fields before FINISHED has this step's number, and none writes them again
        # before all have published the next step, that is, after all have read them.
        self._outbox.fields[_EXTRA] = extra
        self._of_tables(self._outbox)[:, 6] = num_bad
        self._outbox.fields[_FINISHED] = self._step
        self.boxes.wait(_FINISHED, self._step)
        boxes = (self._outbox, *self._neighbours)
        extra_sum = sum(int(box.fields[_EXTRA]) for box in boxes)
        return np.sum([self._of_tables(box)[:, 6] for box in boxes], axis=0), extra_sum

    def _publish(self, owned: Sequence[ndarray]) -> None:
        """Write the ids of this trainer's keys, and reserve room for all that may follow."""
        end, id_dtype = 0, self.wire.id_dtype
        of_tables = self._of_tables(self._outbox)
        for fields, chains, keys, dtype in zip(of_tables, self.chains, owned, self.wire.row_dtypes):
            slots = end + padded(len(keys) * id_dtype.itemsize)
            counts = slots + padded(len(keys) * 4)
            rows = counts + padded(len(keys) * 4)
            # Field 6, the number of bad rows, is left: a neighbour may still read that of the last step.
            fields[:6] = len(keys), chains.num_sources, end, slots, counts, rows
            end = rows + padded(len(keys) * chains.dim * dtype.itemsize)
        self._outbox.reserve(end)
        for fields, chains, keys in zip(of_tables, self.chains, owned):
            view(self._outbox.body, fields[2], len(keys), id_dtype)[:] = chains.keys[keys]
            self.sent_bytes += len(keys) * id_dtype.itemsize
        self._outbox.fields[_PUBLISHED] = self._step

    def _choose(self) -> tuple[list[ndarray], list[list[ndarray]], list[ndarray]]:
        """Owner (place on the machine) of each key, the keys that each neighbour has too, and whether any has
        them; by table. All trainers that have a gradient for a row read the same ids and choose the same.
        """
        num_places = len(self._neighbours) + 1
        owners = [np.full(chains.num_keys, self.place, np.int64) for chains in self.chains]
        shared = [np.zeros(chains.num_keys, bool) for chains in self.chains]
        positions = [
            [
                chains.match(self._ids(box, table), place, num_places, owners[table], shared[table])
                for place, box in zip(self.places, self._neighbours)
            ]
            for table, chains in enumerate(self.chains)
        ]
        return owners, positions, shared

    def _ids(self, box: NeighbourOutbox, table: int) -> ndarray:
        """Ids that a neighbour published for a table, "(n,) int64"."""
        num_keys, _, offset = self._of_tables(box)[table, :3]
        return view(box.body, offset, num_keys, self.wire.id_dtype).astype(np.int64)

    def _deliver(self, owned: Sequence[ndarray], mine: Sequence[ndarray]) -> None:
        """Write the merged rows of the keys that others own; a key's slot is the number of its row among
        them.
        """
        body = self._outbox.body
        tables = zip(self._of_tables(self._outbox), self.chains, self.wire.row_dtypes, owned, mine)
        for fields, chains, dtype, keys, is_mine in tables:
            selected = keys[~is_mine]
            num_keys, num_rows = len(keys), len(selected)
            slots, counts, rows = fields[3:6]
            fields[7] = num_rows
            if num_rows == 0:
                continue
            view(body, slots, num_keys, _INT32)[~is_mine] = np.arange(num_rows)
            counts_of = np.empty(num_rows, np.int64)
            target = torch.from_numpy(body[rows : rows + num_rows * chains.dim * dtype.itemsize]).view(dtype)
            chains.merge_into(selected, target.view(num_rows, chains.dim), counts_of, self._scratch)
            view(body, counts, num_rows, _INT32)[:] = counts_of
            self.sent_bytes += 4 * num_keys + num_rows * (4 + chains.dim * dtype.itemsize)
        self._outbox.fields[_DELIVERED] = self._step

    def _collect(self, owners: Sequence[ndarray], positions: Sequence[Sequence[ndarray]]) -> None:
        """Chain the rows that neighbours delivered for this trainer's keys."""
        for table, (chains, key_owners) in enumerate(zip(self.chains, owners)):
            dtype = self.wire.row_dtypes[table]
            plain = np.dtype(f"i{dtype.itemsize}")  # numpy has no bfloat16: rows are moved as integers
            for number, (box, keys) in enumerate(zip(self._neighbours, positions[table])):
                num_keys, _, _, slots, counts, rows, _, num_rows = self._of_tables(box)[table]
                if num_rows == 0:
                    continue
                row_of = view(box.body, slots, num_keys, _INT32)
                count_of = view(box.body, counts, num_rows, _INT32)
                sums = view(box.body, rows, num_rows * chains.dim, plain).reshape(num_rows, chains.dim)
                if dtype.itemsize < chains.dtype.itemsize:
                    wide = self._scratch.take((table, number), int(num_rows), chains.dim, chains.row_dtype)
                    sums = wide.copy_(torch.from_numpy(sums.copy()).view(dtype)).numpy()
                else:
                    sums = sums.view(chains.dtype)
                chains.add_delivered(keys, key_owners, self.place, (row_of, count_of), sums)


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
        wire: WireFormat,
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
        machines = ranks_by_machine([part for part, _ in everyone], num_machines)
        here = machines[part_id]
        self.place, self.num_places = int(np.flatnonzero(here == group.rank)[0]), len(here)
        if not synchronous:
            if num_machines > 1:
                self.lagged = LaggedExchange(group, starts, machines, chains, wire, part_id, max_lag, apply)
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
            self._network = GradientExchange(group, starts, machines, chains, wire)

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
            self._neighbours.boxes.outbox.fail()
