"""The run's folder: its checkpoint, description, configuration and trackers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from dglkge import __version__
from dglkge.checkpoint.conversion import dataset_fields
from dglkge.checkpoint.layout import RUN_CONFIG_FILE, RUN_TRACKERS_FILE, Progress
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.mirror import Mirror
from dglkge.config import Config, save_config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import load_json
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError, write_error
from dglkge.training.building.components import configured_model, relation_operators
from dglkge.training.building.run_place import RunPlace, open_manager
from dglkge.training.building.tables import describe_optimizer
from dglkge.training.job import Job
from dglkge.training.resume import resumable
from dglkge.training.statistics.trackers import Trackers


def resumable_here(config: Config, meta: CheckpointMeta) -> Callable[[CheckpointMeta, str], object]:
    """Return the check whether a run may go on from a version in its store."""
    settings = dict(meta.config)
    if settings["training"]["matmul_dtype"] == "auto":
        # Chosen later, as the run has recorded it.
        training = {name: value for name, value in settings["training"].items() if name != "matmul_dtype"}
        settings["training"] = training
    return lambda saved, where: resumable(config, saved, meta, settings, where)


def open_checkpoints(job: Job, mirror: Mirror | None) -> CheckpointManager:
    """Open the checkpoint in the run's folder."""
    dataset = job.dataset
    # Only the trainer that writes a machine's files needs names, and only in the first version of a run.
    writes = job.world.is_machine_leader
    names = {name: dataset.mapped_vocabulary(name) for name in dataset.entity_types if writes}
    place = RunPlace.of(job.config)
    return open_manager(place, job.cluster, job.lease, mirror, names, dataset.num_parts)


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
        operators=relation_operators(config, dataset),
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
