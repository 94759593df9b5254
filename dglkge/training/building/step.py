"""The training step of a job: transforms, objective, row store and updates, as configured."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch

from dglkge.errors import InputError, one_line
from dglkge.model.choices import NO_TRANSFORM, ROW_TRANSFORMS
from dglkge.optim.scratch import sharing
from dglkge.sampling.device_batches import DeviceBatches
from dglkge.sampling.query_batches import TrainingBatches
from dglkge.step.contracts import Objective, RowStore, RowTransform, TableTransform
from dglkge.step.objectives import dot_softmax
from dglkge.step.objectives.autograd_loss import AutogradLoss
from dglkge.step.objectives.relation_prediction import WithRelations
from dglkge.step.planning import EdgePlanner
from dglkge.step.row_transforms import AddedFeatures, RowDropout, Times
from dglkge.step.rows import HostStore, Transforms
from dglkge.step.staged_rows import DeviceStore, StagedStore
from dglkge.step.train_step import LookAhead, RowUpdates, TrainStep
from dglkge.training.building.batches import touched_rows
from dglkge.training.building.candidates import build_candidate_loss, build_relation_loss
from dglkge.training.building.components import configured_loss, configured_regularizer
from dglkge.training.building.negatives import build_known, build_negatives, build_range_offset
from dglkge.training.building.on_device import build_device_softmax, try_compiler
from dglkge.training.job import Job
from dglkge.typing import RELATION

logger = logging.getLogger(__name__)


def build_step(job: Job, batches: TrainingBatches) -> tuple[TrainStep, LookAhead]:
    """Return the step, and the batches with those that it makes ahead; a collective."""
    tables, clock = job.tables, job.clock
    transforms = build_transforms(job)
    objective, store = build_objective(job, batches, transforms)
    optimizer = job.optimizer if job.device_tables is None else job.device_tables
    optimizer.when_phase(clock.enter)
    touched = touched_rows(job, batches)
    updates = RowUpdates(tables, optimizer, job.untrained_types, touched or {})
    parameters = [one for one in (job.dense, job.global_vectors) if one is not None]
    ahead = LookAhead(batches, objective, store, clock)
    return TrainStep(objective, store, transforms, parameters, updates, ahead, clock), ahead


def build_objective(job: Job, batches: TrainingBatches, transforms: Transforms) -> tuple[Objective, RowStore]:
    """Make the objective, and the store of its rows; a collective."""
    over_all = job.config.training.objective.over_all
    with sharing(job.step_memory):
        objective: Objective
        if isinstance(batches, DeviceBatches):
            objective = build_device_softmax(job)
            if job.computation.is_compiled:
                _compile(job, lambda: try_compiler(job.computation.device.device))
        else:
            objective = (build_candidate_loss if over_all else _build_sampled)(job, batches, transforms)
        return objective, _build_store(job, transforms, objective)


def _build_store(job: Job, transforms: Transforms, objective: Objective) -> RowStore:
    """Make the store of the rows."""
    tables, device = job.tables, job.computation.device
    if job.device_tables is not None:
        return DeviceStore(tables, transforms, device, job.device_tables)
    if device.is_staged:
        return StagedStore(tables, transforms, device)
    return HostStore(tables, transforms, objective.reads_in_place)


def _build_sampled(job: Job, batches: TrainingBatches, transforms: Transforms) -> Objective:
    """Make the objective against sampled negatives."""
    config, computation, pairs, model = job.config, job.computation, job.pairs, job.computing
    loss, regularizer = configured_loss(config), configured_regularizer(config, model)
    negatives = build_negatives(job)
    offset, range_of = build_range_offset(job, loss)
    known = build_known(job)
    sums_batch = config.loss.batch_reduction == "sum"
    planner = EdgePlanner(list(job.tables), pairs, negatives, sums_batch, known, range_of)
    own_entity = config.negatives.scores_own
    is_compiled = dot_softmax.is_compiled(model, loss) and job.has_loops
    kind = dot_softmax.DotSoftmax if is_compiled else AutogradLoss
    objective: Objective = kind(
        planner, model, loss, regularizer, own_entity, computation, config.training.batch_statistics, offset
    )
    if isinstance(objective, AutogradLoss) and computation.is_compiled:
        own = own_entity and any(lhs == rhs for lhs, rhs in pairs)
        _compile(job, functools.partial(objective.scored.try_out, config.model.dimension, own))
    if config.training.relation_prediction:
        objective = WithRelations(objective, build_relation_loss(job, batches, transforms, planner))
    return objective


def build_transforms(job: Job) -> Transforms:
    """Return the transforms of each table's rows: what is added, then dropout, then the chosen one."""
    config, tables, global_vectors, features = job.config, job.tables, job.global_vectors, job.features
    original_ids = {name: torch.from_numpy(job.layout.original_edge_ids(name)) for name in tables}
    chains: dict[str, list[RowTransform]] = {name: [] for name in tables}
    if global_vectors is not None:
        for name in global_vectors.vectors:
            chains[name].append(global_vectors)
    if features is not None:
        for name in features.entity_types:
            chains[name].append(AddedFeatures(features, original_ids))
    chosen = config.model
    rates = dict.fromkeys(tables.entity_types, chosen.entity_dropout) | {RELATION: chosen.relation_dropout}
    dropout: TableTransform = RowDropout(rates, original_ids, config.seed, config.training.kernels)
    more: list[TableTransform] = [dropout]
    if chosen.row_transform.name != NO_TRANSFORM:
        transform = ROW_TRANSFORMS.get(chosen.row_transform.name).load()
        more.append(transform(chosen.row_transform, original_ids, config.seed))
    if job.model.score_function.has_times:
        # Last: no other transform may change the number of a time.
        more.append(Times(job.model, job.layout.num_times))
    for one in more:
        for name in one.tables:
            chains[name].append(one)
    return Transforms(chains)


def _compile(job: Job, call: Callable[[], None]) -> None:
    """Call a compiled function for the first time, before the first batch; a collective."""
    begin = time.monotonic()

    def try_out() -> None:
        try:
            with job.computation.device.computing():
                call()
        except Exception as error:  # torch's own, and those of the compiler, have no common class
            raise InputError(
                f"training.compile is true, and torch fails to compile the loss: {one_line(error)}; allowed "
                "here: false"
            ) from None

    job.cluster.agree(try_out)
    logger.info("scores and losses are compiled by torch (%.0f s)", time.monotonic() - begin)
