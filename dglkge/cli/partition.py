"""``dglkge partition`` and ``partition_tools/partition.py``: triples to a data set with DGL partitions.

Packages are imported late: the script's ``--help`` needs none of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dglkge.cli.common import (
    add_options,
    flush_output,
    print_json,
    print_rich,
    print_text,
    run_script,
    sigterm_raises,
)
from dglkge.data.text_format import parse_columns, parse_delimiter
from dglkge.distributed.dgl_import import require_dgl
from dglkge.errors import InputError, StorageError
from dglkge.partition.options import Options, ReadingOptions, parse_fractions, parse_memory, parse_prefixes

DESCRIPTION = "Turn triples (head, relation, tail) into a data set folder that dglkge trains from."
EXAMPLES = """\
examples:
  a folder with train.tsv, valid.tsv and test.tsv (or .txt, .csv, .parquet; text also with .gz or .bz2):
    python partition_tools/partition.py --input data/FB15k-237 --output datasets/fb15k237 --num-parts 2

  one file, split 90/5/5 by a hash of each triple:
    python partition_tools/partition.py --input all.tsv.gz --split 0.9,0.05,0.05 --output datasets/mine

  CSV or Parquet with columns of your own, and a weight:
    python partition_tools/partition.py --input facts.parquet --split 0.9 --output datasets/facts \\
        --columns head=subject,relation=predicate,tail=object,weight=confidence

  entities of several types (lines of entity<TAB>type):
    python partition_tools/partition.py --input data/ --entity-types types.tsv --output datasets/typed

  RDF (N-Triples, N-Quads, Turtle, TriG; also .gz and .bz2), with entity types; needs dglkge[rdf]:
    python partition_tools/partition.py --input books.ttl --split 0.9 --types-from rdf:type \\
        --literals numeric --output datasets/books

  a folder of DGL-KE (entities.dict), OpenKE (train2id.txt) or PyKEEN (numeric_triples.tsv.gz), as it is:
    python partition_tools/partition.py --input benchmarks/FB15K237 --output datasets/theirs

  DGL-KE's user-defined form: integer ids in the order head, tail, relation, with id<TAB>name maps:
    python partition_tools/partition.py --input train.txt valid.txt test.txt --columns htr \\
        --entity-map entities.tsv --relation-map relations.tsv --output datasets/udd

--columns takes one of three forms:
  roles in the order of the columns, for files without a header: head,relation,tail,weight or hrtw, htr, ...
  role=name pairs, for files with a header; other columns are not read: head=subject,relation=p,tail=object
  the names of the head, relation, tail [and weight] columns: subject,predicate,object
A .csv file whose first line has the names head, relation and tail, or source, label and target, or the like,
has a header, too. Only .csv knows quotes; in the other text files every character stands for itself. NA and
null are names like others.

The figures show the quality of the data: repeated triples, triples of valid and test that train gives away,
names that train lacks (docs/data-quality.md). --strict-splits refuses leaks and writes nothing: triples of
valid and test that stand in train, and more than SHARE of them that train implies by an inverse, symmetric or
duplicate relation. --drop-leaks leaves leaks out: exact those that stand in train, implied also those that
train implies.

An edge belongs to the partition of its tail. --method metis (the default) keeps neighbours together, so that
trainers fetch fewer rows from other machines; --method random is faster and balances a little better. All
balance nodes and edges. METIS takes no seed: it gives the same partitions every time. What METIS needs is
computed before anything is partitioned, and refused if it is not free. --method ldg takes 24 bytes a triple:
each entity goes to the partition with most of its neighbours, times the room there, in five passes.

Triples are read, numbered and written a million at a time; their ids are in a temporary file beside the
output (12 bytes a triple). --max-memory bounds what is sorted at a time and what METIS may take. The data set
does not depend on it. Names of entities are in memory: about 200 bytes each.

python partition_tools/partition.py and dglkge partition are the same.
exit status: 0 done, 1 failure, 2 something in the input (one line says what), 130 or 143 interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _add_input(parser)
    _add_formats(parser)
    _add_output(parser)


def _add_input(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is read").add_argument
    files: Any = {"type": Path, "metavar": "FILE"}
    add("--input", nargs="+", required=True, type=Path, metavar="PATH", help="a folder, or files")
    add("--columns", default="head,relation,tail", metavar="LIST", help="see below (head,relation,tail)")
    add(
        "--delimiter", metavar="CHAR", help="instead of tab, and of the comma of .csv: tab, comma, space, ..."
    )
    add(
        "--split",
        metavar="FRACTIONS",
        help="split one file: fractions of train,valid,test, or of train alone",
    )
    add(
        "--strict-splits",
        "--strict_splits",
        nargs="?",
        type=float,
        const=0.5,
        metavar="SHARE",
        help="refuse leaks from train into valid and test, see below (0.5)",
    )
    add("--drop-leaks", "--drop_leaks", choices=("exact", "implied"), help="leave them out, see below")
    add("--entity-types", "--entity_types", **files, help="lines of entity and type (else one type, entity)")
    add("--ids", choices=("names", "integers"), help="what the fields are (names; with a map integers)")
    add("--entity-map", "--entity_map", **files, help="lines of integer id and entity name")
    add("--relation-map", "--relation_map", **files, help="lines of integer id and relation name")


def _add_formats(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("formats other than tables").add_argument
    add(
        "--format",
        metavar="NAME",
        help="tsv, csv, parquet, ntriples, nquads, turtle, trig, graphml, dglke, openke or pykeen "
        "(found out by the name, else by the content)",
    )
    add(
        "--prefix", action="append", default=[], metavar="NAME=IRI", help="RDF: shorten IRIs; may be repeated"
    )
    add("--full-iris", "--full_iris", action="store_true", help="RDF: do not shorten IRIs")
    add("--base-iri", "--base_iri", metavar="IRI", help="RDF: what relative IRIs are relative to")
    add(
        "--literals",
        default="drop",
        metavar="POLICY",
        help="RDF: drop them, make them entities, or write the numeric ones to a file in the dataset: "
        "drop, entities or numeric (drop)",
    )
    add(
        "--graph",
        action="append",
        default=[],
        metavar="IRI",
        help='RDF: read this named graph only, "default" for the triples in none; may be repeated (all)',
    )
    add(
        "--types-from",
        "--types_from",
        metavar="RELATION",
        help="take entity types from the triples of a relation (rdf:type), or from an attribute of nodes "
        "(GraphML)",
    )
    add(
        "--max-types",
        "--max_types",
        type=int,
        default=20,
        metavar="N",
        help="types that --types-from makes (20)",
    )
    add(
        "--relation-attribute",
        "--relation_attribute",
        metavar="NAME",
        help="GraphML: attribute of edges that is the relation (relation, predicate, label, labelE or type)",
    )
    add("--name-attribute", "--name_attribute", metavar="NAME", help="GraphML: attribute of nodes (their id)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is made of it").add_argument
    numbers: Any = {"type": int, "metavar": "N"}
    add("--output", required=True, type=Path, metavar="FOLDER", help="the dataset folder to make")
    add("--num-parts", "--num_parts", default=1, **numbers, help="partitions, one per machine (1)")
    add(
        "--method",
        choices=("metis", "ldg", "random"),
        default="metis",
        help="how to partition; ldg is greedy and streaming, for graphs that METIS has no memory for (metis)",
    )
    add(
        "--seed",
        default=0,
        **numbers,
        help="of --split, of --method ldg and random, and of relations' owners (0)",
    )
    add(
        "--max-memory",
        "--max_memory",
        metavar="SIZE",
        help="memory for triples, e.g. 2GB, besides that for names (512 MiB; for METIS what is free)",
    )
    add(
        "--num-workers",
        "--num_workers",
        **numbers,
        help="threads that read and check triples; the data set is the same with any number (all cores)",
    )
    add("--name", help="name of the dataset (the output folder's)")
    add("--overwrite", action="store_true", help="replace the dataset at the output")
    add_options(parser, "json")
    add("--progress", action=argparse.BooleanOptionalAction, help="on stderr (where that is a terminal)")


def make(arguments: argparse.Namespace) -> None:
    """Partition by the command line, and print the figures."""
    require_dgl("dglkge partition")
    # Imported late, so that --help is quick.
    from dglkge.data.dataset_files import Field
    from dglkge.partition.make_dataset import partition_files
    from dglkge.partition.report import print_figures, print_quality

    values = vars(arguments)
    has_map = bool(arguments.entity_map or arguments.relation_map)
    if has_map and arguments.ids == "names":
        raise InputError("--ids names excludes --entity-map and --relation-map")
    parsed = {
        "columns": parse_columns(arguments.columns),
        "split": parse_fractions(arguments.split) if arguments.split else None,
        "max_memory": parse_memory(arguments.max_memory) if arguments.max_memory else None,
        "integer_ids": has_map or arguments.ids == "integers",
        "prefixes": parse_prefixes(arguments.prefix),
        "graphs": tuple(arguments.graph),
    }
    # The other options have the names of their fields.
    values = values | parsed
    reading = ReadingOptions(**{field.name: values[field.name] for field in fields(ReadingOptions)})
    values["reading"] = reading
    options = Options(**{field.name: values[field.name] for field in fields(Options)})
    delimiter = parse_delimiter(arguments.delimiter) if arguments.delimiter is not None else None
    figures = partition_files(arguments.input, arguments.output, options, delimiter)
    try:
        if arguments.json:
            print_json(figures)
        else:
            for note in figures[Field.INPUT]["notes"]:
                print_text(note)
            print_rich(lambda console: print_figures(figures, console))
            print_rich(lambda console: print_quality(figures["quality"], console))
            dropped = [f"{count:,} of {split}" for split, count in figures["dropped_leaks"].items()]
            if dropped:
                print_text(f"left out as leaks: {' and '.join(dropped)}")
            print_text(f"the dataset lies in {arguments.output}")
        flush_output()
    except StorageError as error:
        raise StorageError(
            f"the dataset lies in {arguments.output}, but its figures are lost: {error}"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Partition as a command of ``dglkge``."""
    with sigterm_raises():
        make(args)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Partition as a script of its own; returns the exit status."""
    return run_script("partition.py", sys.modules[__name__], argv)
