"""Holding a run's folder for the job, before anything in it is written."""

from __future__ import annotations

import json
from pathlib import Path

from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError, StorageError

ATTEMPT_SECONDS = 5.0
"""How long one trainer tries before all of them exchange what they found: well below their time limit."""


def hold_run(output: Path, cluster: Cluster) -> Lease:
    """Take the lease on a run's folder; given back when this trainer ends, however it ends. A collective.

    Rank 0 takes it, and where machines share no disk one trainer of each machine does. The others get a lease
    of the same nonce that they can check.

    Raises
    ------
    CheckpointError
        On all trainers, if another job holds a folder or it may not be written to.
    StorageError
        On all trainers, if a disk is full or fails.
    """
    world = cluster.world
    nonce = cluster.gather_texts(new_nonce())[0]
    is_taker = world.rank == 0 or (world.has_own_disk and world.is_machine_leader)
    taker = LeaseTaker(output, nonce, world.job) if is_taker else None
    lease: Lease | None = None
    while True:
        problem: tuple[str, str] | None = None
        if taker is not None and lease is None:
            try:
                lease = taker.attempt(ATTEMPT_SECONDS)
            except (CheckpointError, StorageError) as error:
                problem = (type(error).__name__, str(error))
            if lease is not None:
                cluster.when_ended(lease.release)
        mine = {"problem": problem, "waits": taker is not None and lease is None}
        found = [json.loads(text) for text in cluster.gather_texts(json.dumps(mine))]
        for kind, text in (one["problem"] for one in found if one["problem"]):
            raise StorageError(text) if kind == StorageError.__name__ else CheckpointError(text)
        if not any(one["waits"] for one in found):
            break
    holder_nonce = cluster.gather_texts("" if lease is None else lease.holder_nonce)[0]
    return lease if lease is not None else Lease.of_job(output, nonce, holder_nonce)
