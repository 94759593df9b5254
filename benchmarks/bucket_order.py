"""Quality in bucket order: the same training with one range and with several, from the same start.

    python benchmarks/bucket_order.py --dataset data/fb15k237 --config my.yaml
    python benchmarks/bucket_order.py --dataset data/fb15k237 --ranges 4 --orders inside_out,random

With one range all triples are in one order. With P ranges an epoch walks over their pairs, and negatives come
from the ranges of a bucket; --set sampling.buckets=directed takes PyTorch-BigGraph's buckets. Tables are in
memory in all runs. Each run is a job of its own with one server. Markdown goes to stdout, everything to
--json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import RUN_METRICS_FILE
from dglkge.config.schema import BUCKET_ORDERS
from dglkge.data.range_walk import count_loads, unordered, walk_pairs
from dglkge.errors import DglkgeError, unknown_name
from measuring import our_job
from measuring.machine import describe_machine

LIMIT_SECONDS = 3600.0
OUR_CONFIG = our_job.REPOSITORY / "dglkge" / "config" / "recipes" / "fb15k237" / "complex-1min.yaml"
HEADER = (
    "| ranges | order | loads an epoch | test MRR | below one range | Hits@10 | edges/s | training, s |\n"
    "|--:|---|--:|--:|--:|--:|--:|--:|"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", required=True, type=Path, help="folder written by partition_tools/partition.py")
    add("--config", type=Path, default=OUR_CONFIG, help="YAML file (default: FB15k-237's of a minute)")
    add("--ranges", default="4", metavar="P,...", help="numbers of ranges beside 1 (default: %(default)s)")
    add("--orders", default="inside_out", metavar="NAME,...", help="sampling.bucket_order of them")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    add("--trainers", type=int, default=2)
    add("--limit-seconds", type=float, default=LIMIT_SECONDS, help="of each run")
    add("--json", type=Path, help="file for all figures")
    return parser


def kinds(ranges: str, orders: str) -> list[tuple[int, str]]:
    """Return the runs: one range first, then each number of ranges in each order.

    Raises
    ------
    InputError
        If an order is unknown.
    """
    names = [name for name in orders.split(",") if name]
    for name in names:
        if name not in BUCKET_ORDERS:
            raise unknown_name("order", name, BUCKET_ORDERS)
    numbers = [int(number) for number in ranges.split(",") if int(number) > 1]
    return [(1, ""), *((number, name) for number in numbers for name in names)]


def loads(num_ranges: int, order: str) -> int:
    """Return the loads of an epoch with memory for three ranges of one entity type."""
    if num_ranges == 1:
        return 1
    # Directed buckets need as many or more: each pair of ranges twice, and each range with itself.
    steps = [set(pair) for pair in unordered(walk_pairs(order, num_ranges, 0, 0)).tolist()]
    return count_loads(steps, dict.fromkeys(range(num_ranges), 1), 3).count


def measure(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Train every kind in turn; rows of the table go to stderr as they come."""
    runs: list[dict[str, Any]] = []
    for num_ranges, order in kinds(args.ranges, args.orders):
        folder = work / f"job-{num_ranges}-{order}"
        sets = [f"dataset={args.dataset.resolve()}", "evaluation.split=test", *args.set]
        if num_ranges > 1:
            sets += [f"sampling.num_ranges={num_ranges}", f"sampling.bucket_order={order}"]
        run = our_job.train(args.config, sets, args.trainers, folder, args.limit_seconds)
        metrics = json.loads((folder / "run" / RUN_METRICS_FILE).read_text(encoding="utf-8"))["test"]["both"]
        shutil.rmtree(folder / "run")
        runs.append({"num_ranges": num_ranges, "order": order, "metrics": metrics, **run.to_dict()})
        print(row(runs[-1], runs[0]), file=sys.stderr, flush=True)
    return runs


def row(run: dict[str, Any], first: dict[str, Any]) -> str:
    """Return the row of a run beside that with one range."""
    mrr = run["metrics"]["mrr"]
    cells = [
        str(run["num_ranges"]),
        run["order"] or "of all triples",
        str(loads(run["num_ranges"], run["order"])),
        f"{mrr:.4f}",
        f"{first['metrics']['mrr'] - mrr:+.4f}",
        f"{run['metrics']['hits@10']:.4f}",
        f"{run['edges_per_second']:,.0f}",
        f"{run['wall_seconds']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work = Path(tempfile.mkdtemp(prefix="bucket_order_benchmark_"))
    try:
        kinds(args.ranges, args.orders)  # mistakes are refused before anything runs
        runs = measure(args, work)
    except (DglkgeError, RuntimeError) as error:
        print(f"bucket_order.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join([*HEADER.splitlines(), *(row(run, runs[0]) for run in runs)]))
    if args.json:
        figures = {"machine": describe_machine(), "runs": runs}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
