"""``dglkge export``: a trained model's rows in formats that other programs read."""

from __future__ import annotations

import argparse
from pathlib import Path

from dglkge.cli.common import add_options, human_bytes, open_model, print_result
from dglkge.inference.choices import EXPORT_FORMATS
from dglkge.model.functions.comparators import METRICS

DESCRIPTION = """Write the rows of every table, in the order of the data set's ids.
  npy         {table}.npy (n, D) float32, and the names in {table}.names.txt
  parquet     {table}.parquet with columns name, type and embedding, for DuckDB, Polars and others
  safetensors {table}.safetensors with one tensor, embeddings, and the names in {table}.names.txt
  dglke       {dataset}_{model}_{table}.npy, id maps and config.json, as DGL-KE writes them; only of
              models that were trained with model.reciprocal_relations=false
  tsv         {table}.tsv: a name and its numbers on each line, separated by tabs
  word2vec    {table}.vec: a line with n and D, then a name (white space replaced by _) and its numbers
  faiss       {table}.faiss, an exact index (pip install 'dglkge[faiss]'), and {table}.names.txt
  lancedb     {table}.lance: the folder is a LanceDB database (pip install 'dglkge[lancedb]')
  projector   tensors, metadata and projector_config.pbtxt, for tensorboard --logdir DIR
  huggingface a folder for the Hugging Face hub: tensors, names, config.json and a model card with the
              metrics of the run; dglkge reads it like a run
A name that a format cannot hold, e.g. one with a tab in tsv, is refused before anything is written.
With reciprocal relations, the first half of a relation's row is the one for queries of tails."""
EXAMPLES = """examples:
  dglkge export runs/demo --format npy --output embeddings/
  dglkge export runs/demo --format word2vec --output vectors/ --table entity
  dglkge export runs/demo --format projector --output projector/ --max-rows 5000
  dglkge export runs/demo --format huggingface --output hub/ && hf upload ME/MODEL hub/"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, "run", "no_verify", "json")
    parser.add_argument("--format", required=True, choices=EXPORT_FORMATS, help="format of the files")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--table",
        action="append",
        metavar="TABLE",
        help="only this entity type, or relation; may be repeated (default: all)",
    )
    parser.add_argument(
        "--max-rows",
        type=int,
        metavar="N",
        help="for projector: a random sample of at most N rows of each table (default: 10000)",
    )
    parser.add_argument(
        "--metric",
        choices=METRICS,
        help="for faiss: the metric of the index (default: that of the score function, e.g. inner-product "
        "for complex and l2 for transe_l2)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    """Write the files and print a list of them."""
    written = open_model(args).export(
        args.format, Path(args.output), args.table, args.overwrite, args.max_rows, args.metric
    )
    sizes = [(path, _size_bytes(path)) for path in written]
    files = [{"path": str(path), "size_bytes": size_bytes} for path, size_bytes in sizes]
    print_result(args.json, files, ["file", "size"], [[path, human_bytes(size)] for path, size in sizes])
    return 0


def _size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
