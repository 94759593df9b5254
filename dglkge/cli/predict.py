"""``dglkge predict``: the best answers to a triple with one entity missing."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint.reader import Checkpoint, open_checkpoint
from dglkge.cli.opened_run import (
    SPLITS,
    add_dataset_argument,
    add_run_argument,
    add_verify_argument,
    open_dataset,
    open_model,
)
from dglkge.cli.output import print_columns, print_json
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.inference.link_prediction import Answer, Known, LinkPredictor, LinkQuery
from dglkge.inference.named_queries import NamedQuery, read_queries, resolve
from dglkge.typing import Side

logger = logging.getLogger(__name__)

HELP = "complete a triple: the best tails of (head, relation, ?) or heads of (?, relation, tail)"
DESCRIPTION = """Complete a triple: the best tails of (head, relation, ?) or heads of (?, relation, tail).
Beside an answer that stands in the dataset already stands its split."""
EXAMPLES = """examples:
  dglkge predict runs/demo --head Alice --relation likes          what does Alice like?
  dglkge predict runs/demo --relation likes --tail Bob --topk 3   who likes Bob?
  dglkge predict runs/demo --head Alice --relation likes --known drop
                                                                  only what is new
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
        help="say from which split an answer is known, drop known ones, or do not look (default: mark)",
    )
    add_dataset_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Answer and print."""
    named = _queries(args)
    checkpoint = open_checkpoint(args.run, verify=not args.no_verify)
    queries = [resolve(query, checkpoint.relations, checkpoint.vocabulary) for query in named]
    known, index = _known(args, checkpoint)
    types = {_answer_type(checkpoint, query) for query in queries}
    predictor = LinkPredictor(
        open_model(checkpoint),
        checkpoint.meta.relations,
        checkpoint,
        {entity_type: checkpoint.shards(entity_type) for entity_type in types},
        index,
    )
    answers = predictor.predict(queries, args.topk, known)
    reports = [_report(checkpoint, *one) for one in zip(named, queries, answers)]
    if args.json:
        print_json(reports if args.input else reports[0])
        return 0
    for place, report in enumerate(reports):
        if place:
            print()
        _print_report(report, known)
    return 0


def _queries(args: argparse.Namespace) -> list[NamedQuery]:
    """Read the queries from the arguments or the file that they name."""
    if args.input is not None:
        if args.head is not None or args.tail is not None or args.relation is not None:
            raise InputError("give either --input or one query, not both")
        return read_queries(Path(args.input))
    if args.relation is None or (args.head is None) == (args.tail is None):
        raise InputError("give --relation and either --head (to ask for tails) or --tail (to ask for heads)")
    if args.head is not None:
        return [NamedQuery(Side.TAIL, args.head, args.relation)]
    return [NamedQuery(Side.HEAD, args.tail, args.relation)]


def _known(args: argparse.Namespace, checkpoint: Checkpoint) -> tuple[Known, dict[str, KnownTriples]]:
    """Return what to do with known answers, and what is known by split.

    Marking is the default, but not for want of a dataset: it may lie on another machine.
    """
    known = Known(args.known or Known.MARK.value)
    if known is Known.KEEP:
        return known, {}
    try:
        dataset = open_dataset(checkpoint, args.dataset)
    except InputError as error:
        if args.known is not None or args.dataset is not None:
            raise
        logger.warning("known answers are not marked: %s", error)
        return Known.KEEP, {}
    return known, {split: KnownTriples([dataset.split(split)], dataset.num_relations) for split in SPLITS}


def _answer_type(checkpoint: Checkpoint, query: LinkQuery) -> str:
    """Return the entity type of a query's answers."""
    return checkpoint.relations[query.relation_id].candidate_type(query.side)


def _report(
    checkpoint: Checkpoint, named: NamedQuery, query: LinkQuery, answers: Sequence[Answer]
) -> dict[str, Any]:
    """Describe a query and its answers by names."""
    relation = checkpoint.relations[query.relation_id]
    answer_type = relation.candidate_type(query.side)
    names = checkpoint.vocabulary(answer_type)
    given = "head" if query.side is Side.TAIL else "tail"
    return {
        "query": str(named),
        "asked": query.side.value,
        given: named.entity,
        "relation": checkpoint.relations.labels[query.relation_id],
        "type": answer_type,
        "answers": [
            {"rank": rank, "name": names[answer.entity_id], "score": answer.score, "known": answer.known}
            for rank, answer in enumerate(answers, start=1)
        ],
    }


def _print_report(report: dict[str, Any], known: Known) -> None:
    """Print the answers to one query."""
    print(f"{report['query']}: best {report['asked']}s of type {report['type']}")
    marking = known is Known.MARK
    rows = [
        [
            one["rank"],
            f"{one['score']:.4f}",
            one["name"],
            *([one["known"] or ""] if marking else []),
        ]
        for one in report["answers"]
    ]
    print_columns(["rank", "score", report["asked"], *(["known from"] if marking else [])], rows, indent="  ")
