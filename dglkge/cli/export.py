"""``dglkge export``: a trained model's rows in formats that other programs read."""

from __future__ import annotations

import argparse
from pathlib import Path

from dglkge.cli.common import (
    add_run_argument,
    add_verify_argument,
    human_bytes,
    print_columns,
    print_json,
)
from dglkge.inference.choices import EXPORT_FORMATS

DESCRIPTION = """Write the rows of every table, in the order of the data set's ids.
  npy         {table}.npy (n, D) float32, and the names in {table}.names.txt
  parquet     {table}.parquet with columns name and embedding
  safetensors {table}.safetensors with one tensor, embeddings, and the names in {table}.names.txt
  dglke       {dataset}_{model}_{table}.npy, id maps and config.json, as DGL-KE writes them
  tsv         {table}.tsv: a name and its numbers on each line, separated by tabs
  word2vec    {table}.vec: a line with n and D, then a name (white space replaced by _) and its numbers
With reciprocal relations, the first half of a relation's row is the one for queries of tails."""
EXAMPLES = """examples:
  dglkge export runs/demo --format npy --output embeddings/
  dglkge export runs/demo --format word2vec --output vectors/ --table entity"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_argument(parser)
    add_verify_argument(parser)
    parser.add_argument("--format", required=True, choices=EXPORT_FORMATS, help="format of the files")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--table",
        action="append",
        metavar="TABLE",
        help="only this entity type, or relation; may be repeated (default: all)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.add_argument("--json", action="store_true", help="print the list of files as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the files and print a list of them."""
    from dglkge.inference.run import open_run  # here: --help does without torch

    model = open_run(args.run, verify=not args.no_verify)
    written = model.export(args.format, Path(args.output), args.table, args.overwrite)
    if args.json:
        print_json([{"path": str(path), "size_bytes": path.stat().st_size} for path in written])
    else:
        print_columns(["file", "size"], [[path, human_bytes(path.stat().st_size)] for path in written])
    return 0
