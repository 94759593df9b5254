"""``dglkge predict``: the best answers to a triple with one entity missing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.cli.common import add_options, open_model, print_columns, print_json, print_text
from dglkge.data.text_format import ROLES
from dglkge.errors import InputError
from dglkge.inference.choices import MISSING, Known

if TYPE_CHECKING:
    from dglkge.inference.run import Run

DESCRIPTION = """Complete a triple: the best tails of (head, relation, ?), heads of (?, relation, tail) or
relations of (head, ?, tail). An answer that the data set contains is marked with its split."""
EXAMPLES = """examples:
  dglkge predict runs/demo --head Alice --relation likes          what does Alice like?
  dglkge predict runs/demo --relation likes --tail Bob --topk 3   who likes Bob?
  dglkge predict runs/demo --head Alice --tail Bob                how are Alice and Bob related?
  dglkge predict runs/demo --head Alice --relation likes --known drop
                                                                  only what the data set does not contain
  dglkge predict runs/demo --head Alice --relation likes --probability
                                                                  after dglkge evaluate --calibrate isotonic
  dglkge predict runs/demo --head Carol --relation likes --features new.parquet
                                                                  Carol was not trained; the file has a vector
  dglkge predict runs/demo --input queries.tsv --json             many; each line is head, relation, tail,
                                                                  separated by tabs, one of them a ?"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, "run", "no_verify", "dataset", "features", "json")
    parser.add_argument("--head", metavar="NAME", help="the head")
    parser.add_argument("--relation", metavar="NAME", help="the relation")
    parser.add_argument("--tail", metavar="NAME", help="the tail")
    parser.add_argument(
        "--input", metavar="FILE", help="a file of queries instead: head, relation and tail on each line"
    )
    parser.add_argument(
        "--strict", action="store_true", help="end at the first query of the file with an unknown name"
    )
    parser.add_argument(
        "--topk", type=int, default=10, metavar="K", help="answers to show (default: %(default)s)"
    )
    parser.add_argument(
        "--known",
        choices=[known.value for known in Known],
        help="answers that the data set contains: mark them with their split, drop them, or keep them "
        "unmarked (default: mark; without the data set, warn and keep)",
    )
    parser.add_argument(
        "--probability",
        action="store_true",
        help="show the probability that each answer is true, as dglkge evaluate --calibrate has fitted it",
    )


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    queries, places = _queries(args)
    # The queries are read first: a mistake in them is found before the files are opened.
    model = open_model(args)
    if args.probability:
        model.calibration  # noqa: B018  raises if there is none: the frame would only have NaN
    reports = _reports(model, queries, places, args)
    if args.json:
        # A file gives a list even of one query, so the form depends on the arguments and not on the data.
        print_json(reports if args.input else reports[0])
        return 0
    is_marked = model.known_treatment(args.known)[0] is Known.MARK
    for number, report in enumerate(reports):
        if number:
            print_text()
        _print_table(report, is_marked)
    return 0


Query = tuple[str, str, str]
Report = dict[str, Any]


def _queries(args: argparse.Namespace) -> tuple[list[Query], list[str]]:
    """Return the query that the arguments state, or those of the file that they name, and their places."""
    given = (args.head, args.relation, args.tail)
    if args.input is not None:
        if given != (None, None, None):
            raise InputError("give either --input or one query, not both")
        from dglkge.inference.named_queries import read_queries

        return read_queries(Path(args.input))
    if given.count(None) != 1:
        raise InputError(
            "give two of --head, --relation and --tail; the third is predicted. Got "
            + (" and ".join(f"--{name}" for name in ROLES if getattr(args, name) is not None) or "none")
        )
    head, relation, tail = (MISSING if part is None else part for part in given)
    return [(head, relation, tail)], []


def _reports(run: Run, queries: list[Query], places: list[str], args: argparse.Namespace) -> list[Report]:
    """Answer the queries; returns what JSON has of each."""
    import pandas as pd  # here: it takes half a second, which --help need not

    frame = pd.DataFrame(queries, columns=list(ROLES))
    # One query is the user's command, and a mistake in it is the command's.
    answers = run.predict(frame, args.topk, args.known, strict=not args.input)
    problems = answers[answers["problem"].notna()]
    if args.strict and len(problems):
        first = problems.iloc[0]
        raise InputError(f"{places[first['query']]}: {first['problem']}")
    found: dict[int, list[Any]] = {}
    for answer in answers.itertuples(index=False):
        found.setdefault(answer.query, []).append(answer)
    return [
        _report(run, query, found.get(number, []), places[number] if places else "", args.probability)
        for number, query in enumerate(queries)
    ]


def _report(run: Run, query: Query, answers: list[Any], place: str, with_probability: bool) -> Report:
    """Return a query and its answers as JSON has them."""
    missing = ROLES[query.index(MISSING)]
    given = {role: part for role, part in zip(ROLES, query) if role != missing}
    report: Report = {"query": f"({', '.join(query)})", "asked": missing, **given}
    if answers and answers[0].problem is not None:
        return {**report, "problem": f"{place}: {answers[0].problem}"}
    if answers and missing != "relation":
        report["relation"] = answers[0].relation
        report["type"] = answers[0].type
    report["answers"] = [
        {
            "rank": int(answer.rank),
            "name": getattr(answer, missing),
            "score": answer.score,
            "known": answer.known_from,
            **({"probability": answer.probability} if with_probability else {}),
        }
        for answer in answers
    ]
    return report


def _print_table(report: Report, is_marked: bool) -> None:
    """Print a prediction as a table."""
    if "problem" in report:
        print_text(f"{report['query']}: no answer: {report['problem']}")
        return
    asked, answers = report["asked"], report["answers"]
    of_type = f" of type {report['type']}" if "type" in report else ""
    print_text(f"{report['query']}: best {asked}s{of_type}")
    with_probability = any("probability" in answer for answer in answers)
    rows = [
        [
            answer["rank"],
            f"{answer['score']:.4f}",
            *([f"{answer['probability']:.4f}"] if with_probability else []),
            answer["name"],
            *([answer["known"] or ""] if is_marked else []),
        ]
        for answer in answers
    ]
    header = [
        "rank",
        "score",
        *(["probability"] if with_probability else []),
        asked,
        *(["known from"] if is_marked else []),
    ]
    print_columns(header, rows, indent="  ")
