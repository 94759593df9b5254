"""Filtered test MRR on small graphs: our shipped recipes beside models of PyKEEN and dicee, in one run.

    python benchmarks/small_graphs.py --input PATH/TO/DATASETS --data umls,nations

Each peer trains several models with the settings below, one process with all cores, and ranks the test split
with its own filtered evaluation (realistic ties in PyKEEN). Each peer has an environment of its own, which is
made on first use. Markdown goes to stdout, everything to --json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import RUN_METRICS_FILE
from dglkge.config import load_config
from dglkge.data.dataset_files import SPLITS
from dglkge.errors import DglkgeError
from measuring import our_job
from measuring.machine import describe_machine
from measuring.peer_environment import peer_python
from measuring.processes import run_watched
from quality import FOLDERS, partition, recipes

HERE = Path(__file__).resolve().parent / "measuring"
PEERS: dict[str, list[dict[str, Any]]] = {
    "pykeen": [
        {"model": "ComplEx", "loss": "crossentropy"},
        {"model": "DistMult", "loss": "crossentropy"},
        {"model": "RotatE", "loss": "crossentropy"},
        {"model": "TuckER", "loss": "bceaftersigmoid"},
    ],
    "dicee": [
        {"model": "Keci", "scoring": "KvsAll"},
        {"model": "ComplEx", "scoring": "KvsAll"},
        {"model": "ComplEx", "scoring": "AllvsAll"},
        {"model": "QMult", "scoring": "KvsAll"},
    ],
}
COMMON = {"pykeen": {"lr": 0.001, "batch_size": 128}, "dicee": {"lr": 0.02, "batch_size": 1024}}
HEADER = (
    "| data | from | model | D | MRR | Hits@1 | Hits@3 | Hits@10 | training, s |\n"
    "|---|---|---|--:|--:|--:|--:|--:|--:|"
)
METRICS = ("mrr", "hits@1", "hits@3", "hits@10")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", required=True, type=Path, help="folder with a folder of triples for each data set")
    add("--data", default="umls,nations", metavar="NAME,...", help="folders of examples/")
    add("--peers", default="pykeen,dicee", metavar="NAME,...", help="empty: none")
    add("--peer-python", action="append", default=[], metavar="PEER=FILE", help="an interpreter that has it")
    add("--dimension", type=int, default=200, help="of the peers' models, as each counts it")
    add("--epochs", type=int, default=100, help="of the peers' models")
    add("--trainers", type=int, default=2)
    add("--limit-seconds", type=float, default=1800.0, help="of each run")
    add("--json", type=Path, help="file for all figures")
    return parser


def row(data: str, source: str, model: str, dimension: int, metrics: dict[str, Any], seconds: float) -> str:
    """Return a line of the table."""
    cells = [data, source, model, str(dimension)]
    cells += [f"{metrics[name]:.3f}".lstrip("0") for name in METRICS]
    return "| " + " | ".join([*cells, f"{seconds:.0f}"]) + " |"


def our_models(args: argparse.Namespace, data: str, work: Path) -> list[tuple[str, dict[str, Any]]]:
    """Train the recipes of a data set."""
    dataset, _ = partition(args.input / FOLDERS[data], work)
    rows = []
    for path in recipes(""):
        if path.parent.name != data:
            continue
        folder = work / f"ours-{path.stem}"
        sets = [f"dataset={dataset}", "evaluation.split=test"]
        run = our_job.train(path, sets, args.trainers, folder, args.limit_seconds)
        metrics = json.loads((folder / "run" / RUN_METRICS_FILE).read_text(encoding="utf-8"))["test"]["both"]
        shutil.rmtree(folder)
        dimension = load_config(str(path), []).model.dimension
        line = row(FOLDERS[data], "ours", path.stem, dimension, metrics, run.wall_seconds)
        rows.append((line, {"data": data, "from": "ours", "recipe": path.stem, **metrics}))
    return rows


def plain_files(source: Path, folder: Path) -> Path:
    """Write train.txt, valid.txt and test.txt of tab-separated triples, which both peers read."""
    folder.mkdir()
    for split in SPLITS:
        (path,) = [path for path in source.iterdir() if path.name.partition(".")[0] == split]
        content = path.read_bytes()
        (folder / f"{split}.txt").write_bytes(gzip.decompress(content) if path.suffix == ".gz" else content)
    return folder


def peers(
    args: argparse.Namespace, data: str, pythons: dict[str, Path], work: Path
) -> list[tuple[str, dict[str, Any]]]:
    """Train every model of every peer on a data set; a model that fails is a line that says so."""
    rows = []
    for peer, python in pythons.items():
        for number, choice in enumerate(PEERS[peer]):
            # dicee writes beside the triples: each run has a copy of its own.
            files = plain_files(args.input / FOLDERS[data], work / f"{data}-{peer}-{number}")
            settings = {
                **COMMON[peer],
                **choice,
                "folder": str(files),
                "run": str(files / "run"),
                "result": str(files / "result.json"),
                "dimension": args.dimension,
                "num_epochs": args.epochs,
                "num_threads": len(os.sched_getaffinity(0)),
                "seed": 0,
            }
            written = files / "settings.json"
            written.write_text(json.dumps(settings))
            name = " ".join(str(choice[key]) for key in choice)
            script = HERE / f"{peer}_quality.py"
            try:
                run_watched([str(python), str(script), str(written)], files / "log", args.limit_seconds)
                result = json.loads((files / "result.json").read_text())
            except (RuntimeError, OSError) as error:
                print(f"{peer} {name} on {data}: {error}", file=sys.stderr)
                continue
            line = row(FOLDERS[data], peer, name, args.dimension, result, result["seconds"])
            print(line, file=sys.stderr, flush=True)
            rows.append((line, {"data": data, "from": peer, **choice, **result}))
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work = Path(tempfile.mkdtemp(prefix="small_graphs_"))
    interpreters = dict(entry.split("=", 1) for entry in args.peer_python)
    try:
        pythons = {
            peer: peer_python(
                peer, Path(interpreters[peer]) if peer in interpreters else None, Path(f".venv-{peer}"), []
            ).absolute()
            for peer in args.peers.split(",")
            if peer
        }
        rows = []
        for data in args.data.split(","):
            rows += our_models(args, data, work)
            rows += peers(args, data, pythons, work)
    except (DglkgeError, RuntimeError) as error:
        print(f"small_graphs.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join([HEADER, *(line for line, _ in rows)]))
    if args.json:
        figures = {"machine": describe_machine(), "runs": [figures for _, figures in rows]}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
