"""Reasons for links, checked: training triples that ``explain`` names are removed, and the run trains again.

    python benchmarks/influence.py --triples datasets/UMLS --recipe umls/complex --links 20 --reasons 10

Of some test triples the strongest training triples of both ends are removed, all at once; in another run as
many drawn ones of the same ends, and in a third one those whose removal should raise the score most. Scores
and filtered ranks of the test triples show what the removed ones were worth. Removed triples are no wrong
answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dglkge
from dglkge.data.dataset_files import SPLITS, TEST, TRAIN
from dglkge.errors import DglkgeError, exit_status_of
from dglkge.evaluation.metrics import Protocol
from dglkge.inference.reasons import Explainer
from dglkge.inference.run import Run
from dglkge.typing import Side
from inductive import ROLES, read_split, resolve
from measuring.machine import describe_machine

KINDS = ("strongest", "drawn", "weakest")
HEADER = "| removed | triples | score falls by | rises of | MRR |\n|---|--:|--:|--:|--:|"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--triples", required=True, type=Path, help="folder of train, valid and test")
    add("--recipe", required=True, help="configuration: a file, or one that ships")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field, in all runs")
    add("--links", type=int, default=20, metavar="N", help="test triples (default: 20)")
    add("--reasons", type=int, default=10, metavar="K", help="training triples of each (default: 10)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="file for all figures")
    return parser


def named(run: Run, triples: np.ndarray) -> list[tuple[str, str, str]]:
    """Return triples (n, 3) of ids by name."""
    labels, tables = run.tables.relations.labels, run.tables
    return [
        (
            tables.vocabulary(tables.relations[relation].lhs)[head],
            labels[relation],
            tables.vocabulary(tables.relations[relation].rhs)[tail],
        )
        for head, relation, tail in triples.tolist()
    ]


def removals(run: Run, links: np.ndarray, num: int, seed: int) -> dict[str, list[tuple[str, str, str]]]:
    """Return the training triples to remove, by kind."""
    explainer, draw = Explainer(run), np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    for link in links.tolist():
        sides = [explainer.influences(tuple(link), side) for side in Side]
        triples, influences = (np.concatenate(columns) for columns in zip(*sides))
        order = np.argsort(influences)
        parts["strongest"].append(triples[order[-num:]])
        parts["weakest"].append(triples[order[:num]])
        parts["drawn"].append(triples[draw.permutation(len(triples))[:num]])
    return {
        kind: named(run, np.unique(np.concatenate(triples_of_kind), axis=0))
        for kind, triples_of_kind in parts.items()
    }


def trained(args: argparse.Namespace, work: Path, without: list[tuple[str, str, str]]) -> Run:
    """Train without some triples."""
    frames = {split: read_split(args.triples, split) for split in SPLITS}
    frames["train"] = frames["train"][~pd.MultiIndex.from_frame(frames["train"]).isin(without)]
    settings = dict(text.split("=", 1) for text in args.set)
    settings |= {"evaluation.split": "none", "seed": args.seed}
    return dglkge.train(frames, output=work, config=args.recipe, settings=settings, progress=False)


def measure(run: Run, frame: pd.DataFrame, removed: pd.DataFrame) -> tuple[np.ndarray, float]:
    """Return the scores of test triples (n,), and their MRR, both sides."""
    also_known = [resolve(removed, run)] if len(removed) else []
    result = run.evaluate(Protocol(TEST), resolve(frame, run), also_known=also_known)
    return run.score(frame)["score"].to_numpy(), result.both.mrr


def compare(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train once with all triples, and once without those of each kind."""
    run = trained(args, work / "whole", [])
    test = run.dataset.split(TEST)
    links = test[np.random.default_rng(args.seed).permutation(len(test))[: args.links]]
    frame = pd.DataFrame(named(run, links), columns=ROLES)
    whole, mrr = measure(run, frame, frame[:0])
    rows = {"nothing": {"triples": 0, "fall": 0.0, "rises": 0, "mrr": mrr}}
    for kind, removed in removals(run, links, args.reasons, args.seed).items():
        again = trained(args, work / kind, removed)
        scores, mrr = measure(again, frame, pd.DataFrame(removed, columns=ROLES))
        rows[kind] = {
            "triples": len(removed),
            "fall": float((whole - scores).mean()),
            "rises": int((scores > whole).sum()),
            "mrr": mrr,
        }
    return {"links": len(links), "train": len(run.dataset.split(TRAIN)), "removed": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    args = build_parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as work:
            comparison = compare(args, Path(work))
    except DglkgeError as error:
        print(f"influence.py: error: {error}", file=sys.stderr)
        return exit_status_of(error)
    print(f"{comparison['links']} test triples, {comparison['train']:,} training triples\n\n{HEADER}")
    for kind, row in comparison["removed"].items():
        print(
            f"| {kind} | {row['triples']} | {row['fall']:.2f} | {row['rises']} of {comparison['links']} "
            f"| {row['mrr']:.3f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"machine": describe_machine(), **comparison}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
