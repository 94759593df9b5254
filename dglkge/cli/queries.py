"""``dglkge predict``, ``score`` and ``similar``: questions to a trained model."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.cli.common import (
    DATASET,
    FEATURES,
    JSON,
    RUN,
    VERIFY,
    Command,
    flag,
    open_model,
    option,
    print_columns,
    print_json,
    print_text,
)
from dglkge.data.text_format import ROLES, parse_columns, parse_delimiter
from dglkge.errors import InputError
from dglkge.inference.choices import MISSING, Known

if TYPE_CHECKING:
    from dglkge.inference.run import Run

Query = tuple[str, str, str]
Report = dict[str, Any]


def predict(args: argparse.Namespace) -> int:
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
        _print_prediction(report, is_marked)
    return 0


def _queries(args: argparse.Namespace) -> tuple[list[Query], list[str]]:
    """Return the query that the arguments state, or those of the file that they name, and their places."""
    given = (args.head, args.relation, args.tail)
    if args.input is not None:
        if given != (None, None, None):
            raise InputError("give either --input or one query, not both")
        from dglkge.inference.search import read_queries

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
        _prediction(run, query, found.get(number, []), places[number] if places else "", args.probability)
        for number, query in enumerate(queries)
    ]


def _prediction(run: Run, query: Query, answers: list[Any], place: str, with_probability: bool) -> Report:
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


def _print_prediction(report: Report, is_marked: bool) -> None:
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


def score(args: argparse.Namespace) -> int:
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
        _scored(row, places.get(number, "")) for number, row in enumerate(scored.itertuples(index=False))
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


def _scored(row: Any, place: str) -> dict[str, Any]:
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


def similar(args: argparse.Namespace) -> int:
    """Search and print."""
    model = open_model(args)
    # Similar entities are searched within one type, so an ambiguous name is an error.
    entity_type = model.type_of(args.entity, args.type)
    found = model.nearest(args.entity, entity_type, args.topk)
    if args.json:
        answers = [
            {"rank": rank, "name": answer.name, "cosine": answer.score}
            for rank, answer in enumerate(found, start=1)
        ]
        print_json({"entity": args.entity, "type": entity_type, "similar": answers})
        return 0
    print_text(f"nearest to {args.entity} among entities of type {entity_type}")
    rows = [[rank, f"{answer.score:.4f}", answer.name] for rank, answer in enumerate(found, start=1)]
    print_columns(["rank", "cosine", "name"], rows, indent="  ")
    return 0


TOPK = option("--topk", "answers to show (default: %(default)s)", type=int, default=10, metavar="K")

PREDICT = Command(
    description="""Complete a triple: the best tails of (head, relation, ?), heads of (?, relation, tail) or
relations of (head, ?, tail). An answer that the data set contains is marked with its split.""",
    examples="""examples:
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
                                                                  separated by tabs, one of them a ?""",
    options=[
        RUN,
        VERIFY,
        option("--head", "the head", metavar="NAME"),
        option("--relation", "the relation", metavar="NAME"),
        option("--tail", "the tail", metavar="NAME"),
        option("--input", "a file of queries instead: head, relation and tail on each line", metavar="FILE"),
        flag("--strict", "end at the first query of the file with an unknown name"),
        TOPK,
        option(
            "--known",
            "answers that the data set contains: mark them with their split, drop them, or keep them "
            "unmarked (default: mark; without the data set, warn and keep)",
            choices=[known.value for known in Known],
        ),
        flag(
            "--probability",
            "show the probability that each answer is true, as dglkge evaluate --calibrate has fitted it",
        ),
        DATASET,
        FEATURES,
        JSON,
    ],
    run=predict,
)

SCORE = Command(
    description="""Score the triples of a file. Higher is more plausible; only probabilities, which dglkge
evaluate --calibrate fits, can be compared between relations. Where a name is unknown, the line says so.""",
    examples="""examples:
  dglkge score runs/demo --input triples.tsv
  dglkge score runs/demo --input triples.csv --columns subject,predicate,object --json
  dglkge score runs/demo --input triples.tsv --strict       end at the first unknown name""",
    options=[
        RUN,
        VERIFY,
        option("--input", "triples, as partition.py reads them", required=True, metavar="FILE"),
        option(
            "--columns", "as in partition.py (default: %(default)s)", default=",".join(ROLES), metavar="LIST"
        ),
        option("--delimiter", "instead of tab, and of the comma of .csv", metavar="CHAR"),
        flag("--strict", "end with an error at the first triple with an unknown name"),
        DATASET,
        FEATURES,
        JSON,
    ],
    run=score,
)

SIMILAR = Command(
    description="Show the entities of the same type whose rows have the greatest cosine with an entity's "
    "row.",
    examples="""examples:
  dglkge similar runs/demo --entity Alice
  dglkge similar runs/demo --entity Mercury --type planet --topk 3 --json""",
    options=[
        RUN,
        VERIFY,
        option("--entity", "the entity", required=True, metavar="NAME"),
        option("--type", "its type, if entities of several types share the name", metavar="TYPE"),
        TOPK,
        JSON,
    ],
    run=similar,
)
