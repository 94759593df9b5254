"""``dglkge similar``: the entities whose rows have the greatest cosine with one entity's row."""

from __future__ import annotations

import argparse

from dglkge.cli.common import add_run_argument, add_verify_argument, print_columns, print_json, print_text

DESCRIPTION = "Show the entities of the same type whose rows have the greatest cosine with an entity's row."
EXAMPLES = """examples:
  dglkge similar runs/demo --entity Alice
  dglkge similar runs/demo --entity Mercury --type planet --topk 3 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_argument(parser)
    add_verify_argument(parser)
    parser.add_argument("--entity", required=True, metavar="NAME", help="the entity")
    parser.add_argument(
        "--type", metavar="TYPE", help="its type, if entities of several types share the name"
    )
    parser.add_argument(
        "--topk", type=int, default=10, metavar="K", help="entities to show (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    from dglkge.inference.run import open_run  # here: --help does without torch

    model = open_run(args.run, verify=not args.no_verify)
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
