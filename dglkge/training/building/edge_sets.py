"""Edge sets, their passes and held-out triples, as configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError, unknown_name
from dglkge.kernels.hashing import combine
from dglkge.sampling.edge_batches import EdgeBatches
from dglkge.sampling.machine_batches import MachineBatches, partition_mark, rows_of_sets
from dglkge.sampling.query_batches import TrainingBatches
from dglkge.sampling.triple_order import EdgeSet, TripleOrder, plan_passes
from dglkge.training.held_out import HeldOutEvaluator
from dglkge.training.job import Job
from dglkge.training.passes import Passes
from dglkge.typing import RELATION

TRIPLES_A_BLOCK = 1 << 20
"""Triples that are read at a time."""


def configured_order(config: Config, dataset: Dataset) -> TripleOrder:
    """Return the order of an epoch: all triples as one set, or the named sets one after another.

    Raises
    ------
    InputError
        If the data set has no set of a name.
    """
    wanted, known = config.training.edge_sets, dataset.edge_set_names
    for name in wanted:
        if name not in known:
            raise InputError(f"training.edge_sets: {unknown_name('edge set', name, known)}")
    numbers = dataset.edge_set_of_triples()
    sets = [EdgeSet(TRAIN, range(len(dataset.split(TRAIN))))]
    if wanted and numbers is not None:
        sets = [_edge_set(name, numbers, known.index(name)) for name in wanted]
    return TripleOrder(sets, config.seed, config.evaluation.held_out_fraction)


def _edge_set(name: str, numbers: np.ndarray, number: int) -> EdgeSet:
    """Return the triples of a set: a range where they stand together, else a list."""
    ids = np.flatnonzero(numbers == number).astype(np.int64)
    if len(ids) and ids[-1] - ids[0] + 1 == len(ids):
        return EdgeSet(name, range(int(ids[0]), int(ids[-1]) + 1))
    return EdgeSet(name, ids)


def build_edge_batches(
    config: Config, dataset: Dataset, layout: PartitionLayout, cluster: Cluster, of_edges: dict[str, Any]
) -> EdgeBatches:
    """Make the batches of edges, in the order of the whole graph or of each machine; a collective.

    Parameters
    ----------
    config : Config
    dataset : Dataset
    layout : PartitionLayout
    cluster : Cluster
    of_edges : dict
        Arguments of :class:`dglkge.sampling.edge_batches.EdgeBatches`, without ``edges`` and ``order``.

    Raises
    ------
    InputError
        If the data set has no edge set of a name.
    """
    world, order = cluster.world, configured_order(config, dataset)
    part = world.machine
    edges = layout.edge_table(part)
    if not config.is_ordered_by_machine(world.num_machines):
        return EdgeBatches(edges, **of_edges, order=order)
    triple_ids = np.asarray(edges.triple_ids)
    rows = rows_of_sets(order, triple_ids)
    # By part: trained triples of each set, and a checksum. One trainer of each machine adds them.
    found = np.zeros((layout.num_parts, len(rows) + 1), np.int64)
    if world.is_machine_leader:
        found[part] = [*map(len, rows), partition_mark(triple_ids, rows)]
    found = cluster.sum(found)
    # At least 1: 0 is the order of the whole graph.
    mark = 1 + (combine(*found[:, -1].tolist()) >> 1)
    return MachineBatches(edges, rows, found[:, :-1], part, mark, **of_edges, order=order)


def build_passes(
    job: Job, batches: TrainingBatches, gather: Callable[[str, torch.Tensor], torch.Tensor]
) -> Passes:
    """Return the passes of an epoch, and the ranking of what is held out of them.

    Raises
    ------
    InputError
        If everything is held out.
    """
    config, size = job.config, job.config.training.batch_size
    num_chunks, settings = config.training.edge_chunks, config.evaluation.held_out
    if not isinstance(batches, EdgeBatches):
        return Passes(plan_passes([(0, len(batches) * size)], num_chunks, size))
    order = batches.order
    if not order.num_positions:
        raise InputError(
            f"evaluation.held_out.fraction is {config.evaluation.held_out_fraction:g}, and no triple is left "
            "to train; expected a smaller share, or larger edge sets"
        )
    ranges = [order.range_of(number) for number in range(len(order.sets))]
    held_out = None if settings is None else HeldOutEvaluator(job, settings, order, gather)
    return Passes(plan_passes(ranges, num_chunks, size), held_out)


def touched_rows(
    config: Config, dataset: Dataset, layout: PartitionLayout, batches: TrainingBatches
) -> dict[str, np.ndarray] | None:
    """Return whether a row is trained, by table and node id; None where all rows are.

    With ``training.rows: touched`` those of the trained triples are. It takes a byte for each row in each
    trainer.
    """
    if config.training.rows == "all" or not isinstance(batches, EdgeBatches):
        return None
    train, relations = dataset.split(TRAIN), dataset.relations.relations
    # One array for all tables by original id: where an entity's mark stands follows from the relation.
    starts = dict(zip(layout.ntypes, np.cumsum([0, *map(layout.num_nodes, layout.ntypes)]).tolist()))
    first_head = np.array([starts[relation.lhs] for relation in relations])
    first_tail = np.array([starts[relation.rhs] for relation in relations])
    marks = np.zeros(sum(map(layout.num_nodes, layout.ntypes)), bool)
    for one in batches.order.sets:
        for start in range(0, len(one.triple_ids), TRIPLES_A_BLOCK):
            ids = one.triple_ids[start : start + TRIPLES_A_BLOCK]
            triples = train[ids.start : ids.stop] if isinstance(ids, range) else train[ids]
            heads, numbers, tails = triples.T
            marks[first_head[numbers] + heads] = True
            marks[starts[RELATION] + numbers] = True
            marks[first_tail[numbers] + tails] = True
    return {name: marks[start:][layout.original_ids(name)] for name, start in starts.items()}
