"""Buckets of random triples on several machines, in memory, and the trainers that share them."""

from __future__ import annotations

import numpy as np

from dglkge.data.edge_buckets import EdgeBuckets
from dglkge.data.partition_layout import EdgeTable
from dglkge.sampling.bucket_batches import BucketBatches, BucketOrder
from dglkge.sampling.edge_batches import EdgeOptions, MachineShares
from dglkge.sampling.triple_order import EdgeSet, TripleOrder

NUM_TRIPLES, BATCH_SIZE, CHUNK_SIZE, SEED = 1003, 100, 40, 11
PAIRS = [("person", "person"), ("person", "place")]
PAIR_OF_RELATION = np.array([0, 1])


def toy_order(num_sets: int) -> TripleOrder:
    """Return an order of sets: triple t is in set t modulo their number."""
    ids = [np.arange(number, NUM_TRIPLES, num_sets) for number in range(num_sets)]
    return TripleOrder([EdgeSet(str(number), set_ids) for number, set_ids in enumerate(ids)], SEED)


def toy_buckets(num_parts: int, num_ranges: int, num_sets: int = 1) -> list[EdgeBuckets]:
    """Cut triples at random into parts; ends are drawn so that few buckets have most of them.

    Heads are 10 * triple + range, so that rows and ranges can be told without node ids.
    """
    random = np.random.default_rng(0)
    owner = random.choice(num_parts, NUM_TRIPLES, p=np.arange(1, num_parts + 1) / sum(range(num_parts + 1)))
    first, second = (np.minimum(random.geometric(0.4, NUM_TRIPLES) - 1, num_ranges - 1) for _ in range(2))
    relations = random.integers(0, 2, NUM_TRIPLES)
    buckets = []
    for part in range(num_parts):
        ids = np.flatnonzero(owner == part)
        cells = (ids % num_sets * num_ranges + first[ids]) * num_ranges + second[ids]
        ids = ids[np.argsort(cells, kind="stable")]
        edges = np.stack([10 * ids + first[ids], relations[ids], 10 * ids + second[ids]], axis=1)
        counts = np.zeros((num_sets, 2, num_ranges, num_ranges), np.int64)
        np.add.at(counts, (ids % num_sets, PAIR_OF_RELATION[relations[ids]], first[ids], second[ids]), 1)
        table = EdgeTable(ids, edges, (ids / 7).astype(np.float32))
        buckets.append(EdgeBuckets(table, counts))
    return buckets


def toy_trainers(
    num_parts: int,
    per_machine: int,
    num_ranges: int,
    order: str = "inside_out",
    batch_size: int = BATCH_SIZE,
    is_mixed: bool = False,
    num_sets: int = 1,
    machines: list[EdgeBuckets] | None = None,
) -> list[BucketBatches]:
    """Return all trainers of a cluster."""
    machines = toy_buckets(num_parts, num_ranges, num_sets) if machines is None else machines
    shares = MachineShares(np.array([machine.triples_of_sets for machine in machines]), batch_size)
    return [
        BucketBatches(
            machine, BucketOrder(machine.counts, part, shares, order, SEED, PAIRS, is_mixed), 1,
            EdgeOptions(PAIR_OF_RELATION, NUM_TRIPLES, batch_size, CHUNK_SIZE, local, per_machine, SEED,
                        order=toy_order(num_sets)),
        )
        for part, machine in enumerate(machines)
        for local in range(per_machine)
    ]  # fmt: skip
