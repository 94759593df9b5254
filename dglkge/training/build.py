"""Builds a trainer from a configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dglkge import __version__
from dglkge.checkpoint.conversion import dataset_fields
from dglkge.checkpoint.layout import RUN_CONFIG_FILE, Progress
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.config import Config, save_config
from dglkge.data.dataset import Dataset
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.runtime import Cluster
from dglkge.kernels.rows import widen_rows
from dglkge.training.building.batches import build_batches, build_passes
from dglkge.training.building.checks import check_config, check_dataset
from dglkge.training.building.components import configured_model, entity_dimensions, relation_operators
from dglkge.training.building.step import build_step
from dglkge.training.building.tables import describe_optimizer
from dglkge.training.job import open_job
from dglkge.training.live_evaluator import LiveEvaluator
from dglkge.training.script import JOB, opened_dataset
from dglkge.training.state import open_checkpoints, resumable
from dglkge.training.trainer import Trainer

# Before the first call of a loop numba looks up its own functions for .3 s: here once, before forks.
widen_rows(np.zeros((1, 1), np.uint16), np.zeros(1, np.int64), False, np.zeros((1, 1), np.float32))


def build_trainer(config: Config, cluster: Cluster) -> Trainer:
    """Build a trainer; it resumes from the newest checkpoint in ``config.output``.

    A collective: every trainer calls it. SIGTERM, SIGINT and SIGHUP end it at once: nothing is trained yet.

    Raises
    ------
    InputError
        For an unknown component, values that do not fit each other, or a checkpoint that
        does not fit the configuration.
    Preempted
        If this trainer received a signal to stop.
    """
    with cluster.stop.leaving_at_once():
        return _build(config, cluster)


def _build(config: Config, cluster: Cluster) -> Trainer:
    """Check the configuration, take the run's folder, and build the trainer."""
    check_config(config, cluster.world)
    dataset, output = opened_dataset(config), Path(config.output)
    check_dataset(config, dataset)
    meta = _describe_run(config, dataset)
    # Only the trainer that writes a machine's files needs names, and only in the first version of a run.
    writes = cluster.world.is_machine_leader
    names = {name: dataset.mapped_vocabulary(name) for name in dataset.entity_types if writes}

    def fits(saved: CheckpointMeta, where: str) -> None:
        resumable(config, saved, meta, where)

    # Creates the folder and excludes other jobs from here on.
    checkpoints = open_checkpoints(output, config.checkpoint, cluster, fits, names, dataset.num_parts)
    job = open_job(config, cluster, meta)
    batches = build_batches(job)
    step, ahead = build_step(job, batches)
    evaluator = LiveEvaluator(job.averaged)
    passes = build_passes(job, batches, LiveEvaluator(job).gather)
    run = _describe_run(job.config, dataset)
    trainer = Trainer(job, ahead, step, evaluator, checkpoints, run, JOB, passes)
    # Last: the Trainer has checked by now that the folder's checkpoint belongs to this run.
    if job.world.rank == 0:
        with checkpoints.records.writing():
            save_config(job.config, output / RUN_CONFIG_FILE)
    return trainer


def _describe_run(config: Config, dataset: Dataset) -> CheckpointMeta:
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
        dims=entity_dimensions(config, dataset),
        versions={"dglkge": __version__, "dgl": dgl.__version__, "torch": torch.__version__},
    )
