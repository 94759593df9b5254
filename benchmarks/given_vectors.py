"""Valid and test MRR after a few epochs, with random initial rows and with given vectors, from equal seeds.

    python benchmarks/given_vectors.py --data demo/stdlib --vectors demo/stdlib-vectors.parquet \
        --config dglkge/config/recipes/stdlib/complex.yaml --epochs 2,5,15

Each setting is trained by a job of its own for each number of epochs and seed. Markdown goes to stdout,
everything to --json.
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

import numpy as np

from dglkge.checkpoint.layout import RUN_METRICS_FILE
from dglkge.errors import DglkgeError
from measuring import our_job
from measuring.machine import describe_machine

VARIANTS = {
    "random": ["model.init_from="],
    "random, std 0.1": ["model.init_from=", "model.init_scale=0.1"],
    "pca": [],
    "random projection": ["model.init_from.projection=random"],
    "pca, std 0.1": ["model.init_from.std=0.1"],
    "pca, std 0.1, frozen": ["model.init_from.std=0.1", "model.init_from.frozen=true"],
}
HEADER = "| initial rows | epochs | valid MRR | test MRR | test Hits@10 |\n|---|--:|--:|--:|--:|"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, type=Path, help="folder of a partitioned data set")
    add("--vectors", required=True, type=Path, help="file for model.init_from.path")
    add("--config", required=True, type=Path)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field, in all runs")
    add("--epochs", default="2,5,15", metavar="N,...")
    add("--seeds", default="0", metavar="N,...")
    add("--variants", default=";".join(VARIANTS), metavar="NAME;...")
    add("--trainers", type=int, default=2)
    add("--limit-seconds", type=float, default=1800.0, help="of each run")
    add("--json", type=Path, help="file for all figures")
    return parser


def measure(args: argparse.Namespace, variant: str, epochs: int, seed: int, work: Path) -> dict[str, Any]:
    """Train once; returns the metrics of both splits."""
    folder = work / "run"
    sets = [f"dataset={args.data.absolute()}", f"seed={seed}", f"training.num_epochs={epochs}"]
    sets += [f"evaluation.valid_every_epochs={epochs}", "evaluation.split=test", "checkpoint.every_epochs=0"]
    sets += [f"model.init_from.path={args.vectors.absolute()}", *args.set, *VARIANTS[variant]]
    run = our_job.train(args.config, sets, args.trainers, folder, args.limit_seconds)
    metrics = json.loads((folder / "run" / RUN_METRICS_FILE).read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    figures = {split: metrics[split]["both"] for split in ("valid", "test")}
    return {"variant": variant, "epochs": epochs, "seed": seed, "seconds": run.wall_seconds, **figures}


def row(variant: str, epochs: int, runs: Sequence[dict[str, Any]]) -> str:
    """Return a line of the table: means over the seeds."""
    means = [np.mean([run[split][name] for run in runs]) for split, name in
             (("valid", "mrr"), ("test", "mrr"), ("test", "hits@10"))]  # fmt: skip
    return f"| {variant} | {epochs} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    variants = args.variants.split(";")
    work, lines, runs = Path(tempfile.mkdtemp(prefix="given_vectors_")), [], []
    try:
        for epochs in map(int, args.epochs.split(",")):
            for variant in variants:
                repeats = [
                    measure(args, variant, epochs, seed, work) for seed in map(int, args.seeds.split(","))
                ]
                runs += repeats
                lines.append(row(variant, epochs, repeats))
                print(lines[-1], file=sys.stderr, flush=True)
    except (DglkgeError, RuntimeError) as error:
        print(f"given_vectors.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join([HEADER, *lines]))
    if args.json:
        figures = {"machine": describe_machine(), "runs": runs}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
