"""Collectives over torch.distributed with a timeout and an error that names the missing ranks.

Without a process group every call is the identity.

Between trainers that are all on one machine messages and sums go through shared memory
(:class:`SharedAlltoall`). A trainer writes its message to its outbox (:mod:`dglkge.optim.outboxes`) with the
place of each reader's piece, and counts it as written; the others copy their pieces and count the message as
read. Before the next message a trainer waits until all have read the last one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray

from dglkge.optim.outboxes import Neighbours, Outbox, open_neighbours, usable

#: A rank that waits longer than this writes it to torch's store, from which the others read who is missing.
_ANNOUNCE_AFTER_SECONDS = 2.0
#: Time for the other ranks to see a broken connection and write to the store too.
_GRACE_SECONDS = 1.0
#: Limit of a question to torch's store, which answers within milliseconds while its process runs.
_STORE_SECONDS = 5.0

#: Fields of an outbox's header.
_WRITTEN, _READ, _FIRST_PLACE = range(3)


class Alltoall:
    """The process group of an optimizer, or one process alone.

    ========================  ====  ====  ==========================
    torch.distributed         rank  size  collectives
    ========================  ====  ====  ==========================
    not initialised           0     1     identity
    one process               0     1     identity
    gloo                      r     n     on host memory
    nccl                      r     n     through the current device
    ========================  ====  ====  ==========================

    Parameters
    ----------
    timeout_seconds : float
        Limit of every wait.
    own_group : bool
        Open a new process group instead of using the default one (a collective call): needed where a
        background thread communicates while the caller does.
    device : torch.device, optional
        Where the tensors of :meth:`rows` are. For a GPU the group of its own is one of NCCL, and has no other
        use.
    purpose, duty : str
        Parts of error messages: "<purpose>: trainers [1] did not come ...: every trainer must <duty>".
    """

    _num_groups = 0

    def __init__(
        self,
        timeout_seconds: float,
        own_group: bool = False,
        purpose: str = "optimizer step",
        duty: str = "call step() equally often, also without gradients",
        device: torch.device | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._purpose, self._duty = purpose, duty
        self.rank, self.size = 0, 1
        self.device = torch.device("cpu")
        self._group: Any = None
        self._sequence = 0
        self._store_is_silent = False
        Alltoall._num_groups += 1
        self._name = f"dglkge_optim_{Alltoall._num_groups}"
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if own_group and self.size > 1:
                backend = "nccl" if device is not None and device.type == "cuda" else None
                limit = datetime.timedelta(seconds=timeout_seconds)
                self._group = dist.new_group(timeout=limit, backend=backend)
            if "nccl" in dist.get_backend():
                self.device = torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: Any) -> list[Any]:
        """Gather a value of every rank, in the order of ranks: numbers, texts, lists, dictionaries, as JSON.

        torch's ``all_gather_object`` has no timeout of its own, and unpickling runs code.
        """
        if self.size == 1:
            return [value]
        text = np.frombuffer(json.dumps(value, default=float).encode(), np.uint8)
        lengths = self.counts(np.full((self.size, 1), len(text))).ravel().tolist()
        received = np.empty(sum(lengths), np.uint8)
        self.share(text, received, lengths)
        return [json.loads(bytes(piece)) for piece in np.split(received, np.cumsum(lengths)[:-1])]

    def counts(self, counts: ndarray) -> ndarray:
        """Send row r of "(size, k) int64" to rank r; row r of the result is from rank r."""
        sent = np.ascontiguousarray(counts)
        received, row_bytes = np.empty_like(sent), [sent[0].nbytes] * self.size
        self.messages(_as_bytes(sent), row_bytes, _as_bytes(received), row_bytes)
        return received

    def messages(
        self, sent: ndarray, sent_bytes: list[int], received: ndarray, received_bytes: list[int]
    ) -> None:
        """Send consecutive pieces of ``sent`` "(sum(sent_bytes),) uint8" to ranks 0, 1, ...; fill
        ``received`` alike.
        """
        if self.size == 1:
            received[:] = sent
            return
        outgoing = torch.from_numpy(sent).to(self.device)
        incoming = torch.from_numpy(received)
        landing = incoming.to(self.device)
        lengths = (received_bytes, sent_bytes)
        self._wait(dist.all_to_all_single(landing, outgoing, *lengths, group=self._group, async_op=True))
        if landing is not incoming:
            incoming.copy_(landing)

    def share(self, message: ndarray, received: ndarray, received_bytes: list[int]) -> None:
        """Send one message "(n,) uint8" to every rank; fill ``received`` with theirs, rank after rank."""
        self.messages(np.tile(message, self.size), [len(message)] * self.size, received, received_bytes)

    def rows(self, sent: torch.Tensor, sent_counts: list[int], received_counts: list[int]) -> torch.Tensor:
        """Send consecutive rows of ``sent`` "(n, ...)" to ranks 0, 1, ...; returns those that arrive, rank by
        rank.

        On a GPU the exchange is queued and not waited for. NCCL's watchdog ends the process where it takes
        longer than ``timeout_seconds``.
        """
        if self.size == 1:
            return sent
        received = sent.new_empty((sum(received_counts), *sent.shape[1:]))
        is_queued = sent.is_cuda
        work = dist.all_to_all_single(
            received, sent, received_counts, sent_counts, group=self._group, async_op=not is_queued
        )
        if not is_queued:
            self._wait(work)
        return received

    def sum(self, values: ndarray) -> ndarray:
        """Sum "(k,)" int64 or float64 over all ranks; also a barrier, as it needs the numbers of every rank.

        Every rank sends its numbers to every other: a few bytes, and one round of messages where gloo's
        all_reduce takes 2 (size - 1), one after the other.
        """
        return self.counts(np.tile(values, (self.size, 1))).sum(axis=0)

    def _wait(self, work: Any) -> None:
        """Wait for a collective, at most ``timeout_seconds``."""
        self._sequence += 1
        deadline = time.monotonic() + self.timeout_seconds
        patience = min(_ANNOUNCE_AFTER_SECONDS, self.timeout_seconds / 2)
        announced = False
        while True:
            started = time.monotonic()
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, patience)))
                if self.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                return
            except RuntimeError as error:
                if not announced:
                    announced = True
                    self._num_announced(self.rank, add=1)
                ended_early = time.monotonic() - started < 0.9 * patience
                patience = deadline - time.monotonic()
                if ended_early:
                    # A closed connection reaches the ranks one after the other: let them write to the store.
                    time.sleep(_GRACE_SECONDS)
                if ended_early or patience <= 0:
                    raise self._failure(error) from error

    def _num_announced(self, rank: int, add: int = 0) -> int | None:
        """Number of times that a rank has announced the current collective in the store.

        None if rank 0, which holds the store, has ended or does not answer.
        """
        if self._store_is_silent:
            return None
        # torch has no public access to the store of the default group.
        # add() with 0 reads a counter at once, where get() would block until the key exists.
        store = dist.distributed_c10d._get_default_store()
        answers: list[int] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # rank 0 has exited
                answers.append(store.add(f"{self._name}/{self._sequence}/{rank}", add))

        # In a thread: the store's client has no timeout, and waits for ever where rank 0 is stopped.
        thread = threading.Thread(target=ask, daemon=True, name="dglkge-store")
        thread.start()
        thread.join(_STORE_SECONDS)
        # The thread holds the client's lock, so that later questions would wait as well.
        self._store_is_silent = not answers and thread.is_alive()
        return answers[0] if answers else None

    def _failure(self, error: RuntimeError) -> Exception:
        """Exception for a collective that did not complete; names the ranks that have not announced it."""
        counts = [self._num_announced(rank) for rank in range(self.size)]
        missing = [] if None in counts else [rank for rank, count in enumerate(counts) if count == 0]
        who = f"trainers {missing} did not come" if missing else "a trainer is gone"
        if self._store_is_silent:
            who = "trainer 0, which holds torch's store, did not answer"
        reason = str(error).splitlines()[0]
        if "timed out" in reason.lower():
            return TimeoutError(
                f"{self._purpose}: {who} within {self.timeout_seconds:g} s: every trainer must {self._duty}"
            )
        return ConnectionError(f"{self._purpose}: the exchange broke, {who} ({reason})")


def _as_bytes(numbers: ndarray) -> ndarray:
    """View a contiguous array as bytes "(n,) uint8"."""
    return numbers.view(np.uint8).reshape(-1)


class SharedAlltoall(Alltoall):
    """The default process group; through shared memory where all trainers can read one another's.

    Its constructor is a collective, with the parameters of :class:`Alltoall`.

    Attributes
    ----------
    near : Neighbours or None
        The other trainers if messages go through shared memory.
    """

    def __init__(self, timeout_seconds: float, purpose: str, duty: str) -> None:
        super().__init__(timeout_seconds, purpose=purpose, duty=duty)
        self.near: Neighbours | None = None
        self._round = 0
        if self.size == 1:
            return
        outbox = Outbox(_FIRST_PLACE + 2 * self.size) if usable() and self.device.type == "cpu" else None
        addresses = enumerate(self.gather(outbox.address if outbox else None))
        others = open_neighbours([(rank, address) for rank, address in addresses if rank != self.rank])
        # All trainers must take the same path.
        if all(self.gather(others is not None)) and outbox is not None and others is not None:
            self.near = Neighbours(outbox, others, timeout_seconds, purpose, duty)

    def messages(
        self, sent: ndarray, sent_bytes: list[int], received: ndarray, received_bytes: list[int]
    ) -> None:
        if self.near is None:
            super().messages(sent, sent_bytes, received, received_bytes)
            return
        ends = np.cumsum(sent_bytes)
        self._write(self.near, sent, ends - sent_bytes, ends)
        self._read(self.near, received, received_bytes)

    def share(self, message: ndarray, received: ndarray, received_bytes: list[int]) -> None:
        if self.near is None:
            super().share(message, received, received_bytes)
            return
        self._write(self.near, message, np.zeros(self.size, np.int64), np.full(self.size, len(message)))
        self._read(self.near, received, received_bytes)

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of float32 numbers (n,) of all trainers, added in float64 in the order of ranks.

        In shared memory each trainer adds a slice, and float32 goes both ways.
        """
        if self.near is None:
            total = values.double()
            if self.size > 1:
                self._wait(dist.all_reduce(total, async_op=True))
            return total
        near, numbers = self.near, values.detach().contiguous().numpy()
        bounds = np.array([len(numbers) * rank // self.size for rank in range(self.size + 1)])
        own = slice(int(bounds[self.rank]), int(bounds[self.rank + 1]))
        self._write(near, numbers.view(np.uint8), 4 * bounds[:-1], 4 * bounds[1:])
        near.wait(_WRITTEN, self._round)
        total_slice = np.zeros(own.stop - own.start)
        for piece in self._pieces(near):
            total_slice += piece.view(np.float32)
        near.outbox.fields[_READ] = self._round
        total = torch.empty(len(numbers))
        sizes = (4 * np.diff(bounds)).tolist()
        self.share(total_slice.astype(np.float32).view(np.uint8), total.numpy().view(np.uint8), sizes)
        return total

    def _write(self, near: Neighbours, message: ndarray, starts: ndarray, ends: ndarray) -> None:
        """Write a message, with the place of each rank's piece, once the last one was read."""
        near.wait(_READ, self._round)
        self._round += 1
        near.outbox.reserve(len(message))
        near.outbox.body[: len(message)] = message
        places = near.outbox.fields[_FIRST_PLACE:]
        places[: self.size], places[self.size : 2 * self.size] = starts, ends
        near.outbox.fields[_WRITTEN] = self._round

    def _pieces(self, near: Neighbours) -> list[ndarray]:
        """Return the piece for this trainer of every rank's message, as they lie in their outboxes."""
        boxes: list[Any] = [*near.others[: self.rank], near.outbox, *near.others[self.rank :]]
        ends = [box.fields[_FIRST_PLACE + self.rank :: self.size][:2].tolist() for box in boxes]
        return [box.body[start:end] for box, (start, end) in zip(boxes, ends)]

    def _read(self, near: Neighbours, received: ndarray, received_bytes: list[int]) -> None:
        """Copy the pieces of all messages one after another."""
        near.wait(_WRITTEN, self._round)
        np.concatenate(self._pieces(near), out=received[: sum(received_bytes)])
        near.outbox.fields[_READ] = self._round
