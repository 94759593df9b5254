"""Where a run has its versions: the lease on its folder, its store, its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
from dglkge.checkpoint.manifest import CheckpointMeta, Manifest
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.stores import open_store
from dglkge.config.schema import CheckpointConfig
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.runtime import Cluster
from dglkge.launch.remote.run_store import LauncherStore

ATTEMPT_SECONDS = 5.0
"""Time that one trainer tries before all of them exchange their results: well below their timeout."""


def hold_run(output: Path, cluster: Cluster) -> Lease:
    """Take the lease on a run's folder, released when this trainer ends, however it ends; a collective.

    Rank 0 takes it, and where machines share no disk one trainer of each machine. The others get a lease of
    the same nonce, which they can check.
    """
    world = cluster.world
    # One nonce for the whole job: trainers that hold no lease check by it that the file is still this job's.
    nonce = cluster.gather_texts(new_nonce())[0]
    taker = LeaseTaker(output, nonce, world.job) if world.is_disk_leader else None
    lease: Lease | None = None

    def attempt() -> Lease | None:
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


def open_checkpoints(
    output: Path,
    settings: CheckpointConfig,
    cluster: Cluster,
    fits: Callable[[CheckpointMeta, str], object],
    names: Mapping[str, Vocabulary],
    num_parts: int,
) -> CheckpointManager:
    """Take a run's folder, bring every disk of the job to the store's version, and open the checkpoint.

    A collective. Where a URL is configured, or machines share no disk, a store has the run: that of the URL
    or the launcher's; the folder on each machine is a cache of it. ``fits`` takes the description of a
    version in the store, and its place; it raises an error if this job may not go on from it.

    Raises
    ------
    CheckpointError, InputError
        On all trainers: another job holds a folder, it may not be written to or is a copy of another run, or
        the URL cannot be opened.
    StorageError
        On all trainers, if a disk is full or fails, or the store cannot be reached.
    """
    world, lease = cluster.world, hold_run(output, cluster)
    has_store = bool(settings.storage) or world.has_own_disk
    mirror = _open_mirror(output, settings, cluster, lease, fits) if has_store else None
    group = TrainerGroup(
        world.rank,
        world.is_machine_leader,
        cluster.barrier,
        cluster.gather_texts,
        world.timeout_seconds,
    )
    return CheckpointManager(output / CHECKPOINT_FOLDER, group, names, num_parts, lease, mirror, has_store)


def _open_mirror(
    output: Path,
    settings: CheckpointConfig,
    cluster: Cluster,
    lease: Lease,
    fits: Callable[[CheckpointMeta, str], object],
) -> Mirror | None:
    """Open the run's store on the writer of each machine, and fill the disks from it; a collective."""
    world = cluster.world

    def open_here() -> Mirror | None:
        if not world.is_machine_leader:
            return None
        store = open_store(settings.storage) if settings.storage else LauncherStore(output)
        return Mirror(store, output, lease, settings.store_seconds, settings.local)

    mirror = cluster.agree(open_here)
    # Rank 0 first: it takes the store, to which a folder that has a run already may be uploaded.
    where = "" if mirror is None else mirror.url
    is_first = world.rank == 0
    _fill(cluster, mirror if is_first else None, lambda saved: fits(saved, where), bool(settings.storage))
    # Another machine may see the same folder in spite of --sync: then its lease is that machine's.
    fills = not is_first and lease.is_holder
    _fill(cluster, mirror if fills else None)
    return mirror


def _fill(
    cluster: Cluster,
    mirror: Mirror | None,
    check: Callable[[CheckpointMeta], object] | None = None,
    may_upload: bool = False,
) -> None:
    """Bring a disk to the store's version, on the trainers with a mirror; a collective.

    With a check of the run there the job takes the store.
    """

    def find() -> Manifest | None:
        if mirror is None:
            return None
        return mirror.newest() if check is None else mirror.take(check)

    found = cluster.agree(find)
    num_bytes = 0 if found is None else found.num_bytes
    most = max(map(int, cluster.gather_texts(str(num_bytes))))
    cluster.agree(lambda: None if mirror is None else mirror.fill(found, may_upload), most)
