"""``partition_tools/extend.py``: adds triples and entities to a data set; old ids and partitions stay."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """Add triples, entities and relations to a data set. A new folder is made, in which every old
id and every entity's partition stays; new ids follow after the last. The new triples are an edge set of their
own, which training can walk over alone."""
EXAMPLES = """\
examples:
  add the triples of February:
    python partition_tools/extend.py --dataset datasets/news --input 2026-02.tsv --name 2026-02 \\
        --output datasets/news-02

  go on from the run on the old data set; train the new triples only, and only rows that occur in them:
    dglkge train --set dataset=datasets/news-02 --set output=runs/news-02 \\
        --set checkpoint.init_path=runs/news --set training.edge_sets='[2026-02]' --set training.rows=touched

  several entity types: a new entity takes the type that a known relation gives it, or that of a file:
    python partition_tools/extend.py --dataset datasets/typed --input more.tsv --entity-types types.tsv \\
        --name more --output datasets/typed-more

valid and test stay as they are. Repeated triples are kept and counted, as partition.py does.
exit status: 0 done, 1 failure, 2 something in the input (one line says what), 130 or 143 interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("--dataset", required=True, type=Path, metavar="FOLDER", help="the data set to extend; it stays")
    add("--input", nargs="+", required=True, type=Path, metavar="FILE", help="tsv, csv (also gz) or Parquet")
    add("--output", required=True, type=Path, metavar="FOLDER", help="the data set folder to make")
    add("--name", required=True, help="name of the edge set of the new triples")
    add("--columns", default="head,relation,tail", metavar="LIST", help="as of partition.py")
    add("--delimiter", metavar="CHAR", help="instead of tab, and of the comma of .csv")
    add("--entity-types", "--entity_types", type=Path, metavar="FILE", help="lines of entity and type")
    add("--overwrite", action="store_true", help="replace the data set at the output")
    add("--json", action="store_true", help="print the figures as JSON")


def _terminate(signal_number: int, frame: object) -> None:
    """Raise, so that the temporary folder is removed and the child process is ended."""
    raise SystemExit(128 + signal_number)


def run(args: argparse.Namespace) -> int:
    """Extend, and print what was added."""
    # Imported late, so that --help is quick.
    from dglkge.data.text_format import parse_columns, parse_delimiter
    from dglkge.partition.extend import extend_dataset

    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        figures = extend_dataset(
            args.dataset,
            args.input,
            args.output,
            args.name,
            parse_columns(args.columns),
            None if args.delimiter is None else parse_delimiter(args.delimiter),
            args.entity_types,
            args.overwrite,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.json:
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    else:
        added = figures["added"]
        sys.stdout.write(
            f"edge set {added['edge_set']}: {added['triples']:,} triples, {added['entities']:,} new "
            f"entities, {added['relations']:,} new relations\nthe data set lies in {args.output}\n"
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Extend as a script of its own; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="extend.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="extend.py: %(message)s")
    # After the arguments are parsed, so that --help needs no package.
    from dglkge.errors import DglkgeError, InputError

    try:
        return run(args)
    except InputError as error:
        sys.stderr.write(f"extend.py: {error}\n")
        return 2
    except DglkgeError as error:
        sys.stderr.write(f"extend.py: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("extend.py: interrupted; nothing was left behind\n")
        return 130
