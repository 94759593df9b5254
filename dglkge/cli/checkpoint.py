"""``dglkge checkpoint``: inspect, verify and convert a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from dglkge.cli import inspect_run
from dglkge.cli.common import add_import_argument, add_options, print_columns, print_text
from dglkge.errors import InputError
from dglkge.inference.choices import EXPORT_FORMATS, IMPORT_FORMATS

DESCRIPTION = """Show a checkpoint (inspect), compare every file with its checksum (verify), or convert it.

convert --to FORMAT writes the rows for other programs, like dglkge export. convert --to bigraph writes a
folder that PyTorch-BigGraph resumes from, at the pass where the run stands. convert --to run creates a run on
a data set, which can be evaluated and resumed, from a checkpoint of PyTorch-BigGraph, or with --from FORMAT
from files of rows. Entities, relations and types are matched by name; see --type."""
CONVERT_EXAMPLES = """  dglkge checkpoint convert runs/demo --to parquet --output tables/
  dglkge checkpoint convert runs/demo --to bigraph --output bigraph_model/
  dglkge checkpoint convert bigraph_model/ --to run --dataset data/mine --output runs/theirs
  dglkge checkpoint convert tables/ --from parquet --score-function complex --reciprocal --to run \\
      --dataset data/mine --output runs/back"""
EXAMPLES = f"""examples:
  dglkge checkpoint inspect runs/demo
  dglkge checkpoint verify runs/demo/checkpoint/epoch_10
{CONVERT_EXAMPLES}"""

TO_RUN, TO_BIGRAPH = "run", "bigraph"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three actions and their arguments."""
    # Subparsers inherit no formatter: without it argparse would refill the examples.
    raw = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, help_text, example in (
        ("inspect", "show version, progress, model, tables and sizes", "runs/demo"),
        ("verify", "inspect, and compare every file with its checksum", "runs/demo/checkpoint/epoch_10"),
    ):
        action = actions.add_parser(
            name,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            epilog=f"example:\n  dglkge checkpoint {name} {example}",
            formatter_class=raw,
        )
        add_options(action, "run", "json")
        add_import_argument(action)
    convert = actions.add_parser(
        "convert",
        help="convert to and from other programs' formats",
        description="Write a checkpoint's rows for other programs, or create a run from theirs.",
        epilog=f"examples:\n{CONVERT_EXAMPLES}",
        formatter_class=raw,
    )
    convert.add_argument("run", metavar="SOURCE", help="a run, a checkpoint, or a folder of files for --from")
    convert.add_argument(
        "--to", required=True, choices=[TO_RUN, TO_BIGRAPH, *EXPORT_FORMATS], help="what to write"
    )
    convert.add_argument(
        "--from", dest="source_format", choices=IMPORT_FORMATS, help="format of files of rows to read"
    )
    convert.add_argument("--output", required=True, metavar="DIR", help="folder for what is written")
    convert.add_argument("--dataset", metavar="DIR", help="for --to run: the run's data set")
    convert.add_argument(
        "--score-function",
        metavar="NAME",
        help="for --from: the rows' score function (dglke: read from its files)",
    )
    convert.add_argument(
        "--score-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for --from: an option of the score function, e.g. p=1 of keci; may be repeated",
    )
    convert.add_argument(
        "--reciprocal", action="store_true", help="for --from: a relation's row has a half for each side"
    )
    convert.add_argument(
        "--type",
        action="append",
        default=[],
        metavar="THEIRS=OURS",
        help="for --to run: an entity type of the checkpoint and that of the data set, e.g. all=entity; not "
        "needed if the names are equal or each side has one type; may be repeated",
    )
    add_import_argument(convert)
    convert.add_argument("--overwrite", action="store_true", help="replace files that exist, not a run")


def run(args: argparse.Namespace) -> int:
    """Inspect, verify or convert."""
    if args.action == "convert":
        return _convert(args)
    # dglkge inspect is the same command with an option instead of an action.
    args.verify = args.action == "verify"
    return inspect_run.run(args)


def _convert(args: argparse.Namespace) -> int:
    """Write the files, or the run."""
    # Here: --help does without torch and pandas.
    from dglkge.checkpoint.conversion import convert_to_run, copy_for_bigraph
    from dglkge.checkpoint.reader import open_checkpoint
    from dglkge.data.dataset import Dataset
    from dglkge.inference.imports.import_tables import import_tables
    from dglkge.inference.run import open_run

    output = Path(args.output)
    # Options that would be ignored are errors, before anything is read.
    for option, value in (
        ("--reciprocal", args.reciprocal),
        ("--score-function", args.score_function),
        ("--score-option", args.score_option),
    ):
        if value and not args.source_format:
            raise InputError(f"{option} goes with --from; a checkpoint has its own score function and shape")
    if args.to != TO_RUN:
        if args.source_format:
            raise InputError(f"--from goes with --to {TO_RUN}, got --to {args.to}")
        if args.type:
            raise InputError(f"--type goes with --to {TO_RUN}, got --to {args.to}")
        if args.to == TO_BIGRAPH:
            if args.overwrite:
                raise InputError(f"--overwrite goes with the other formats of --to; got --to {TO_BIGRAPH}")
            version = copy_for_bigraph(open_checkpoint(args.run), output)
            print_text(f"version {version}, the number of finished passes, is in {output}")
            return 0
        written = open_run(args.run).export(args.to, output, overwrite=args.overwrite)
        print_columns(["file"], [[path] for path in written])
        return 0
    if args.overwrite:
        raise InputError(
            f"--overwrite goes with the formats of --to; --to {TO_RUN} replaces no run: take another --output"
        )
    if not args.dataset:
        raise InputError(f"--to {TO_RUN} needs --dataset: the folder of the run's data set")
    if args.type and args.source_format:
        raise InputError("--type goes with a checkpoint, not with --from")
    # After the checks of the options: opening a data set maps all of its arrays.
    dataset = Dataset.open(args.dataset)
    if args.source_format is None:
        convert_to_run(open_checkpoint(args.run), dataset, output, args.type)
    else:
        options = dict(map(_score_option, args.score_option))
        import_tables(
            Path(args.run), args.source_format, dataset, args.score_function, args.reciprocal, output, options
        )
    print_text(f"version 1 of the run is in {output}")
    return 0


def _score_option(text: str) -> tuple[str, int]:
    """Return the name and the value of an option of a score function."""
    name, separator, value = text.partition("=")
    if not (name and separator and value.isascii() and value.isdigit()):
        raise InputError(f"--score-option {text!r} is not of the form NAME=NUMBER, e.g. p=1")
    return name, int(value)
