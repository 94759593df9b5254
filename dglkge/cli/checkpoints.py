"""``dglkge checkpoint``: what a checkpoint has, and its rows in other formats."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.cli import common
from dglkge.cli.common import command, flag, goes_with, open_model, option, print_table, print_text
from dglkge.distributed.jobs import human_bytes
from dglkge.errors import InputError
from dglkge.inference.choices import EXPORT_FORMATS, IMPORT_FORMATS
from dglkge.model.functions.comparators import METRICS

TO_RUN, TO_BIGRAPH = "run", "bigraph"
TARGETS = (TO_RUN, TO_BIGRAPH, *EXPORT_FORMATS)


@command(common.RUN, flag("--verify", "read every file and compare it with its checksum"), common.IMPORT)
def inspect(args: argparse.Namespace) -> dict[str, Any]:
    """Show a checkpoint's version, progress, model, tables and files.
    With --verify, read every file and compare it with its checksum.

    Examples
    --------
      dglkge checkpoint inspect runs/demo
      dglkge checkpoint inspect runs/demo --verify --json
    """
    args.no_verify = True  # inspect compares all files itself, once, if that is asked for
    return open_model(args).inspect(args.verify)


@command(common.RUN, common.IMPORT)
def verify(args: argparse.Namespace) -> dict[str, Any]:
    """Inspect, and compare every file with its checksum.

    Examples
    --------
      dglkge checkpoint verify runs/demo/checkpoint/epoch_10
    """
    args.verify = True
    return inspect.run(args)


@verify.shows
@inspect.shows
def _print_report(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the description as text."""
    from dglkge.inference.run import model_text  # here: --help does without torch

    dataset = report["dataset"]
    lines = {
        "checkpoint": f"{report['path']}, version {report['version']}, {human_bytes(report['size_bytes'])}",
        "progress": _listed_values(report["progress"]),
        "model": model_text(report["model"]),
        "optimizer": _listed_values(report["optimizer"]),
        "dataset": f"{dataset['name']} ({dataset['path']}), fingerprint {dataset['fingerprint'][:12]}",
        "seed": report["seed"],
        "written by": _listed_values(report["versions"]),
    }
    # Counted over all files: a checkpoint of PyTorch-BigGraph has no checksum at all.
    unknown = sum(file["crc32"] is None for file in report["files"])
    if report["verified"]:
        lines["checksums"] = f"all {len(report['files'])} files are as they were written"
    elif args.verify:
        of_files = f"{unknown} of {len(report['files'])} files"
        lines["checksums"] = f"none for {of_files}, which PyTorch-BigGraph wrote: not verified"
    for name, text in lines.items():
        print_text(f"{name:<11} {text}")
    print_text()
    cells = {"table": "{name}", "rows": "{num_rows}", "width": "{width}", "parts": "{num_parts}"}
    state = {"optimizer state": lambda table: ", ".join(table["optimizer_state"]) or "-", "size": _size}
    print_table({**cells, **state}, report["tables"])


def _size(record: Mapping[str, Any]) -> str:
    return human_bytes(record["size_bytes"])


def _listed_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


@command(
    common.RUN,
    common.NO_VERIFY,
    option("--format FORMAT", "see above", required=True, choices=EXPORT_FORMATS),
    common.OUTPUT,
    option("--table TABLE", "only this entity type, or relation (default: all)", is_repeated=True),
    option("--max-rows", "for projector: sample at most N rows of a table (default: 10000)", type=int),
    option("--metric", "for faiss and qdrant (default: that of the score function)", choices=METRICS),
    common.OVERWRITE,
    common.IMPORT,
)
def export(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the rows of every table, in the order of the data set's ids.
      npy         {table}.npy (n, D) float32, and the names in {table}.names.txt
      parquet     {table}.parquet with columns name, type and embedding, for DuckDB, Polars and others
      safetensors {table}.safetensors with one tensor, embeddings, and the names in {table}.names.txt
      dglke       {dataset}_{model}_{table}.npy, id maps and config.json, as DGL-KE writes them; only of
                  models that were trained with model.reciprocal_relations=false
      tsv         {table}.tsv: a name and its numbers on each line, separated by tabs
      word2vec    {table}.vec: a line with n and D, then a name (white space replaced by _) and its numbers
      faiss       {table}.faiss, an exact index (pip install 'dglkge[faiss]'), and {table}.names.txt
      lancedb     {table}.lance: the folder is a LanceDB database (pip install 'dglkge[lancedb]')
      qdrant      qdrant/: a folder of Qdrant's local mode, a collection for each table (pip install
                  'dglkge[qdrant]')
      projector   tensors, metadata and projector_config.pbtxt, for tensorboard --logdir DIR
      huggingface a folder for the Hugging Face hub: tensors, names, config.json and a model card with the
                  metrics of the run; dglkge reads it like a run
    A name that a format cannot hold, e.g. one with a tab in tsv, is refused before anything is written.
    With reciprocal relations, the first half of a relation's row is the one for queries of tails.

    Examples
    --------
      dglkge checkpoint export runs/demo --format npy -o embeddings/
      dglkge checkpoint export runs/demo --format word2vec -o vectors/ --table entity
      dglkge checkpoint export runs/demo --format projector -o projector/ --max-rows 5000
      dglkge checkpoint export runs/demo --format huggingface -o hub/ && hf upload ME/MODEL hub/
    """
    choices = (args.table, args.overwrite, args.max_rows, args.metric)
    return _listed(open_model(args).export(args.format, Path(args.output), *choices))


def _listed(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return paths and sizes; of a folder, of all its files."""
    files = [[file for file in (path, *path.rglob("*")) if file.is_file()] for path in paths]
    sizes = [sum(file.stat().st_size for file in inside) for inside in files]
    return [{"path": str(path), "size_bytes": size} for path, size in zip(paths, sizes)]


@export.shows
def _print_files(files: list[dict[str, Any]], _args: argparse.Namespace) -> None:
    print_table({"file": "{path}", "size": _size}, files)


@command(
    option("run SOURCE", "a run, a checkpoint, or a folder of files for --from"),
    option("--to FORMAT", "run, bigraph, or a format of checkpoint export", required=True, choices=TARGETS),
    option("--from", "format of files of rows to read", dest="source_format", choices=IMPORT_FORMATS),
    common.OUTPUT,
    option("--dataset DIR", "for --to run: the run's data set"),
    option("--score-function NAME", "for --from: the rows' score function (dglke: read from its files)"),
    option("--score-option NAME=VALUE", "for --from: that function's option, e.g. p=1", is_repeated=True),
    flag("--reciprocal", "for --from: a relation's row has a half for each side"),
    option(
        "--type THEIRS=OURS",
        "for --to run: an entity type and its name in the data set, where these differ and there are "
        "several, e.g. all=entity",
        is_repeated=True,
    ),
    flag("--fold-in", "for --to run: new entities get rows from their training triples in the data set"),
    flag("--overwrite", "replace files that exist, not a run"),
    common.IMPORT,
)
def convert(args: argparse.Namespace) -> Any:
    """Write a checkpoint's rows for other programs, or create a run from theirs.

    --to FORMAT writes the rows for other programs, like dglkge checkpoint export. --to bigraph writes a
    folder that PyTorch-BigGraph resumes from, at the pass where the run stands. --to run creates a run on a
    data set, which can be evaluated and resumed, from a checkpoint of PyTorch-BigGraph, or with --from
    FORMAT from files of rows. Entities, relations and types are matched by name; see --type. With --fold-in
    the data set may have entities that the checkpoint lacks.

    Examples
    --------
      dglkge checkpoint convert runs/demo --to parquet -o tables/
      dglkge checkpoint convert runs/demo --to bigraph -o bigraph_model/
      dglkge checkpoint convert bigraph_model/ --to run --dataset data/mine -o runs/theirs
      dglkge checkpoint convert runs/news --to run --dataset datasets/news-02 --fold-in -o runs/news-02
      dglkge checkpoint convert tables/ --from parquet --score-function complex --reciprocal --to run \\
          --dataset data/mine -o runs/back
    """
    # Here: --help does without torch and pandas.
    from dglkge.checkpoint.conversion import convert_to_run, copy_for_bigraph
    from dglkge.checkpoint.reader import open_checkpoint
    from dglkge.data.dataset import Dataset
    from dglkge.inference.exports.import_tables import import_tables
    from dglkge.inference.run import open_run

    output = Path(args.output)
    # Options that would be ignored are errors, before anything is read.
    for name in ("reciprocal", "score_function", "score_option"):
        goes_with(args, name, args.source_format, "--from; a checkpoint has its own score function and shape")
    if args.to != TO_RUN:
        for name, dest in (("from", "source_format"), ("type", "type"), ("fold-in", "fold_in")):
            goes_with(args, dest, False, f"--to {TO_RUN}, got --to {args.to}", name)
        if args.to == TO_BIGRAPH:
            goes_with(args, "overwrite", False, f"the other formats of --to; got --to {TO_BIGRAPH}")
            return {"path": str(output), "version": copy_for_bigraph(open_checkpoint(args.run), output)}
        return _listed(open_model(args).export(args.to, output, overwrite=args.overwrite))
    text = f"the formats of --to; --to {TO_RUN} replaces no run: take another --output"
    goes_with(args, "overwrite", False, text)
    if not args.dataset:
        raise InputError(f"--to {TO_RUN} needs --dataset: the folder of the run's data set")
    for name in ("type", "fold_in"):
        goes_with(args, name, not args.source_format, "a checkpoint, not with --from")
    # After the checks of the options: opening a data set maps all of its arrays.
    dataset = Dataset.open(args.dataset)
    if args.source_format is None:
        run = open_run(args.run).add_entities_of(dataset) if args.fold_in else None
        convert_to_run(run.checkpoint if run else open_checkpoint(args.run), dataset, output, args.type)
    else:
        options = dict(map(_score_option, args.score_option))
        model = (args.score_function, args.reciprocal, output, options)
        import_tables(Path(args.run), args.source_format, dataset, *model)
    return {"path": str(output), "version": 1}


@convert.shows
def _print_converted(result: Any, args: argparse.Namespace) -> None:
    if isinstance(result, list):
        _print_files(result, args)
        return
    source = "of the run" if args.to == TO_RUN else "(the number of finished passes)"
    print_text(f"version {result['version']} {source} is in {result['path']}")


def _score_option(text: str) -> tuple[str, int]:
    """Return the name and the value of an option of a score function."""
    name, separator, value = text.partition("=")
    if not (name and separator and value.isascii() and value.isdigit()):
        raise InputError(f"--score-option {text!r} is not of the form NAME=NUMBER, e.g. p=1")
    return name, int(value)
