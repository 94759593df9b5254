"""The run's folder: its lease, its store, its checkpoint, description, configuration and trackers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dglkge import __version__
from dglkge.checkpoint.conversion import dataset_fields
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, RUN_CONFIG_FILE, RUN_TRACKERS_FILE, Progress
from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
from dglkge.checkpoint.manifest import CheckpointMeta, StoredVersion
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.stores import open_store
from dglkge.config import Config, save_config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import load_json
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import InputError, write_error
from dglkge.launch.remote.run_store import LauncherStore
from dglkge.training.building.components import configured_model
from dglkge.training.building.tables import describe_optimizer
from dglkge.training.job import Job
from dglkge.training.resume import resumable
from dglkge.training.trackers import Trackers

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


def open_mirror(config: Config, cluster: Cluster, lease: Lease, meta: CheckpointMeta) -> Mirror | None:
    """Open the run's store and bring every disk of the job to its version; a collective.

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
    url, world = config.checkpoint.storage, cluster.world
    if not url and not world.has_own_disk:
        return None

    def open_here() -> Mirror | None:
        """Connect to the store on the writer of a machine."""
        if not world.is_machine_leader:
            return None
        store = open_store(url) if url else LauncherStore.of_this_process(Path(config.output))
        return Mirror(
            store,
            config.output,
            lease,
            config.checkpoint.store_seconds,
            is_cache=_is_cache(config, world),
            keeps_files=config.checkpoint.local,
        )

    mirror = cluster.agree(open_here)
    # Rank 0 first: it may have a version that was not uploaded when its job was killed.
    settings, where = dict(meta.config), "" if mirror is None else mirror.url
    if settings["training"]["matmul_dtype"] == "auto":
        # Chosen later, as the run has recorded it.
        training = {name: value for name, value in settings["training"].items() if name != "matmul_dtype"}
        settings["training"] = training
    fits = functools.partial(resumable, config, meta=meta, settings=settings, where=where)
    _agree(cluster, mirror if world.rank == 0 else None, fits)
    # Another machine may see the same folder in spite of --sync: then its lease is that machine's.
    fills = world.rank != 0 and world.is_disk_leader and lease.is_holder
    _agree(cluster, mirror if fills else None, None)
    return mirror


def _is_cache(config: Config, world: World) -> bool:
    """Return whether the store has the run, and the run's folder is a cache of it."""
    return world.has_own_disk or not config.checkpoint.local


def _agree(cluster: Cluster, mirror: Mirror | None, check: Callable[[CheckpointMeta], object] | None) -> None:
    """Bring a disk and the URL to the newer version, on the trainers with a mirror; a collective.

    With a check of the run there the job takes the URL.
    """
    found: list[StoredVersion | None] = []

    def find() -> None:
        """Read the pointer and the manifest."""
        if mirror is not None:
            found.append(mirror.newest() if check is None else mirror.take(check))

    cluster.agree(find)
    sizes = [one.manifest.num_bytes for one in found if one is not None]
    most = max(map(int, cluster.gather_texts(str(max(sizes, default=0)))))
    cluster.agree(lambda: mirror.agree(found[0], check is not None) if mirror is not None else None, most)


def open_checkpoints(job: Job, mirror: Mirror | None) -> CheckpointManager:
    """Open the checkpoint in the run's folder."""
    world, dataset, cluster = job.world, job.dataset, job.cluster
    # Only the trainer that writes a machine's files needs names, and only in the first version of a run.
    writes = world.is_machine_leader
    names = {name: dataset.mapped_vocabulary(name) for name in dataset.entity_types if writes}
    return CheckpointManager(
        job.output / CHECKPOINT_FOLDER,
        TrainerGroup(
            world.rank,
            writes,
            cluster.barrier,
            cluster.gather_texts,
            world.timeout_seconds,
            world.has_own_disk,
        ),
        names,
        dataset.num_parts,
        job.lease,
        mirror,
        is_cache=_is_cache(job.config, world),
    )


def describe_run(config: Config, dataset: Dataset) -> CheckpointMeta:
    """Return the description of a run that every version of its checkpoint holds."""
    return CheckpointMeta(
        config=config.to_dict(),
        **dataset_fields(dataset),
        progress={
            Progress.FINISHED_EPOCHS: 0,
            Progress.BATCHES_DONE: 0,
            Progress.GLOBAL_BATCH_SIZE: config.training.batch_size,
        },
        seed=config.seed,
        score_function=config.model.score_function.name,
        score_options=configured_model(config).score_function.options,
        dim=config.model.dimension,
        reciprocal=config.model.reciprocal_relations,
        optimizer=describe_optimizer(config.optimizer),
        versions={"dglkge": __version__, "dgl": dgl.__version__, "torch": torch.__version__},
    )


def record_config(config: Config, output: Path) -> None:
    """Write the run's configuration.

    Raises
    ------
    InputError
        If the folder may not be written to.
    StorageError
        If the disk is full or fails.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        save_config(config, output / RUN_CONFIG_FILE)
    except OSError as error:
        raise write_error(f"cannot write to {output}", error) from error


def open_trackers(config: Config, cluster: Cluster, records: LeasedFolder) -> Trackers:
    """Return the trackers, which end when this trainer ends; none on ranks above 0."""
    if cluster.world.rank != 0:
        return Trackers()
    path = Path(config.output) / RUN_TRACKERS_FILE

    def recall() -> dict[str, str]:
        """Return the ids that earlier starts recorded."""
        try:
            return {str(name): str(id_) for name, id_ in load_json(path).items()}
        except InputError:  # no earlier start had a tracker, or the file is damaged: its run is a new one
            return {}

    write = functools.partial(records.write_json, RUN_TRACKERS_FILE)
    trackers = Trackers(config.training.loggers, Path(config.output), config.to_dict(), recall, write)
    cluster.on_exit(trackers.finish)
    return trackers
