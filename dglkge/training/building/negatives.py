"""Builders of the negative samplers of the sides that are trained, and of the answers that are masked."""

from __future__ import annotations

from functools import partial

import numpy as np

from dglkge.config.schema import MIXED
from dglkge.data.dataset_files import TRAIN
from dglkge.data.range_walk import range_bounds
from dglkge.kernels.hashing import combine
from dglkge.model.choices import NEGATIVE_SAMPLERS, MixedSettings
from dglkge.model.losses import Loss
from dglkge.sampling.draws import count_degrees, degree_weights
from dglkge.sampling.known_answers import KnownAnswers
from dglkge.sampling.negatives import NegativeSampler
from dglkge.sampling.range_negatives import NodeRanges, RangeNegatives, range_offset
from dglkge.training.job import Job
from dglkge.typing import RELATION, Side

_HEADS_KEY = 0x4EAD


def build_negatives(job: Job) -> dict[Side, NegativeSampler]:
    """Make the sampler of each side that is trained.

    Both sides have the same one if they have equally many negatives: rows are then looked up and updated once
    for both. Otherwise each has its own, with a seed of its own. In directed buckets each has its own too,
    for its range.
    """
    config, dataset, layout, tables, pairs = job.config, job.dataset, job.layout, job.tables, job.pairs
    chosen = config.negatives
    node_ids = {name: np.asarray(layout.node_ids(name)) for name in dataset.entity_types}
    counts = {side: count for side, count in chosen.per_side.items() if count}
    local = {name: (tables[name].first_node_id, tables[name].end_node_id) for name in dataset.entity_types}
    shares = chosen.shares
    weights: dict[str, np.ndarray] | None = None
    if chosen.power:
        types = [(relation.lhs, relation.rhs) for relation in dataset.relations.relations]
        num_entities = {name: len(ids) for name, ids in node_ids.items()}
        degrees = count_degrees(dataset.split(TRAIN), types, num_entities)
        weights = {name: degree_weights(found, chosen.power) for name, found in degrees.items()}
    num_ranges = config.sampling.num_ranges
    if num_ranges > 1:
        is_mixed = config.sampling.buckets == MIXED
        ranges = _node_ranges(job, is_mixed)
        if weights is not None:
            weights = {name: found[layout.original_ids(name)] for name, found in weights.items()}
        more = (shares, ranges, tables[RELATION].part, pairs, config.seed, weights)
        of_sides: dict[Side, NegativeSampler]
        of_sides = {side: RangeNegatives(side, count, *more) for side, count in counts.items()}
        if is_mixed and len(set(counts.values())) == 1:
            return dict.fromkeys(counts, next(iter(of_sides.values())))
        return of_sides
    make = partial(NEGATIVE_SAMPLERS.get(chosen.name).load(), **chosen.options(MixedSettings))
    if weights is not None:
        make = partial(make, weights=weights)
    by_count: dict[int, NegativeSampler] = {}
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


def build_known(job: Job) -> KnownAnswers | None:
    """Make the index of known answers; None where they count as negatives."""
    if not job.config.negatives.mask_known:
        return None
    names = [*job.dataset.entity_types, RELATION]
    original_ids = {name: np.asarray(job.layout.original_edge_ids(name)) for name in names}
    return KnownAnswers(job.dataset.known_triples([TRAIN]), original_ids)
