"""Buckets of random triples on several machines, in memory, and the trainers that share them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dglkge.data.edge_buckets import EdgeBuckets
from dglkge.data.partition_layout import EdgeTable
from dglkge.data.range_walk import range_bounds
from dglkge.sampling.bucket_batches import BucketBatches

NUM_TRIPLES, BATCH_SIZE, CHUNK_SIZE, SEED = 1003, 100, 40, 11
PAIRS = [("person", "person"), ("person", "place")]
PAIR_OF_RELATION = np.array([0, 1])


def toy_buckets(num_parts: int, num_ranges: int) -> list[EdgeBuckets]:
    """Cut triples at random into parts; ends are drawn so that few buckets have most of them.

    Heads are 10 * triple + range, so that rows and ranges can be told without node ids.
    """
    random = np.random.default_rng(0)
    owner = random.choice(num_parts, NUM_TRIPLES, p=np.arange(1, num_parts + 1) / sum(range(num_parts + 1)))
    first, second = (np.minimum(random.geometric(0.4, NUM_TRIPLES) - 1, num_ranges - 1) for _ in range(2))
    relations = random.integers(0, 2, NUM_TRIPLES)
    found = []
    for part in range(num_parts):
        ids = np.flatnonzero(owner == part)
        ids = ids[np.argsort(first[ids] * num_ranges + second[ids], kind="stable")]
        edges = np.stack([10 * ids + first[ids], relations[ids], 10 * ids + second[ids]], axis=1)
        counts = np.zeros((2, num_ranges, num_ranges), np.int64)
        np.add.at(counts, (PAIR_OF_RELATION[relations[ids]], first[ids], second[ids]), 1)
        starts = np.linspace(0, 300, num_parts + 1).astype(np.int64)
        bounds = {name: range_bounds(starts, num_ranges) for name in ("person", "place")}
        table = EdgeTable(ids, edges, (ids / 7).astype(np.float32))
        found.append(EdgeBuckets(table, counts, bounds, Path()))
    return found


def toy_trainers(
    num_parts: int,
    per_machine: int,
    num_ranges: int,
    order: str = "inside_out",
    batch_size: int = BATCH_SIZE,
    is_mixed: bool = False,
) -> list[BucketBatches]:
    """Return all trainers of a cluster."""
    machines = toy_buckets(num_parts, num_ranges)
    sizes = np.array([len(machine.table.triple_ids) for machine in machines])
    return [
        BucketBatches(
            machine, order, sizes, PAIRS, 1, is_mixed,
            pair_of_relation=PAIR_OF_RELATION, num_triples=NUM_TRIPLES, batch_size=batch_size,
            chunk_size=CHUNK_SIZE, local_rank=local, trainers_per_machine=per_machine, seed=SEED,
        )
        for machine in machines
        for local in range(per_machine)
    ]  # fmt: skip
