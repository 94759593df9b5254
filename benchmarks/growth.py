"""Growth of cost: by graph, dimension, negatives and trainers; of partitioning, by triples.

    python benchmarks/growth.py sizes --values 10000,100000,1000000,10000000 --work /some/disk
    python benchmarks/growth.py dimension --dataset data/fb15k237
    python benchmarks/growth.py partition --values 1000000,10000000 --triples_per_entity 10 \\
        --work /some/disk --partition_options "--max_memory 500MB"

Jobs train a few hundred batches of an epoch with one server. "sizes" makes graphs with as many edges as
entities (synthetic_graph.py), and "partition" runs partition.py on them, beside a plain read of the same file
by pyarrow, into a table of dictionary columns. The exponent is that of the cost between a row and the one
before: of processor time per edge in jobs, where 0 is no growth and 1 is linear, and of seconds in all for
"partition", where 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
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
from measuring.product_limit import flops_per_positive
from measuring.run_figures import RunFigures

DEFAULT_VALUES = {
    "sizes": "10000,100000,1000000",
    "dimension": "50,100,200,400,1000",
    "negatives": "10,100,1000,4000",
    "trainers": "1,2,3,4",
    "partition": "10000,100000,1000000",
}
NUM_EPOCHS = 2  # the second, when everything is warm, counts
LIMIT_SECONDS = 900.0
NUM_RELATIONS = 100
PYARROW_READ = """
import sys, pyarrow as pa, pyarrow.csv as csv
names = ["head", "relation", "tail"]
types = dict.fromkeys(names, pa.dictionary(pa.int32(), pa.string()))
parse = csv.ParseOptions(delimiter="\\t", quote_char=False)
print(csv.read_csv(sys.argv[1], csv.ReadOptions(column_names=names), parse,
                   csv.ConvertOptions(column_types=types)).num_rows)
"""

JOB_HEADER = (
    "| {what} | edges/s | CPU s per million edges | exponent | GFLOP/s | peak memory, GB "
    "| start to first batch, s |\n|--:|--:|--:|--:|--:|--:|--:|"
)
PARTITION_HEADER = (
    "| triples | seconds per million | exponent | pyarrow, seconds per million | ratio "
    "| peak memory, GB | per million, GB | pyarrow, peak GB | ratio |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=DEFAULT_VALUES)
    add("--values", help="sizes of the rows, ascending; the defaults take a minute or two")
    add("--dataset", type=Path, help="what dimension, negatives and trainers train on")
    add("--dimension", type=int, help="default 200; for sizes 50")
    add("--negatives", type=int, help="default 1000; for sizes 100")
    add("--trainers", type=int, default=2)
    add("--matmul_dtypes", default="float32")
    add("--batches", type=int, default=150, help="of each epoch (default: 150)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    add("--work", type=Path, help="folder for graphs, which are kept there (default: a temporary one)")
    add("--triples_per_entity", type=int, default=1, help="of the graphs that are partitioned (1)")
    add("--partition_options", default="", help='more options of partition.py, e.g. "--max_memory 1GB"')
    add("--json", type=Path, help="file for all figures")
    return parser


def exponent(costs: Sequence[float], sizes: Sequence[float]) -> float | None:
    """Return the power of the size by which the cost has grown between the last two rows."""
    if len(costs) < 2:
        return None
    return math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2])


def triples_of(num: int, work: Path, per_entity: int = 1) -> Path:
    """Return a folder with a synthetic graph of so many edges; made unless it is there."""
    folder = work / (f"triples-{num}" if per_entity == 1 else f"triples-{num}-{per_entity}")
    if not folder.exists():
        command = [sys.executable, str(our_job.SCRIPT.with_name("synthetic_graph.py"))]
        command += [
            "--entities",
            str(num // per_entity),
            "--edges",
            str(num),
            "--relations",
            str(NUM_RELATIONS),
        ]
        run_watched([*command, "--output", str(folder)], work / "synthetic.log", LIMIT_SECONDS)
    return folder


def partition_command(triples: Path, output: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command that makes a dataset, of one partition unless the options say otherwise."""
    program = our_job.REPOSITORY / "partition_tools" / "partition.py"
    return [sys.executable, str(program), "--input", str(triples), "--output", str(output), *options]


def dataset_of(num: int, work: Path) -> Path:
    """Return a synthetic dataset; made unless it is there."""
    folder = work / f"dataset-{num}"
    if not folder.exists():
        run_watched(partition_command(triples_of(num, work), folder), work / "partition.log", LIMIT_SECONDS)
    return folder


def train(args: argparse.Namespace, value: int, work: Path) -> tuple[RunFigures, int]:
    """Train with one value of what grows; returns the figures and the products' operations per positive."""
    settings = {
        "dimension": args.dimension or (50 if args.what == "sizes" else 200),
        "negatives": args.negatives or (100 if args.what == "sizes" else 1000),
        "trainers": args.trainers,
        args.what: value,
    }
    dataset = dataset_of(value, work) if args.what == "sizes" else args.dataset.resolve()
    sets = [
        f"dataset={dataset}",
        f"model.dimension={settings['dimension']}",
        f"negatives.num_uniform={settings['negatives']}",
        f"training.matmul_dtype={args.matmul_dtypes}",
        # One more than are trained: leaving early skips the last commit.
        f"training.num_epochs={NUM_EPOCHS + 1}",
        "checkpoint.every_epochs=0",
        "checkpoint.background=false",
        "regularizer.name=none",
        "evaluation.split=none",
        *args.set,
    ]
    folder = work / f"job-{args.what}-{value}"
    # Without the checkpoint of an earlier call, from which the job would resume.
    shutil.rmtree(folder, ignore_errors=True)
    limits = {"max_batches": args.batches, "max_epochs": NUM_EPOCHS}
    run = our_job.train(None, sets, settings["trainers"], folder, LIMIT_SECONDS, **limits)
    return run, flops_per_positive(settings["negatives"], settings["dimension"])


def job_rows(args: argparse.Namespace, values: Sequence[int], work: Path) -> tuple[list[str], list[Any]]:
    """Train with each value; returns the lines of the table and the figures."""
    lines, rows = JOB_HEADER.format(what=args.what).splitlines(), []
    costs: list[float] = []
    for number, value in enumerate(values):
        run, flops = train(args, value, work)
        costs.append(run.processor_seconds_per_million)
        power = exponent(costs, values[: number + 1])
        lines.append(
            f"| {value:,} | {run.edges_per_second:,.0f} | {costs[-1]:.2f} | {_number(power)} "
            f"| {run.edges_per_second * flops / 1e9:,.0f} | {run.peak_bytes / 1e9:.2f} "
            f"| {run.first_batch_seconds:.1f} |"
        )
        rows.append({"value": value, **run.to_dict()})
    return lines, rows


def partition_rows(
    args: argparse.Namespace, values: Sequence[int], work: Path
) -> tuple[list[str], list[Any]]:
    """Partition a graph of each size, and read its file with pyarrow; returns table and figures."""
    lines, rows = PARTITION_HEADER.splitlines(), []
    costs: list[float] = []
    for number, value in enumerate(values):
        triples = triples_of(value, work, args.triples_per_entity)
        output = work / f"dataset-{value}"
        shutil.rmtree(output, ignore_errors=True)
        reading = [sys.executable, "-c", PYARROW_READ, str(triples / "train.tsv")]
        plain = run_watched(reading, work / "pyarrow.log", LIMIT_SECONDS)
        command = partition_command(triples, output, shlex.split(args.partition_options))
        build = run_watched(command, work / "partition.log", LIMIT_SECONDS)
        costs.append(build.seconds)
        power = exponent(costs, values[: number + 1])
        millions = value / 1e6
        lines.append(
            f"| {value:,} | {build.seconds / millions:.1f} | {_number(power)} "
            f"| {plain.seconds / millions:.1f} "
            f"| {build.seconds / plain.seconds:.1f}× | {build.peak_bytes / 1e9:.2f} "
            f"| {build.peak_bytes / 1e9 / millions:.2f} | {plain.peak_bytes / 1e9:.2f} "
            f"| {build.peak_bytes / plain.peak_bytes:.1f}× |"
        )
        rows.append({"value": value, "ours": vars(build), "pyarrow": vars(plain)})
    return lines, rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = build_parser()
    args = parser.parse_args(words)
    if args.what not in ("sizes", "partition") and args.dataset is None:
        parser.error(f"{args.what} needs --dataset")
    values = [int(value) for value in (args.values or DEFAULT_VALUES[args.what]).split(",")]
    work = (args.work or Path(tempfile.mkdtemp(prefix="growth_benchmark_"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        rows = (
            partition_rows(args, values, work) if args.what == "partition" else job_rows(args, values, work)
        )
    except (DglkgeError, RuntimeError) as error:
        print(f"growth.py: {error}", file=sys.stderr)
        return 1
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    lines, row_figures = rows
    print("\n".join(lines))
    if args.json:
        figures = {"machine": describe_machine(), "what": args.what, "rows": row_figures}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
