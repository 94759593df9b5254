"""Builders of the batches in bucket order, and of the prefetch of the ranges that come next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.config import Config
from dglkge.config.schema import MIXED
from dglkge.data import dataset_files
from dglkge.data.edge_buckets import ALL_TRIPLES, TrainedSets, make_buckets, open_buckets
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.runtime import Cluster
from dglkge.embeddings.mapped_rows import MappedRows
from dglkge.embeddings.table_set import TableSet
from dglkge.kernels.hashing import combine
from dglkge.planning.host import available_memory
from dglkge.sampling.bucket_batches import BucketBatches
from dglkge.sampling.machine_batches import rows_of_sets
from dglkge.sampling.prefetch import Prefetcher, TripleReader
from dglkge.sampling.triple_order import TripleOrder


def build_bucket_batches(
    config: Config,
    layout: PartitionLayout,
    cluster: Cluster,
    pairs: Sequence[tuple[str, str]],
    order: TripleOrder,
    of_edges: dict[str, Any],
) -> BucketBatches:
    """Make the batches in bucket order; one trainer of each machine makes the files. A collective.

    Parameters
    ----------
    config : Config
    layout : PartitionLayout
    cluster : Cluster
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    order : TripleOrder
        Its edge sets are walked in turn, without what it holds out.
    of_edges : dict
        Arguments of :class:`dglkge.sampling.edge_batches.EdgeBatches`, without ``edges`` and ``order``.

    Raises
    ------
    CheckpointError, StorageError
        On all trainers, if one of them cannot write the files.
    """
    world, num_ranges = cluster.world, config.sampling.num_ranges
    part = world.machine
    spare = Path(config.output) / dataset_files.PARTITIONS / dataset_files.part_folder(part)
    sets = ALL_TRIPLES
    if config.training.edge_sets or config.evaluation.held_out:
        sets = TrainedSets(order.made_of(), partial(rows_of_sets, order), len(order.sets))

    def make_files() -> None:
        """Make the files of this machine, on one of its trainers."""
        if world.is_machine_leader:
            make_buckets(layout, part, num_ranges, pairs, of_edges["pair_of_relation"], spare, sets)

    # The others wait for the disk: the files are read once and written once.
    edges = layout.edge_table(part)
    cluster.agree(make_files, 2 * int(np.asarray(edges.edges).nbytes + np.asarray(edges.triple_ids).nbytes))
    buckets = open_buckets(layout, part, num_ranges, pairs, spare, sets)
    # By part: triples of each set, and a checksum of the counts. One trainer of each machine adds them.
    found = np.zeros((layout.num_parts, len(order.sets) + 1), np.int64)
    if world.is_machine_leader:
        found[part] = [*buckets.triples_of_sets, buckets.checksum()]
    found = cluster.sum(found)
    walk, is_mixed = config.sampling.bucket_order, config.sampling.buckets == MIXED
    # At least 1: 0 is the order of the whole graph.
    mark = 1 + (combine(*found[:, -1].tolist(), int(is_mixed)) >> 1)
    return BucketBatches(buckets, walk, part, found[:, :-1], pairs, mark, is_mixed, **of_edges, order=order)


def prefetch_ranges(batches: BucketBatches, tables: TableSet, optimizer: Any, cluster: Cluster) -> None:
    """Read ranges ahead and push out written ones, where tables are files on a disk.

    One trainer of each machine does it for all. The others map what comes, and unmap what is pushed out: the
    kernel drops no page that a process has mapped. For tables in memory nobody does anything.
    """
    is_leader = cluster.world.is_machine_leader
    num_ranges = batches.walk.num_ranges
    rows_of: dict[str, list[torch.Tensor]] = {}
    for name in tables.entity_types:
        state = optimizer.state_tensors(tables[name].embedding).values()
        rows_of[name] = [tables[name].local_rows, *(one.local_partition for one in state)]
    # Where everything fits, pages that were written back may stay: the next visit then reads nothing.
    num_bytes = sum(rows.numel() * rows.element_size() for found in rows_of.values() for rows in found)
    # All trainers of a machine must agree: a page that one of them keeps mapped stays in memory.
    drops = bool(cluster.sum(np.array([num_bytes > available_memory()], dtype=np.int64))[0])
    mapped: dict[str, list[MappedRows]] = {}
    for name, found in rows_of.items():
        pages = [MappedRows.of_tensor(rows, num_ranges, drops, is_leader) for rows in found]
        mapped[name] = [one for one in pages if one is not None]
    if not any(mapped.values()):
        return
    # The first rows were made, or read from a checkpoint, range after range by this process.
    there = {(name, number) for name in mapped for number in range(num_ranges)} if drops else set()
    prefetcher = Prefetcher(batches.walk, mapped, there)
    batches.when_batch(prefetcher.advance)
    if drops:
        # All trainers: a page goes with the last one that has it mapped.
        files = [MappedRows.of_array(table, drops) for table in batches.triple_tables]
        reader = TripleReader(batches, [one for one in files if one is not None])
        batches.when_batch(reader.advance)
    cluster.on_exit(prefetcher.close)
