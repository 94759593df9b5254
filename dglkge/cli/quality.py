"""``dglkge quality``: repeated triples, leaks into valid and test, unseen names and degrees of a data set."""

from __future__ import annotations

import argparse

from dglkge.cli.common import add_options, print_json, print_rich

DESCRIPTION = """Show the quality of a data set: repeated triples, triples of valid and test that train gives
away, names that train lacks, inverse and duplicate relations, degrees, connected components.
dglkge partition prints the same; docs/data-quality.md explains each figure."""
EXAMPLES = """examples:
  dglkge quality datasets/wn18
  dglkge quality datasets/wn18 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("dataset", metavar="DATASET", help="a folder that dglkge partition made")
    add_options(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Measure, or read what was measured, and print."""
    from dglkge.data.dataset import Dataset  # here: --help does without pandas
    from dglkge.partition.report import print_quality

    quality = Dataset.open(args.dataset).quality()
    if args.json:
        print_json(quality)
    else:
        print_rich(lambda console: print_quality(quality, console))
    return 0
