"""``dglkge evaluate``: rank a split against a checkpoint's files, in one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from dglkge.checkpoint.layout import split_metrics_file
from dglkge.cli.common import (
    add_dataset_argument,
    add_run_argument,
    add_verify_argument,
    print_json,
    print_text,
    write_json,
)
from dglkge.data.dataset_files import SPLITS
from dglkge.errors import InputError
from dglkge.evaluation.metrics import format_table
from dglkge.evaluation.protocol import Protocol
from dglkge.inference.run import open_run

HELP = "rank the true answers of a split among all entities of the right type"
DESCRIPTION = """Rank the head and the tail of every triple of a split among all entities of the right type,
and show MR, MRR, Hits@1/3/10/50 and AUC. Reads the files of the checkpoint and of the
data set, and uses every core; no server is needed."""
EXAMPLES = """examples:
  dglkge evaluate runs/demo                              filtered, all candidates, test split
  dglkge evaluate runs/demo --split valid --limit 500    the first 500 triples of the valid split
  dglkge evaluate runs/demo --per-relation               the metrics of every relation too"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_argument(parser)
    add_verify_argument(parser)
    parser.add_argument(
        "--split", choices=SPLITS, default="test", help="which triples (default: %(default)s)"
    )
    add_dataset_argument(parser)
    parser.add_argument(
        "--raw", action="store_true", help="rank among other known answers too (default: filtered)"
    )
    parser.add_argument(
        "--candidates",
        metavar="N",
        default="all",
        help="all entities of the type, or N sampled ones for each query (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sampled candidates (default: %(default)s)"
    )
    parser.add_argument(
        "--ties",
        default="realistic",
        choices=("realistic", "optimistic", "pessimistic"),
        help="rank among equal scores: the mean, the best or the worst (default: %(default)s)",
    )
    parser.add_argument("--per-relation", action="store_true", help="show the metrics of every relation too")
    parser.add_argument(
        "--batch-size", type=int, default=4096, metavar="N", help="queries at a time (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N triples of the split")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="JSON file with the metrics of every relation (default: RUN/metrics-SPLIT.json)",
    )
    parser.add_argument("--json", action="store_true", help="print that JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate, then print and write the metrics."""
    protocol = Protocol(
        split=args.split,
        filtered=not args.raw,
        num_candidates=_num_candidates(args.candidates),
        ties=args.ties,
        batch_size=args.batch_size,
        seed=args.seed,
    )
    # Mistakes in the arguments are found before the checkpoint is read, which may take minutes.
    if args.limit is not None and args.limit < 1:
        raise InputError(f"--limit must be at least 1, got {args.limit}")
    model = open_run(args.run, args.dataset, verify=not args.no_verify)
    # Two queries for each triple: its head and its tail.
    triples = model.dataset.split(args.split)[: args.limit]
    # disable=None shows the bar only on a terminal.
    with tqdm(total=2 * len(triples), desc="rank", unit="query", disable=True if args.json else None) as bar:
        result = model.evaluate(protocol, triples, progress=bar.update)
    checkpoint = model.checkpoint
    report = {
        "run": str(checkpoint.run_folder),
        "version": checkpoint.version,
        "dataset": model.dataset.name,
        "num_triples": len(triples),
        **result.to_dict(),
    }
    target = Path(args.output) if args.output else checkpoint.run_folder / split_metrics_file(args.split)
    write_json(target, report)  # before printing: a closed pipe must not lose the result
    if args.json:
        print_json(report)
    else:
        print_text(format_table(result, args.per_relation))
        print_text(f"written to {target}")
    return 0


def _num_candidates(text: str) -> int | None:
    """Parse the value of ``--candidates``; None for all."""
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--candidates must be all or a number of at least 1, got {text!r}")
    return int(text)
