"""The lease on a run's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.runtime import Cluster

ATTEMPT_SECONDS = 5.0
"""Time that one trainer tries before all of them exchange their results: well below their timeout."""


def hold_run(output: Path, cluster: Cluster) -> Lease:
    """Take the lease on a run's folder, released when this trainer ends, however it ends; a collective.

    Rank 0 takes it, and where machines share no disk one trainer of each machine. The others get a lease of
    the same nonce, which they can check.

    Raises
    ------
    CheckpointError
        On all trainers, if another job holds a folder or it may not be written to.
    StorageError
        On all trainers, if a disk is full or fails.
    """
    world = cluster.world
    # One nonce for the whole job: trainers that hold no lease check by it that the file is still this job's.
    nonce = cluster.gather_texts(new_nonce())[0]
    is_taker = world.rank == 0 or (world.has_own_disk and world.is_machine_leader)
    taker = LeaseTaker(output, nonce, world.job) if is_taker else None
    lease: Lease | None = None

    def attempt() -> Lease | None:
        """Try to take the lease, where this trainer needs one and has none."""
        return lease if taker is None or lease is not None else taker.attempt(ATTEMPT_SECONDS)

    # Short attempts instead of one long wait: between them all trainers exchange results, within the timeout
    # of a collective.
    while True:
        taken = cluster.agree(attempt)
        if taken is not None and lease is None:
            cluster.on_exit(taken.release)
        lease = taken
        if not cluster.sum(np.array([taker is not None and lease is None], np.int64))[0]:
            break
    holder_nonce = cluster.gather_texts("" if lease is None else lease.holder_nonce)[0]
    return lease if lease is not None else Lease.of_job(output, nonce, holder_nonce)
