"""``dglkge evaluate``: rank a split on a checkpoint's files, in one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.cli.opened_run import (
    SPLITS,
    add_dataset_argument,
    add_run_argument,
    add_verify_argument,
    open_dataset,
    open_model,
)
from dglkge.cli.output import print_json, write_json
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import format_table
from dglkge.evaluation.protocol import Protocol

HELP = "rank the true answers of a split among all entities of the right type"
DESCRIPTION = """Rank the head and the tail of every triple of a split among all entities of the right type,
and show MR, MRR, Hits@1/3/10/50 and AUC. Works on the files of the checkpoint and of
the dataset, with every core; no server is needed."""
EXAMPLES = """examples:
  dglkge evaluate runs/demo                              filtered, all candidates, test split
  dglkge evaluate runs/demo --split valid --limit 500    the first 500 triples of the valid split
  dglkge evaluate runs/demo --per-relation               every relation's figures as well"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_argument(parser)
    add_verify_argument(parser)
    parser.add_argument(
        "--split", choices=SPLITS, default="test", help="which triples (default: %(default)s)"
    )
    add_dataset_argument(parser)
    parser.add_argument(
        "--raw", action="store_true", help="let other known answers compete (default: filtered)"
    )
    parser.add_argument(
        "--candidates",
        metavar="N",
        default="all",
        help="all entities of the type, or N drawn ones for each query (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the drawn candidates (default: %(default)s)")
    parser.add_argument(
        "--ties",
        default="realistic",
        choices=("realistic", "optimistic", "pessimistic"),
        help="rank among equal scores: the mean, the best or the worst (default: %(default)s)",
    )
    parser.add_argument("--per-relation", action="store_true", help="show every relation's figures as well")
    parser.add_argument(
        "--batch-size", type=int, default=4096, metavar="N", help="queries at a time (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N triples of the split")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="JSON with every relation's figures (default: RUN/metrics-SPLIT.json)",
    )
    parser.add_argument("--json", action="store_true", help="print that JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print and write the figures."""
    protocol = Protocol(
        split=args.split,
        filtered=not args.raw,
        num_candidates=_num_candidates(args.candidates),
        ties=args.ties,
        batch_size=args.batch_size,
        seed=args.seed,
    )
    if args.limit is not None and args.limit < 1:
        raise InputError(f"--limit must be at least 1, got {args.limit}")
    checkpoint = open_checkpoint(args.run, verify=not args.no_verify)
    dataset = open_dataset(checkpoint, args.dataset)
    triples = dataset.split(args.split)[: args.limit]
    known = KnownTriples([dataset.split(split) for split in SPLITS], dataset.num_relations)
    evaluator = RankingEvaluator(open_model(checkpoint), checkpoint.meta.relations, protocol)
    shards = {entity_type: checkpoint.shards(entity_type) for entity_type in checkpoint.entity_types}
    with tqdm(total=2 * len(triples), desc="rank", unit="query", disable=True if args.json else None) as bar:
        result = evaluator.evaluate(
            triples,
            known if protocol.filtered else None,
            checkpoint,
            shards,
            progress=bar.update,
        )
    report = {
        "run": str(checkpoint.run_folder),
        "version": checkpoint.version,
        "dataset": dataset.name,
        "num_triples": len(triples),
        **result.to_dict(),
    }
    target = Path(args.output) if args.output else checkpoint.run_folder / f"metrics-{args.split}.json"
    write_json(target, report)
    if args.json:
        print_json(report)
    else:
        print(format_table(result, args.per_relation))
        print(f"written to {target}")
    return 0


def _num_candidates(text: str) -> int | None:
    """Read --candidates."""
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--candidates must be all or a number of at least 1, got {text!r}")
    return int(text)
