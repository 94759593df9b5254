"""Speed of training and ranking on a device, on a synthetic graph: sampled negatives and all entities.

    python benchmarks/device.py --device cuda
    python benchmarks/device.py --device cuda --entities 10000000 --edges 50000000 --json gpu.json
    python benchmarks/device.py --device cpu --entities 2000 --edges 20000 --batch-size 2000

The graph has the skew of real ones (synthetic_graph.py) and one partition. Each case is a job of one server
and some trainers under dglkge-launch (default: one trainer for each GPU, else two), without a ranking; the
first epoch is the warm-up. Then the checkpoint of the first case is ranked by dglkge evaluate, which reads
files: its time includes opening them. --devices cpu,cuda runs all cases on both in turn; --compile adds the
cases of sampled negatives with training.compile. Markdown goes to stdout, everything to --json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dglkge.errors import DglkgeError
from dglkge.launch.machine import usable_gpus
from dglkge.typing import CPU_DEVICE, DEVICES
from measuring import our_job, tables
from measuring.machine import describe_machine

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent

COMPILED = "training.compile=true"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", "--devices", dest="devices", default="auto", metavar="NAME,...",
        help=f"one or several of {', '.join(DEVICES)} (default: %(default)s)")  # fmt: skip
    add("--entities", type=int, default=1_000_000)
    add("--relations", type=int, default=1000)
    add("--edges", type=int, default=10_000_000)
    add("--dimension", type=int, default=100)
    add("--negatives", type=int, default=1000, help="of a chunk (default: %(default)s)")
    add("--batch-size", type=int, default=100_000, help="triples (default: %(default)s)")
    add("--chunk-size", type=int, default=1000, help="triples that share negatives (default: %(default)s)")
    add("--all-dimension", type=int, default=500, help="dimension of one_vs_all (default: %(default)s)")
    add("--all-batch-size", type=int, default=1000, help="triples of its batch (default: %(default)s)")
    add("--all-batches", type=int, default=50, help="leave its epochs after so many batches")
    add("--epochs", type=int, default=3)
    add("--trainers", type=int, help="default: one for each GPU, else 2")
    add("--score-functions", default="complex,transe_l2", metavar="NAME,...",
        help="of the cases with sampled negatives (default: %(default)s)")  # fmt: skip
    add("--compile", action="store_true", help="sampled negatives also with training.compile, but for cpu")
    add("--ranked", type=int, default=1000, help="triples that are ranked; 0: none (default: %(default)s)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    add("--limit-seconds", type=float, default=1800.0, help="of each run")
    add("--work", type=Path, help="where graph and runs are kept (default: a temporary folder, removed)")
    add("--json", type=Path, help="file for all figures")
    return parser


def make_dataset(args: argparse.Namespace, folder: Path) -> Path:
    """Write the graph and partition it, unless the folder has it."""
    source, dataset = folder / "triples", folder / "dataset"
    if not dataset.exists():
        shape = ("--entities", args.entities, "--relations", args.relations, "--edges", args.edges)
        make = [HERE / "synthetic_graph.py", *shape, "--output", source]
        build = [REPOSITORY / "partition_tools" / "partition.py", "--input", source, "--output", dataset]
        for command in (make, build):
            subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return dataset


def cases(args: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """Return the settings of each case, and the batches after which its epochs are left; 0: whole epochs."""
    # No penalty: it costs the same in all of them.
    common = ["regularizer.name=none", "optimizer.name=row_adagrad"]
    settings = {
        f"{name}, D = {args.dimension}, {args.negatives} negatives": (
            [
                *common,
                f"model.score_function={name}",
                f"model.dimension={args.dimension}",
                f"negatives.num_uniform={args.negatives}",
                f"negatives.chunk_size={args.chunk_size}",
                f"training.batch_size={args.batch_size}",
            ],
            0,
        )
        for name in args.score_functions.split(",")
    }
    if args.compile:
        compiled = {name: ([*sets, COMPILED], batches) for name, (sets, batches) in settings.items()}
        settings |= {f"{name}, compiled": case for name, case in compiled.items()}
    settings[f"complex, D = {args.all_dimension}, one_vs_all"] = (
        [
            *common,
            "model.score_function=complex",
            f"model.dimension={args.all_dimension}",
            "training.objective=one_vs_all",
            f"training.batch_size={args.all_batch_size}",
        ],
        args.all_batches,
    )
    return settings


def measure(args: argparse.Namespace, work: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Run all cases on all devices; return the figures by case and device."""
    dataset = make_dataset(args, work)
    trainers = args.trainers or len(usable_gpus()) or 2
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    run = None
    for number, (name, (settings, max_batches)) in enumerate(cases(args).items()):
        for device in args.devices.split(","):
            if device == CPU_DEVICE and COMPILED in settings:
                continue
            folder = work / f"{number}-{device}"
            sets = [f"dataset={dataset}", f"training.num_epochs={args.epochs}", "evaluation.split=none"]
            sets += [f"training.device={device}", "training.profile=true", *settings, *args.set]
            done = our_job.train(None, sets, trainers, folder, args.limit_seconds, max_batches)
            measured.setdefault(name, {})[device] = done.to_dict()
            run = run or folder / "run"
    if run is not None and args.ranked:
        name = f"ranking of {args.ranked} triples, D = {args.dimension}"
        measured[name] = {device: rank(args, run, device) for device in args.devices.split(",")}
    return measured


def rank(args: argparse.Namespace, run: Path, device: str) -> dict[str, Any]:
    """Rank the first triples of the test split; returns the seconds of the command and the MRR."""
    command = [sys.executable, "-m", "dglkge.cli.main", "evaluate", str(run), "--limit", str(args.ranked)]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--device", device, "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=args.limit_seconds,
    )
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "mrr": json.loads(done.stdout)["both"]["mrr"]}


def report(cases: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the tables."""
    lines = ["| case | device | edges/s | first epoch | seconds |", "|---|---|---:|---:|---:|"]
    for name, by_device in cases.items():
        for device, figures in by_device.items():
            if "edges_per_second" in figures:
                speeds = f"{figures['edges_per_second']:,.0f} | {figures['first_edges_per_second']:,.0f}"
                lines.append(f"| {name} | {device} | {speeds} | {figures['wall_seconds']:.1f} |")
            else:
                lines.append(
                    f"| {name}, MRR {figures['mrr']:.4f} | {device} | | | {figures['seconds']:.1f} |"
                )
    phases = {
        f"{name}, {device}": figures["phase_seconds"]
        for name, by_device in cases.items()
        for device, figures in by_device.items()
        if figures.get("phase_seconds")
    }
    parts = ["\n".join(lines)]
    parts += [tables.columns_table("ms of a trainer's batch", phases, 1e3, 2)] if phases else []
    return "\n\n".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    unknown = [name for name in args.devices.split(",") if name not in DEVICES]
    if unknown:
        print(f"device.py: {unknown[0]!r} is no device; known: {', '.join(DEVICES)}", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="device_benchmark_")) if args.work is None else args.work
    work.mkdir(parents=True, exist_ok=True)
    try:
        measured = measure(args, work.resolve())
    except (DglkgeError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"device.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(report(measured))
    if args.json:
        arguments = {name: str(value) for name, value in vars(args).items()}
        everything = {"machine": describe_machine(), "arguments": arguments, "cases": measured}
        args.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
