"""Collectives over torch.distributed with a timeout and an error that names the missing ranks.

Without a process group every call is the identity.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray

#: A rank that waits longer than this writes it to torch's store, from which the others read who is missing.
_ANNOUNCE_AFTER_SECONDS = 2.0
#: Time for the other ranks to see a broken connection and write to the store too.
_GRACE_SECONDS = 1.0
#: Limit of a question to torch's store, which answers within milliseconds while its process runs.
_STORE_SECONDS = 5.0
_SILENT = "torch's store does not answer"


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
        self.messages(np.tile(text, self.size), [len(text)] * self.size, received, lengths)
        ends = np.cumsum(lengths).tolist()
        return [json.loads(bytes(received[end - num : end])) for num, end in zip(lengths, ends)]

    def counts(self, counts: ndarray) -> ndarray:
        """Send row r of "(size, k) int64" to rank r; row r of the result is from rank r."""
        if self.size == 1:
            return counts
        sent = torch.from_numpy(counts).to(self.device)
        received = torch.empty_like(sent)
        self._wait(dist.all_to_all_single(received, sent, group=self._group, async_op=True))
        return received.cpu().numpy()

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
        self._wait(
            dist.all_to_all_single(
                landing, outgoing, received_bytes, sent_bytes, group=self._group, async_op=True
            )
        )
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
                    with contextlib.suppress(RuntimeError):  # rank 0 has exited or is stopped
                        self._num_announced(self.rank, add=1)
                ended_early = time.monotonic() - started < 0.9 * patience
                patience = deadline - time.monotonic()
                if ended_early:
                    # A closed connection reaches the ranks one after the other: let them write to the store.
                    time.sleep(_GRACE_SECONDS)
                if ended_early or patience <= 0:
                    raise self._failure(error) from error

    def _num_announced(self, rank: int, add: int = 0) -> int:
        """Number of times that a rank has announced the current collective in the store.

        A RuntimeError if rank 0, which holds the store, has ended or does not answer.
        """
        if self._store_is_silent:
            raise RuntimeError(_SILENT)
        # torch has no public access to the store of the default group.
        # add() with 0 reads a counter at once, where get() would block until the key exists.
        store = dist.distributed_c10d._get_default_store()
        answer: queue.Queue[Any] = queue.Queue()

        def ask() -> None:
            try:
                answer.put(store.add(f"{self._name}/{self._sequence}/{rank}", add))
            except RuntimeError as error:
                answer.put(error)

        # In a thread: the store's client has no timeout, and waits for ever where rank 0 is stopped.
        threading.Thread(target=ask, daemon=True, name="dglkge-store").start()
        try:
            reply = answer.get(timeout=_STORE_SECONDS)
        except queue.Empty:
            # The thread holds the client's lock, so that later questions would wait as well.
            self._store_is_silent = True
            raise RuntimeError(_SILENT) from None
        if isinstance(reply, RuntimeError):
            raise reply
        return int(reply)

    def _failure(self, error: RuntimeError) -> Exception:
        """Exception for a collective that did not complete; names the ranks that have not announced it."""
        try:
            missing = [rank for rank in range(self.size) if self._num_announced(rank) == 0]
        except RuntimeError:
            missing = []
        who = f"trainers {missing} did not come" if missing else "a trainer is gone"
        if self._store_is_silent:
            who = "trainer 0, which holds torch's store, did not answer"
        reason = str(error).splitlines()[0]
        if "timed out" in reason.lower():
            return TimeoutError(
                f"{self._purpose}: {who} within {self.timeout_seconds:g} s: every trainer must {self._duty}"
            )
        return ConnectionError(f"{self._purpose}: the exchange broke, {who} ({reason})")
