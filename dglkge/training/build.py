"""Builds a trainer from a configuration."""

from __future__ import annotations

from pathlib import Path

from dglkge.checkpoint.mirror import Mirror
from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import VALID
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import InputError
from dglkge.evaluation.protocol import Protocol
from dglkge.training.building.batches import build_batches
from dglkge.training.building.compiled_loss import check_compiled_loss
from dglkge.training.building.components import check_config
from dglkge.training.building.device import check_device
from dglkge.training.building.edge_sets import build_passes
from dglkge.training.building.loss_settings import check_data_of_loss
from dglkge.training.building.mirrored import open_mirror
from dglkge.training.building.module_precision import check_precision
from dglkge.training.building.run_files import describe_run, open_checkpoints, record_config
from dglkge.training.building.run_lease import hold_run
from dglkge.training.building.step import build_step
from dglkge.training.building.warm_start import refuse_bigraph_output
from dglkge.training.epochs import JOB
from dglkge.training.job import Job, open_job
from dglkge.training.join import opened_dataset
from dglkge.training.live_evaluator import LiveEvaluator
from dglkge.training.trainer import Trainer


def check_training(config: Config, world: World) -> None:
    """Refuse a configuration that cannot be trained in a job, whatever the data set.

    Raises
    ------
    InputError
        For an unknown component, or values that do not fit each other.
    """
    check_config(config, world.num_machines, world.num_machines if world.has_own_disk else 1)
    check_device(config)
    check_precision(config)
    check_compiled_loss(config)


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
        return _open(config, cluster)


def _open(config: Config, cluster: Cluster) -> Trainer:
    """Check the configuration, take the run's folder, and build the trainer."""
    check_training(config, cluster.world)
    dataset = opened_dataset(config)
    refuse_empty_splits(config, dataset)
    check_data_of_loss(config, dataset)
    refuse_bigraph_output(config)
    # The lease creates the folder and excludes other jobs from here on.
    lease = hold_run(Path(config.output), cluster)
    mirror = open_mirror(config, cluster, lease, describe_run(config, dataset))
    return build(open_job(config, cluster, lease), mirror)


def build(job: Job, mirror: Mirror | None) -> Trainer:
    """Build the trainer of a job; a collective.

    Parameters
    ----------
    job : Job
    mirror : Mirror or None
        The run's copy at a URL.
    """
    config, cluster = job.config, job.cluster
    batches = build_batches(job)
    step, ahead = build_step(job, batches)
    checkpoints = open_checkpoints(job, mirror)
    evaluator = LiveEvaluator(job, _protocol(config))
    passes = build_passes(config, job.dataset, batches, job.model, evaluator.gather, cluster)
    trainer = Trainer(
        job, ahead, step, evaluator, checkpoints, describe_run(config, job.dataset), JOB, passes
    )
    # Last: the Trainer has checked by now that the folder's checkpoint belongs to this run.
    if job.world.rank == 0:
        record_config(config, job.output)
    return trainer


def refuse_empty_splits(config: Config, dataset: Dataset) -> None:
    """Refuse, before anything is trained, to rank a split that has no triples.

    Raises
    ------
    InputError
        Naming the setting that requests it.
    """
    wanted: list[tuple[str, str, str, str]] = []
    if config.evaluation.split != "none":
        wanted.append(("evaluation.split", config.evaluation.split, config.evaluation.split, "none"))
    if config.evaluation.valid_every_epochs:
        every = str(config.evaluation.valid_every_epochs)
        wanted.append(("evaluation.valid_every_epochs", every, VALID, "0"))
    for setting, value, split, allowed in wanted:
        if not len(dataset.split(split)):
            raise InputError(
                f"{setting} is {value}, and {dataset.path} has no {split} triples to rank; "
                f"allowed is {allowed}, or a data set with that split"
            )


def _protocol(config: Config) -> Protocol:
    chosen = config.evaluation
    return Protocol(
        split=chosen.split,
        filtered=chosen.filtered,
        num_candidates=chosen.num_candidates or None,
        ties=chosen.ties,
        batch_size=chosen.batch_size,
        seed=config.seed,
    )
