"""Finds the files of an input, their splits and format, and reads them: tables, RDF, folders and others."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.data.quality import BUCKET_BYTES
from dglkge.data.text_format import RowRules, bare_path, compression
from dglkge.data.triples import TripleFile
from dglkge.errors import InputError
from dglkge.partition.entity_types import take_types
from dglkge.partition.ingest import Reading, Watch, available_cores, bytes_at_a_time, ingest, table_chunks
from dglkge.partition.options import FORMATS, Format, Options, find_format, format_by_name
from dglkge.partition.readers import id_folders
from dglkge.partition.readers.dgl_graph import find_dgl, read_graphs
from dglkge.partition.readers.graphml import read_graphml
from dglkge.partition.readers.numbered import find_ogb
from dglkge.partition.readers.rdf import read_rdf
from dglkge.partition.report import reading_progress, show_line

WORDS = {TRAIN: TRAIN, "training": TRAIN, VALID: VALID, "validation": VALID, "val": VALID, "dev": VALID}
WORDS |= {TEST: TEST, "testing": TEST}
"""Words that stand for a split."""

_FOLDERS = {
    "ogb": find_ogb,
    "pykeen": id_folders.find_pykeen,
    "openke": id_folders.find_openke,
    "dglke": id_folders.find_dglke,
    "dgl": find_dgl,
}
_USES = {
    "base_iri": ("--base-iri is for RDF", "rdf"),
    "full_iris": ("--full-iris is for RDF", "rdf"),
    "graphs": ("--graph is for RDF", "rdf"),
    "literals": ("--literals is for RDF", "rdf"),
    "name_attribute": ("--name-attribute is for GraphML", "graphml"),
    "prefixes": ("--prefix is for RDF", "rdf"),
    "relation_attribute": ("--relation-attribute is for GraphML and graphs of DGL", "graphml", "dgl"),
    "columns": ("--columns is for tables", "table"),
    "integer_ids": ("--ids integers, --entity-map and --relation-map are for tables", "table"),
    "delimiter": ("--delimiter is for tables", "table"),
}
"""Families of formats that an option is for; the other options are for all."""


@dataclass(frozen=True)
class Source:
    """An input: files by split, at least of train, and their format; the reader of a folder with id maps.

    ``how`` says how the format was found: by ``"name"``, ``"content"``, ``"files"`` of the folder, or
    ``"format"`` for the user's choice.
    """

    files: dict[str, list[tuple[Path, Format]]]
    how: str
    folder: id_folders.IdFolder | None = None

    @property
    def family(self) -> str:
        """Family of the formats."""
        return self.files[TRAIN][0][1].family

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return [path for path, _ in chain(*self.files.values())]

    @property
    def title(self) -> str:
        """The format for people: ``N-Triples, gzip``."""
        if self.folder is not None:
            return self.folder.layout
        packing, files = {None: "", "gzip": ", gzip", "bz2": ", bzip2"}, chain(*self.files.values())
        return " and ".join(dict.fromkeys(kind.title + packing[compression(path)] for path, kind in files))

    @property
    def line(self) -> str:
        """One line for people: the files, their format and how it was found."""
        # In a folder, files of one name may lie in a folder for each split.
        place = os.path.commonpath([path.parent for path in self.paths]) if self.folder else ""
        names = [os.path.relpath(path, place) if self.folder else path.name for path in self.paths]
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        some = f"{place} ({some})" if self.folder else some
        how = "as --format says" if self.how == "format" else f"by {self.how}"
        return f"input: {some}: {self.title} ({how})"


def split_of(path: Path) -> str | None:
    """Return the split in a file's name (``train.tsv``, ``dev.txt.gz``, ``wiki-test.txt``), or None."""
    # The last word before the extension counts: "train-2020-test.txt" is a test split.
    return WORDS.get(re.split(r"[-_.]", bare_path(path).stem.lower())[-1])


def one_each(files: Sequence[Path], place: str) -> dict[str, Path]:
    """Return the file of each split, by their names; two of one split are an InputError."""
    by_split: dict[str, Path] = {}
    for path in files:
        split = split_of(path)
        if split in by_split:
            both = f"{by_split[split].name} and {path.name}"
            raise InputError(f"{place}: the {split} split is ambiguous: {both}; give files")
        if split:
            by_split[split] = path
    return {split: by_split[split] for split in SPLITS if split in by_split}


def find_input(inputs: Sequence[Path], options: Options) -> Source:
    """Find the files of an input, their splits and their format.

    The input is a folder with files named train, valid and test, or up to three files. Files with other
    names are taken as train, valid and test in their order. With ``options.split`` the files are one set of
    triples, unless their names say train, valid and test.

    Raises
    ------
    InputError
        If something is missing, two files claim the same split, a format cannot be found out, or formats or
        options do not go together.
    """
    kind = None if options.reading.format is None else FORMATS[options.reading.format]
    for path in inputs:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
    source = _id_folder(inputs, kind) or _source(inputs, kind, is_one_set=isinstance(options.split, tuple))
    examples = {kind.family: f"{path.name} ({kind.title})" for path, kind in chain(*source.files.values())}
    if len(examples) > 1:
        some = ", ".join(examples.values())
        raise InputError(f"these files do not go together: {some}; give files of one kind, or --format")
    # Options that the format has no use for.
    for name, (words, *families) in _USES.items():
        given: Any = options.reading if hasattr(options.reading, name) else options
        if getattr(given, name) != getattr(type(given)(), name) and source.family not in families:
            raise InputError(f"{words}, and the input is {source.title}")
    return source


def _id_folder(inputs: Sequence[Path], kind: Format | None) -> Source | None:
    """Return the folder of another project, or PyKEEN's folders, if they are one."""
    are_folders = all(path.is_dir() for path in inputs)
    # A table called train is read as such; DGL-KE's own is one.
    is_table = kind is None and len(inputs) == 1 and are_folders and _has_train_table(inputs[0])
    names = ["dglke"] if is_table else [name for name in _FOLDERS if kind in (None, FORMATS[name])]
    for name in names if are_folders else ():
        folder = None
        if len(inputs) == 1:
            folder = _FOLDERS[name](inputs[0])
        elif name == "pykeen" and all((path / id_folders.PYKEEN_TRIPLES).is_file() for path in inputs):
            if len(inputs) > len(SPLITS):
                raise InputError(f"--input takes up to three folders of PyKEEN, got {len(inputs)}")
            is_named, place = all(map(split_of, inputs)), "the folders given"
            by_split = one_each(inputs, place) if is_named else dict(zip(SPLITS, inputs))
            folder = id_folders.pykeen_folder(by_split)
        if folder is not None:
            files = {split: [(path, FORMATS[name])] for split, path in folder.files.items()}
            return Source(files, "files" if kind is None else "format", folder)
    if kind is not None and kind.family == "folder":
        if are_folders:
            raise InputError(f"{inputs[0]}: its files are not those of {kind.title} (--format {kind.name})")
        raise InputError(f"--format {kind.name} is for a folder, got the file {inputs[0]}")
    return None


def _has_train_table(folder: Path) -> bool:
    files = [path for path in folder.iterdir() if split_of(path) == TRAIN and path.is_file()]
    return any(kind.family == "table" for kind in map(format_by_name, files) if kind)


def _source(inputs: Sequence[Path], kind: Format | None, is_one_set: bool) -> Source:
    """Return files, or those of a folder, by split."""
    files = list(inputs)
    if len(inputs) == 1 and inputs[0].is_dir():
        files = _in_folder(inputs[0], kind, is_one_set)
    if folder := next(filter(Path.is_dir, files), None):
        raise InputError(f"--input takes one folder or up to three files; got the folder {folder} among them")
    words = [split_of(path) for path in files]
    if (is_one_set and not any(words)) or len(files) == 1:
        by_split = {TRAIN: files}
    elif len(files) > len(SPLITS):
        raise InputError(f"--input takes up to three files (train, valid, test), got {len(files)}")
    elif not any(words):
        by_split = {split: [path] for split, path in zip(SPLITS, files)}
    elif not all(words):
        unclear = files[words.index(None)]
        raise InputError(f"{unclear}: its name does not say which of train, valid and test it is, others' do")
    else:
        by_split = {split: [path] for split, path in one_each(files, "the files given").items()}
    formats = {path: (kind, "format") if kind else find_format(path) for path in files}
    how = "content" if any(how == "content" for _, how in formats.values()) else formats[files[0]][1]
    return Source({split: [(p, formats[p][0]) for p in paths] for split, paths in by_split.items()}, how)


def _in_folder(folder: Path, kind: Format | None, is_one_set: bool) -> list[Path]:
    """Return the files of a folder named train, valid and test, or all those of RDF or GraphML."""
    formats = {path: format_by_name(path) for path in sorted(folder.iterdir()) if path.is_file()}
    # Tables first: a folder of tables may have other files as well.
    for family in ("table", "rdf", "graphml"):
        mine = [path for path, entry in formats.items() if entry and entry.family == family]
        mine = [path for path in mine if kind in (None, formats[path])]
        named = [path for path in mine if split_of(path)]
        if TRAIN in map(split_of, named):
            return list(one_each(named, str(folder)).values())
        if mine and family != "table" and not named:
            if not is_one_set and len(mine) > 1:
                count = f"{len(mine)} files of {find_format(mine[0])[0].title}"
                advice = "--split 0.9 takes them as one set of triples"
                raise InputError(f"{folder} has {count}, none called train; {advice}")
            return mine
    kinds = sorted({suffix for format_ in FORMATS.values() for suffix in format_.extensions})
    raise InputError(
        f"{folder} has no file called train with one of the extensions {', '.join(kinds)}, most of them "
        "also with .gz or .bz2, and no data set of DGL-KE, OGB, OpenKE or PyKEEN, and no partitions of DGL"
    )


def read_files(inputs: Sequence[Path], temporary: Path, options: Options) -> Reading:
    """Find out the input's format and read it.

    Raises
    ------
    InputError
        If the input is wrong; the message names file and line.
    """
    source = find_input(inputs, options)
    show_line(options.progress, source.line)
    with reading_progress(source.paths, options.progress) as watch:
        if source.family == "table":
            reading = _read_tables(source, temporary, options, watch)
        elif source.folder is not None:
            reading = source.folder.read(watch, options)
        elif source.family == "dgl":
            reading = read_graphs(source.files, options, watch)
        elif source.family == "graphml":
            reading = read_graphml(source.files, options.reading, watch)
        else:
            reading = read_rdf(source.files, options.reading, watch, temporary)
    take_types(reading, options, source.family)
    files = {split: [str(path) for path, _ in files] for split, files in source.files.items()}
    reading.figures = {"format": source.title, "found_by": source.how, "files": files, **reading.figures}
    reading.notes.insert(0, source.line)
    return reading


def _read_tables(source: Source, temporary: Path, options: Options, watch: Watch) -> Reading:
    """Read text and Parquet files."""
    maps, columns = id_folders.read_id_maps(options), options.columns
    num_workers = options.num_workers or available_cores()
    read_bytes = bytes_at_a_time(options.max_memory or BUCKET_BYTES, num_workers)
    rules = RowRules() if maps is None else maps.rules
    table = partial(TripleFile, columns=columns, delimiter=options.delimiter, rules=rules)
    files = {
        split: [table(path, kind=kind.name, read_bytes=read_bytes) for path, kind in paths]
        for split, paths in source.files.items()
    }

    def place(split: str, row: int) -> str:
        first, *more = files[split]
        return ", ".join(str(file.path) for file in files[split]) if more else first.places([row])[row]

    chunks = table_chunks(files, watch)
    triples = ingest(chunks, maps, columns, temporary, num_workers, options.time_granularity)
    reading = Reading(triples, columns=columns, place=place)
    header = files[TRAIN][0].header
    if header:
        reading.notes.append("header: " + ", ".join(f"{role} is {name!r}" for role, name in header.items()))
    return reading
