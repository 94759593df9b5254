"""Exchange between the trainers of one machine through shared memory instead of the loopback network.

Each trainer writes to an outbox of its own: an anonymous file in memory (``memfd_create``), which the others
open through ``/proc`` and map read-only. The file has no name that could clash or be left behind, and the
kernel frees it with the last process that maps it.

1. Every trainer publishes the ids of the rows that it has gradients for.
2. A row that only one trainer has is updated by that trainer: its gradient is not copied. For a row that
   several have, one of them, chosen by the id, is the owner; the others write their merged gradients to their
   outboxes.
3. Once these are delivered, each owner adds them to its own and updates the rows.

While a trainer waits for the others' rows it updates those that no other trainer has.

Memory ordering: the header has 64-bit counters that hold the number of the last step that reached a point of
the protocol (published, delivered, finished). A trainer writes the contents first and the counter last; a
reader polls the counter first and reads the contents after. x86-64 makes stores visible in program order and
does not reorder loads with loads, and an aligned 64-bit store is atomic: a reader that sees the counter of a
step also sees its contents. Other processors need barriers that numpy does not have: :func:`usable` is False
there, and the rows are sent over the network instead.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from dglkge.optim.network_exchange import WireFormat
from dglkge.optim.row_chains import GradientRows, padded
from dglkge.optim.scratch import Scratch

_NAME = "dglkge-optim"
_TOKEN, _CAPACITY, _FAILED, _FIRST_FIELD = range(4)


class Address(NamedTuple):
    """Address of an outbox: process, file descriptor in it, and a random token that its header repeats."""

    pid: int
    descriptor: int
    token: int
    header_bytes: int


def usable() -> bool:
    """Whether this system has anonymous shared files and a processor with the memory ordering above."""
    return hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class _Memory:
    """Mapped memory of an outbox: its header, the fields of the protocol in it, and its body."""

    _header_bytes: int
    _header: ndarray
    fields: ndarray

    def _divide(self, memory: mmap.mmap) -> ndarray:
        """Take header and fields from the memory; returns the body."""
        whole = np.frombuffer(memory, np.uint8)
        self._header = whole[: self._header_bytes].view(np.int64)
        self.fields = self._header[_FIRST_FIELD:]
        return whole[self._header_bytes :]


class Outbox(_Memory):
    """A trainer's own outbox.

    Attributes
    ----------
    fields : ndarray
        "(num_fields,) int64" header fields of the protocol, all 0 at the start.
    body : ndarray
        "(capacity,) uint8".
    """

    def __init__(self, num_fields: int) -> None:
        self._descriptor = os.memfd_create(_NAME)
        self._header_bytes = -(-8 * (_FIRST_FIELD + num_fields) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map(self._header_bytes)
        self._header[_TOKEN] = secrets.randbits(62)
        self.address = Address(os.getpid(), self._descriptor, int(self._header[_TOKEN]), self._header_bytes)

    def __del__(self) -> None:
        if os.getpid() == self.address.pid:
            os.close(self._descriptor)

    def _map(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)
        self.body = self._divide(mmap.mmap(self._descriptor, num_bytes))
        self._header[_CAPACITY] = num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Make the body at least so large; pages are allocated when they are first written."""
        if num_bytes > len(self.body):
            self._map(self._header_bytes + -(-num_bytes * 3 // 2 // mmap.PAGESIZE) * mmap.PAGESIZE)

    def fail(self) -> None:
        """Mark this trainer as failed, so that the others raise at once instead of timing out."""
        self._header[_FAILED] = 1


class NeighbourOutbox(_Memory):
    """The outbox of another trainer of this machine, read only.

    Raises
    ------
    OSError
        It cannot be opened, or the process id is another process's: of another PID namespace, or reused.
    """

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        self.pid = address.pid
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        # Before it is opened: another process's file may be a pipe, which blocks.
        is_outbox = os.readlink(path).startswith(f"/memfd:{_NAME}")
        if not is_outbox or os.stat(path).st_size < address.header_bytes:
            raise OSError(f"{path} is no outbox of trainer {rank}")
        with open(path, "rb") as file:
            self._descriptor = os.dup(file.fileno())
        self._header_bytes = address.header_bytes
        self._map(self._header_bytes)
        if self._header[_TOKEN] != address.token:
            raise OSError(f"process {address.pid} is not trainer {rank}")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def _map(self, num_bytes: int) -> None:
        self._body = self._divide(mmap.mmap(self._descriptor, num_bytes, prot=mmap.PROT_READ))

    @property
    def body(self) -> ndarray:
        """Body "(capacity,) uint8", mapped again after its trainer enlarged it."""
        if self._header[_CAPACITY] > self._header_bytes + len(self._body):
            self._map(int(self._header[_CAPACITY]))
        return self._body

    @property
    def has_failed(self) -> bool:
        """Whether a step of that trainer failed."""
        return bool(self._header[_FAILED])


_PUBLISHED, _DELIVERED, _FINISHED, _EXTRA, _FIRST_COUNT = range(5)
# Waits are mostly shorter than a millisecond: poll that long, then sleep in growing intervals.
_SPIN_SECONDS = 0.001
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 2e-5, 1e-3
_LIVENESS_SECONDS = 0.5


#: Header fields of each table: number of keys and gradients; offsets in the body of ids, slots, counts and
#: rows; number of rows that were not finite, and of those that were delivered.
_FIELDS_A_TABLE = 8


def num_fields(num_tables: int) -> int:
    """Header fields that an outbox needs for so many tables."""
    return _fields_of(num_tables).start


def _fields_of(table: int) -> slice:
    """Header fields of a table."""
    return slice(_FIRST_COUNT + _FIELDS_A_TABLE * table, _FIRST_COUNT + _FIELDS_A_TABLE * (table + 1))


class SharedExchange:
    """Exchange of gradients between the trainers of this machine.

    Parameters
    ----------
    outbox, neighbours : Outbox, sequence of NeighbourOutbox
        Of this trainer, and of the others.
    place, places : int, sequence of int
        Number of this trainer and of each neighbour among the machine's trainers.
    chains : sequence of GradientRows
        The gradients of each table.
    wire : WireFormat
        Types in which ids and rows are written.
    timeout_seconds : float
        Limit of every wait.

    Attributes
    ----------
    sent_bytes : int
        Bytes written for the others since the start.
    """

    def __init__(
        self,
        outbox: Outbox,
        neighbours: Sequence[NeighbourOutbox],
        place: int,
        places: Sequence[int],
        chains: Sequence[GradientRows],
        wire: WireFormat,
        timeout_seconds: float,
    ) -> None:
        self._outbox, self._neighbours = outbox, neighbours
        self._place, self._places = place, places
        self._chains, self._wire = chains, wire
        self._timeout_seconds = timeout_seconds
        self._step = 0
        self.sent_bytes = 0
        self._scratch = Scratch()
        self._fields = [_fields_of(table) for table in range(len(chains))]

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
        self._wait(_PUBLISHED)
        enter("exchange")
        owners, positions, is_shared = self._choose()
        mine = [key_owners[keys] == self._place for key_owners, keys in zip(owners, owned)]
        shared = [table_shared[keys] for table_shared, keys in zip(is_shared, owned)]
        self._deliver(owned, mine)
        yield [keys[~also] for keys, also in zip(owned, shared)]
        enter("waiting")
        self._wait(_DELIVERED)
        enter("exchange")
        self._collect(owners, positions)
        yield [keys[is_mine & also] for keys, is_mine, also in zip(owned, mine, shared)]

    def active(self) -> ndarray:
        """Whether any trainer of this machine has a gradient, for each table "(num_tables,) bool"; within a
        run.
        """
        boxes: list[Any] = [self._outbox, *self._neighbours]
        return np.array([any(box.fields[fields][1] for box in boxes) for fields in self._fields])

    def finish(self, num_bad: ndarray, extra: int) -> tuple[ndarray, int]:
        """Wait until every trainer of the machine has finished the step; returns the sums of both
        arguments.
        """
        # No trainer reads these fields before FINISHED has this step's number, and none writes them again
        # before all have published the next step, that is, after all have read them.
        self._outbox.fields[_EXTRA] = extra
        for fields, bad in zip(self._fields, num_bad):
            self._outbox.fields[fields][6] = bad
        self._outbox.fields[_FINISHED] = self._step
        self._wait(_FINISHED)
        extra_sum = int(extra) + sum(int(box.fields[_EXTRA]) for box in self._neighbours)
        neighbours_bad = [[box.fields[fields][6] for fields in self._fields] for box in self._neighbours]
        return num_bad + np.sum(neighbours_bad, axis=0, dtype=np.int64), extra_sum

    def fail(self) -> None:
        """Mark this trainer as failed: the others stop waiting for it."""
        self._outbox.fail()

    def _publish(self, owned: Sequence[ndarray]) -> None:
        """Write the ids of this trainer's keys, and reserve room for all that may follow."""
        end, plan = 0, []
        id_bytes = self._wire.id_dtype.itemsize
        for chains, keys, dtype in zip(self._chains, owned, self._wire.row_dtypes):
            ids = end
            slots = ids + padded(len(keys) * id_bytes)
            counts = slots + padded(len(keys) * 4)
            rows = counts + padded(len(keys) * 4)
            end = rows + padded(len(keys) * chains.dim * dtype.itemsize)
            plan.append((len(keys), chains.num_sources, ids, slots, counts, rows))
        self._outbox.reserve(end)
        body = self._outbox.body
        for chains, keys, fields, numbers in zip(self._chains, owned, self._fields, plan):
            # Field 6, the number of bad rows, is left: a neighbour may still read that of the last step.
            self._outbox.fields[fields][:6] = numbers
            _view(body, numbers[2], len(keys), self._wire.id_dtype)[:] = chains.keys[keys]
            self.sent_bytes += len(keys) * id_bytes
        self._outbox.fields[_PUBLISHED] = self._step

    def _choose(self) -> tuple[list[ndarray], list[list[ndarray]], list[ndarray]]:
        """Owner (place on the machine) of each key, the keys that each neighbour has too, and whether any has
        them; by table. All trainers that have a gradient for a row read the same ids and choose the same.
        """
        num_places = len(self._neighbours) + 1
        owners = [np.full(chains.num_keys, self._place, np.int64) for chains in self._chains]
        shared = [np.zeros(chains.num_keys, bool) for chains in self._chains]
        positions = [
            [
                chains.match(self._ids(box, table), place, num_places, owners[table], shared[table])
                for place, box in zip(self._places, self._neighbours)
            ]
            for table, chains in enumerate(self._chains)
        ]
        return owners, positions, shared

    def _ids(self, box: NeighbourOutbox, table: int) -> ndarray:
        """Ids that a neighbour published for a table, "(n,) int64"."""
        num_keys, _, offset = box.fields[self._fields[table]][:3]
        return _view(box.body, offset, num_keys, self._wire.id_dtype).astype(np.int64)

    def _deliver(self, owned: Sequence[ndarray], mine: Sequence[ndarray]) -> None:
        """Write the merged rows of the keys that others own; a key's slot is the number of its row among
        them.
        """
        body = self._outbox.body
        for table, (keys, is_mine) in enumerate(zip(owned, mine)):
            chains, dtype = self._chains[table], self._wire.row_dtypes[table]
            selected = keys[~is_mine]
            num_keys, num_rows = len(keys), len(selected)
            _, _, _, slots, counts, rows, _, _ = self._outbox.fields[self._fields[table]]
            self._outbox.fields[self._fields[table]][7] = num_rows
            if num_rows == 0:
                continue
            slot_of = _view(body, slots, num_keys, np.dtype(np.int32))
            slot_of[~is_mine] = np.arange(num_rows)
            counts_of = np.empty(num_rows, np.int64)
            target = torch.from_numpy(body[rows : rows + num_rows * chains.dim * dtype.itemsize]).view(dtype)
            chains.merge_into(selected, target.view(num_rows, chains.dim), counts_of, self._scratch)
            _view(body, counts, num_rows, np.dtype(np.int32))[:] = counts_of
            self.sent_bytes += 4 * num_keys + num_rows * (4 + chains.dim * dtype.itemsize)
        self._outbox.fields[_DELIVERED] = self._step

    def _collect(self, owners: Sequence[ndarray], positions: Sequence[Sequence[ndarray]]) -> None:
        """Chain the rows that neighbours delivered for this trainer's keys."""
        for table, (chains, key_owners) in enumerate(zip(self._chains, owners)):
            dtype = self._wire.row_dtypes[table]
            plain = np.dtype(f"i{dtype.itemsize}")  # numpy has no bfloat16: rows are moved as integers
            for number, (box, keys) in enumerate(zip(self._neighbours, positions[table])):
                num_keys, _, _, slots, counts, rows, _, num_rows = box.fields[self._fields[table]]
                if num_rows == 0:
                    continue
                row_of, count_of = (
                    _view(box.body, *place, np.dtype(np.int32))
                    for place in ((slots, num_keys), (counts, num_rows))
                )
                sums = _view(box.body, rows, num_rows * chains.dim, plain).reshape(num_rows, chains.dim)
                if dtype.itemsize < chains.dtype.itemsize:
                    wide = self._scratch.take((table, number), int(num_rows), chains.dim, chains.row_dtype)
                    sums = wide.copy_(torch.from_numpy(sums.copy()).view(dtype)).numpy()
                else:
                    sums = sums.view(chains.dtype)
                chains.add_delivered(keys, key_owners, self._place, (row_of, count_of), sums)

    def _wait(self, field: int) -> None:
        """Wait until every neighbour has reached this point of the current step."""
        started = next_look = time.monotonic()
        for box in self._neighbours:
            pause = _SHORTEST_SLEEP_SECONDS
            while box.fields[field] < self._step:
                now = time.monotonic()
                if now - started < _SPIN_SECONDS:
                    os.sched_yield()  # a sleep of 0 takes 50 microseconds; with one core the others must run
                    continue
                time.sleep(pause)
                pause = min(_LONGEST_SLEEP_SECONDS, 1.2 * pause)
                is_late = now - started > self._timeout_seconds
                if is_late or now > next_look:
                    if (failure := self._failure(field, is_late)) is not None:
                        raise failure
                    next_look = now + _LIVENESS_SECONDS

    def _failure(self, field: int, is_late: bool) -> Exception | None:
        """Return the error if a neighbour that is missing has ended, or is late."""
        missing = [box for box in self._neighbours if box.fields[field] < self._step]
        for box in missing:
            if box.has_failed or not is_alive(box.pid):
                end = "gave up" if box.has_failed else "ended"
                return ConnectionError(
                    f"optimizer step {self._step}: trainer {box.rank} (process {box.pid}) {end}"
                )
        if not missing or not is_late:
            return None
        return TimeoutError(
            f"optimizer step {self._step}: trainers {[box.rank for box in missing]} did not come within "
            f"{self._timeout_seconds:g} s: every trainer must call step() equally "
            "often, also without gradients"
        )


def _view(body: ndarray, offset: int, num_elements: int, dtype: np.dtype) -> ndarray:
    """Elements of a body as an array of another type, a view."""
    return body[offset : offset + int(num_elements) * dtype.itemsize].view(dtype)
