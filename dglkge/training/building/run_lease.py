"""The lease on a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError, StorageError

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
    # Short attempts instead of one long wait: between them all trainers exchange results, within the timeout
    # of a collective.
    while True:
        problem: tuple[str, str] | None = None
        if taker is not None and lease is None:
            try:
                lease = taker.attempt(ATTEMPT_SECONDS)
            except (CheckpointError, StorageError) as error:
                problem = (type(error).__name__, str(error))
            if lease is not None:
                cluster.on_exit(lease.release)
        mine = {"problem": problem, "waits": taker is not None and lease is None}
        found = [json.loads(text) for text in cluster.gather_texts(json.dumps(mine))]
        # All trainers raise the first problem, in the order of ranks: none is left waiting in a collective.
        for kind, text in (one["problem"] for one in found if one["problem"]):
            raise StorageError(text) if kind == StorageError.__name__ else CheckpointError(text)
        if not any(one["waits"] for one in found):
            break
    holder_nonce = cluster.gather_texts("" if lease is None else lease.holder_nonce)[0]
    return lease if lease is not None else Lease.of_job(output, nonce, holder_nonce)
