"""Memory and speed of dense parameters, replicated and sharded (``dense.sharding``), side by side.

    python benchmarks/dense_sharding.py --dataset data/fb15k237

Jobs under dglkge-launch with one server train the same batches against all entities, in turn. The time of a
batch is that of the second epoch. Memory is the peak of the proportional set size of all processes; the last
row has a score function without dense parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import dglkge
from measuring import our_job
from measuring.machine import describe_machine


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", required=True, type=Path, help="folder written by partition_tools/partition.py")
    add("--score-function", default="tucker", metavar="NAME")
    add("--dimension", type=int, default=200)
    add("--batch-size", type=int, default=200)
    add("--trainers", type=int, default=2)
    add("--max-batches", type=int, default=30, help="of each of two epochs")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    add("--limit-seconds", type=float, default=600.0, help="of each run")
    add("--json", type=Path, help="file for all figures")
    return parser


def run(args: argparse.Namespace, score_function: str, sharding: str, folder: Path) -> dict[str, Any]:
    """Train by one of the settings; the first epoch warms up."""
    settings = [
        f"dataset={args.dataset.resolve()}",
        f"model.score_function={score_function}",
        f"model.dimension={args.dimension}",
        f"dense.sharding={sharding}",
        f"training.batch_size={args.batch_size}",
        "training.objective=one_vs_all",
        "training.matmul_dtype=float32",
        "training.num_epochs=3",
        "evaluation.split=none",
        "checkpoint.every_epochs=0",
        *args.set,
    ]
    figures = our_job.train(
        None, settings, args.trainers, folder, args.limit_seconds, args.max_batches, max_epochs=2
    )
    return {
        "dense parameters": f"{score_function}, {sharding}",
        "batch_milliseconds": 1000 * figures.epochs[-1].seconds / args.max_batches,
        "peak_mib": figures.peak_bytes / 2**20,
    }


def main() -> int:
    """Run all settings in turn and print a table."""
    args = build_parser().parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for name, sharding in (
            (args.score_function, "replicated"),
            (args.score_function, "fsdp"),
            ("complex", "replicated"),
        ):
            rows.append(run(args, name, sharding, Path(work, f"{name}_{sharding}")))
    print(describe_machine())
    print(f"\n| {' | '.join(rows[0])} |\n|---|{'--:|' * (len(rows[0]) - 1)}")
    for row in rows:
        cells = [value if isinstance(value, str) else f"{value:,.1f}" for value in row.values()]
        print(f"| {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("dense_sharding.py", main))
