"""Memory of one machine's trainers that the others read: outboxes, and waits that watch their owners.

Each trainer writes to an outbox of its own: an anonymous file in memory (``memfd_create``), which the others
open through ``/proc`` and map read-only. The file has no name that could clash or be left behind, and the
kernel frees it with the last process that maps it.

Memory ordering: the header has 64-bit counters that hold the number of the last step that reached a point of
a protocol. A trainer writes the contents first and the counter last; a reader polls the counter first and
reads the contents after. x86-64 makes stores visible in program order and does not reorder loads with loads,
and an aligned 64-bit store is atomic: a reader that sees the counter of a step also sees its contents. Other
processors need barriers that numpy does not have: :func:`usable` is False there, and the network is used
instead.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

logger = logging.getLogger(__name__)

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


# Waits are mostly shorter than a millisecond: poll that long, then sleep in growing intervals.
_SPIN_SECONDS = 0.001
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 2e-5, 1e-3
_LIVENESS_SECONDS = 0.5


@dataclass
class Neighbours:
    """This trainer's outbox, those of the other trainers of its machine, and the waits for them.

    ``purpose`` and ``duty`` are parts of error messages, as of :class:`Alltoall`.
    """

    outbox: Outbox
    others: Sequence[NeighbourOutbox]
    timeout_seconds: float
    purpose: str = "optimizer step"
    duty: str = "call step() equally often, also without gradients"

    def wait(self, field: int, step: int) -> None:
        """Wait until a counter of every other trainer has reached a step.

        Raises
        ------
        ConnectionError
            If one of them has ended or failed.
        TimeoutError
            If one is late.
        """
        started = next_look = time.monotonic()
        for box in self.others:
            pause = _SHORTEST_SLEEP_SECONDS
            while box.fields[field] < step:
                now = time.monotonic()
                if now - started < _SPIN_SECONDS:
                    os.sched_yield()  # a sleep of 0 takes 50 microseconds; with one core the others must run
                    continue
                time.sleep(pause)
                pause = min(_LONGEST_SLEEP_SECONDS, 1.2 * pause)
                is_late = now - started > self.timeout_seconds
                if is_late or now > next_look:
                    if (failure := self._failure(field, step, is_late)) is not None:
                        raise failure
                    next_look = now + _LIVENESS_SECONDS

    def _failure(self, field: int, step: int, is_late: bool) -> Exception | None:
        """Return the error if a trainer that is missing has ended, or is late."""
        missing = [box for box in self.others if box.fields[field] < step]
        for box in missing:
            if box.has_failed or not is_alive(box.pid):
                end = "gave up" if box.has_failed else "ended"
                return ConnectionError(f"{self.purpose} {step}: trainer {box.rank} (process {box.pid}) {end}")
        if not missing or not is_late:
            return None
        return TimeoutError(
            f"{self.purpose} {step}: trainers {[box.rank for box in missing]} did not come within "
            f"{self.timeout_seconds:g} s: every trainer must {self.duty}"
        )


def open_neighbours(addresses: Sequence[tuple[int, Any]]) -> list[NeighbourOutbox] | None:
    """Return the outboxes of other trainers by rank and address, or None if one cannot be opened."""
    try:
        return [NeighbourOutbox(rank, Address(*address)) for rank, address in addresses]
    except (OSError, TypeError) as error:  # another machine, container or user, or no outbox
        logger.info("a neighbour's memory cannot be opened: %s", error)
        return None
