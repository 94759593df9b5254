"""Builders of negatives: samplers of the sides, answers that are masked, and draws on a device."""

from __future__ import annotations

from functools import partial

import numpy as np

from dglkge.config.schema import MIXED
from dglkge.data.dataset_files import TRAIN
from dglkge.data.range_walk import range_bounds
from dglkge.kernels.hashing import combine
from dglkge.model.choices import NEGATIVE_SAMPLERS, NO_TRANSFORM, MixedSettings
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss, Softmax
from dglkge.sampling import negatives as sampling
from dglkge.sampling.device_batches import ChunkNegatives, DeviceBatches
from dglkge.sampling.edge_batches import EdgeOptions
from dglkge.sampling.range_negatives import NodeRanges, RangeNegatives, range_offset
from dglkge.step.objectives.device_softmax import DeviceSoftmax
from dglkge.training.building.components import configured_loss, configured_regularizer
from dglkge.training.job import Job
from dglkge.typing import RELATION, Side

_HEADS_KEY = 0x4EAD


def build_negatives(job: Job) -> dict[Side, sampling.NegativeSampler]:
    """Make the sampler of each side that is trained.

    Both sides have the same one if they have equally many negatives: rows are then looked up and updated once
    for both. Otherwise each has its own, with a seed of its own. In directed buckets each has its own too,
    for its range.
    """
    config, dataset, layout, tables, pairs = job.config, job.dataset, job.layout, job.tables, job.pairs
    settings = config.negatives
    node_ids = {name: np.asarray(layout.node_ids(name)) for name in dataset.entity_types}
    counts = {side: count for side, count in settings.per_side.items() if count}
    local = {name: (tables[name].first_node_id, tables[name].end_node_id) for name in dataset.entity_types}
    shares = settings.shares
    weights: dict[str, np.ndarray] | None = None
    if settings.power:
        types = [(relation.lhs, relation.rhs) for relation in dataset.relations.relations]
        num_entities = {name: len(ids) for name, ids in node_ids.items()}
        degrees = sampling.count_degrees(dataset.split(TRAIN), types, num_entities)
        weights = {
            name: sampling.degree_weights(numbers, settings.power) for name, numbers in degrees.items()
        }
    num_ranges = config.sampling.num_ranges
    if num_ranges > 1:
        is_mixed = config.sampling.buckets == MIXED
        ranges = _node_ranges(job, is_mixed)
        if weights is not None:
            weights = {name: values[layout.original_ids(name)] for name, values in weights.items()}
        more = (shares, ranges, tables[RELATION].part, pairs, config.seed, weights)
        samplers: dict[Side, sampling.NegativeSampler]
        samplers = {side: RangeNegatives(side, count, *more) for side, count in counts.items()}
        if is_mixed and len(set(counts.values())) == 1:
            return dict.fromkeys(counts, next(iter(samplers.values())))
        return samplers
    make = partial(NEGATIVE_SAMPLERS.get(settings.name).load(), **settings.options(MixedSettings))
    if weights is not None:
        make = partial(make, weights=weights)
    by_count: dict[int, sampling.NegativeSampler] = {}
    # Tails first: they keep the run's seed.
    for side in sorted(counts, key=lambda side: side is Side.HEAD):
        if counts[side] not in by_count:
            seed = combine(_HEADS_KEY, config.seed) if by_count else config.seed
            by_count[counts[side]] = make(counts[side], shares, node_ids, local, pairs, seed)
    return {side: by_count[count] for side, count in counts.items()}


def build_range_offset(job: Job, loss: Loss) -> tuple[float, NodeRanges | None]:
    """Return what the scores of answers in the range of the query's entity are lowered by, and the ranges.

    0 and None where they are not: in directed buckets, and for a loss that takes scores for no log-odds.
    """
    num_ranges = job.config.sampling.num_ranges
    # Of two ranges a bucket has all triples.
    if num_ranges <= 2 or job.config.sampling.buckets != MIXED or not loss.takes_log_odds:
        return 0.0, None
    return range_offset(num_ranges), _node_ranges(job, False)


def _node_ranges(job: Job, is_mixed: bool) -> NodeRanges:
    num, starts = job.config.sampling.num_ranges, job.layout.range_starts
    bounds = {name: range_bounds(starts(name), num) for name in job.dataset.entity_types}
    return NodeRanges(bounds, num, is_mixed)


def build_known(job: Job) -> sampling.KnownAnswers | None:
    """Make the index of known answers; None where they count as negatives."""
    if not job.config.negatives.mask_known:
        return None
    names = [*job.dataset.entity_types, RELATION]
    original_ids = {name: np.asarray(job.layout.original_edge_ids(name)) for name in names}
    return sampling.KnownAnswers(job.dataset.known_triples([TRAIN]), original_ids)


def draws_on_device(job: Job) -> bool:
    """Return whether the batches of a job are drawn and computed by :class:`DeviceSoftmax`."""
    config, function = job.config, job.computing.score_function
    negatives, model, objective = config.negatives, config.model, config.training.objective
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
        and not (negatives.mask_known or model.entity_dropout or model.relation_dropout)
        and model.row_transform.name == NO_TRANSFORM
        and all(_uniform(job).values())
    )


def _uniform(job: Job) -> dict[Side, sampling.UniformNegatives | None]:
    """Return the sampler of each side, None where its negatives are not all uniform."""
    return {
        side: sampler.all_uniform if type(sampler) is sampling.MixedNegatives else None
        for side, sampler in build_negatives(job).items()
    }


def build_device_batches(job: Job, options: EdgeOptions) -> DeviceBatches:
    """Make the batches of a job that draws on its device."""
    edges = job.layout.edge_table(job.world.machine)
    return DeviceBatches(edges, options, job.computation.device.device)


def build_device_softmax(job: Job) -> DeviceSoftmax:
    """Make the objective of a job that draws on its device."""
    config, model, (entity_type,) = job.config, job.computing, job.dataset.entity_types
    device = job.computation.device.device
    uniform = _uniform(job)
    # Sides with one sampler share their negatives.
    distinct = {id(sampler): sampler for sampler in uniform.values() if sampler is not None}
    there = {key: ChunkNegatives(sampler, entity_type, device) for key, sampler in distinct.items()}
    samplers = {side: there[id(sampler)] for side, sampler in uniform.items()}
    regularizer, sums_batch = configured_regularizer(config, model), config.loss.batch_reduction == "sum"
    options = (config.negatives.scores_own, sums_batch, job.computation)
    size = config.negatives.chunk_size
    return DeviceSoftmax(entity_type, samplers, size, model, regularizer, *options)
