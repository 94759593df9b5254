"""Memory that one trainer writes and the other trainers of its machine read.

It is an anonymous file in memory (``memfd_create``) that the others open through ``/proc``: it has no name
that could clash or be left behind, and it goes when the last process that maps it goes. A header of 64-bit
integers says which step its contents belong to; the processors for which :func:`usable` answers yes make
writes visible in the order in which they were made, so a reader that sees the number of a step also sees what
was written before it.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
from typing import NamedTuple

import numpy as np

_TOKEN, _CAPACITY, _FAILED, _FIRST_FIELD = range(4)


class Address(NamedTuple):
    """How others find an outbox: process, file descriptor in it, and a number that proves that it is the
    right one."""

    pid: int
    descriptor: int
    token: int
    header_bytes: int


def usable() -> bool:
    """Whether this system has anonymous shared files and orders writes as described above."""
    return hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class Outbox:
    """A trainer's own outbox.

    Parameters
    ----------
    num_fields : int
        Number of header fields.

    Attributes
    ----------
    fields : np.ndarray
        "(n,) int64" header fields of the protocol, all 0 at the start.
    body : np.ndarray
        "(capacity,) uint8".
    """

    def __init__(self, num_fields: int) -> None:
        self._descriptor = os.memfd_create("dglkge-optim")
        self._header_bytes = -(-8 * (_FIRST_FIELD + num_fields) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map(self._header_bytes)
        self._header[_TOKEN] = secrets.randbits(62)
        self.address = Address(os.getpid(), self._descriptor, int(self._header[_TOKEN]), self._header_bytes)

    def __del__(self) -> None:
        if os.getpid() == self.address.pid:
            os.close(self._descriptor)

    def _map(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)
        whole = np.frombuffer(mmap.mmap(self._descriptor, num_bytes), np.uint8)
        self._header = whole[: self._header_bytes].view(np.int64)
        self.fields = self._header[_FIRST_FIELD:]
        self.body = whole[self._header_bytes :]
        self._header[_CAPACITY] = num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Make the body at least so large. Memory is only taken where it is written."""
        if num_bytes > len(self.body):
            self._map(self._header_bytes + -(-num_bytes * 3 // 2 // mmap.PAGESIZE) * mmap.PAGESIZE)

    def fail(self) -> None:
        """Tell the others that this trainer gave up."""
        self._header[_FAILED] = 1


class NeighbourOutbox:
    """The outbox of another trainer of this machine, read only.

    Parameters
    ----------
    rank : int
        Rank of that trainer.
    address : Address
        Where it is.

    Raises
    ------
    OSError
        It cannot be opened, or something else is there.
    """

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        self.pid = address.pid
        with open(f"/proc/{address.pid}/fd/{address.descriptor}", "rb") as file:
            self._descriptor = os.dup(file.fileno())
        self._header_bytes = address.header_bytes
        self._map(self._header_bytes)
        if self._header[_TOKEN] != address.token:
            raise OSError(f"process {address.pid} is not trainer {rank}")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def _map(self, num_bytes: int) -> None:
        whole = np.frombuffer(mmap.mmap(self._descriptor, num_bytes, prot=mmap.PROT_READ), np.uint8)
        self._header = whole[: self._header_bytes].view(np.int64)
        self._fields = self._header[_FIRST_FIELD:]
        self._body = whole[self._header_bytes :]

    @property
    def fields(self) -> np.ndarray:
        """Header fields, as :attr:`Outbox.fields`."""
        return self._fields

    @property
    def body(self) -> np.ndarray:
        """Body "(capacity,) uint8", mapped anew when its owner made it larger."""
        if self._header[_CAPACITY] > self._header_bytes + len(self._body):
            self._map(int(self._header[_CAPACITY]))
        return self._body

    @property
    def has_failed(self) -> bool:
        """Whether that trainer gave up."""
        return bool(self._header[_FAILED])
