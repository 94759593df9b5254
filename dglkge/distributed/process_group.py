"""torch's process group, whose rendezvous listens on one address instead of all, and whose end is sure."""

from __future__ import annotations

import datetime
import errno
import faulthandler
import socket
import time

import torch.distributed as dist

from dglkge.distributed.server_ports import PortTakenError

LAST_TENSORS_SECONDS = 0.1
END_LIMIT_SECONDS = 60


def start_process_group(
    rendezvous: tuple[str, int], rank: int, world_size: int, limit_seconds: float
) -> None:
    """Join the other trainers over gloo; torch's own ``env://`` would listen on every interface.

    Anybody who reaches torch's store can change what it holds, so it is to be reached from the network of
    the job only: rank 0 hands it a socket that listens on the job's address.

    Parameters
    ----------
    rendezvous : tuple of (str, int)
        IPv4 address of the machine of rank 0, and the port where rank 0 listens there.
    rank, world_size : int
    limit_seconds : float
        No collective, and no wait for the others to come, takes longer.

    Raises
    ------
    PortTakenError
        On rank 0, if another program listens there.
    """
    limit = datetime.timedelta(seconds=limit_seconds)
    listener = _listen(rendezvous).detach() if rank == 0 else None  # the store closes it
    store = dist.TCPStore(
        *rendezvous,
        world_size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def end_process_group() -> None:
    """Leave the process group, together with the others.

    torch 2.2 waits for gloo's threads without giving Python's lock away, and a thread that has just ended a
    collective needs the lock to let go of its tensor: in one of 60 processes that left right after a
    collective, both waited for ever. A moment before is enough for the threads. Should it not be, the
    process ends with status 1 and says where it was; no Python code could do that then.
    """
    dist.barrier()
    time.sleep(LAST_TENSORS_SECONDS)
    faulthandler.dump_traceback_later(END_LIMIT_SECONDS, exit=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens on one address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # ports of connections that have just ended are no obstacle
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"{address[0]}:{address[1]}") from error
        raise
    return listener
