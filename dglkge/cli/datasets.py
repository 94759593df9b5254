"""``dglkge data``: list, download, make and extend data sets, and show what is in them.

``build`` and ``extend`` are scripts of ``partition_tools`` too. Packages are imported late: for ``--help``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dglkge.cli import common
from dglkge.cli.common import command, file_format, flag, option, print_rich, print_text
from dglkge.data.text_format import bare_path
from dglkge.data.vocabulary import GRANULARITIES
from dglkge.distributed.dgl_import import require_dgl
from dglkge.distributed.jobs import parse_bytes
from dglkge.distributed.preemption import handled
from dglkge.errors import InputError, StorageError
from dglkge.partition import options

LIST_COLUMNS = ("name", "entities", "relations", "train", "valid", "test", "verified by")


def run_script(name: str, argv: Sequence[str] | None = None) -> int:
    """Run ``partition.py`` or ``extend.py``; returns the exit status."""
    command = {"partition.py": build, "extend.py": extend}[name]
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(message)s")
    return common.run_command(name, lambda: command.call(command.parser(name).parse_args(argv)))


@command(
    "what is read",
    option("sources SOURCE", "a folder, files, or a name of dglkge data list", nargs="*", type=Path),
    option("--input SOURCE", "the same", nargs="+", type=Path),
    common.COLUMNS,
    common.DELIMITER,
    option("--split FRACTIONS", "split one set: shares of train,valid,test, or of train (0.9,0.05,0.05)"),
    option("--strict-splits SHARE", "refuse leaks, see below (0.5)", nargs="?", type=float, const=0.5),
    option("--drop-leaks", "leave them out, see below", choices=("exact", "implied")),
    option("--entity-types FILE", "lines of entity and type (else one type, entity)", type=Path),
    option("--ids", "what the fields are (names; with a map integers)", choices=("names", "integers")),
    option("--entity-map FILE", "lines of integer id and entity name", type=Path),
    option("--relation-map FILE", "lines of integer id and relation name", type=Path),
    "formats other than tables",
    option("--format NAME", f"{', '.join(options.FORMATS)} (found out by the name, else by the content)"),
    option("--prefix NAME=IRI", "RDF: shorten IRIs", is_repeated=True),
    flag("--full-iris", "RDF: do not shorten IRIs"),
    option("--base-iri IRI", "RDF: what relative IRIs are relative to"),
    option("--literals POLICY", "RDF: drop, entities, or numeric: numbers to a file (drop)", default="drop"),
    option("--graph IRI", 'RDF: only this graph; "default": triples in none (all)', is_repeated=True),
    option("--types-from RELATION", "entity types by a relation (rdf:type) or an attribute (GraphML)"),
    option("--max-types", "types that --types-from makes (20)", default=20),
    option(
        "--relation-attribute NAME",
        "GraphML: attribute of edges that is the relation (relation, predicate, label, labelE or type); "
        "graphs of DGL: edge data (etype, rel_type or _TYPE)",
    ),
    option("--name-attribute NAME", "GraphML: attribute of nodes (their id)"),
    "what is made of it",
    option("-o --output FOLDER", "the dataset folder to make (data/NAME)", type=Path),
    option("--num-parts", "partitions, one per machine (1)", default=1),
    option("--method", "how to partition, see below (metis)", choices=options.METHODS, default="metis"),
    option("--seed", "of --split, --method ldg and random, and relations' owners (0)", default=0),
    option("--max-memory SIZE", "memory for triples, not names, e.g. 2GB (512 MiB; METIS: what is free)"),
    option("--num-workers", "threads that read and check triples (all cores)", type=int),
    option("--time-granularity", "cut dates of the time column (as they are)", choices=[*GRANULARITIES]),
    option("--name", "name of the dataset (the output folder's)"),
    common.OVERWRITE,
    option("--progress", "on stderr (if that is a terminal)", action=argparse.BooleanOptionalAction),
)
def build(args: argparse.Namespace) -> int:
    """Turn triples (head, relation, tail) into a data set folder that dglkge trains from.

    Examples
    --------
      dglkge data build fb15k-237                                          by its name, downloaded once
      dglkge data build data/FB15k-237 -o datasets/fb15k237 --num-parts 2  with train.tsv, valid.tsv, test.tsv
      dglkge data build all.tsv.gz --split 0.9,0.05,0.05 -o datasets/mine  split by a hash of each triple
      dglkge data build facts.parquet --columns head=subject,relation=predicate,tail=object,weight=confidence
      dglkge data build data/ --entity-types types.tsv -o datasets/typed   lines of entity<TAB>type
      dglkge data build books.ttl --split 0.9 --types-from rdf:type        RDF; needs dglkge[rdf]
      dglkge data build benchmarks/FB15K237 -o datasets/theirs             as DGL-KE, OpenKE or PyKEEN has it
      dglkge data build parts -o datasets/graph      a graph of DGL, or a folder of its partitions, which stay
      dglkge data build train.txt valid.txt test.txt --columns htr --entity-map entities.tsv \\
          --relation-map relations.tsv                                     integer ids, with id<TAB>name maps

    --columns takes one of three forms:
      roles in the order of the columns, in files without a header: head,relation,tail,time or hrtT, hrtw, ...
      role=name pairs, in files with a header; other columns are not read: head=subject,relation=p,tail=object
      the names of the head, relation, tail [and weight] columns: subject,predicate,object
    docs/inputs.md has the formats, and what takes how much memory; docs/data-quality.md the figures, and the
    leaks that --strict-splits refuses (all that stand in train, and more than SHARE that train implies) and
    --drop-leaks leaves out (exact: those that stand in train; implied: also those that train implies).

    An edge belongs to the partition of its tail. --method metis keeps neighbours together, so that trainers
    fetch fewer rows from other machines; ldg does so in a stream, with 24 bytes a triple in place of 250;
    random is faster and balances a little better. All balance nodes and edges. METIS takes no seed.

    python partition_tools/partition.py and dglkge data build are the same.
    exit status: 0 done, 1 failure, 2 something in the input (one line says what), 130 or 143 interrupted.
    """
    require_dgl("dglkge data build")
    # Imported late, so that --help is quick.
    from dglkge.data.dataset_files import Field
    from dglkge.partition.make_dataset import partition_triples
    from dglkge.partition.report import print_figures

    sources = [*args.sources, *(args.input or [])]
    if not sources:
        raise InputError("give a folder or files of triples, or a name of dglkge data list")
    output = args.output or Path("data") / bare_path(sources[0]).stem
    has_map = bool(args.entity_map or args.relation_map)
    if has_map and args.ids == "names":
        raise InputError("--ids names excludes --entity-map and --relation-map")
    columns, delimiter = file_format(args)
    parsed = {
        "columns": columns,
        "delimiter": delimiter,
        "split": options.parse_fractions(args.split) if args.split else options.AUTO_SPLIT,
        "max_memory": parse_bytes(args.max_memory) if args.max_memory else None,
        "integer_ids": has_map or args.ids == "integers",
        "prefixes": options.parse_prefixes(args.prefix),
        "graphs": tuple(args.graph),
    }
    # The other options have the names of their fields.
    values = vars(args) | parsed
    values["reading"] = _of_values(options.ReadingOptions, values)
    with _sigterm_raised():
        figures = partition_triples(sources, output, _of_values(options.Options, values))
    try:
        if args.json:
            common.print_json(figures)
        else:
            for note in figures[Field.INPUT]["notes"]:
                print_text(note)
            print_rich(lambda console: print_figures(figures, console))
            _print_quality(figures["quality"], args)
            leaks = [f"{count:,} of {split}" for split, count in figures["dropped_leaks"].items()]
            if leaks:
                print_text(f"left out as leaks: {' and '.join(leaks)}")
            print_text(f"the dataset lies in {output}")
        common.flush_output()
    except StorageError as error:
        raise StorageError(f"the dataset lies in {output}, but its figures are lost: {error}") from None
    return 0


def _of_values(kind: type[Any], values: dict[str, Any]) -> Any:
    """Build a dataclass of the values that have the names of its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def _sigterm_raised() -> contextlib.AbstractContextManager[object]:
    """Let SIGTERM raise inside the block, so that temporary folders are removed and child processes end."""
    return handled([signal.SIGTERM], lambda number, _frame: sys.exit(128 + number))


@command(
    option("--dataset FOLDER", "the data set to extend; it stays", required=True, type=Path),
    option("--input FILE", "tsv, csv (also gz) or Parquet", nargs="+", required=True, type=Path),
    option("-o --output FOLDER", "the data set folder to make", required=True, type=Path),
    option("--name", "name of the edge set of the new triples", required=True),
    common.COLUMNS,
    common.DELIMITER,
    option("--entity-types FILE", "lines of entity and type", type=Path),
    common.OVERWRITE,
)
def extend(args: argparse.Namespace) -> dict[str, Any]:
    """Add triples, entities and relations to a data set. A new folder is made, in which every old id and
    every entity's partition stays; new ids follow after the last. The new triples are an edge set of their
    own, which training can walk over alone.

    Examples
    --------
      dglkge data extend --dataset datasets/news --input 2026-02.tsv --name 2026-02 -o datasets/news-02

      go on from the run on the old data set; train the new triples only, and only rows that occur in them:
        dglkge train dataset=datasets/news-02 output=runs/news-02 checkpoint.init_path=runs/news \\
            training.edge_sets='[2026-02]' training.rows=touched

    With several entity types, a new entity takes the type that a known relation gives it, or --entity-types;
    valid and test stay as they are. Repeated triples are kept and counted, as partition.py does.
    exit status: 0 done, 1 failure, 2 something in the input (one line says what), 130 or 143 interrupted.
    """
    require_dgl("dglkge data extend")
    # Imported late, so that --help is quick.
    from dglkge.partition.extend import extend_dataset

    columns, delimiter = file_format(args)
    names = (args.dataset, args.input, args.output, args.name)
    with _sigterm_raised():
        return extend_dataset(*names, columns, delimiter, args.entity_types, args.overwrite)


@extend.shows
def _print_extended(figures: dict[str, Any], args: argparse.Namespace) -> None:
    added = figures["added"]
    times = f", {added['times']:,} new times" if added["times"] else ""
    print_text(
        f"edge set {added['edge_set']}: {added['triples']:,} triples, {added['entities']:,} new "
        f"entities, {added['relations']:,} new relations{times}\nthe data set lies in {args.output}"
    )


@command(option("dataset DATASET", "a folder that dglkge data build made"))
def check(args: argparse.Namespace) -> dict[str, Any]:
    """Show the quality of a data set: repeated triples, triples of valid and test that train gives
    away, names that train lacks, inverse and duplicate relations, degrees, connected components.
    dglkge data build prints the same; docs/data-quality.md explains each figure.

    Examples
    --------
      dglkge data check datasets/wn18
      dglkge data check datasets/wn18 --json
    """
    from dglkge.data.dataset import Dataset

    return Dataset.open(args.dataset).quality()


@check.shows
def _print_quality(figures: dict[str, Any], _args: argparse.Namespace) -> None:
    """Print the figures of a data set's quality."""
    from dglkge.partition.report import print_quality

    print_rich(lambda console: print_quality(figures, console))


@command()
def list_data(_args: argparse.Namespace) -> dict[str, Any]:
    """List the data sets of the field that have a name; dglkge data build and dglkge.train take
    it in place of files. The last column says what a download is compared with.

    Examples
    --------
      dglkge data list
      dglkge data list --json    with addresses, checksums, licences and citations
    """
    from dglkge.data.public_data import public_data

    return {name: {**vars(entry), "verified_by": entry.verified_by} for name, entry in public_data().items()}


@list_data.shows
def show_list(entries: dict[str, Any], _args: argparse.Namespace) -> None:
    """Print a line for each."""
    counts = {name: map("{:,}".format, entry["counts"].values()) for name, entry in entries.items()}
    rows = [[name, *counts[name], entry["verified_by"]] for name, entry in entries.items()]
    common.print_columns(LIST_COLUMNS, rows)


@command(option("name NAME", "of dglkge data list, in any spelling"))
def get_data(args: argparse.Namespace) -> dict[str, Any]:
    """Download a data set, compare checksums and counts, and print its folder.

    Examples
    --------
      dglkge data get fb15k-237

    Downloads go to ~/.cache/dglkge, or the folder that DGLKGE_CACHE names. DGLKGE_DATA is the URL of a
    mirror, with the files of each data set in a folder of its name, or a folder of this kind; that needs no
    network.
    """
    from dglkge.data.public_data import get_public
    from dglkge.partition.sources import read_named

    entry = get_public(args.name)
    with tempfile.TemporaryDirectory(prefix="dglkge-data-") as temporary:
        progress = False if args.quiet or args.json else None
        folder, _ = read_named(entry, Path(temporary), options.Options(progress=progress))
    return {**vars(entry), "folder": str(folder)}


@get_data.shows
def show_data(entry: dict[str, Any], _args: argparse.Namespace) -> None:
    """Print counts, source and folder."""
    counts = ", ".join(f"{count:,} {noun}" for noun, count in entry["counts"].items())
    print_text("{name}: {}\n{citation}\nlicence: {licence}\n{folder}".format(counts, **entry))


@command(
    option("texts TEXTS", "table of names and texts: .tsv, .csv with a header, or .parquet"),
    option("-o --output FILE", "Parquet file to write", required=True),
    option("--dimension", "width of the vectors at most, without an encoder", least=1, default=256),
    option(
        "--encoder", "model of sentence-transformers, on the hub or a folder (default: TF-IDF)", default=""
    ),
    option("--like FILE", "encode as this file of vectors, which the command has written"),
    common.OVERWRITE,
)
def vectors(args: argparse.Namespace) -> dict[str, Any]:
    """Turn names, labels or descriptions of entities into vectors: TF-IDF of their words, reduced
    by a singular value decomposition, or a sentence encoder. Training takes them as features or initial rows.

    Examples
    --------
      dglkge data vectors descriptions.tsv -o vectors.parquet      NAME<tab>TEXT lines
      dglkge data vectors labels.csv -o vectors.parquet --encoder all-MiniLM-L6-v2
      dglkge train my.yaml 'features.files=[vectors.parquet]'
      dglkge data vectors new.tsv --like vectors.parquet -o new.parquet    for dglkge predict --features
    """
    from dglkge.data import vector_files

    output = Path(args.output)
    if output.exists() and not args.overwrite:
        raise InputError(f"{output} exists; --overwrite replaces it")
    if args.like and args.encoder:
        raise InputError("--like has an encoder, that of its file; leave out --encoder")
    texts = vector_files.read_texts(Path(args.texts))
    if args.like:
        rows = vector_files.open_encoder(Path(args.like))(texts.values())
    else:
        rows = vector_files.text_vectors(texts, args.dimension, args.encoder)
    vector_files.write_vectors(output, texts, rows, args.dimension, None if args.like else args.encoder)
    return {"path": str(output), "texts": len(texts), "dimension": rows.shape[1]}


@vectors.shows
def _show_vectors(result: dict[str, Any], _args: argparse.Namespace) -> None:
    """Print what was written, and how to use it."""
    print_text(f"{result['texts']} vectors of {result['dimension']} numbers in {result['path']}")
    print_text(f"next: dglkge train my.yaml 'features.files=[{result['path']}]', or model.init_from.path=...")
