"""``dglkge extend``, ``partition_tools/extend.py``: further triples and entities; old ids stay."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dglkge.cli.common import add_options, print_json, print_text, run_script, sigterm_raises
from dglkge.distributed.dgl_import import require_dgl

DESCRIPTION = """Add triples, entities and relations to a data set. A new folder is made, in which every old
id and every entity's partition stays; new ids follow after the last. The new triples are an edge set of their
own, which training can walk over alone."""
EXAMPLES = """\
examples:
  add the triples of February:
    dglkge extend --dataset datasets/news --input 2026-02.tsv --name 2026-02 \\
        --output datasets/news-02

  go on from the run on the old data set; train the new triples only, and only rows that occur in them:
    dglkge train --set dataset=datasets/news-02 --set output=runs/news-02 \\
        --set checkpoint.init_path=runs/news --set training.edge_sets='[2026-02]' --set training.rows=touched

  several entity types: a new entity takes the type that a known relation gives it, or that of a file:
    dglkge extend --dataset datasets/typed --input more.tsv --entity-types types.tsv \\
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
    add_options(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Extend, and print what was added."""
    require_dgl("dglkge extend")
    # Imported late, so that --help is quick.
    from dglkge.data.text_format import parse_columns, parse_delimiter
    from dglkge.partition.extend import extend_dataset

    with sigterm_raises():
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
    if args.json:
        print_json(figures)
    else:
        added = figures["added"]
        print_text(
            f"edge set {added['edge_set']}: {added['triples']:,} triples, {added['entities']:,} new "
            f"entities, {added['relations']:,} new relations\nthe data set lies in {args.output}"
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Extend as a script of its own; returns the exit status."""
    return run_script("extend.py", sys.modules[__name__], argv)
