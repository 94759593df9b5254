"""torch's process group, whose rendezvous listens on one address instead of all."""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist


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


def _listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens on one address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # ports of connections that have just ended are no obstacle
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
