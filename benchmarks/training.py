"""Speed of training: ours as a real job, beside the limit of the products alone and beside a peer.

    python benchmarks/training.py --table fb15k237-400 --dataset data/fb15k237 --peer pbg
    python benchmarks/training.py --dataset data/mine --dimension 200 --negatives 100 --trainers 2

A job of one server and some trainers runs under dglkge-launch, once for each type of matrix products, then
the peer on the same triples and settings, and so on in turn, --pairs times. Figures are medians over the
repeats; edges/s of a run is the median over its epochs after the first. Memory is the peak of the
proportional set sizes of all processes together. Markdown goes to stdout, everything to --json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.config import Config, field_table, load_config
from dglkge.errors import DglkgeError
from measuring import our_job, pbg_peer, pykeen_peer, tables
from measuring.machine import describe_machine
from measuring.peer_environment import INSTALLS, peer_python
from measuring.product_limit import flops_per_positive, measure_product_limit
from measuring.run_figures import RunFigures

Limits: TypeAlias = dict[str, list[float]]
"""By run: operations per second of the products alone, for each of its repeats."""

TABLES = {
    "fb15k237-400": "--dimension 400 --negatives 1000 --epochs 3 --set regularizer.weight=0.001",
    "fb15k237-200": "--dimension 200 --negatives 1000 --epochs 3 --set regularizer.weight=0.001",
    "entities-500k": "--dimension 200 --negatives 100 --epochs 3 --config none --set regularizer.name=none "
    "--set optimizer.name=row_adagrad --peer-set num_uniform_negs=50 --peer-parts 4",
}
"""The tables of docs/throughput.md; options that are given besides win."""

OUR_CONFIG = our_job.REPOSITORY / "dglkge" / "config" / "recipes" / "fb15k237" / "complex-1min.yaml"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--table", choices=TABLES, help="options of a table of docs/throughput.md")
    add("--dataset", required=True, type=Path, help="folder written by partition_tools/partition.py")
    add("--config", default=str(OUR_CONFIG), help="YAML file, or none (default: FB15k-237's)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    add("--epochs", type=int, default=3)
    add("--trainers", type=int, default=2)
    add("--dimension", type=int, default=400)
    add("--negatives", type=int, default=1000, help="uniform negatives of a chunk")
    runs = "one run for each type of products; :async for trainers that do not wait for one another"
    add("--matmul_dtypes", default="float32,bfloat16", metavar="TYPE[:async],...", help=runs)
    add("--pairs", type=int, default=1, help="how often all runs are repeated, in turn (default: 1)")
    add("--mrr", action="store_true", help="rank the test split after training")
    add("--profile", action="store_true", help="show where a batch's time goes")
    add("--max-batches", type=int, default=0, help="leave our epochs after so many batches; 0: none")
    add("--peer", choices=INSTALLS, help="run this as well")
    add("--peer-python", type=Path, help="interpreter that has the peer (default: an environment is made)")
    add("--peer-folder", type=Path, help="where that is made (default: .venv-PEER)")
    add("--peer-set", action="append", default=[], metavar="KEY=JSON", help="override one of its settings")
    add("--peer-parts", type=int, default=1, help="partitions of its entities")
    add("--pip-flag", action="append", default=[], help="for the peer's environment")
    add("--limit-seconds", type=float, default=900.0, help="of each run")
    add("--work", type=Path, help="where runs are kept (default: a temporary folder, removed)")
    add("--json", type=Path, help="file for all figures")
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; a table's options come first, so that given ones win."""
    parser = build_parser()
    table = parser.parse_args(words).table
    return parser.parse_args([*TABLES[table].split(), *words] if table else words)


def settings(args: argparse.Namespace, kind: str) -> list[str]:
    """Return our settings for a run of ``--matmul_dtypes``."""
    # Fields are looked up, so that the benchmark also runs with older versions of the schema.
    known = {row[0] for row in field_table()}
    dtype, _, mode = kind.partition(":")
    return [
        f"dataset={args.dataset.resolve()}",
        f"model.dimension={args.dimension}",
        f"negatives.num_uniform={args.negatives}",
        f"training.num_epochs={args.epochs}",
        f"training.matmul_dtype={dtype}",
        f"evaluation.split={'test' if args.mrr else 'none'}",
        *(["training.synchronous=false"] if mode == "async" else []),
        *(["training.profile=true"] if args.profile and "training.profile" in known else []),
        *args.set,
    ]


def config_path(args: argparse.Namespace) -> Path | None:
    """Return the configuration file, None for the defaults."""
    return None if args.config == "none" else Path(args.config)


def measure(args: argparse.Namespace, work: Path) -> tuple[dict[str, list[RunFigures]], Limits]:
    """Run everything in turn.

    The products' limit is measured before and after each of our runs: on a shared machine it changes from
    minute to minute, as the runs do.
    """
    kinds = args.matmul_dtypes.split(",")
    runs: dict[str, list[RunFigures]] = {f"ours, {kind}": [] for kind in kinds}
    limits: Limits = {name: [] for name in runs}
    python = None
    if args.peer:
        folder = args.peer_folder or Path(f".venv-{args.peer}")
        python = peer_python(args.peer, args.peer_python, folder, args.pip_flag).absolute()
        runs[args.peer] = []
    path = config_path(args)
    for turn in range(args.pairs):
        for kind in kinds:
            folder = work / f"{kind.replace(':', '-')}-{turn}"
            before = measure_limit(args, kind)
            runs[f"ours, {kind}"].append(
                our_job.train(
                    path, settings(args, kind), args.trainers, folder, args.limit_seconds, args.max_batches
                )
            )
            limits[f"ours, {kind}"].append((before + measure_limit(args, kind)) / 2)
            # Checkpoints of many runs would fill the disk.
            shutil.rmtree(folder / "run" / CHECKPOINT_FOLDER, ignore_errors=True)
        if python is not None:
            config = load_config(path, settings(args, kinds[0]))
            runs[args.peer].append(_run_peer(args, python, config, work / f"{args.peer}-{turn}"))
    return runs, limits


def _run_peer(args: argparse.Namespace, python: Path, config: Config, folder: Path) -> RunFigures:
    if args.peer == "pykeen":
        return pykeen_peer.train(python, config, folder, args.limit_seconds)
    shape = (args.trainers, args.peer_parts, args.peer_set)
    return pbg_peer.train(python, config, *shape, folder, args.limit_seconds)


def measure_limit(args: argparse.Namespace, kind: str) -> float:
    """Measure the products' limit of one of our runs, in operations per second."""
    config = load_config(config_path(args), settings(args, kind))
    threads = max(1, len(os.sched_getaffinity(0)) // args.trainers)
    # A trainer's products are of its share of a chunk.
    rows = min(config.training.batch_size, config.negatives.chunk_size) // args.trainers
    shape = (args.trainers, threads, rows, args.negatives, args.dimension)
    return measure_product_limit(*shape, dtype=kind.partition(":")[0], seconds=2.0)


def report(args: argparse.Namespace, runs: dict[str, list[RunFigures]], limits: Limits) -> str:
    """Return the tables."""
    flops = flops_per_positive(args.negatives, args.dimension)
    parts = [tables.run_table(runs, args.peer, flops, limits)]
    rates = {name: statistics.median(repeats) for name, repeats in limits.items()}
    lines = [
        f"{name}: {rate / 1e9:,.0f} GFLOP/s, {rate / flops:,.0f} edges/s" for name, rate in rates.items()
    ]
    parts.append("The products alone: " + "; ".join(lines) + ".")
    parts += [
        f"Every repeat of {name}, edges/s: " + ", ".join(f"{run.edges_per_second:,.0f}" for run in repeats)
        for name, repeats in runs.items()
        if len(repeats) > 1
    ]
    last_runs = {name: repeats[-1] for name, repeats in runs.items() if name != args.peer}
    marks = {name: run.start_marks for name, run in last_runs.items()}
    parts.append(tables.columns_table("seconds from the start of the command", marks, 1.0, 2))
    phases = {name: run.phase_seconds for name, run in last_runs.items() if run.phase_seconds}
    if phases:
        parts.append(tables.columns_table("ms of a trainer's batch", phases, 1e3, 2))
    return "\n\n".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = parse(sys.argv[1:] if words is None else words)
    work = Path(tempfile.mkdtemp(prefix="training_benchmark_")) if args.work is None else args.work
    try:
        runs, limits = measure(args, work.resolve())
    except (DglkgeError, RuntimeError) as error:
        print(f"training.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(report(args, runs, limits))
    if args.json:
        content = {
            "machine": describe_machine(),
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "product_flops_per_second": limits,
            "runs": {name: [run.to_dict() for run in repeats] for name, repeats in runs.items()},
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
