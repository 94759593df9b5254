"""``dglkge predict`` and ``similar``: questions to a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.cli import common
from dglkge.cli.common import command, figure, flag, open_model, option, print_columns, print_text
from dglkge.data.text_format import ROLES, TIME
from dglkge.errors import InputError
from dglkge.inference.choices import MISSING, Known

if TYPE_CHECKING:
    from dglkge.inference.run import Run

Report = dict[str, Any]
Parts = tuple[str, ...]
"""Head, relation and tail of a question, and time where triples have one."""

K = option("-k --k", "answers to show", "--topk", default=10)


@command(
    *common.MODEL_AND_DATASET,
    option("--head NAME", "the head"),
    option("--relation NAME", "the relation"),
    option("--tail NAME", "the tail"),
    option("--time TIME", "of the relation, where triples have times; ? asks when (quote it)"),
    option(
        "--triples FILE",
        "a file (as of dglkge data build) instead: with a ? for one part it is predicted, else scored",
        "--input",
    ),
    option("--columns LIST", "of the file", default=",".join(ROLES)),
    common.DELIMITER,
    flag("--strict", "end at the first triple of the file with an unknown name"),
    K,
    option(
        "--known",
        "answers that the data set contains: mark them with their split, drop them, or keep them "
        "unmarked (default: mark; without the data set, warn and keep)",
        choices=[known.value for known in Known],
    ),
    common.SEEN,
    flag("--probability", "an error where dglkge calibrate has fitted no probabilities, which are shown"),
    *common.NEW_ENTITIES,
    common.RULES,
)
def predict(args: argparse.Namespace) -> Any:
    """Complete a triple: the best tails of (head, relation, ?), heads of (?, relation, tail) or relations
    of (head, ?, tail). An answer that the data set contains is marked with its split. A whole triple is
    scored: higher is more plausible, and only probabilities can be compared between relations.

    Examples
    --------
      dglkge predict runs/demo --head Alice --relation likes          what does Alice like?
      dglkge predict runs/demo --relation likes --tail Bob -k 3       who likes Bob?
      dglkge predict runs/demo --head Alice --tail Bob                how are Alice and Bob related?
      dglkge predict runs/news --head Alice --relation visits --time 2014-05-01         where was she then?
      dglkge predict runs/news --head Alice --relation visits --tail Rome --time '?'    when was she there?
      dglkge predict runs/demo --head Alice --relation likes --known drop         what the data set lacks
      dglkge predict runs/demo --head Alice --relation likes --candidates seen    what others like
      dglkge predict runs/demo --head Alice --relation likes --probability        after dglkge calibrate
      dglkge predict runs/demo --head Carol --relation likes --features new.parquet     Carol was not trained
      dglkge predict runs/demo --head Alice --relation likes --rules  with rules, as dglkge evaluate --rules
      dglkge predict runs/demo --triples queries.tsv --json           many; a ? stands for the part to predict
      dglkge predict runs/demo --triples triples.csv --columns subject,predicate,object    scores, without a ?
    """
    questions = dict(enumerate(_questions(args)))
    # The file is read first: a mistake in it is found before those of the run are opened.
    model = open_model(args)
    if args.probability:
        model.calibration  # noqa: B018  raises if there is none
    reports: dict[int, Report] = {}
    for answer, are_queries in ((_predictions, True), (_scores, False)):
        rows = {row: parts for row, parts in questions.items() if (MISSING in parts) == are_queries}
        if rows:
            reports |= answer(model, rows, args)
    # A file gives a list even of one query, so the form depends on the arguments and not on the data.
    return [reports[row] for row in questions] if args.triples else reports[0]


@predict.shows
def _print_reports(result: Any, args: argparse.Namespace) -> None:
    """Print predictions, each as a table, and then the scored triples as one."""
    reports = result if args.triples else [result]
    for number, report in enumerate(report for report in reports if "query" in report):
        if number:
            print_text()
        if "problem" in report:
            print_text(f"{report['query']}: no answer: {report['problem']}")
            continue
        type_note = f" of type {report['type']}" if "type" in report else ""
        print_text(f"{report['query']}: best {report['asked']}s{type_note}")
        _print_table(report["answers"], ["rank", "score", "probability", "name", "known"], report["asked"])
    scores = [report for report in reports if "query" not in report]
    _print_table(scores, ["score", "probability", *ROLES, "known", "problem"])
    if num_problems := sum("problem" in report for report in scores):
        print(f"dglkge predict: {num_problems} of {len(scores)} triples have a problem", file=sys.stderr)


def _questions(args: argparse.Namespace) -> list[Parts]:
    """Return the triples of the file that the arguments name, or the one that they state."""
    parts = [getattr(args, role) for role in ROLES]
    if args.triples is None:
        if parts.count(None) > 1:
            got = " and ".join(f"--{role}" for role, part in zip(ROLES, parts) if part is not None) or "none"
            raise InputError(
                "give two of --head, --relation and --tail, and the third is predicted, or all three for "
                f"their score. Got {got}"
            )
        return [(*(part or MISSING for part in parts), *([] if args.time is None else [args.time]))]
    if [*parts, args.time] != [None] * 4:
        raise InputError("give either --triples or one query, not both")
    from dglkge.data.triples import TripleFile  # here: pandas takes half a second, which one query need not

    file = TripleFile(Path(args.triples), *common.file_format(args))
    frames = (chunk.filter([*ROLES, TIME]).astype(str) for chunk in file.frames())
    return [row for frame in frames for row in frame.itertuples(index=False, name=None)]


def _located(problems: Mapping[int, str | None], args: argparse.Namespace) -> dict[int, str]:
    """Return the problems of rows with their places in the file; with ``--strict`` the first is an error."""
    rows = [row for row, problem in problems.items() if problem is not None]
    if not rows:
        return {}
    from dglkge.data.triples import TripleFile

    places = TripleFile(Path(args.triples), *common.file_format(args)).places(rows)
    if args.strict:
        raise InputError(f"{places[min(rows)]}: {problems[min(rows)]}")
    return {row: f"{places[row]}: {problems[row]}" for row in rows}


def _predictions(run: Run, queries: Mapping[int, Parts], args: argparse.Namespace) -> dict[int, Report]:
    """Answer queries; returns what JSON has of each, by row."""
    from dglkge.inference.frames import Query

    # One query is the user's command, and a mistake in it is the command's.
    asked = [Query.of(*parts) for parts in queries.values()]
    groups = dict(zip(queries, run.answer_queries(asked, args.k, args.known, args.candidates)))
    problems = {row: group["problem"] for row, group in groups.items() if group["problem"] is not None}
    if problems and not args.triples:
        raise InputError(problems[0])
    located = _located(problems, args)
    reports = {}
    for row, group in groups.items():
        parts, missing, answers = queries[row], group["missing"], group["answers"]
        known = {role: part for role, part in zip(ROLES, parts) if role != missing}
        report = reports[row] = {"query": f"({', '.join(parts)})", "asked": missing, **known}
        if row in located:
            report["problem"] = located[row]
            continue
        if answers and missing != "relation":
            report |= {"relation": answers[0]["relation"], "type": group["type"]}
        ranked = [(answer["rank"], answer[missing], _scored(answer)) for answer in answers]
        report["answers"] = [{"rank": rank, "name": name, **figures} for rank, name, figures in ranked]
    return reports


def _scored(row: Report) -> Report:
    """Return score, probability (if one was fitted) and split of a row."""
    probability = {} if row.get("probability") is None else {"probability": row["probability"]}
    return {"score": row["score"], **probability, "known": row["known_from"]}


def _print_table(reports: list[Report], names: list[str], heading: str = "") -> None:
    """Print reports as a table; a column that none of them needs is left out."""
    shown = [name for name in names if any(report.get(name) is not None for report in reports)]
    headings = {"name": heading, "known": "known from"}
    if reports:
        rows = [[figure(report.get(name)) for name in shown] for report in reports]
        print_columns([headings.get(name, name) for name in shown], rows)


def _scores(run: Run, triples: Mapping[int, Parts], args: argparse.Namespace) -> dict[int, Report]:
    """Score whole triples; returns what JSON has of each, by row."""
    import pandas as pd  # here: it takes half a second, which one query need not

    frame = pd.DataFrame(list(triples.values()), list(triples))
    scored = run.score(frame.set_axis([*ROLES, TIME][: len(frame.columns)], axis=1), strict=not args.triples)
    located = _located(scored["problem"].dropna().to_dict(), args)
    rows = zip(triples, scored.to_dict("records"))
    return {
        row: {role: triple[role] for role in ROLES}
        | ({"problem": located[row]} if row in located else _scored(triple))
        for row, triple in rows
    }


@command(
    *common.MODEL,
    option("name ENTITY", "the entity", nargs="?"),
    option("--entity ENTITY", argparse.SUPPRESS),
    option("--type TYPE", "its type, if entities of several types share the name"),
    K,
    *common.NEW_ENTITIES,
)
def similar(args: argparse.Namespace) -> dict[str, Any]:
    """Show the entities of the same type whose rows have the greatest cosine with an entity's row.

    Examples
    --------
      dglkge similar runs/demo Alice
      dglkge similar runs/demo Mercury --type planet -k 3 --json
      dglkge similar runs/demo Carol --about 'Carol=wrote the compiler'
    """
    if (args.name is None) == (args.entity is None):
        raise InputError("give one entity: dglkge similar RUN ENTITY")
    entity = args.entity or args.name
    model = open_model(args)
    # Similar entities are searched within one type, so an ambiguous name is an error.
    entity_type = model.type_of(entity, args.type)
    answers = model.nearest(entity, entity_type, args.k)
    ranked = enumerate(answers, start=1)
    rows = [{"rank": rank, "name": name, "cosine": cosine} for rank, (name, cosine) in ranked]
    return {"entity": entity, "type": entity_type, "similar": rows}


@similar.shows
def _print_similar(result: Report, _args: argparse.Namespace) -> None:
    print_text(f"nearest to {result['entity']} among entities of type {result['type']}")
    common.print_table({"rank": "{rank}", "cosine": "{cosine:.4f}", "name": "{name}"}, result["similar"])
