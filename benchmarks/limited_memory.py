"""A graph from its triples to predictions while all processes share a limit of memory.

    python benchmarks/debian_graph.py --output data/debian-triples --sources Sources.xz
    python benchmarks/limited_memory.py --input data/debian-triples --work /some/disk --limit 1GiB

Each command (partition.py, dglkge train, evaluate, predict) runs in a control group of its own, whose memory,
page cache and shared memory included, is limited. The table has the time and the peak of each. It needs the
right to make a control group with the memory controller, usually root. Markdown goes to stdout, everything to
--json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import RUN_METRICS_FILE
from dglkge.distributed.jobs import parse_bytes
from dglkge.errors import DglkgeError, InputError
from measuring import our_job
from measuring.machine import describe_machine
from measuring.memory_group import MemoryGroup
from measuring.processes import run_watched

HEADER = "| command | seconds | CPU seconds | peak, GB | of the limit |\n|---|--:|--:|--:|--:|"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", required=True, type=Path, help="folder with train.tsv, valid.tsv and test.tsv")
    add("--work", required=True, type=Path, help="folder on a disk for the data set, the run and logs")
    add("--limit", default="1GiB", metavar="SIZE", help="of each command (%(default)s)")
    add("--trainers", type=int, default=2)
    add("--partition-options", default="", help='more options of partition.py, e.g. "--max_memory 500MB"')
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field of the run")
    add("--limit-seconds", type=float, default=3600.0, help="of each command (%(default)s)")
    add("--json", type=Path, help="file for all figures")
    return parser


def commands(args: argparse.Namespace, dataset: Path, run: Path, metrics: Path) -> dict[str, list[str]]:
    """Return the commands by their names, in their order; evaluate writes the metrics."""
    with (args.input / "test.tsv").open(encoding="utf-8") as lines:
        head, relation, _ = next(lines).rstrip("\n").split("\t")
    program = [sys.executable, "-m", "dglkge.cli.main"]
    config = args.work / "run.yaml"
    config.write_text(f"dataset: {dataset}\noutput: {run}\n", encoding="utf-8")
    sets = [word for setting in args.set for word in ("--set", setting)]
    partition = our_job.REPOSITORY / "partition_tools" / "partition.py"
    return {
        "partition": [
            *(sys.executable, str(partition), "--input", str(args.input), "--output", str(dataset)),
            *args.partition_options.split(),
        ],
        "train": [*program, "train", str(config), "--num_trainers", str(args.trainers), *sets],
        "evaluate": [*program, "evaluate", str(run), "--split", "test", "--output", str(metrics)],
        "predict": [*program, "predict", str(run), "--head", head, "--relation", relation, "--topk", "5"],
    }


def run_limited(command: Sequence[str], limit: int, log: Path, limit_seconds: float) -> dict[str, float]:
    """Run a command in a control group, and return what it took.

    Raises
    ------
    RuntimeError
        If it fails, or if the kernel has killed a process of it for lack of memory.
    """
    with MemoryGroup(limit) as group:
        try:
            done = run_watched(group.command(command), log, limit_seconds, our_job.VARIABLES)
        except RuntimeError as error:
            if killed := group.out_of_memory_kills():
                raise RuntimeError(f"{error}\nthe limit killed {killed} of its processes") from None
            raise
        if killed := group.out_of_memory_kills():
            raise RuntimeError(f"{command[0]} ended well, but {killed} processes were killed by the limit")
        return {
            "seconds": done.seconds,
            "processor_seconds": done.processor_seconds,
            "peak_group_bytes": group.peak_bytes(),
            "peak_proportional_bytes": done.peak_bytes,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands and print the table."""
    args = build_parser().parse_args(argv)
    try:
        limit = parse_bytes(args.limit)
        if not (args.input / "test.tsv").is_file():
            raise InputError(
                f"--input must have train.tsv, valid.tsv and test.tsv; {args.input} has no test.tsv"
            )
        args.work.mkdir(parents=True, exist_ok=True)
        dataset, run = args.work / "dataset", args.work / "run"
        metrics = args.work / RUN_METRICS_FILE
        for folder in (dataset, run):
            shutil.rmtree(folder, ignore_errors=True)
        usage: dict[str, dict[str, float]] = {}
        print(HEADER, flush=True)
        for name, command in commands(args, dataset, run, metrics).items():
            figures = run_limited(command, limit, args.work / f"{name}.log", args.limit_seconds)
            usage[name] = figures
            print(
                f"| {name} | {figures['seconds']:.0f} | {figures['processor_seconds']:.0f} "
                f"| {figures['peak_group_bytes'] / 1e9:.2f} | {figures['peak_group_bytes'] / limit:.2f} |",
                flush=True,
            )
    except DglkgeError as error:
        print(f"limited_memory.py: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"limited_memory.py: {error}", file=sys.stderr)
        return 1
    ranked: dict[str, Any] = json.loads(metrics.read_text(encoding="utf-8"))
    record = {
        "machine": describe_machine(),
        "limit_bytes": limit,
        "settings": args.set,
        "commands": usage,
        "metrics": {name: ranked[name] for name in ("both", "head", "tail")},
    }
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
