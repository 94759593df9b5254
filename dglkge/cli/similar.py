"""``dglkge similar``: the entities whose rows are nearest to one's."""

from __future__ import annotations

import argparse

import torch

from dglkge.checkpoint.reader import Checkpoint, open_checkpoint
from dglkge.cli.opened_run import add_run_argument, add_verify_argument
from dglkge.cli.output import print_columns, print_json
from dglkge.errors import InputError
from dglkge.inference.similarity import most_similar

HELP = "the entities nearest to an entity, by cosine"
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
        "--type", metavar="TYPE", help="its type, where entities of several types share the name"
    )
    parser.add_argument(
        "--topk", type=int, default=10, metavar="K", help="entities to show (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    checkpoint = open_checkpoint(args.run, verify=not args.no_verify)
    entity_type = _type_of(checkpoint, args.entity, args.type)
    names = checkpoint.vocabulary(entity_type)
    ids = torch.tensor([names.id(args.entity)])
    (answers,) = most_similar(checkpoint, checkpoint.shards(entity_type), entity_type, ids, args.topk)
    found = [
        {"rank": rank, "name": names[answer.entity_id], "cosine": answer.score}
        for rank, answer in enumerate(answers, start=1)
    ]
    if args.json:
        print_json({"entity": args.entity, "type": entity_type, "similar": found})
        return 0
    print(f"nearest to {args.entity} among entities of type {entity_type}")
    rows = [[one["rank"], f"{one['cosine']:.4f}", one["name"]] for one in found]
    print_columns(["rank", "cosine", "name"], rows, indent="  ")
    return 0


def _type_of(checkpoint: Checkpoint, entity: str, entity_type: str | None) -> str:
    """Return the type of an entity.

    Raises
    ------
    InputError
        If several types have the name. One that no type has is left to the vocabulary, whose message
        shows the nearest names.
    """
    if entity_type is not None:
        if entity_type not in checkpoint.entity_types:
            known = ", ".join(map(repr, checkpoint.entity_types))
            raise InputError(f"unknown entity type {entity_type!r}; known: {known}")
        return entity_type
    types = [known for known in checkpoint.entity_types if entity in checkpoint.vocabulary(known)]
    if len(types) > 1:
        raise InputError(
            f"{entity!r} is the name of entities of several types: {', '.join(types)}; say --type"
        )
    if not types and len(checkpoint.entity_types) > 1:
        raise InputError(
            f"no entity of any type is called {entity!r}; say --type to see the nearest names of one of "
            + ", ".join(checkpoint.entity_types)
        )
    return (types or checkpoint.entity_types)[0]
