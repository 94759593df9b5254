"""The batches of a run and their negatives; passes; the rows that are trained.

Batches have an order, by edge sets, machines or ranges. Negatives have a sampler for each side, and answers
that are masked; both can be drawn on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.config.schema import MIXED
from dglkge.data.dataset_files import PARTITIONS, TRAIN, part_folder
from dglkge.data.edge_buckets import ALL_TRIPLES, BucketFiles, TrainedSets
from dglkge.data.known_triples import KnownTriples
from dglkge.data.range_walk import range_bounds
from dglkge.embeddings.mapped_rows import MappedRows
from dglkge.errors import InputError
from dglkge.kernels.hashing import combine
from dglkge.model.choices import NEGATIVE_SAMPLERS, NO_TRANSFORM, MixedSettings
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss, Softmax
from dglkge.planning.host import available_memory
from dglkge.sampling import edge_batches, negatives
from dglkge.sampling.bucket_batches import BucketBatches, BucketOrder
from dglkge.sampling.device_batches import ChunkNegatives, DeviceBatches
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions
from dglkge.sampling.prefetch import Prefetcher, TripleReader
from dglkge.sampling.query_batches import PairIndex, QueryBatches, QueryIndex, TrainingBatches
from dglkge.sampling.range_negatives import NodeRanges, RangeNegatives, range_offset
from dglkge.sampling.triple_order import EdgeSet, TripleOrder, plan_passes
from dglkge.step.objectives.device_softmax import AllEntities, DeviceSoftmax
from dglkge.training.building.components import configured_loss, configured_regularizer, relation_weights
from dglkge.training.job import Job
from dglkge.training.statistics.held_out import HeldOutBuckets, HeldOutEvaluator
from dglkge.training.statistics.passes import BucketStatistics, Passes
from dglkge.typing import RELATION, Side

TRIPLES_A_BLOCK = 1 << 20
"""Triples that are read at a time."""

_HEADS_KEY = 0x4EAD


def build_batches(job: Job) -> TrainingBatches:
    """Make the batches of queries or edges; a collective."""
    config, dataset, world = job.config, job.dataset, job.world
    if config.training.objective.by_queries:
        return _trained_queries(job)
    order = configured_order(job)
    turn = (world.local_rank, world.trainers_per_machine)
    options = edge_options(job, len(dataset.split(TRAIN)), turn, order)
    if draws_on_device(job):
        return DeviceBatches(job.layout.edge_table(world.machine), options, job.computation.device.device)
    if config.sampling.num_ranges == 1:
        return build_edge_batches(job, order, options)
    batches = build_bucket_batches(job, order, options)
    prefetch_ranges(job, batches)
    return batches


def edge_options(
    job: Job, num_triples: int, turn: tuple[int, int], order: TripleOrder | None = None
) -> EdgeOptions:
    """Return the options of batches of edges.

    Parameters
    ----------
    turn : (int, int)
        (i, k): this trainer is number i of the k that have the same edges.
    """
    config, dataset = job.config, job.dataset
    # Batches have node ids of relations, the data set lists relations by original id.
    by_node = job.layout.original_edge_ids(RELATION)
    number = {pair: index for index, pair in enumerate(job.pairs)}
    # The number of each relation's edge type; -1 where no training triple has it.
    pairs = [(relation.lhs, relation.rhs) for relation in dataset.relations.relations]
    pair_of_node = np.array([number.get(pair, -1) for pair in pairs], np.int64)[by_node]
    weights = relation_weights(config, dataset)
    weights = None if weights is None else weights[by_node]
    sizes = (num_triples, config.training.batch_size, config.negatives.chunk_size)
    return EdgeOptions(pair_of_node, *sizes, *turn, config.seed, weights, config.loss.has_confidences, order)


def _trained_queries(job: Job) -> QueryBatches:
    """Make the batches of ``k_vs_all``."""
    config, dataset = job.config, job.dataset
    if dataset.has_weights:  # a query stands for several triples
        problem = f"training.objective k_vs_all takes no weights of triples, and {dataset.path} has them"
        raise InputError(f"{problem}; allowed: negative_sampling, one_vs_all")
    triples, known = dataset.split(TRAIN), dataset.known_triples([TRAIN])
    if config.evaluation.held_out is not None:
        # The index in the data set's folder is that of all triples.
        triples = triples[configured_order(job).is_trained(0, np.arange(len(triples), dtype=np.int64))]
        known = KnownTriples([triples], dataset.num_relations)
    return query_batches(job, triples, known)


def query_batches(job: Job, triples: np.ndarray, known: KnownTriples) -> QueryBatches:
    """Make the batches of the queries of triples (n, 3), which ``known`` indexes."""
    config, world = job.config, job.world
    types = [(relation.lhs, relation.rhs) for relation in job.dataset.relations.relations]
    turn, size = (world.machine, world.local_rank, world.trainers_per_machine), config.training.batch_size
    predicts_relations = bool(config.training.relation_prediction)
    pairs = PairIndex(triples if predicts_relations else triples[:0], types, job.layout.num_times)
    # A query whose answers share one label counts as often as it has answers.
    counts = configured_loss(config).over_candidates().splits_labels
    return QueryBatches(QueryIndex(known), job.layout, types, size, turn, config.seed, pairs, counts)


def configured_order(job: Job) -> TripleOrder:
    """Return the order of an epoch: all triples as one set, or the named sets one after another."""
    config, dataset = job.config, job.dataset
    names, known = config.training.edge_sets, dataset.edge_set_names
    numbers = dataset.edge_set_of_triples()
    sets = [EdgeSet(TRAIN, range(len(dataset.split(TRAIN))))]
    if names and numbers is not None:
        sets = [_edge_set(name, numbers, known.index(name)) for name in names]
    return TripleOrder(sets, config.seed, config.evaluation.held_out_fraction)


def _edge_set(name: str, numbers: np.ndarray, number: int) -> EdgeSet:
    """Return the triples of a set: a range where they stand together, else a list."""
    ids = np.flatnonzero(numbers == number).astype(np.int64)
    is_range = len(ids) and ids[-1] - ids[0] + 1 == len(ids)
    return EdgeSet(name, range(int(ids[0]), int(ids[-1]) + 1) if is_range else ids)


def build_edge_batches(job: Job, order: TripleOrder, options: EdgeOptions) -> EdgeBatches:
    """Make the batches of edges, in the order of the whole graph or of each machine; a collective.

    Parameters
    ----------
    order : TripleOrder
        That of the options.
    """
    world = job.cluster.world
    edges = job.layout.edge_table(world.machine)
    if not job.config.is_ordered_by_machine(world.num_machines):
        return EdgeBatches(edges, options)
    triple_ids = np.asarray(edges.triple_ids)
    rows = edge_batches.rows_of_sets(order, triple_ids)
    checksum = edge_batches.partition_mark(triple_ids, rows) if world.is_machine_leader else 0
    counts, mark = _gather_counts(job, list(map(len, rows)), checksum)
    return edge_batches.MachineBatches(edges, rows, counts, world.machine, mark, options)


def _gather_counts(job: Job, counts: Sequence[int], checksum: int, *more: int) -> tuple[np.ndarray, int]:
    """Return the trained triples of each set by part, and the mark of an order; a collective.

    One trainer of each machine adds its own.
    """
    parts = np.zeros((job.layout.num_parts, len(counts) + 1), np.int64)
    if job.cluster.world.is_machine_leader:
        parts[job.cluster.world.machine] = [*counts, checksum]
    parts = job.cluster.sum(parts)
    # At least 1: 0 is the order of the whole graph.
    return parts[:, :-1], 1 + (combine(*parts[:, -1].tolist(), *more) >> 1)


def build_bucket_batches(job: Job, order: TripleOrder, options: EdgeOptions) -> BucketBatches:
    """Make the batches in bucket order; one trainer of each machine makes the files. A collective.

    Parameters
    ----------
    order, options
        As for :func:`build_edge_batches`.
    """
    config, layout, world, pairs = job.config, job.layout, job.cluster.world, job.pairs
    part, num_ranges, sets = world.machine, config.sampling.num_ranges, ALL_TRIPLES
    spare = job.output / PARTITIONS / part_folder(part)
    if config.training.edge_sets or config.evaluation.held_out:
        sets = TrainedSets(order.made_of(), partial(edge_batches.rows_of_sets, order), len(order.sets))
    files = BucketFiles(layout, part, num_ranges, pairs, spare, sets)
    make = partial(files.make, options.pair_of_relation) if world.is_machine_leader else lambda: None
    # The others wait for the disk: the files are read once and written once.
    edges = layout.edge_table(part)
    num_bytes = int(np.asarray(edges.edges).nbytes + np.asarray(edges.triple_ids).nbytes)
    job.cluster.agree(make, 2 * num_bytes)
    buckets, is_mixed = files.open(), config.sampling.buckets == MIXED
    checksum = buckets.checksum() if world.is_machine_leader else 0
    counts, mark = _gather_counts(job, buckets.triples_of_sets.tolist(), checksum, int(is_mixed))
    shares, order_name = edge_batches.MachineShares(counts, options.batch_size), config.sampling.bucket_order
    walk = BucketOrder(buckets.counts, part, shares, order_name, options.seed, pairs, is_mixed)
    return BucketBatches(buckets, walk, mark, options)


def prefetch_ranges(job: Job, batches: BucketBatches) -> None:
    """Read ranges ahead and push out written ones, where tables are files on a disk.

    One trainer of each machine does it for all. The others map what comes, and unmap what is pushed out: the
    kernel drops no page that a process has mapped. For tables in memory nobody does anything.
    """
    cluster, num_ranges = job.cluster, batches.walk.num_ranges
    is_leader = cluster.world.is_machine_leader
    rows_of = {part.table: [part.rows, *part.state.values()] for part in job.parts()}
    # Where everything fits, pages that were written back may stay: the next visit then reads nothing.
    num_bytes = sum(rows.nbytes for tensors in rows_of.values() for rows in tensors)
    # All trainers of a machine must agree: a page that one of them keeps mapped stays in memory.
    drops = bool(cluster.sum(np.array([num_bytes > available_memory()], dtype=np.int64))[0])
    mapped: dict[str, list[MappedRows]] = {}
    for name, tensors in rows_of.items():
        pages = (MappedRows.from_tensor(rows, num_ranges, drops, is_leader) for rows in tensors)
        mapped[name] = [rows for rows in pages if rows is not None]
    if not any(mapped.values()):
        return
    # The first rows were made, or read from a checkpoint, range after range by this process.
    there = {(name, number) for name in mapped for number in range(num_ranges)} if drops else set()
    prefetcher = Prefetcher(batches.walk, mapped, there)
    batches.when_batch(prefetcher.advance)
    if drops:
        # All trainers: a page goes with the last one that has it mapped.
        files = [MappedRows.from_array(table, drops) for table in batches.triple_tables]
        reader = TripleReader(batches, [file for file in files if file is not None])
        batches.when_batch(reader.advance)
    cluster.on_exit(prefetcher.close)


def build_passes(job: Job, batches: TrainingBatches, gather: Callable[[str, Tensor], Tensor]) -> Passes:
    """Return the passes of an epoch, and the ranking of what is held out of them."""
    config, size = job.config, job.config.training.batch_size
    order = batches.order if isinstance(batches, EdgeBatches) else configured_order(job)
    if not order.num_positions:
        problem = f"evaluation.held_out.fraction is {config.evaluation.held_out_fraction:g}"
        expected = "expected a smaller share, or larger edge sets"
        raise InputError(f"{problem}, and no triple is left to train; {expected}")
    sets = list(map(order.range_of, range(len(order.sets))))
    if not isinstance(batches, EdgeBatches):
        sets = [(0, len(batches) * size)]  # of queries
    passes = plan_passes(sets, config.training.edge_chunks, size)
    held_out = None if config.evaluation.held_out is None else HeldOutEvaluator(job, order, gather)
    if not isinstance(batches, BucketBatches):
        return Passes(passes, held_out)
    held_out_buckets = None if held_out is None else HeldOutBuckets(held_out, batches.walk)
    return Passes(passes, buckets=BucketStatistics(job, batches, held_out_buckets))


def touched_rows(job: Job, batches: TrainingBatches) -> dict[str, np.ndarray]:
    """Return whether a row is trained, by table and node id; empty where all rows are.

    With ``training.rows: touched`` those of the trained triples are. It takes a byte for each row in each
    trainer.
    """
    if job.config.training.rows == "all" or not isinstance(batches, EdgeBatches):
        return {}
    train, relations, layout = job.dataset.split(TRAIN), job.dataset.relations.relations, job.layout
    # One array for all tables by original id: where an entity's mark stands follows from the relation.
    starts = dict(zip(layout.ntypes, np.cumsum([0, *map(layout.num_nodes, layout.ntypes)]).tolist()))
    first_head = np.array([starts[relation.lhs] for relation in relations])
    first_tail = np.array([starts[relation.rhs] for relation in relations])
    marks = np.zeros(sum(map(layout.num_nodes, layout.ntypes)), bool)
    for edge_set in batches.order.sets:
        for start in range(0, len(edge_set.triple_ids), TRIPLES_A_BLOCK):
            ids = edge_set.triple_ids[start : start + TRIPLES_A_BLOCK]
            triples = train[ids.start : ids.stop] if isinstance(ids, range) else train[ids]
            heads, numbers, tails = triples.T
            marks[first_head[numbers] + heads] = True
            marks[starts[RELATION] + numbers // layout.num_times] = True
            marks[first_tail[numbers] + tails] = True
    return {name: marks[start:][layout.original_ids(name)] for name, start in starts.items()}


def build_negatives(job: Job) -> dict[Side, negatives.NegativeSampler]:
    """Make the sampler of each side that is trained.

    Both sides have the same one if they have equally many negatives: rows are then looked up and updated once
    for both. Otherwise each has its own, with a seed of its own. In directed buckets each has its own too,
    for its range.
    """
    config, dataset, layout, tables, pairs = job.config, job.dataset, job.layout, job.tables, job.pairs
    settings, shares = config.negatives, config.negatives.shares
    node_ids = {name: np.asarray(layout.node_ids(name)) for name in dataset.entity_types}
    counts = {side: count for side, count in settings.per_side.items() if count}
    local = {name: (tables[name].first_node_id, tables[name].end_node_id) for name in dataset.entity_types}
    weights: dict[str, np.ndarray] | None = None
    if settings.power:
        types = [(relation.lhs, relation.rhs) for relation in dataset.relations.relations]
        num_entities = {name: len(ids) for name, ids in node_ids.items()}
        degrees = negatives.count_degrees(dataset.split(TRAIN), types, num_entities)
        as_weights = partial(negatives.degree_weights, power=settings.power)
        weights = {name: as_weights(numbers) for name, numbers in degrees.items()}
    num_ranges = config.sampling.num_ranges
    if num_ranges > 1:
        is_mixed = config.sampling.buckets == MIXED
        ranges = _node_ranges(job, is_mixed)
        if weights is not None:
            weights = {name: values[layout.original_ids(name)] for name, values in weights.items()}
        more = (shares, ranges, tables[RELATION].part, pairs, config.seed, weights)
        samplers: Any = {side: RangeNegatives(side, count, *more) for side, count in counts.items()}
        is_shared = is_mixed and len(set(counts.values())) == 1
        return dict.fromkeys(counts, next(iter(samplers.values()))) if is_shared else samplers
    options = settings.options(MixedSettings) | ({} if weights is None else {"weights": weights})
    make = partial(NEGATIVE_SAMPLERS.get(settings.name).load(), **options)
    by_count: dict[int, negatives.NegativeSampler] = {}
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


def build_known(job: Job) -> negatives.KnownAnswers | None:
    """Make the index of known answers; None where they count as negatives."""
    if not job.config.negatives.mask_known:
        return None
    original_ids = {name: np.asarray(job.layout.original_edge_ids(name)) for name in job.tables}
    return negatives.KnownAnswers(job.dataset.known_triples([TRAIN]), original_ids)


def draws_on_device(job: Job) -> bool:
    """Return whether the batches of a job are drawn and computed by :class:`DeviceSoftmax`."""
    config, function = job.config, job.computing.score_function
    model, objective, predicts = config.model, config.training.objective, config.training.relation_prediction
    return (
        job.device_tables is not None
        and job.world.world_size == 1
        and not job.computation.is_reference
        and not (objective.by_queries or objective.smoothing)
        and not (predicts and (job.layout.num_times > 1 or not function.has_relation_product))
        # One edge type that joins one entity type, in one order.
        and len(job.dataset.entity_types) == len(job.pairs) == 1
        and not (config.training.edge_sets or config.evaluation.held_out or config.training.batch_statistics)
        and type(job.computing) is KgeModel
        and function.is_product
        and not (function.has_module or function.shares_relations)
        and type(configured_loss(config)) is Softmax
        and not config.loss.has_adversarial_weights
        and not (config.negatives.mask_known or model.entity_dropout or model.relation_dropout)
        and model.row_transform.name == NO_TRANSFORM
        and (objective.over_all or all(_uniform(job).values()))
    )


def _uniform(job: Job) -> dict[Side, negatives.UniformNegatives | None]:
    """Return the sampler of each side, None where its negatives are not all uniform."""
    return {
        side: sampler.all_uniform if type(sampler) is negatives.MixedNegatives else None
        for side, sampler in build_negatives(job).items()
    }


def build_device_softmax(job: Job) -> DeviceSoftmax:
    """Make the objective of a job that draws on its device."""
    config, model, (entity_type,) = job.config, job.computing, job.dataset.entity_types
    device, over_all = job.computation.device.device, config.training.objective.over_all
    samplers: dict[Side, ChunkNegatives | AllEntities]
    if over_all:
        node_ids = torch.from_numpy(np.array(job.layout.node_ids(entity_type)))
        samplers = dict.fromkeys((Side.TAIL, Side.HEAD), AllEntities(node_ids.to(device)))
    else:
        uniform = _uniform(job)
        # Sides with one sampler share their negatives.
        distinct = {id(sampler): sampler for sampler in uniform.values() if sampler is not None}
        there = {key: ChunkNegatives(sampler, entity_type, device) for key, sampler in distinct.items()}
        samplers = {side: there[id(sampler)] for side, sampler in uniform.items()}
    size = config.training.batch_size if over_all else config.negatives.chunk_size
    regularizer, sums_batch = configured_regularizer(config, model), config.loss.batch_reduction == "sum"
    options = (config.negatives.scores_own and not over_all, sums_batch, job.computation)
    first, end = job.tables[RELATION].first_node_id, job.tables[RELATION].end_node_id
    more = torch.arange(first, end, device=device), config.training.relation_prediction
    return DeviceSoftmax(entity_type, samplers, size, model, regularizer, *options, *more)
