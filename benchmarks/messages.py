"""Processor time of what trainers of one machine send one another: queries and dense gradients.

    python benchmarks/messages.py
    python benchmarks/messages.py --trainers 2,8 --json messages.json

*queries*: both sides of a batch of 1,000 triples, D = 400, to all trainers, and the gradients back to their
own (``training.objective: one_vs_all``). *dense*: the sum of a million dense gradients. Each through torch's
process group (gloo, the loopback network) and through shared memory, in turns; medians of the rounds.
Processor time is that of all trainers together, threads and waits included, and does not depend on how many
cores there are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dglkge.optim.alltoall import Alltoall, SharedAlltoall
from dglkge.step.objectives.query_exchange import QueryBlock, QueryExchange

NUM_QUERIES, DIM, DENSE_NUMBERS = 2_000, 400, 1_000_000
ROUNDS, STEPS = 5, 20


def works(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Make what is measured, by kind and way."""
    ways: dict[str, Alltoall] = {
        "network": Alltoall(300),
        "memory": SharedAlltoall(300, "exchange", "take part"),
    }
    num = NUM_QUERIES // size
    blocks = [QueryBlock(torch.ones(num, DIM), np.arange(num), np.ones(num, np.float32))]
    gradients = [torch.ones(num * size, DIM)]
    values = torch.full((DENSE_NUMBERS,), float(rank))

    def queries(group: Alltoall) -> Callable[[], object]:
        exchange = QueryExchange(group, [DIM], size)

        def run() -> None:
            exchange.gather(blocks)
            exchange.return_gradients(gradients)

        return run

    def network_sum() -> None:
        dist.all_reduce(values.double())

    return {
        **{f"queries, {way}": queries(group) for way, group in ways.items()},
        "dense, network": network_sum,
        "dense, memory": lambda: ways["memory"].sum_rows(values),  # type: ignore[attr-defined]
    }


def trainer(rank: int, size: int, folder: str, results: Any) -> None:
    """Measure as one of the trainers: processor milliseconds of a step, by what was measured."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    measured: dict[str, list[float]] = {}
    runs = works(rank, size)
    for round_ in range(ROUNDS + 1):
        for name, run in runs.items():
            dist.barrier()
            start = time.process_time()
            for _ in range(STEPS):
                run()
            if round_:  # the first warms up
                measured.setdefault(name, []).append(1e3 * (time.process_time() - start) / STEPS)
    results.put(measured)
    results.close()
    results.join_thread()  # a thread of the queue sends; os._exit would not wait for it
    dist.barrier()
    os._exit(0)


def measure(size: int) -> dict[str, float]:
    """Return the processor milliseconds of a step of all trainers together."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=trainer, args=(rank, size, folder, results), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        every = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    return {
        name: statistics.median(map(sum, zip(*(measured[name] for measured in every)))) for name in every[0]
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", default="2,8,16", help="numbers of trainers (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures too")
    args = parser.parse_args()
    figures = {}
    print("| trainers | queries, network | queries, memory | dense, network | dense, memory |")
    print("|--:|--:|--:|--:|--:|")
    for size in map(int, args.trainers.split(",")):
        figures[size] = measure(size)
        print(
            f"| {size} | " + " | ".join(f"{value:.1f}" for value in figures[size].values()) + " |", flush=True
        )
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
