"""Torch's process group: a rendezvous on one address, errors that all trainers raise, a bounded shutdown."""

from __future__ import annotations

import datetime
import errno
import faulthandler
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dglkge.distributed.addresses import PortTakenError
from dglkge.errors import CheckpointError, DglkgeError, InputError, JobError, NotReadyError, StorageError
from dglkge.optim.alltoall import SharedAlltoall

Result = TypeVar("Result")

KINDS = {kind.__name__: kind for kind in (CheckpointError, InputError, JobError, NotReadyError, StorageError)}


def agree(
    gather: Callable[[str], Sequence[str]],
    work: Callable[[], Result],
    wait: Callable[[], object] = lambda: None,
) -> Result:
    """Run a function on every trainer, a collective; if it fails on one, all raise its error.

    Parameters
    ----------
    gather : callable
        Returns the texts of all trainers in the order of ranks, within a fixed timeout.
    work : callable
    wait : callable
        A barrier before that, which allows for work of very different length.

    Raises
    ------
    DglkgeError
        That of the first rank that failed, of its kind; of ranks above 0 with the rank before the text.
    """
    problem: tuple[str, str] | None = None
    results: list[Result] = []
    try:
        results.append(work())
    except DglkgeError as error:
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS)
        problem = (name, str(error))
    wait()
    for rank, text in enumerate(gather(json.dumps(problem))):
        if (failure := json.loads(text)) is not None:
            raise KINDS[failure[0]](failure[1] if rank == 0 else f"rank {rank}: {failure[1]}")
    return results[0]


class DeviceGroups:
    """The process groups of a job's trainers, by device; the same calls in the same order on every trainer.

    The timeout limits every wait on a GPU; NCCL's watchdog ends the process then.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._groups: dict[torch.device, Any] = {}
        self._host: SharedAlltoall | None = None

    def group(self, device: torch.device) -> Any:
        """Return the group whose collectives take tensors on a device; a collective at its first call."""
        if device not in self._groups:
            is_gpu = device.type == "cuda"
            made = dist.new_group(timeout=self._timeout, backend="nccl") if is_gpu else dist.group.WORLD
            self._groups[device] = made
        return self._groups[device]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all trainers, in place and on its device, and return it; a collective."""
        if dist.is_initialized():
            dist.all_reduce(values, group=self.group(values.device))
        return values

    def sum_gradients(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of float32 numbers (n,) over all trainers, which are added in float64; a collective.

        Through shared memory where all trainers are on one machine and the numbers on the host.
        """
        if values.device.type != "cpu":
            return self.sum(values.double())
        if self._host is None:
            seconds = self._timeout.total_seconds()
            duty = "train every batch, also with no triples of its own"
            self._host = SharedAlltoall(seconds, "sum of dense gradients", duty)
        return self._host.sum_rows(values)


LAST_TENSORS_SECONDS = 0.1
"""Time for gloo's threads to release the tensors of the last collective."""

END_TIMEOUT_SECONDS = 60

RANK_0_SECONDS = 10.0
"""Time for rank 0 to find that its port is taken, and for the launcher to end this process then."""


def start_process_group(rendezvous: tuple[str, int], rank: int, world_size: int, seconds: float) -> None:
    """Join the other trainers over gloo, with a store that listens on the job's address only.

    torch's own ``env://`` listens on every interface, and its store has no authentication: every program that
    reaches it can change its content. So rank 0 passes it a socket that listens on the job's address.
    `seconds` are the timeout of the rendezvous and of each collective. Raises PortTakenError on rank 0.
    """
    timeout = datetime.timedelta(seconds=seconds)
    try:
        # With SO_REUSEADDR: accepts a port whose last connections are in TIME_WAIT. The store closes it.
        listener = socket.create_server(rendezvous).detach() if rank == 0 else None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"{rendezvous[0]}:{rendezvous[1]}") from error
        raise
    try:
        # wait_for_workers=False: init_process_group waits for all ranks itself.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            *rendezvous, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener,
            use_libuv=False,  # the other backend takes no listening socket in torch 2.6
        )  # fmt: skip
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError:
        # Rank 0 reports first what is wrong with the port.
        if rank > 0:
            time.sleep(RANK_0_SECONDS)
        raise


def end_process_group() -> None:
    """Leave the process group together with the other trainers; a collective.

    torch 2.2 joined gloo's threads while it held Python's global lock, and a thread that has just ended a
    collective needs that lock to release its tensor: 1 of 60 processes that left right after a collective
    blocked forever. A short sleep is enough for the threads. If it is not, the watchdog of ``faulthandler``,
    a thread of C, ends the process with status 1 and prints where it was; no Python code could run then.
    """
    # No rank may close its connections while another one still waits in a collective.
    dist.barrier()
    time.sleep(LAST_TENSORS_SECONDS)
    faulthandler.dump_traceback_later(END_TIMEOUT_SECONDS, exit=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
