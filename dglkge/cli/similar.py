"""``dglkge similar``: the entities whose rows have the greatest cosine with one entity's row."""

from __future__ import annotations

import argparse

from dglkge.cli.common import add_options, open_model, print_columns, print_json, print_text

DESCRIPTION = "Show the entities of the same type whose rows have the greatest cosine with an entity's row."
EXAMPLES = """examples:
  dglkge similar runs/demo --entity Alice
  dglkge similar runs/demo --entity Mercury --type planet --topk 3 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, "run", "no_verify", "json")
    parser.add_argument("--entity", required=True, metavar="NAME", help="the entity")
    parser.add_argument(
        "--type", metavar="TYPE", help="its type, if entities of several types share the name"
    )
    parser.add_argument(
        "--topk", type=int, default=10, metavar="K", help="entities to show (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    model = open_model(args)
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
