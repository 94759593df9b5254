"""Builds a trainer from a configuration."""

from __future__ import annotations

from pathlib import Path

from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.training.building.batches import build_batches, build_passes
from dglkge.training.building.checks import check_config, check_dataset
from dglkge.training.building.run_folder import (
    describe_run,
    open_checkpoints,
    record_config,
    resumable_here,
)
from dglkge.training.building.run_place import RunPlace, hold_run, open_mirror
from dglkge.training.building.step import build_step
from dglkge.training.epochs import JOB
from dglkge.training.job import open_job
from dglkge.training.join import opened_dataset
from dglkge.training.live_evaluator import LiveEvaluator
from dglkge.training.trainer import Trainer


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
    dataset = opened_dataset(config)
    check_dataset(config, dataset)
    # The lease creates the folder and excludes other jobs from here on.
    lease = hold_run(Path(config.output), cluster)
    fits = resumable_here(config, describe_run(config, dataset))
    mirror = open_mirror(RunPlace.of(config), cluster, lease, fits)
    job = open_job(config, cluster, lease)
    batches = build_batches(job)
    step, ahead = build_step(job, batches)
    checkpoints = open_checkpoints(job, mirror)
    evaluator = LiveEvaluator(job.averaged)
    passes = build_passes(job, batches, LiveEvaluator(job).gather)
    meta = describe_run(job.config, job.dataset)
    trainer = Trainer(job, ahead, step, evaluator, checkpoints, meta, JOB, passes)
    # Last: the Trainer has checked by now that the folder's checkpoint belongs to this run.
    if job.world.rank == 0:
        record_config(job.config, job.output)
    return trainer
