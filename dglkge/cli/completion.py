"""``dglkge complete``: all likely missing triples of a graph, in a Parquet file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dglkge.cli import common
from dglkge.cli.common import Command, option, print_columns, print_text
from dglkge.data.dataset_files import SPLITS
from dglkge.errors import InputError
from dglkge.inference.choices import ALL, CANDIDATES
from dglkge.launch.machine import usable_cores

SHOWN_RANKS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)


def complete(args: argparse.Namespace) -> dict[str, Any]:
    """Search, write the file, and for held-out triples the curve beside the run."""
    cores = usable_cores()
    if args.threads is not None and not 1 <= args.threads <= cores:
        raise InputError(f"--threads must be 1 to {cores}, the cores of this process; got {args.threads}")
    import torch  # here: --help does without

    from dglkge.checkpoint.layout import completion_file
    from dglkge.inference.completion import plan_completion, write_completion

    run = common.open_model(args)
    torch.set_num_threads(args.threads or cores)
    completion = plan_completion(
        run,
        args.relation or None,
        args.head or None,
        args.head_type or None,
        args.min_probability,
        args.k,
        args.candidates,
        args.held_out,
    )
    path = Path(args.output)
    with common.progress_bar(args, completion.num_queries, desc="complete", unit="query") as bar:
        summary = write_completion(completion, path, args.threads or cores, args.overwrite, bar.update)
    if args.held_out is not None:
        target = run.checkpoint.run_folder / completion_file(args.held_out)
        common.write_json(target, {**completion.identity(), **summary})
    return summary


def _print_summary(summary: dict[str, Any], _args: argparse.Namespace) -> None:
    print_text(
        f"{summary['triples']:,} missing triples of {summary['queries']:,} pairs of head and relation, and "
        f"{summary['pairs']:,} possible triples"
    )
    if "held_out" in summary:
        print_text(f"{summary['held_out_triples']:,} triples of the {summary['held_out']} split to be found:")
        points = [point for point in summary["curve"] if point["rank"] in SHOWN_RANKS]
        points += summary["curve"][-1:] if summary["curve"][-1:] != points[-1:] else []
        rows = [[f"{p['rank']:,}", f"{p['precision']:.4f}", f"{p['recall']:.4f}"] for p in points]
        print_columns(["best", "precision", "recall"], rows)
    print_text(f"written to {summary['path']}")


COMPLETE = Command(
    description="""Write the likely triples that the data set does not have to a Parquet file: for every pair
of head and relation, the tails above a probability or the best k; sorted by descending score. All possible
triples are compared, on all cores; a bound skips those that cannot be likely. After an interruption the same
command goes on.""",
    examples="""examples:
  dglkge calibrate runs/demo --positive-rate 1e-5       first: the share of true triples
  dglkge complete runs/demo -o missing.parquet                        probability of .5 or more
  dglkge complete runs/demo -o missing.parquet --min-probability 0.9 --relation likes
  dglkge complete runs/demo -o best.parquet -k 3 --candidates seen    the best 3 tails of each pair
  dglkge complete runs/demo -o found.parquet --held-out test          how many test triples are found?""",
    options=[
        *common.MODEL,
        common.DATASET,
        option("-o --output", "the Parquet file", required=True, metavar="FILE"),
        option("--relation", "only this one", is_repeated=True, metavar="NAME"),
        option("--head", "only this one", is_repeated=True, metavar="NAME"),
        option("--head-type", "only relations with heads of this type", is_repeated=True, metavar="TYPE"),
        option(
            "--min-probability",
            "least probability, as dglkge calibrate has fitted them (default: 0.5, or none with -k)",
            type=float,
            metavar="P",
        ),
        option("-k --k", "most tails of each pair of head and relation", type=int),
        option(
            "--candidates",
            "all entities of the types, or heads and tails seen on that side of the relation",
            choices=CANDIDATES,
            default=ALL,
        ),
        option(
            "--held-out",
            "a split that counts as missing; the precision of finding it is shown, and in dglkge report",
            choices=SPLITS,
        ),
        common.OVERWRITE,
        option("--threads", "threads (default: all cores)", type=int),
    ],
    run=complete,
    show=_print_summary,
)
