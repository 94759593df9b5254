"""``dglkge recipes``: the configurations that ship, by name."""

from __future__ import annotations

import argparse

from dglkge.cli.common import add_options, print_json, print_result, print_text
from dglkge.config import load_config
from dglkge.config.recipes import NAMED_SCHEMA, SCHEMA, recipe_file, recipe_files

DESCRIPTION = (
    """List the configurations that ship, or print one of them. docs/quality.md has their MRR and time."""
)
EXAMPLES = """examples:
  dglkge recipes
  dglkge recipes fb15k237/complex-5min > my.yaml       a file to change
  dglkge train --recipe fb15k237/complex-5min --set dataset=data/mine --set output=runs/mine"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one")
    add_options(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Print."""
    if args.name is not None:
        path = recipe_file(args.name)
        if args.json:
            print_json(load_config(str(path), []).to_dict())
        else:
            # A copy lies elsewhere: it names the schema by its place on this machine.
            print_text(path.read_text(encoding="utf-8").rstrip().replace(NAMED_SCHEMA, str(SCHEMA), 1))
        return 0
    rows = []
    for name, path in recipe_files().items():
        config = load_config(str(path), [])
        model = config.model
        rows.append((name, model.score_function.name, model.dimension, config.training.num_epochs))
    header = ("name", "score function", "dimension", "epochs")
    print_result(args.json, [dict(zip(header, row)) for row in rows], header, rows)
    return 0
