"""``dglkge predict``: the best answers to a triple with one entity missing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dglkge.cli.common import (
    add_dataset_argument,
    add_run_argument,
    add_verify_argument,
    print_columns,
    print_json,
    print_text,
)
from dglkge.errors import InputError
from dglkge.inference.named_queries import NamedQuery, read_queries
from dglkge.inference.run import Prediction, open_run
from dglkge.inference.search import Known
from dglkge.typing import Side

HELP = "complete a triple: the best tails of (head, relation, ?) or heads of (?, relation, tail)"
DESCRIPTION = """Complete a triple: the best tails of (head, relation, ?) or heads of (?, relation, tail).
An answer that the data set contains is marked with its split."""
EXAMPLES = """examples:
  dglkge predict runs/demo --head Alice --relation likes          what does Alice like?
  dglkge predict runs/demo --relation likes --tail Bob --topk 3   who likes Bob?
  dglkge predict runs/demo --head Alice --relation likes --known drop
                                                                  only what the data set does not contain
  dglkge predict runs/demo --head Alice --relation likes --probability
                                                                  after dglkge evaluate --calibrate isotonic
  dglkge predict runs/demo --input queries.tsv --json             many; each line is head, relation, tail,
                                                                  separated by tabs, one of them a ?"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_argument(parser)
    add_verify_argument(parser)
    parser.add_argument("--head", metavar="NAME", help="the head, to ask for tails")
    parser.add_argument("--relation", metavar="NAME", help="the relation")
    parser.add_argument("--tail", metavar="NAME", help="the tail, to ask for heads")
    parser.add_argument(
        "--input", metavar="FILE", help="a file of queries instead: head, relation and tail on each line"
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
    add_dataset_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    queries = _queries(args)
    # The queries are read first: a mistake in them is found before the files are opened.
    model = open_run(args.run, args.dataset, verify=not args.no_verify)
    known = Known(args.known) if args.known else None
    predictions = model.predict(queries, args.topk, known, args.probability)
    if args.json:
        reports = [_report(prediction) for prediction in predictions]
        # A file gives a list even of one query, so the form depends on the arguments and not on the data.
        print_json(reports if args.input else reports[0])
        return 0
    for place, prediction in enumerate(predictions):
        if place:
            print_text()
        _print_table(prediction)
    return 0


def _queries(args: argparse.Namespace) -> list[NamedQuery]:
    """Return the query that the arguments state, or those of the file that they name."""
    if args.input is not None:
        if args.head is not None or args.tail is not None or args.relation is not None:
            raise InputError("give either --input or one query, not both")
        return read_queries(Path(args.input))
    if args.relation is None or (args.head is None) == (args.tail is None):
        raise InputError("give --relation and either --head (to ask for tails) or --tail (to ask for heads)")
    if args.head is not None:
        return [NamedQuery(Side.TAIL, args.head, args.relation)]
    return [NamedQuery(Side.HEAD, args.tail, args.relation)]


def _report(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON has it."""
    query = prediction.query
    return {
        "query": str(query),
        "asked": query.side.value,
        "head" if query.side is Side.TAIL else "tail": query.entity,
        "relation": prediction.relation,
        "type": prediction.answer_type,
        "answers": [
            {
                "rank": rank,
                "name": answer.name,
                "score": answer.score,
                "known": answer.known,
                **({} if answer.probability is None else {"probability": answer.probability}),
            }
            for rank, answer in enumerate(prediction.answers, start=1)
        ],
    }


def _print_table(prediction: Prediction) -> None:
    """Print a prediction as a table."""
    side = prediction.query.side.value
    print_text(f"{prediction.query}: best {side}s of type {prediction.answer_type}")
    with_probability = any(answer.probability is not None for answer in prediction.answers)
    rows = [
        [
            rank,
            f"{answer.score:.4f}",
            *([f"{answer.probability:.4f}"] if with_probability else []),
            answer.name,
            *([answer.known or ""] if prediction.is_marked else []),
        ]
        for rank, answer in enumerate(prediction.answers, start=1)
    ]
    header = [
        "rank",
        "score",
        *(["probability"] if with_probability else []),
        side,
        *(["known from"] if prediction.is_marked else []),
    ]
    print_columns(header, rows, indent="  ")
