"""From the files of triples to a filtered test MRR: seconds of each part, for some numbers of epochs.

    python examples/benchmarks/quality.py --input PATH/TO/FB15k-237 --runs bfloat16:3,bfloat16:12,float32:12

The triples are partitioned once; each run is then a job of its own from an empty folder, with one server.
"To the end of training" counts partitioning, the start, all epochs and the last checkpoint on disk.
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

from dglkge.errors import DglkgeError
from measuring import our_job
from measuring.machine import describe_machine
from measuring.processes import run_watched
from measuring.run_figures import RunFigures

LIMIT_SECONDS = 1800.0
OUR_CONFIG = our_job.REPOSITORY / "examples" / "fb15k237" / "complex.yaml"
HEADER = (
    "| products | epochs | partitioning, s | start to first batch, s | training, s "
    "| files to the end of training, s | ranking, s | test MRR |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", required=True, type=Path, help="folder with train, valid and test files")
    add("--runs", default="bfloat16:3,bfloat16:12,float32:12", metavar="PRODUCTS:EPOCHS,...")
    add("--config", type=Path, default=OUR_CONFIG, help="YAML file (default: FB15k-237's)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    add("--trainers", type=int, default=2)
    add("--json", type=Path, help="file for all figures")
    return parser


def row(products: str, num_epochs: int, partition_seconds: float, run: RunFigures) -> str:
    """Return the row of a run; the job's seconds after its training are those of the ranking, and its end."""
    # Seconds from the start of the command until training begins.
    before = run.start_marks["training"]
    whole = partition_seconds + before + run.wall_seconds
    ranking = run.job_seconds - before - run.wall_seconds
    cells = [products, str(num_epochs), f"{partition_seconds:.1f}", f"{run.first_batch_seconds:.1f}"]
    cells += [f"{run.wall_seconds:.1f}", f"{whole:.1f}", f"{ranking:.1f}", f"{run.mrr or 0:.4f}"]
    return "| " + " | ".join(cells) + " |"


def measure(args: argparse.Namespace, work: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Partition and train; returns the lines of the table and the figures."""
    dataset, lines, found = work / "dataset", HEADER.splitlines(), []
    program = our_job.REPOSITORY / "partition_tools" / "partition.py"
    command = [sys.executable, str(program), "--input", str(args.input), "--output", str(dataset)]
    partition_seconds = run_watched(command, work / "partition.log", LIMIT_SECONDS).seconds
    for number, chosen in enumerate(args.runs.split(",")):
        products, _, num_epochs = chosen.partition(":")
        sets = [
            f"dataset={dataset}",
            f"training.matmul_dtype={products}",
            f"training.num_epochs={int(num_epochs)}",
            "evaluation.split=test",
            *args.set,
        ]
        # A folder of its own for each run: nothing is resumed.
        run = our_job.train(args.config, sets, args.trainers, work / f"job-{number}", LIMIT_SECONDS)
        lines.append(row(products, int(num_epochs), partition_seconds, run))
        found.append({"products": products, "partition_seconds": partition_seconds, **run.to_dict()})
    return lines, found


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work = Path(tempfile.mkdtemp(prefix="quality_benchmark_"))
    try:
        lines, found = measure(args, work)
    except (DglkgeError, RuntimeError) as error:
        print(f"quality.py: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join(lines))
    if args.json:
        figures = {"machine": describe_machine(), "runs": found}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
