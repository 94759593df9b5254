"""Batches, negatives and losses that one trainer draws and computes on its device, beside its tables."""

from __future__ import annotations

import torch

from dglkge.model.choices import NO_TRANSFORM
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Softmax
from dglkge.sampling.device_batches import ChunkNegatives, DeviceBatches
from dglkge.sampling.edge_batches import EdgeOptions
from dglkge.sampling.negatives import MixedNegatives, UniformNegatives
from dglkge.step.objectives.device_softmax import DeviceSoftmax
from dglkge.training.building.components import configured_loss, configured_regularizer
from dglkge.training.building.negatives import build_negatives
from dglkge.training.job import Job
from dglkge.typing import Side


def draws_on_device(job: Job) -> bool:
    """Return whether the batches of a job are drawn and computed by :class:`DeviceSoftmax`."""
    config, function = job.config, job.computing.score_function
    chosen, model, objective = config.negatives, config.model, config.training.objective
    return (
        job.device_tables is not None
        and job.world.world_size == 1
        and not job.computation.is_reference
        and not (objective.over_all or config.training.relation_prediction)
        # One edge type that joins one entity type, in one order.
        and len(job.dataset.entity_types) == len(job.pairs) == 1
        and not (config.training.edge_sets or config.evaluation.held_out or config.training.batch_statistics)
        and type(job.computing) is KgeModel
        and function.is_product
        and not (function.has_module or function.shares_relations)
        and type(configured_loss(config)) is Softmax
        and not config.loss.has_adversarial_weights
        and not (chosen.mask_known or model.entity_dropout or model.relation_dropout)
        and model.row_transform.name == NO_TRANSFORM
        and all(_uniform(job).values())
    )


def _uniform(job: Job) -> dict[Side, UniformNegatives | None]:
    """Return the sampler of each side, None where its negatives are not all uniform."""
    return {
        side: sampler.all_uniform if type(sampler) is MixedNegatives else None
        for side, sampler in build_negatives(job).items()
    }


def build_device_batches(job: Job, options: EdgeOptions) -> DeviceBatches:
    """Make the batches of a job that draws on its device."""
    edges = job.layout.edge_table(job.world.machine)
    return DeviceBatches(edges, options, job.computation.device.device)


def build_device_softmax(job: Job) -> DeviceSoftmax:
    """Make the objective of a job that draws on its device."""
    config, (entity_type,) = job.config, job.dataset.entity_types
    device = job.computation.device.device
    uniform = _uniform(job)
    # Sides with one sampler share their negatives.
    there = {id(one): ChunkNegatives(one, entity_type, device) for one in uniform.values() if one is not None}
    samplers = {side: there[id(one)] for side, one in uniform.items()}
    return DeviceSoftmax(
        entity_type,
        samplers,
        config.negatives.chunk_size,
        job.computing,
        configured_regularizer(config, job.computing),
        config.negatives.scores_own,
        config.loss.batch_reduction == "sum",
        job.computation,
    )


def try_compiler(device: torch.device) -> None:
    """Compile something small: what the first batch compiles takes long, and its error would come late."""
    torch.compile(lambda numbers: 2 * numbers)(torch.ones(2, device=device))
