"""Finds the files of an input, their format and their splits, and reads those that are no tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.data.dataset_files import SPLITS, TRAIN
from dglkge.data.text_format import Columns
from dglkge.errors import InputError, unknown_name
from dglkge.partition.ingest import IdTriples
from dglkge.partition.inputs import Options, find_sources, one_each, split_of
from dglkge.partition.readers.entity_types import too_general, types_from_triples
from dglkge.partition.readers.formats import (
    FOLDER,
    FORMATS,
    GRAPHML,
    RDF,
    TABLE,
    Format,
    compression,
    find_format,
    format_by_name,
    format_named,
)
from dglkge.partition.readers.graphml import TYPE_RELATION, read_graphml
from dglkge.partition.readers.id_folders import (
    PYKEEN_TRIPLES,
    IdFolder,
    find_dglke,
    find_openke,
    find_pykeen,
    pykeen_folder,
)
from dglkge.partition.readers.options import ReadingOptions
from dglkge.partition.readers.prefixes import WELL_KNOWN, PrefixTable
from dglkge.partition.readers.rdf import read_rdf
from dglkge.partition.readers.reading import Reading, Watch

_FOLDERS = {"pykeen": find_pykeen, "openke": find_openke, "dglke": find_dglke}
_OPTIONS_OF = {
    RDF: {"prefixes", "full_iris", "base_iri", "literals", "graphs"},
    GRAPHML: {"relation_attribute", "name_attribute"},
}
"""Reading options of one family of formats; the others are for all."""

_ARGUMENTS = {"prefixes": "prefix", "graphs": "graph"}
"""Options of the command line that are called otherwise than in ReadingOptions."""


@dataclass(frozen=True)
class Source:
    """An input: files by split, and their format.

    Attributes
    ----------
    files : dict of str to list of (Path, Format)
        The files of each split, at least of ``"train"``.
    how : str
        How the format was found: ``"name"``, ``"content"``, ``"files"`` of the folder, or ``"format"`` for
        the user's choice.
    folder : IdFolder, optional
        The reader of a folder with id maps.
    """

    files: dict[str, list[tuple[Path, Format]]]
    how: str
    folder: IdFolder | None = None

    @property
    def family(self) -> str:
        """Family of the formats."""
        return self.files[TRAIN][0][1].family

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return [path for files in self.files.values() for path, _ in files]

    @property
    def title(self) -> str:
        """The format for people: ``N-Triples, gzip``."""
        if self.folder is not None:
            return self.folder.layout
        kinds = [_title(path, format_) for files in self.files.values() for path, format_ in files]
        return " and ".join(dict.fromkeys(kinds))

    @property
    def line(self) -> str:
        """One line for people: the files, their format and how it was found."""
        names = [path.name for path in self.paths]
        if self.folder is not None:
            # Files of one name may lie in a folder for each split.
            place = os.path.commonpath([path.parent for path in self.paths])
            names = [os.path.relpath(path, place) for path in self.paths]
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if self.folder is not None:
            some = f"{place} ({some})"
        how = {"format": "as --format says"}.get(self.how, f"by {self.how}")
        return f"input: {some}: {self.title} ({how})"

    def figures(self) -> dict[str, Any]:
        """Return the same for the report."""
        files = {split: [str(path) for path, _ in files] for split, files in self.files.items()}
        return {"format": self.title, "found_by": self.how, "files": files}


def _title(path: Path, format_: Format) -> str:
    kind = compression(path)
    return f"{format_.title}, {kind}" if kind else format_.title


def find_input(inputs: Sequence[Path], options: Options) -> Source:
    """Find the files of an input, their splits and their format.

    Parameters
    ----------
    inputs : sequence of Path
        A folder, or files. With ``options.split`` the files are one set of triples, unless their names say
        train, valid and test.
    options : Options

    Raises
    ------
    InputError
        If something is missing, a format cannot be found out, or formats or options do not go together.
    """
    reading = options.reading
    wanted = None if reading.format is None else format_named(reading.format)
    for path in inputs:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
    source = _find(inputs, options, wanted)
    families = {format_.family: path for files in source.files.values() for path, format_ in files}
    if len(families) > 1:
        some = ", ".join(f"{path.name} ({find_format(path)[0].title})" for path in families.values())
        raise InputError(f"these files do not go together: {some}; give files of one kind, or --format")
    _check_fitting(source, options)
    return source


def _find(inputs: Sequence[Path], options: Options, wanted: Format | None) -> Source:
    if all(path.is_dir() for path in inputs):
        found = _id_folder(inputs, wanted)
        if found is not None:
            return found
        if wanted is not None and wanted.family == FOLDER:
            raise InputError(
                f"{inputs[0]}: its files are not those of {wanted.title} (--format {wanted.name})"
            )
    elif wanted is not None and wanted.family == FOLDER:
        raise InputError(f"--format {wanted.name} is for a folder, got the file {inputs[0]}")
    files = list(inputs)
    if len(inputs) == 1 and inputs[0].is_dir():
        files = _in_folder(inputs[0], wanted, all_of_them=options.split is not None)
    is_one_set = options.split is not None and not any(map(split_of, files))
    by_split: dict[str, list[Path]] = {TRAIN: files}
    if not is_one_set or any(path.is_dir() for path in files):
        by_split = {split: [path] for split, path in find_sources(files).items()}
    formats = {path: (wanted, "format") if wanted else find_format(path) for path in files}
    how = "content" if any(how == "content" for _, how in formats.values()) else formats[files[0]][1]
    return Source({split: [(p, formats[p][0]) for p in paths] for split, paths in by_split.items()}, how)


def _id_folder(folders: Sequence[Path], wanted: Format | None) -> Source | None:
    """Return the folder of another project, or PyKEEN's folders, if they are one."""
    names = _FOLDERS if wanted is None else [wanted.name]
    for name in names:
        found = None
        if len(folders) == 1 and name in _FOLDERS:
            # A table called train is read, as it always was; DGL-KE's own is one.
            if wanted is None and name != "dglke" and _has_train_table(folders[0]):
                continue
            found = _FOLDERS[name](folders[0])
        elif name == "pykeen" and all((folder / PYKEEN_TRIPLES).is_file() for folder in folders):
            found = pykeen_folder(_splits_of_folders(folders))
        if found is not None:
            files = {split: [(path, FORMATS[name])] for split, path in found.files.items()}
            return Source(files, "files" if wanted is None else "format", found)
    return None


def _has_train_table(folder: Path) -> bool:
    kinds = [format_by_name(path) for path in folder.iterdir() if split_of(path) == TRAIN and path.is_file()]
    return any(kind is not None and kind.family == TABLE for kind in kinds)


def _splits_of_folders(folders: Sequence[Path]) -> dict[str, Path]:
    if len(folders) > len(SPLITS):
        raise InputError(f"--input takes up to three folders of PyKEEN, got {len(folders)}")
    if all(map(split_of, folders)):
        return one_each(list(folders), "the folders given")
    return dict(zip(SPLITS, folders))


def _in_folder(folder: Path, wanted: Format | None, all_of_them: bool) -> list[Path]:
    """Return the files of a folder named train, valid and test, or all those of RDF or GraphML."""
    formats = {path: format_by_name(path) for path in sorted(folder.iterdir()) if path.is_file()}
    known = {path: format_ for path, format_ in formats.items() if format_ is not None}
    # Tables first: the folders that were always read are read as before.
    for family in (TABLE, RDF, GRAPHML):
        mine = [path for path, kind in known.items() if kind.family == family and wanted in (None, kind)]
        named = [path for path in mine if split_of(path)]
        if TRAIN in map(split_of, named):
            return list(one_each(named, str(folder)).values())
        if mine and family != TABLE and not named:
            if not all_of_them and len(mine) > 1:
                raise InputError(
                    f"{folder} has {len(mine)} files of {known[mine[0]].title}, none called train; "
                    "--split 0.9 takes them as one set of triples"
                )
            return mine
    kinds = sorted({suffix for kind in FORMATS.values() for suffix in kind.extensions})
    raise InputError(
        f"{folder} has no file called train with one of the extensions {', '.join(kinds)}, most of them "
        "also with .gz or .bz2, and no data set of DGL-KE, OpenKE or PyKEEN"
    )


def _check_fitting(source: Source, options: Options) -> None:
    """Refuse options that the input's format has no use for."""
    given = options.reading.given()
    for family, names in _OPTIONS_OF.items():
        for name in sorted(given & names) if source.family != family else ():
            option = _ARGUMENTS.get(name, name).replace("_", "-")
            what = {RDF: "RDF", GRAPHML: "GraphML"}[family]
            raise InputError(f"--{option} is for {what}, and the input is {source.title}")
    if source.family != TABLE:
        if options.columns != Columns():
            raise InputError(f"--columns is for tables, and the input is {source.title}")
        if options.integer_ids:
            options_of_ids = "--ids integers, --entity-map and --relation-map"
            raise InputError(f"{options_of_ids} are for tables, and the input is {source.title}")


def read_input(source: Source, options: Options, watch: Watch, temporary: Path) -> Reading:
    """Read an input that is no table.

    Parameters
    ----------
    source : Source
    options : Options
    watch : callable
        Progress.
    temporary : Path
        Folder for temporary files.

    Raises
    ------
    InputError
        If a file is wrong; the message names file and line.
    """
    if source.folder is not None:
        return source.folder.read(watch)
    if source.family == GRAPHML:
        paths = {split: [path for path, _ in files] for split, files in source.files.items()}
        return read_graphml(paths, options.reading, watch)
    return read_rdf(source.files, options.reading, watch, temporary)


def take_types(reading: Reading, options: Options, family: str) -> None:
    """Turn the triples of the relation ``types_from`` into entity types.

    Raises
    ------
    InputError
        If there is no such relation, or nothing else.
    """
    wanted = options.reading.types_from
    if wanted is None:
        return
    triples = reading.triples
    relation, general = _type_relation(triples, reading, options.reading, family)
    before = len(triples.entities)
    rows_before = sum(map(len, triples.splits.values()))
    triples, types, classes = types_from_triples(
        triples, relation, general, options.reading.max_types, options.num_parts
    )
    if len(triples.splits[TRAIN]) == 0:
        raise InputError(f"--types-from {wanted}: no triple is left to train on")
    reading.triples, reading.types = triples, types
    num_rows = rows_before - sum(map(len, triples.splits.values()))
    left_out = before - len(triples.entities)
    reading.figures["types"] = {
        "from": wanted,
        "triples": num_rows,
        "entities_left_out": left_out,
        "classes": classes,
    }
    reading.notes.append(
        f"{num_rows:,} triples of {wanted} became {len(types[0])} entity types; "
        f"{left_out:,} entities and classes without other triples are left out"
    )


def _type_relation(
    triples: IdTriples, reading: Reading, options: ReadingOptions, family: str
) -> tuple[int, np.ndarray]:
    """Return the id of the relation, and which entities are classes that say nothing."""
    wanted = options.types_from or ""
    no_class = np.zeros(len(triples.entities), dtype=bool)
    if family == GRAPHML:
        if TYPE_RELATION not in triples.relations:
            raise InputError(f"--types-from: no node has the attribute {wanted!r}")
        return triples.relations.index(TYPE_RELATION), no_class
    name = wanted
    if family == RDF:
        table = PrefixTable(reading.figures["prefixes"])
        iri = PrefixTable(options.prefixes, reading.figures["prefixes"], WELL_KNOWN).expand(wanted)
        name = table.shorten(iri)
        for id_, entity in enumerate(triples.entities):
            # Classes of literals and blank nodes (restrictions of OWL) have no name to use.
            no_class[id_] = entity[0] in '"_' or too_general(table.expand(entity))
    if name not in triples.relations:
        raise unknown_name("relation of --types-from", wanted, triples.relations)
    return triples.relations.index(name), no_class
