"""Where a run has its versions: the lease on its folder, its store, its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
from dglkge.checkpoint.manifest import CheckpointMeta, Manifest
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.stores import open_store
from dglkge.config import Config
from dglkge.config.schema import CheckpointConfig
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.launch.remote.run_store import LauncherStore

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
    taker = LeaseTaker(output, nonce, world.job) if world.is_disk_leader else None
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


@dataclass(frozen=True)
class RunPlace:
    """Where a run has its versions.

    Attributes
    ----------
    output : Path
        The run's folder on each machine.
    url : str
        Of the run's store, if it is a URL; empty: the folder, or the launcher's where machines share no disk.
    store_seconds : float
        A commit waits for so long for a store that is out of reach.
    keeps_files : bool
        Whether files with rows stay in the folder when the store has them.
    """

    output: Path
    url: str = ""
    store_seconds: float = CheckpointConfig().store_seconds
    keeps_files: bool = True

    @classmethod
    def of(cls, config: Config) -> RunPlace:
        """Return the place that a configuration names."""
        settings = config.checkpoint
        return cls(Path(config.output), settings.storage, settings.store_seconds, settings.local)

    def has_store(self, world: World) -> bool:
        """Return whether a store has the run, and the run's folder is a cache of it."""
        return bool(self.url) or world.has_own_disk


def open_mirror(
    place: RunPlace, cluster: Cluster, lease: Lease, fits: Callable[[CheckpointMeta, str], object]
) -> Mirror | None:
    """Open the run's store and bring every disk of the job to its version; a collective.

    Parameters
    ----------
    place : RunPlace
    cluster : Cluster
    lease : Lease
        On the run's folder.
    fits : callable
        Takes the description of a version in the store, and its place; raises an error if this job may not go
        on from it.

    Returns
    -------
    Mirror or None
        On the writer of each machine, if a URL is configured or machines share no disk.

    Raises
    ------
    InputError
        On all trainers: for a URL that cannot be opened, or a copy of another run.
    StorageError
        On all trainers, if the store cannot be reached.
    """
    world = cluster.world
    if not place.has_store(world):
        return None

    def open_here() -> Mirror | None:
        """Connect to the store on the writer of a machine."""
        if not world.is_machine_leader:
            return None
        store = open_store(place.url) if place.url else LauncherStore(place.output)
        return Mirror(store, place.output, lease, place.store_seconds, place.keeps_files)

    mirror = cluster.agree(open_here)
    # Rank 0 first: it takes the store, to which a folder that has a run already may be uploaded.
    where = "" if mirror is None else mirror.url
    is_first = world.rank == 0
    _fill(cluster, mirror if is_first else None, lambda saved: fits(saved, where), bool(place.url))
    # Another machine may see the same folder in spite of --sync: then its lease is that machine's.
    fills = not is_first and world.is_disk_leader and lease.is_holder
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
    found: list[Manifest | None] = []

    def find() -> None:
        """Read the pointer and the manifest."""
        if mirror is not None:
            found.append(mirror.newest() if check is None else mirror.take(check))

    cluster.agree(find)
    sizes = [one.num_bytes for one in found if one is not None]
    most = max(map(int, cluster.gather_texts(str(max(sizes, default=0)))))
    cluster.agree(lambda: mirror.fill(found[0], may_upload) if mirror is not None else None, most)


def open_manager(
    place: RunPlace,
    cluster: Cluster,
    lease: Lease,
    mirror: Mirror | None,
    names: Mapping[str, Vocabulary],
    num_parts: int,
) -> CheckpointManager:
    """Open the checkpoint in a folder for all trainers of a job."""
    world = cluster.world
    group = TrainerGroup(
        world.rank,
        world.is_machine_leader,
        cluster.barrier,
        cluster.gather_texts,
        world.timeout_seconds,
        world.has_own_disk,
    )
    folder = place.output / CHECKPOINT_FOLDER
    return CheckpointManager(folder, group, names, num_parts, lease, mirror, place.has_store(world))
