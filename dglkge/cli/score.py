"""``dglkge score``: scores and probabilities of given triples."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from dglkge.cli.common import add_options, open_model, print_columns, print_json
from dglkge.data.text_format import ROLES, parse_columns, parse_delimiter
from dglkge.errors import InputError

DESCRIPTION = """Score the triples of a file. Higher is more plausible; only probabilities, which dglkge
evaluate --calibrate fits, can be compared between relations. Where a name is unknown, the line says so."""
EXAMPLES = """examples:
  dglkge score runs/demo --input triples.tsv
  dglkge score runs/demo --input triples.csv --columns subject,predicate,object --json
  dglkge score runs/demo --input triples.tsv --strict       end at the first unknown name"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, "run", "no_verify", "dataset", "features", "json")
    parser.add_argument("--input", required=True, metavar="FILE", help="triples, as partition.py reads them")
    parser.add_argument(
        "--columns", default=",".join(ROLES), metavar="LIST", help="as in partition.py (default: %(default)s)"
    )
    parser.add_argument("--delimiter", metavar="CHAR", help="instead of tab, and of the comma of .csv")
    parser.add_argument(
        "--strict", action="store_true", help="end with an error at the first triple with an unknown name"
    )


def run(args: argparse.Namespace) -> int:
    """Score and print."""
    import pandas as pd  # here: it takes half a second, which --help need not

    from dglkge.data.triples import places_of_rows, read_chunks

    path, columns = Path(args.input), parse_columns(args.columns)
    delimiter = parse_delimiter(args.delimiter) if args.delimiter is not None else None
    chunks = [chunk[list(ROLES)].astype(str) for chunk in read_chunks(path, columns, delimiter)]
    frame = pd.concat(chunks, ignore_index=True) if chunks else pd.DataFrame(columns=list(ROLES))
    if not len(frame):
        raise InputError(f"{path} has no triples")
    scored = open_model(args).score(frame)
    problems = scored["problem"].dropna()
    places = places_of_rows(path, problems.index.tolist(), columns, delimiter)
    if args.strict and len(problems):
        first = problems.index[0]
        raise InputError(f"{places[first]}: {problems[first]}")
    reports = [
        _report(row, places.get(number, "")) for number, row in enumerate(scored.itertuples(index=False))
    ]
    if args.json:
        print_json(reports)
        return 0
    header = ["score", "probability", *ROLES, "known from", "problem"]
    shown = [name for name in header if name in ("score", *ROLES) or any(_cell(r, name) for r in reports)]
    print_columns(shown, [[_cell(report, name) for name in shown] for report in reports])
    if len(problems):
        print(f"dglkge score: {len(problems)} of {len(reports)} triples have a problem", file=sys.stderr)
    return 0


def _report(row: Any, place: str) -> dict[str, Any]:
    """Return a triple as JSON has it: NaN and None are left out."""
    report: dict[str, Any] = {role: getattr(row, role) for role in ROLES}
    if row.problem is not None:
        return {**report, "problem": f"{place}: {row.problem}"}
    report["score"] = row.score
    if not math.isnan(row.probability):
        report["probability"] = row.probability
    report["known"] = row.known_from
    return report


def _cell(report: dict[str, Any], name: str) -> str:
    value = report.get({"known from": "known"}.get(name, name))
    return f"{value:.4f}" if isinstance(value, float) else value or ""
