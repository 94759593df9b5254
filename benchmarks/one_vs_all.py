"""Speed of training against all entities: ours as a real job, beside the matmuls' limit and two peers.

    python benchmarks/one_vs_all.py --dataset data/fb15k237 --pykeen

ComplEx, softmax, Adagrad, both sides of every triple. Ours runs under dglkge-launch with one server, once for
each objective and type of matmuls. The limit is what plain torch.mm reaches with the same shapes and type, in
as many processes as there are trainers, measured before each of our runs. The peers run in one process with
all cores: LibKGE's formulation of 1vsAll, written out in plain torch, and with --pykeen PyKEEN's LCWA loop,
which trains (entity, relation) pairs with all their answers, as our k_vs_all does. Everything runs in turn,
--pairs times; figures are medians. Markdown goes to stdout, everything to --json.
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
from typing import Any

import numpy as np

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.errors import DglkgeError
from measuring import our_job
from measuring.machine import describe_machine
from measuring.peer_environment import peer_python
from measuring.processes import run_watched
from measuring.product_limit import flops_per_positive, measure_product_limit

HERE = Path(__file__).resolve().parent / "measuring"
KINDS = ("one_vs_all:float32", "one_vs_all:bfloat16", "k_vs_all:bfloat16")
"""Objective and type of matmuls of each of our runs."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", required=True, type=Path, help="folder written by partition_tools/partition.py")
    add("--kinds", default=",".join(KINDS), metavar="OBJECTIVE:TYPE,...", help="our runs")
    add("--dimension", type=int, default=400)
    add("--batch-size", type=int, default=1000)
    add("--trainers", type=int, default=2)
    add("--epochs", type=int, default=2, help="of ours; the median is over those after the first")
    add("--max-batches", type=int, default=100, help="leave our epochs after so many batches; 0: none")
    add("--libkge-batches", type=int, default=15, help="0: do not run LibKGE's formulation")
    add("--pykeen", action="store_true", help="run PyKEEN's LCWA as well")
    add("--pykeen-triples", type=int, default=1000, help="triples of its epoch; 0: all")
    # Its ComplEx multiplies (batch, entities, D) numbers out: 23 GB for 1,000 pairs of FB15k-237 at D = 400.
    add("--pykeen-batch-size", type=int, default=100)
    add("--peer-python", type=Path, help="interpreter that has PyKEEN (default: an environment is made)")
    add("--pairs", type=int, default=1, help="how often all runs are repeated, in turn")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field of ours")
    add("--limit-seconds", type=float, default=900.0, help="of each run")
    add("--json", type=Path, help="file for all figures")
    return parser


def run_ours(args: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """Train by one of our kinds."""
    objective, _, dtype = kind.partition(":")
    settings = [
        f"dataset={args.dataset.resolve()}",
        f"model.dimension={args.dimension}",
        "regularizer.name=none",  # as the peers
        f"training.objective={objective}",
        f"training.matmul_dtype={dtype}",
        # A triple gives two queries and a pair gives one, so k_vs_all gets twice as many for equal matmuls.
        f"training.batch_size={args.batch_size * (2 if objective == 'k_vs_all' else 1)}",
        f"training.num_epochs={args.epochs}",
        "training.profile=true",
        "evaluation.split=none",
        "checkpoint.every_epochs=0",
        *args.set,
    ]
    run = our_job.train(None, settings, args.trainers, folder, args.limit_seconds, args.max_batches)
    shutil.rmtree(folder / "run" / CHECKPOINT_FOLDER, ignore_errors=True)
    per_query = 1 if objective == "k_vs_all" else 2
    return {
        "queries_per_second": per_query * run.edges_per_second,
        "peak_bytes": run.peak_bytes,
        "phase_seconds": run.phase_seconds,
    }


def run_peer(args: argparse.Namespace, script: str, python: Path, folder: Path) -> dict[str, Any]:
    """Train by a peer's script; returns what it wrote and its peak of memory."""
    folder.mkdir(parents=True)
    settings = {
        "triples": str(args.dataset.resolve() / "train.npy"),
        "dimension": args.dimension,
        "batch_size": args.batch_size,
        "max_batches": args.libkge_batches,
        "max_triples": args.pykeen_triples,
        "pykeen_batch_size": args.pykeen_batch_size,
        "num_epochs": 2,
        "lr": 0.1,
        "init_scale": 1e-3,
        "seed": 0,
        "num_threads": len(os.sched_getaffinity(0)),
        "timings": str(folder / "timings.json"),
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    command = [str(python), str(HERE / script), str(path)]
    done = run_watched(command, folder / "train.log", args.limit_seconds)
    timings: dict[str, Any] = json.loads((folder / "timings.json").read_text(encoding="utf-8"))
    return {**timings, "peak_bytes": done.peak_bytes}


def run_libkge(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train by LibKGE's formulation of 1vsAll."""
    figures = run_peer(args, "one_vs_all_libkge.py", Path(sys.executable), folder)
    # Without the first batch, which allocates memory.
    seconds = statistics.median(figures["seconds"][1:])
    return {"queries_per_second": 2 * figures["edges"] / seconds, "peak_bytes": figures["peak_bytes"]}


def run_pykeen(args: argparse.Namespace, python: Path, folder: Path) -> dict[str, Any]:
    """Train by PyKEEN's LCWA loop."""
    figures = run_peer(args, "lcwa_pykeen.py", python, folder)
    speed = figures["queries"] / min(figures["seconds"][1:])
    return {"queries_per_second": speed, "peak_bytes": figures["peak_bytes"]}


def measure_limit(args: argparse.Namespace, dtype: str) -> float:
    """Measure the matmuls' limit of a type, in operations per second."""
    num_entities = int(np.load(args.dataset / "train.npy", mmap_mode="r")[:, [0, 2]].max()) + 1
    threads = max(1, len(os.sched_getaffinity(0)) // args.trainers)
    # The queries of a whole batch against a trainer's share of the entities.
    rows, columns = 2 * args.batch_size, num_entities // args.trainers
    return measure_product_limit(args.trainers, threads, rows, columns, args.dimension, dtype, seconds=3.0)


Runs = dict[str, list[dict[str, Any]]]


def measure(args: argparse.Namespace, work: Path) -> tuple[Runs, dict[str, float]]:
    """Run everything in turn; return the runs by name, and the medians of the limits by type."""
    runs: Runs = {}
    limits: dict[str, list[float]] = {}
    python = None
    if args.pykeen:
        python = peer_python("pykeen", args.peer_python, Path(".venv-pykeen"), []).absolute()
    for turn in range(args.pairs):
        for kind in filter(None, args.kinds.split(",")):
            dtype = kind.partition(":")[2]
            limits.setdefault(dtype, []).append(measure_limit(args, dtype))
            folder = work / f"{kind.replace(':', '-')}-{turn}"
            runs.setdefault(f"ours, {kind}", []).append(run_ours(args, kind, folder))
        if args.libkge_batches:
            figures = run_libkge(args, work / f"libkge-{turn}")
            runs.setdefault("LibKGE's 1vsAll in torch", []).append(figures)
        if python is not None:
            figures = run_pykeen(args, python, work / f"pykeen-{turn}")
            runs.setdefault("PyKEEN's LCWA", []).append(figures)
    return runs, {dtype: statistics.median(rates) for dtype, rates in limits.items()}


def report(args: argparse.Namespace, runs: Runs, limits: dict[str, float]) -> str:
    """Return the tables."""
    num_entities = int(np.load(args.dataset / "train.npy", mmap_mode="r")[:, [0, 2]].max()) + 1
    # Half of a positive's operations, which has two queries.
    flops = flops_per_positive(num_entities, args.dimension) / 2
    speeds = {
        name: statistics.median(run["queries_per_second"] for run in repeats)
        for name, repeats in runs.items()
    }
    peers = [name for name in speeds if not name.startswith("ours")]
    lines = [
        "| run | queries/s | GFLOP/s | of the matmuls' limit | peak memory, GB |"
        + "".join(f" : {name} |" for name in peers),
        "|---|--:|--:|--:|--:|" + "--:|" * len(peers),
    ]
    for name, speed in speeds.items():
        limit = limits.get(name.rpartition(":")[2])
        share = f"{speed * flops / limit:.0%}" if limit and name.startswith("ours") else ""
        peak = max(run["peak_bytes"] for run in runs[name]) / 1e9
        ratios = "".join(f" {speed / speeds[peer]:.2f}× |" for peer in peers)
        lines.append(f"| {name} | {speed:,.0f} | {speed * flops / 1e9:,.0f} | {share} | {peak:.2f} |{ratios}")
    lines.append("")
    lines += [f"The matmuls alone, {dtype}: {rate / 1e9:,.0f} GFLOP/s." for dtype, rate in limits.items()]
    for name, repeats in runs.items():
        phases = repeats[-1].get("phase_seconds", {})
        if phases:
            text = ", ".join(f"{phase} {1e3 * seconds:.1f}" for phase, seconds in phases.items())
            lines.append(f"{name}, ms of a trainer's batch: {text}.")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work = Path(tempfile.mkdtemp(prefix="one_vs_all_benchmark_"))
    try:
        runs, limits = measure(args, work)
    except (DglkgeError, RuntimeError, OSError) as error:
        print(f"one_vs_all.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(report(args, runs, limits))
    if args.json:
        figures = {"machine": describe_machine(), "product_flops_per_second": limits, "runs": runs}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
