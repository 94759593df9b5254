"""``dglkge predict`` and ``similar``: questions to a trained model."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.cli.common import (
    DATASET,
    FEATURES,
    IMPORT,
    JSON,
    NO_VERIFY,
    RUN,
    Command,
    flag,
    open_model,
    option,
    print_columns,
    print_json,
    print_text,
)
from dglkge.data.text_format import ROLES, Columns, parse_columns, parse_delimiter
from dglkge.errors import InputError
from dglkge.inference.choices import MISSING, Known

if TYPE_CHECKING:
    import pandas as pd

    from dglkge.inference.run import Run

Report = dict[str, Any]


def predict(args: argparse.Namespace) -> int:
    """Predict or score, and print."""
    frame = _questions(args)
    # The file is read first: a mistake in it is found before those of the run are opened.
    model = open_model(args)
    if args.probability:
        model.calibration  # noqa: B018  raises if there is none
    is_query = (frame == MISSING).any(axis=1)
    reports: dict[int, Report] = {}
    for answer, rows in ((_predictions, frame[is_query]), (_scores, frame[~is_query])):
        if len(rows):
            reports |= answer(model, rows, args)
    if args.json:
        # A file gives a list even of one query, so the form depends on the arguments and not on the data.
        print_json([reports[row] for row in frame.index] if args.triples else reports[0])
        return 0
    queries = [reports[row] for row in frame.index[is_query]]
    is_marked = bool(queries) and model.known_treatment(args.known)[0] is Known.MARK
    for number, report in enumerate(queries):
        if number:
            print_text()
        _print_prediction(report, is_marked)
    _print_scores([reports[row] for row in frame.index[~is_query]])
    return 0


def _questions(args: argparse.Namespace) -> pd.DataFrame:
    """Return the triples of the file that the arguments name, or the one that they state."""
    import pandas as pd  # here: it takes half a second, which --help need not

    from dglkge.data.triples import read_chunks

    parts = [getattr(args, role) for role in ROLES]
    if args.triples is None:
        if parts.count(None) > 1:
            got = " and ".join(f"--{role}" for role in ROLES if getattr(args, role) is not None) or "none"
            raise InputError(
                "give two of --head, --relation and --tail, and the third is predicted, or all three for "
                f"their score. Got {got}"
            )
        return pd.DataFrame([[part or MISSING for part in parts]], columns=list(ROLES))
    if parts != [None, None, None]:
        raise InputError("give either --triples or one query, not both")
    chunks = read_chunks(Path(args.triples), *_format(args))
    frames = [chunk[list(ROLES)].astype(str) for chunk in chunks]
    if not any(map(len, frames)):
        raise InputError(f"{args.triples} has no triples")
    return pd.concat(frames, ignore_index=True)


def _format(args: argparse.Namespace) -> tuple[Columns, str | None]:
    """Return columns and delimiter of the file."""
    return parse_columns(args.columns), None if args.delimiter is None else parse_delimiter(args.delimiter)


def _places(problems: pd.Series, args: argparse.Namespace) -> dict[int, str]:
    """Return where rows with problems are in the file; with ``--strict`` the first of them is an error."""
    from dglkge.data.triples import places_of_rows

    places = places_of_rows(Path(args.triples), problems.index.tolist(), *_format(args))
    if args.strict and len(problems):
        first = min(places)
        raise InputError(f"{places[first]}: {problems[first]}")
    return places


def _predictions(run: Run, queries: pd.DataFrame, args: argparse.Namespace) -> dict[int, Report]:
    """Answer queries; returns what JSON has of each, by row."""
    # One query is the user's command, and a mistake in it is the command's.
    answers = run.predict(queries, args.k, args.known, strict=not args.triples)
    problems = answers[answers["problem"].notna()].set_index("query")["problem"]
    places = _places(problems, args) if args.triples else {}
    by_query: dict[int, list[Any]] = {row: [] for row in queries.index}
    for answer in answers.itertuples(index=False):
        by_query[answer.query].append(answer)
    return {
        row: _prediction(tuple(queries.loc[row]), rows, places.get(row, ""), args.probability)
        for row, rows in by_query.items()
    }


def _prediction(query: tuple[str, ...], answers: list[Any], place: str, with_probability: bool) -> Report:
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


def _scores(run: Run, triples: pd.DataFrame, args: argparse.Namespace) -> dict[int, Report]:
    """Score whole triples; returns what JSON has of each, by row."""
    scored = run.score(triples, strict=not args.triples)
    places = _places(scored["problem"].dropna(), args) if args.triples else {}
    return {row.Index: _scored(row, places.get(row.Index, "")) for row in scored.itertuples()}


def _scored(row: Any, place: str) -> Report:
    """Return a triple as JSON has it: NaN and None are left out."""
    report: Report = {role: getattr(row, role) for role in ROLES}
    if row.problem is not None:
        return {**report, "problem": f"{place}: {row.problem}"}
    report["score"] = row.score
    if not math.isnan(row.probability):
        report["probability"] = row.probability
    return {**report, "known": row.known_from}


def _print_scores(reports: list[Report]) -> None:
    """Print scored triples as a table; a column that no triple needs is left out."""
    names = {"score": "score", "probability": "probability", **{role: role for role in ROLES}}
    names |= {"known": "known from", "problem": "problem"}
    shown = [name for name in names if any(report.get(name) is not None for report in reports)]
    rows = [[_cell(report.get(name)) for name in shown] for report in reports]
    if rows:
        print_columns([names[name] for name in shown], rows)
    num_problems = sum("problem" in report for report in reports)
    if num_problems:
        text = f"{num_problems} of {len(reports)} triples have a problem"
        print(f"dglkge predict: {text}", file=sys.stderr)


def _cell(value: float | str | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else value or ""


def similar(args: argparse.Namespace) -> int:
    """Search and print."""
    if (args.name is None) == (args.entity is None):
        raise InputError("give one entity: dglkge similar RUN ENTITY")
    args.entity = args.entity or args.name
    model = open_model(args)
    # Similar entities are searched within one type, so an ambiguous name is an error.
    entity_type = model.type_of(args.entity, args.type)
    found = model.nearest(args.entity, entity_type, args.k)
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


K = option("-k --k", "answers to show (default: %(default)s)", "--topk", type=int, default=10)

PREDICT = Command(
    description="""Complete a triple: the best tails of (head, relation, ?), heads of (?, relation, tail) or
relations of (head, ?, tail). An answer that the data set contains is marked with its split. A whole triple is
scored: higher is more plausible, and only probabilities can be compared between relations.""",
    examples="""examples:
  dglkge predict runs/demo --head Alice --relation likes          what does Alice like?
  dglkge predict runs/demo --relation likes --tail Bob -k 3       who likes Bob?
  dglkge predict runs/demo --head Alice --tail Bob                how are Alice and Bob related?
  dglkge predict runs/demo --head Alice --relation likes --known drop
                                                                  only what the data set does not contain
  dglkge predict runs/demo --head Alice --relation likes --probability
                                                                  after dglkge calibrate
  dglkge predict runs/demo --head Carol --relation likes --features new.parquet
                                                                  Carol was not trained; the file has a vector
  dglkge predict runs/demo --triples queries.tsv --json           many; a ? stands for the part to predict
  dglkge predict runs/demo --triples triples.csv --columns subject,predicate,object
                                                                  scores, where no part is a ?""",
    options=[
        RUN,
        NO_VERIFY,
        option("--head", "the head", metavar="NAME"),
        option("--relation", "the relation", metavar="NAME"),
        option("--tail", "the tail", metavar="NAME"),
        option(
            "--triples",
            "a file (as of dglkge data build) instead: with a ? for one part it is predicted, else scored",
            "--input",
            metavar="FILE",
        ),
        option("--columns", "of the file (default: %(default)s)", default=",".join(ROLES), metavar="LIST"),
        option("--delimiter", "instead of tab, and of the comma of .csv", metavar="CHAR"),
        flag("--strict", "end at the first triple of the file with an unknown name"),
        K,
        option(
            "--known",
            "answers that the data set contains: mark them with their split, drop them, or keep them "
            "unmarked (default: mark; without the data set, warn and keep)",
            choices=[known.value for known in Known],
        ),
        flag("--probability", "show the probability that each answer is true: dglkge calibrate fits it"),
        DATASET,
        FEATURES,
        IMPORT,
        JSON,
    ],
    run=predict,
)

SIMILAR = Command(
    description="Show the entities of the same type whose rows have the greatest cosine with an entity's "
    "row.",
    examples="""examples:
  dglkge similar runs/demo Alice
  dglkge similar runs/demo Mercury --type planet -k 3 --json""",
    options=[
        RUN,
        NO_VERIFY,
        option("name", "the entity", nargs="?", metavar="ENTITY"),
        option("--entity", argparse.SUPPRESS, metavar="ENTITY"),
        option("--type", "its type, if entities of several types share the name", metavar="TYPE"),
        K,
        IMPORT,
        JSON,
    ],
    run=similar,
)
