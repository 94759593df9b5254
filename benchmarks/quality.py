"""From the files of triples to a filtered test MRR: seconds of each part, or a table of the shipped recipes.

    python benchmarks/quality.py --input PATH/TO/FB15k-237 --runs bfloat16:3,bfloat16:12,float32:12
    python benchmarks/quality.py --table --input PATH/TO/DATASETS --seeds 3 --json table.json
    python benchmarks/quality.py --table --input PATH/TO/DATASETS --recipes fb15k237/complex

Each run is a job of its own from an empty folder, with one server; triples are partitioned once. "To the end
of training" counts partitioning, the start, all epochs and the last checkpoint on disk. With --table, --input
has a folder for each data set (FB15k-237, WN18RR, ...), and each recipe that ships (dglkge config recipes) is
trained as it stands, with --seeds several times if a training takes at most five minutes: the row has means,
and the largest MRR less the smallest. The best published figures at about the same size stand beside it. The
table of all takes hours: with --json, the same command goes on after the runs that the file has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from dglkge.checkpoint.layout import RUN_METRICS_FILE
from dglkge.config import load_config
from dglkge.config.load import recipe_files
from dglkge.data.dataset_files import replacing
from dglkge.data.public_data import find_public
from dglkge.errors import DglkgeError, unknown_name
from measuring import our_job
from measuring.machine import describe_machine
from measuring.processes import run_watched
from measuring.run_figures import RunFigures

LIMIT_SECONDS = 3600.0
OUR_CONFIG = our_job.REPOSITORY / "dglkge" / "config" / "recipes" / "fb15k237" / "complex-1min.yaml"
HEADER = (
    "| products | epochs | partitioning, s | start to first batch, s | training, s "
    "| files to the end of training, s | ranking, s | test MRR |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)
TABLE_HEADER = (
    "| data | recipe | D | MRR | spread | Hits@1 | Hits@3 | Hits@10 | pessimistic MRR | training, s "
    "| memory, GB | published MRR |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)
SHORT_SECONDS = 300.0
"""A training of at most so long is repeated with other seeds."""
FOLDERS = {
    "fb15k237": "FB15k-237",
    "wn18rr": "WN18RR",
    "wn18": "WN18",
    "codex-s": "CoDEx-S",
    "umls": "UMLS",
    "nations": "Nations",
    "icews14": "ICEWS14",
}
"""Folders of recipes, and what the folders of their triples are called."""
PUBLISHED = {
    ("FB15k-237", "complex"): ".348 (LibKGE), .388 (Chen et al. 2021, D = 2000)",
    ("FB15k-237", "distmult"): ".343 (LibKGE)",
    ("FB15k-237", "rescal"): ".356 (LibKGE)",
    ("FB15k-237", "rotate"): ".333 (LibKGE)",
    ("FB15k-237", "transe_l2"): ".313 (LibKGE)",
    ("FB15k-237", "transe_l1"): ".313 (LibKGE)",
    ("WN18RR", "complex"): ".475 (LibKGE), .49 (Lacroix et al. 2018, D = 1000)",
    ("WN18RR", "distmult"): ".453 (KGTuner)",
    ("WN18RR", "rotate"): ".478 (LibKGE)",
    ("WN18RR", "rescal"): ".467 (LibKGE)",
    ("WN18", "complex"): ".939 (DGL-KE)",
    ("WN18", "rotate"): ".944 (DGL-KE)",
    ("WN18", "simple"): ".945 (DGL-KE)",
    ("CoDEx-S", "complex"): ".465 (Safavi and Koutra 2020)",
    ("CoDEx-S", "rescal"): ".404 (Safavi and Koutra 2020)",
    ("CoDEx-S", "transe_l2"): ".354 (Safavi and Koutra 2020)",
    ("ICEWS14", "tcomplex"): ".61 (Lacroix et al. 2020)",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        required=True,
        type=Path,
        help="folder with train, valid and test files, or of such",
    )
    add("--table", action="store_true", help="train the shipped recipes")
    add("--recipes", default="", metavar="NAME,...", help="of --table (default: all)")
    add("--seeds", type=int, default=1, help="of --table: runs of a recipe that trains in five minutes")
    add("--limit-seconds", type=float, default=LIMIT_SECONDS, help="of each run")
    add("--runs", default="bfloat16:3,bfloat16:12,float32:12", metavar="PRODUCTS:EPOCHS,...")
    add("--config", type=Path, default=OUR_CONFIG, help="YAML file (default: FB15k-237's)")
    add("--defaults", action="store_true", help="instead of --config: all settings by default")
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


def partition(triples: Path, work: Path) -> tuple[Path, float]:
    """Partition triples; returns the data set and the seconds."""
    dataset = work / f"dataset-{triples.name}"
    program = our_job.REPOSITORY / "partition_tools" / "partition.py"
    command = [sys.executable, str(program), "--input", str(triples), "--output", str(dataset)]
    # A data set of the registry may have more columns than a triple.
    entry = find_public(triples.name)
    command += ["--columns", entry.columns] if entry is not None and entry.columns else []
    return dataset, run_watched(command, work / "partition.log", LIMIT_SECONDS).seconds


def recipes(text: str) -> list[Path]:
    """Return the files of recipes, by name ("fb15k237/complex"), or all of them.

    Raises
    ------
    InputError
        If a name is unknown.
    """
    paths = {name: path for name, path in recipe_files().items() if path.parent.name in FOLDERS}
    names = [name for name in text.split(",") if name] or list(paths)
    for name in names:
        if name not in paths:
            raise unknown_name("recipe", name, paths)
    return [paths[name] for name in names]


def measure_recipes(args: argparse.Namespace, work: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Train each recipe as it stands; returns the lines of the table and the figures."""
    lines, figures = TABLE_HEADER.splitlines(), _measured(args)
    datasets: dict[str, Path] = {}
    for path in recipes(args.recipes):
        data, name = FOLDERS[path.parent.name], f"{path.parent.name}/{path.stem}"
        runs = [run for run in figures if (run["recipe"], run["set"]) == (name, args.set)]
        while len(runs) < (args.seeds if all(run["wall_seconds"] <= SHORT_SECONDS for run in runs) else 1):
            if data not in datasets:
                datasets[data], _ = partition(args.input / data, work)
            sets = [f"dataset={datasets[data]}", "evaluation.split=test", f"seed={len(runs)}", *args.set]
            folder = work / f"job-{len(figures)}"
            run = our_job.train(path, sets, args.trainers, folder, args.limit_seconds)
            metrics = json.loads((folder / "run" / RUN_METRICS_FILE).read_text(encoding="utf-8"))["test"]
            shutil.rmtree(folder)
            runs.append({"recipe": name, "set": args.set, "data": data, "metrics": metrics, **run.to_dict()})
            figures.append(runs[-1])
            _write(args, figures)
        lines.append(recipe_row(data, path, runs))
        print(lines[-1], file=sys.stderr, flush=True)
    return lines, figures


def _measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs of an earlier table in the file of ``--json``."""
    if not args.json or not args.json.exists():
        return []
    return list(json.loads(args.json.read_text(encoding="utf-8"))["runs"])


def recipe_row(data: str, path: Path, runs: Sequence[dict[str, Any]]) -> str:
    """Return the row of a recipe: means of its runs, and the largest MRR less the smallest."""
    config = load_config(str(path), [])
    both = [run["metrics"]["both"] for run in runs]
    pessimistic = [run["metrics"]["ties"]["pessimistic"]["both"]["mrr"] for run in runs]
    means = {key: mean(one[key] for one in both) for key in ("mrr", "hits@1", "hits@3", "hits@10")}
    spread = max(one["mrr"] for one in both) - min(one["mrr"] for one in both)
    figures = [means.pop("mrr"), spread, *means.values(), mean(pessimistic)]
    texts = [f"{figure:.3f}".lstrip("0") for figure in figures]
    texts[1] = texts[1] if len(runs) > 1 else ""
    cells = [data, f"`{path.parent.name}/{path.name}`", str(config.model.dimension), *texts]
    cells += [f"{mean(run['wall_seconds'] for run in runs):.0f}"]
    cells += [f"{mean(run['peak_bytes'] for run in runs) / 1e9:.1f}"]
    return "| " + " | ".join([*cells, PUBLISHED.get((data, config.model.score_function.name), "")]) + " |"


def measure(args: argparse.Namespace, work: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Partition and train; returns the lines of the table and the figures."""
    lines, figures = HEADER.splitlines(), []
    dataset, partition_seconds = partition(args.input, work)
    for number, variant in enumerate(args.runs.split(",")):
        products, _, num_epochs = variant.partition(":")
        sets = [
            f"dataset={dataset}",
            f"training.matmul_dtype={products}",
            f"training.num_epochs={int(num_epochs)}",
            "evaluation.split=test",
            *args.set,
        ]
        # A folder of its own for each run: nothing is resumed.
        config = None if args.defaults else args.config
        run = our_job.train(config, sets, args.trainers, work / f"job-{number}", args.limit_seconds)
        lines.append(row(products, int(num_epochs), partition_seconds, run))
        figures.append({"products": products, "partition_seconds": partition_seconds, **run.to_dict()})
    return lines, figures


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work = Path(tempfile.mkdtemp(prefix="quality_benchmark_"))
    try:
        lines, runs = (measure_recipes if args.table else measure)(args, work)
    except (DglkgeError, RuntimeError) as error:
        print(f"quality.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join(lines))
    _write(args, runs)
    return 0


def _write(args: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """Write the figures of all runs, if there is a file for them."""
    if args.json:
        with replacing(args.json) as file:
            file.write(json.dumps({"machine": describe_machine(), "runs": runs}, indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
