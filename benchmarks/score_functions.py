"""Speed of every score function with sampled negatives: ours as a real job, beside the same formula in torch.

    python benchmarks/score_functions.py --dataset data/fb15k237

Ours runs under dglkge-launch with one server, in float32 and in bfloat16 (a score function without matmuls is
measured once). The peer is one process with all cores that computes scores as DGL-KE does, see
measuring/plain_torch_scores.py. Both train the same triples with as many negatives for each batch and side.
Everything runs in turn, --pairs times; figures are medians. Markdown goes to stdout, everything to --json.
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

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.errors import DglkgeError
from dglkge.model.kge_model import build_model
from measuring import our_job
from measuring.machine import describe_machine
from measuring.plain_torch_scores import KINDS
from measuring.processes import run_watched

PEER = Path(__file__).resolve().parent / "measuring" / "plain_torch_scores.py"
LOSSES = ("softmax", "self_adversarial")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", required=True, type=Path, help="folder written by partition_tools/partition.py")
    add("--score-functions", default=",".join(KINDS), metavar="NAME,...")
    add("--losses", default=",".join(LOSSES), metavar="NAME,...")
    add("--dimension", type=int, default=200)
    add("--batch-size", type=int, default=1000)
    add("--negatives", type=int, default=1000, help="for each batch and side")
    add("--trainers", type=int, default=2)
    add("--max-batches", type=int, default=60, help="of each of our epochs, of which there are two")
    add("--peer-batches", type=int, default=12)
    add("--peer-seconds", type=float, default=60.0, help="the peer begins no batch after so many seconds")
    add("--pairs", type=int, default=1, help="how often all runs are repeated, in turn")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field of ours")
    add("--limit-seconds", type=float, default=900.0, help="of each run")
    add("--json", type=Path, help="file for all figures")
    return parser


def run_ours(args: argparse.Namespace, name: str, loss: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Train by one of our settings; the first epoch warms up."""
    settings = [
        f"dataset={args.dataset.resolve()}",
        f"model.score_function={name}",
        f"model.dimension={args.dimension}",
        "regularizer.name=none",  # as the peers
        f"loss.name={loss}",
        f"training.matmul_dtype={dtype}",
        f"training.batch_size={args.batch_size}",
        f"negatives.num_uniform={args.negatives}",
        f"negatives.chunk_size={args.batch_size}",
        "training.num_epochs=2",
        "training.profile=true",
        "evaluation.split=none",
        "checkpoint.every_epochs=0",
        *args.set,
    ]
    run = our_job.train(None, settings, args.trainers, folder, args.limit_seconds, args.max_batches)
    shutil.rmtree(folder / "run" / CHECKPOINT_FOLDER, ignore_errors=True)
    return {
        "edges_per_second": run.edges_per_second,
        "peak_bytes": run.peak_bytes,
        "phase_seconds": run.phase_seconds,
    }


def run_peer(args: argparse.Namespace, name: str, loss: str, folder: Path) -> dict[str, Any]:
    """Train by plain torch; the first batch, which allocates memory, does not count."""
    folder.mkdir(parents=True)
    settings = {
        "triples": str(args.dataset.resolve() / "train.npy"),
        "score_function": name,
        "loss": loss,
        "dimension": args.dimension,
        "batch_size": args.batch_size,
        "num_negatives": args.negatives,
        "max_batches": args.peer_batches,
        "max_seconds": args.peer_seconds,
        "lr": 0.1,
        "seed": 0,
        "num_threads": len(os.sched_getaffinity(0)),
        "timings": str(folder / "timings.json"),
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    done = run_watched([sys.executable, str(PEER), str(path)], folder / "train.log", args.limit_seconds)
    timings = json.loads((folder / "timings.json").read_text(encoding="utf-8"))
    seconds = statistics.median(timings["seconds"][1:] or timings["seconds"])
    return {"edges_per_second": timings["edges"] / seconds, "peak_bytes": done.peak_bytes}


def dtypes_of(name: str, dimension: int) -> list[str]:
    """Types of matmuls that make a difference to a score function."""
    operations = build_model(name, dimension, True).score_function.operations(dimension)
    return ["float32", "bfloat16"] if operations else ["float32"]


def measure(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Run everything in turn; returns a row for each score function and loss, and writes those it has."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for turn in range(args.pairs):
        for name in args.score_functions.split(","):
            for loss in args.losses.split(","):
                row = rows.setdefault((name, loss), {"score_function": name, "loss": loss, "runs": {}})
                for dtype in dtypes_of(name, args.dimension):
                    figures = run_ours(args, name, loss, dtype, work / f"{name}-{loss}-{dtype}-{turn}")
                    row["runs"].setdefault(dtype, []).append(figures)
                figures = run_peer(args, name, loss, work / f"{name}-{loss}-peer-{turn}")
                row["runs"].setdefault("peer", []).append(figures)
                write(args, list(rows.values()))
                print(f"{name}, {loss}: measured", file=sys.stderr, flush=True)
    return list(rows.values())


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what has been measured: a run that is ended early keeps it."""
    if args.json:
        report = {"machine": describe_machine(), "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [
        "| score function | loss | float32, edges/s | bfloat16 | plain torch | float32 ratio | best ratio |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        speeds = {
            kind: statistics.median(run["edges_per_second"] for run in repeats)
            for kind, repeats in row["runs"].items()
        }
        peer, exact, rounded = speeds["peer"], speeds["float32"], speeds.get("bfloat16")
        best = max(exact, rounded or 0)
        cells = [row["score_function"], row["loss"], f"{exact:,.0f}", f"{rounded:,.0f}" if rounded else ""]
        cells += [f"{peer:,.0f}", f"{exact / peer:.1f}×", f"{best / peer:.1f}×"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work = Path(tempfile.mkdtemp(prefix="score_functions_benchmark_"))
    try:
        rows = measure(args, work)
    except (DglkgeError, RuntimeError, OSError) as error:
        print(f"score_functions.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
