"""Traffic between machines in bucket order, with the same walk on all of them and with disjoint pairs.

    python benchmarks/bucket_schedules.py
    python benchmarks/bucket_schedules.py --machines 4 --ranges 16 --local 0.8

PyTorch-BigGraph's lock server keeps machines on pairs without a common partition, since a partition is on one
machine at a time. Here rows stay where they are, and a machine trains the triples of its own tails; of other
machines it needs the rows of heads and of negatives. This counts, for a synthetic graph and an epoch, the
distinct rows of others that each machine's share of each batch needs, and the ranges that a machine reads
from its disk with memory for three ranges, those that others ask it for included. Nothing is trained and no
process is started. Schedules:

* same: all machines follow one walk, as dglkge does;
* rotated heads: machine m adds m to the range of the heads, so that at no time two machines ask for
  heads of the same range;
* shifted: machine m starts m/M of an epoch later.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dglkge.data.range_walk import WALKS, count_loads, walk_pairs
from synthetic_graph import scatter, zipf_ranks

Ids = npt.NDArray[np.int64]
SCHEDULES = ("same", "rotated heads", "shifted")
HELD_RANGES = 3
ENTITY_EXPONENT = 0.75
HEADER = (
    "| schedule | rows of others, million | GB | ranges read by a machine |\n|---|--:|--:|--:|"
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--entities", type=int, default=100_000, help="of the graph (%(default)s)")
    add("--edges", type=int, default=1_000_000, help="of the graph (%(default)s)")
    add("--machines", type=int, default=2, metavar="M")
    add("--ranges", type=int, default=8, metavar="P")
    add("--order", choices=WALKS, default="inside_out")
    add(
        "--local",
        type=float,
        default=0.5,
        help="share of triples with both ends on one machine (%(default)s)",
    )
    add("--dimension", type=int, default=100)
    add("--batch", type=int, default=1000, help="triples of a machine's share of a batch (%(default)s)")
    add(
        "--negatives",
        type=int,
        default=100,
        help="for each side, from the ranges of all machines (%(default)s)",
    )
    add("--seed", type=int, default=0)
    return parser


def make_graph(args: argparse.Namespace) -> tuple[Ids, Ids, Ids, Ids]:
    """Return the machine and the range of each head, the head, and machine times P plus range of the tail."""
    random = np.random.default_rng(args.seed)
    heads, tails = (
        scatter(
            zipf_ranks(random.random(args.edges), args.entities, ENTITY_EXPONENT), args.entities, args.seed
        )
        for _ in range(2)
    )
    # Entities lie on machines in runs of equal length, and in ranges inside of them.
    per_machine = args.entities // args.machines
    heads, tails = (
        np.minimum(heads, per_machine * args.machines - 1),
        np.minimum(tails, per_machine * args.machines - 1),
    )
    moved = random.random(args.edges) < _share_to_move(args.local, args.machines)
    heads = np.where(moved, tails // per_machine * per_machine + heads % per_machine, heads)
    return (
        heads // per_machine,
        heads % per_machine * args.ranges // per_machine,
        heads,
        tails // per_machine * args.ranges + tails % per_machine * args.ranges // per_machine,
    )


def _share_to_move(local: float, machines: int) -> float:
    """Return the share of heads to move to the tail's machine, of which 1/M are there by chance."""
    by_chance = 1 / machines
    return max(0.0, (local - by_chance) / (1 - by_chance))


def walks(args: argparse.Namespace, schedule: str) -> list[Ids]:
    """Return each machine's pairs (P * P, 2) of an epoch in their order."""
    walk = walk_pairs(args.order, args.ranges, args.seed, 0)
    if schedule == "rotated heads":
        step = [np.array([machine * args.ranges // args.machines, 0]) for machine in range(args.machines)]
        return [(walk + shift) % args.ranges for shift in step]
    if schedule == "shifted":
        return [
            np.roll(walk, -machine * len(walk) // args.machines, axis=0) for machine in range(args.machines)
        ]
    return [walk] * args.machines


def count_rows(args: argparse.Namespace, graph: tuple[Ids, Ids, Ids, Ids], orders: Sequence[Ids]) -> int:
    """Return the distinct rows of other machines that the batches of an epoch need, over all machines."""
    head_machine, head_range, heads, tail_place = graph
    random = np.random.default_rng(args.seed)
    total = 0
    for machine, order in enumerate(orders):
        mine = np.flatnonzero(tail_place // args.ranges == machine)
        turn = np.empty((args.ranges, args.ranges), np.int64)
        turn[order[:, 0], order[:, 1]] = np.arange(len(order))
        turns = turn[head_range[mine], tail_place[mine] % args.ranges]
        in_order = mine[np.lexsort((random.random(len(mine)), turns))]
        for start in range(0, len(in_order), args.batch):
            batch = in_order[start : start + args.batch]
            away = batch[head_machine[batch] != machine]
            total += len(np.unique(heads[away]))
            # Negatives of both sides: uniform over the ranges of one number on all machines.
            total += 2 * round(args.negatives * (1 - 1 / args.machines))
    return total


def count_reads(args: argparse.Namespace, orders: Sequence[Ids]) -> int:
    """Return the ranges that a machine reads in an epoch: for its own pairs, and for what others ask."""
    # Others ask for heads, for negatives of the heads' range and for those of the tails' range: at any time a
    # machine needs the ranges of all pairs, its own among them.
    both = np.concatenate(orders, axis=1)
    sizes = dict.fromkeys(range(args.ranges), 1)
    return count_loads([set(ranges) for ranges in both.tolist()], sizes, HELD_RANGES).count


def main(words: Sequence[str] | None = None) -> int:
    """Count and print."""
    args = build_parser().parse_args(words)
    graph = make_graph(args)
    # A row goes out as float32 with its id, and its gradient comes back so.
    row_bytes = 2 * (4 * args.dimension + 8)
    print(HEADER)
    for schedule in SCHEDULES:
        orders = walks(args, schedule)
        rows = count_rows(args, graph, orders)
        print(
            f"| {schedule} | {rows / 1e6:.3f} | {rows * row_bytes / 1e9:.3f} | {count_reads(args, orders)} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
