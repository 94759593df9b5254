"""One GPU in ten minutes: exactness, speed of sampled negatives, MRR; tables for the docs.

    python benchmarks/gpu.py --dataset data/fb15k237 --json gpu.json
    python benchmarks/gpu.py --parts speed --work /tmp/gpu

* exactness: the tests that train on a GPU, against the plain twin on the CPU.
* speed: ComplEx, D = 100, against 1,000 negatives of each chunk of 1,000 triples, with all tables on the GPU
  and row-wise Adagrad, on a synthetic graph (synthetic_graph.py); the first epoch is the warm-up.
* mrr: ComplEx, D = 2000, against all entities with relation prediction (Chen et al. 2021), trained and
  ranked on the test split of FB15k-237.

Markdown goes to stdout, everything to --json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import device
from dglkge.errors import DglkgeError
from measuring import our_job
from measuring.machine import describe_machine

TESTS = ("tests/training/test_on_gpu.py", "tests/training/test_drawn_on_device.py")
PARTS = ("exactness", "speed", "mrr")
ON_GPU = (
    "training.device=cuda",
    "tables.storage=device",
    "checkpoint.every_epochs=0",
    "training.profile=true",
)
RANKED = (
    "model.score_function=complex",
    "model.dimension=2000",
    "training.objective=one_vs_all",
    "training.relation_prediction=4",
    "training.batch_size=2000",
    "training.num_epochs=64",
    "training.compile=true",
    "regularizer.name=n3",
    "regularizer.weight=0.05",
    "optimizer.lr=0.3",
    "optimizer.schedule={name: CosineAnnealingLR, T_max: 64}",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), metavar="NAME,...", help="default: %(default)s")
    add("--dataset", help="partitioned FB15k-237, for mrr (default: by name, which downloads it)")
    add("--entities", type=int, default=5_000_000)
    add("--relations", type=int, default=1000)
    add("--edges", type=int, default=20_000_000)
    add("--epochs", type=int, default=5, help="of speed; the first is the warm-up (default: %(default)s)")
    add("--batch-sizes", default="500000,1000000", metavar="N,...", help="of speed (default: %(default)s)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field of mrr")
    add("--limit-seconds", type=float, default=600.0, help="of each run")
    add("--work", type=Path, help="where graph and runs are kept (default: a temporary folder, removed)")
    add("--json", type=Path, help="file for all figures")
    return parser


def exactness(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the tests; returns pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=args.limit_seconds, cwd=device.REPOSITORY
    )
    (work / "tests.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    return {"status": done.returncode, "summary": done.stdout.strip().splitlines()[-1]}


def speed_settings(batch_size: str) -> list[str]:
    """Return the settings of a case of speed."""
    return [
        *ON_GPU,
        "model.score_function=complex",
        "model.dimension=100",
        "negatives.num_uniform=1000",
        "negatives.chunk_size=1000",
        f"training.batch_size={batch_size}",
        "training.compile=true",
        "regularizer.name=none",
        "optimizer.name=row_adagrad",
        "evaluation.split=none",
    ]


def speed(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the figures of each batch size."""
    dataset = device.make_dataset(args, work)
    sets = [f"dataset={dataset}", f"training.num_epochs={args.epochs + 1}"]
    figures = {}
    for size in args.batch_sizes.split(","):
        folder = work / f"speed-{size}"
        # An epoch less than configured: no checkpoint is written.
        run = our_job.train(
            None, [*sets, *speed_settings(size)], 1, folder, args.limit_seconds, max_epochs=args.epochs
        )
        figures[size] = run.to_dict()
    return figures


def mrr(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the figures of the run."""
    sets = [f"dataset={args.dataset or 'fb15k-237'}", *ON_GPU, *RANKED, *args.set]
    done = our_job.train(None, sets, 1, work / "mrr", args.limit_seconds)
    return done.to_dict()


def report(figures: dict[str, Any]) -> str:
    """Return the tables."""
    lines = [f"GPU: {figures['gpu']}", ""]
    if "exactness" in figures:
        lines += [f"exactness: {figures['exactness']['summary']}", ""]
    if "speed" in figures:
        lines += ["| triples in a batch | edges/s | seconds to the first batch |", "|---:|---:|---:|"]
        for size, run in figures["speed"].items():
            lines.append(
                f"| {int(size):,} | {run['edges_per_second']:,.0f} | {run['first_batch_seconds']:.1f} |"
            )
        lines.append("")
    if "mrr" in figures:
        run = figures["mrr"]
        lines += [
            "| FB15k-237 | seconds of training | test MRR |",
            "|---|---:|---:|",
            f"| ComplEx, D = 2000 | {run['wall_seconds']:.0f} | {run['mrr']:.4f} |",
        ]
    return "\n".join(lines).rstrip()


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    parts = args.parts.split(",")
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        print(f"gpu.py: {unknown[0]!r} is no part; known: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(f"gpu.py: torch {torch.__version__} finds no GPU here", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="gpu_benchmark_")) if args.work is None else args.work
    work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "machine": describe_machine()}
    try:
        for name in parts:
            figures[name] = globals()[name](args, work.resolve())
    except (DglkgeError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(report(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
