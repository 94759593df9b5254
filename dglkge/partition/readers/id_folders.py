"""Reads data set folders of DGL-KE, OpenKE and PyKEEN, which give every name an id; the ids are kept."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.data.text_format import ROLES, Columns, RowRules
from dglkge.data.triples import place_of_row, read_chunks
from dglkge.errors import InputError, unknown_name
from dglkge.partition.ingest import check_names, ingest_ids
from dglkge.partition.inputs import id_map, read_id_map
from dglkge.partition.readers.formats import READ_ERRORS, open_stream, text_lines
from dglkge.partition.readers.reading import Reading, Watch

PYKEEN_TRIPLES = "numeric_triples.tsv.gz"
_PYKEEN_FOLDERS = {"training": TRAIN, "validation": VALID, "testing": TEST}
_HTR = Columns(("head", "tail", "relation"))


@dataclass(frozen=True)
class IdFolder:
    """A data set folder with id maps.

    Attributes
    ----------
    layout : str
        Name for people.
    files : dict of str to Path
        The file of each split.
    read : callable
        Reads it, given a function for progress.
    """

    layout: str
    files: dict[str, Path]
    read: Callable[[Watch], Reading]


def find_pykeen(folder: Path) -> IdFolder | None:
    """Return PyKEEN's triples factory in a folder, or the factories of a data set, or None."""
    if (folder / PYKEEN_TRIPLES).is_file():
        return pykeen_folder({TRAIN: folder})
    found = {
        split: folder / name
        for name, split in _PYKEEN_FOLDERS.items()
        if (folder / name / PYKEEN_TRIPLES).is_file()
    }
    return pykeen_folder(found) if TRAIN in found else None


def pykeen_folder(factories: Mapping[str, Path]) -> IdFolder:
    """Return the reader of the folders that ``TriplesFactory.to_path_binary`` wrote, one for each split."""
    files = {split: factories[split] / PYKEEN_TRIPLES for split in SPLITS if split in factories}
    return IdFolder("PyKEEN triples factories", files, lambda watch: _read_pykeen(factories, files, watch))


def find_openke(folder: Path) -> IdFolder | None:
    """Return OpenKE's files in a folder (``train2id.txt``, ``entity2id.txt``, ...), or None."""
    files = _splits(folder, "{}2id.txt")
    if TRAIN not in files or not _has(folder, "entity2id.txt", "relation2id.txt"):
        return None
    return IdFolder("OpenKE's files", files, lambda watch: _read_openke(folder, files, watch, counted=True))


def find_dglke(folder: Path) -> IdFolder | None:
    """Return DGL-KE's files of a built-in data set, or None.

    Those are ``train.txt`` with ``entities.dict`` and ``relations.dict``, or (Freebase) with ids and with
    ``entity2id.txt`` and ``relation2id.txt``.
    """
    files = _splits(folder, "{}.txt")
    if TRAIN not in files:
        return None
    if _has(folder, "entities.dict", "relations.dict"):
        return IdFolder("DGL-KE's files", files, lambda watch: _read_dicts(folder, files, watch))
    if _has(folder, "entity2id.txt", "relation2id.txt") and _all_integers(_first_line(files[TRAIN])):
        return IdFolder(
            "DGL-KE's files of Freebase (head, tail, relation)",
            files,
            lambda watch: _read_openke(folder, files, watch, counted=False),
        )
    return None


def _splits(folder: Path, pattern: str) -> dict[str, Path]:
    paths = {split: folder / pattern.format(split) for split in SPLITS}
    return {split: path for split, path in paths.items() if path.is_file()}


def _has(folder: Path, *names: str) -> bool:
    return all((folder / name).is_file() for name in names)


def _first_line(path: Path) -> list[str]:
    """Return the fields of the first line, an empty list if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().split()
    except (OSError, UnicodeDecodeError):
        return []


def _all_integers(fields: list[str]) -> bool:
    return len(fields) == 3 and all(text.isascii() and text.isdigit() for text in fields)


def _limits(entities: list[str], relations: list[str]) -> RowRules:
    return RowRules({"head": len(entities), "relation": len(relations), "tail": len(entities)})


def _reading(
    entities: list[str], relations: list[str], chunks: Mapping[str, Iterator[pd.DataFrame]], layout: str
) -> Reading:
    check_names(entities, "entity", "\n")
    check_names(relations, "relation", "\n\t")
    return Reading(ingest_ids(chunks, entities, relations), figures={"layout": layout})


def _read_dicts(folder: Path, files: Mapping[str, Path], watch: Watch) -> Reading:
    """Read ``entities.dict`` (id, name), ``relations.dict`` and triples of names, or of ids."""
    entities = read_id_map(folder / "entities.dict", "entity")
    relations = read_id_map(folder / "relations.dict", "relation")
    ids = {"head": _index(entities), "relation": _index(relations)}
    ids["tail"] = ids["head"]
    first = _first_line(files[TRAIN])
    # A name may be a number: ids only if the first triple cannot be one of names.
    is_named = not _all_integers(first) or all(name in ids[role] for name, role in zip(first, ROLES))
    rules = RowRules() if is_named else _limits(entities, relations)
    chunks = {}
    for split, path in files.items():
        rows = read_chunks(path, rules=rules, on_bytes=watch(path))
        chunks[split] = _numbered(rows, path, ids) if is_named else rows
    layout = f"entities.dict, relations.dict and triples of {'names' if is_named else 'ids'}"
    return _reading(entities, relations, chunks, layout)


def _index(names: list[str]) -> dict[str, int]:
    return {name: id_ for id_, name in enumerate(names)}


def _numbered(
    chunks: Iterator[pd.DataFrame], path: Path, ids: Mapping[str, Mapping[str, int]]
) -> Iterator[pd.DataFrame]:
    """Replace the names of each chunk by their ids."""
    num_rows = 0
    for chunk in chunks:
        numbers = {}
        for role in ROLES:
            column = chunk[role]
            names = column.cat.categories.tolist()
            of_category = np.array([ids[role].get(name, -1) for name in names], dtype=np.int64)
            numbers[role] = of_category[column.cat.codes.to_numpy()]
            unknown = np.flatnonzero(numbers[role] < 0)
            if len(unknown):
                row = int(unknown[0])
                noun = "relation" if role == "relation" else "entity"
                error = unknown_name(noun, column.iloc[row], ids[role])
                raise InputError(f"{place_of_row(path, num_rows + row)}: {error}")
        num_rows += len(chunk)
        yield pd.DataFrame(numbers)


def _read_openke(folder: Path, files: Mapping[str, Path], watch: Watch, counted: bool) -> Reading:
    """Read ``entity2id.txt``, ``relation2id.txt`` and files of head, tail and relation ids.

    Parameters
    ----------
    counted : bool
        Whether the files of triples begin with a line that has their number.
    """
    entities = _counted_names(folder / "entity2id.txt", "entity")
    relations = _counted_names(folder / "relation2id.txt", "relation")
    rules = _limits(entities, relations)
    chunks = {split: _id_lines(path, rules, watch, counted) for split, path in files.items()}
    return _reading(entities, relations, chunks, "entity2id.txt, relation2id.txt, head tail relation")


def _id_lines(path: Path, rules: RowRules, watch: Watch, counted: bool) -> Iterator[pd.DataFrame]:
    """Read lines of head, tail and relation, separated by spaces or tabs."""
    try:
        with open_stream(path) as (_, stream):
            lines = text_lines(stream)
            expected = _count_in(path, next(lines, "")) if counted else None
            line = next(lines, "")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8: {error.reason}") from error
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if expected == 0:
        raise InputError(f"{path}: the file is empty: it has no triples")
    delimiter = "\t" if "\t" in line else " "
    num_rows = 0
    for chunk in read_chunks(path, _HTR, delimiter, rules, watch(path), skip_first=counted):
        num_rows += len(chunk)
        yield chunk
    if expected not in (None, num_rows):
        raise InputError(f"{path}:1: it says {expected} triples, the file has {num_rows}")


def _count_in(path: Path, line: str) -> int:
    text = line.strip()
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{path}:1: got {line[:80]!r}, expected the number of lines that follow")
    return int(text)


def _counted_names(path: Path, noun: str) -> list[str]:
    """Read a file of a count line and lines of name and id; return the names by id."""

    def rows() -> Iterator[tuple[int, str, str]]:
        for number, line in enumerate(lines, start=2):
            if line:
                # A name may have spaces, an id has none.
                name, space, id_text = line.rstrip().rpartition("\t" if "\t" in line else " ")
                if not space or not name:
                    raise InputError(f"{path}:{number}: got {line[:80]!r}, expected {noun} name and id")
                yield number, id_text, name.rstrip()

    try:
        with open_stream(path) as (_, stream):
            lines = text_lines(stream)
            expected = _count_in(path, next(lines, ""))
            names = id_map(rows(), path, noun)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8: {error.reason}") from error
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if len(names) != expected:
        raise InputError(f"{path}:1: it says {expected} names, the file has {len(names)}")
    return names


def _read_pykeen(factories: Mapping[str, Path], files: Mapping[str, Path], watch: Watch) -> Reading:
    """Read the gzipped tables of PyKEEN's factories; ``base.pth`` has nothing that they lack."""
    maps = {}
    for split, folder in factories.items():
        entities = _pykeen_names(folder / "entity_to_id.tsv.gz", "entity")
        maps[split] = entities, _pykeen_names(folder / "relation_to_id.tsv.gz", "relation")
        if maps[split] != maps[TRAIN]:
            raise InputError(
                f"{folder}: its ids are not those of {factories[TRAIN]} (an inductive data set?)"
            )
    entities, relations = maps[TRAIN]
    columns = Columns(ROLES, {role: role for role in ROLES})
    rules = _limits(entities, relations)
    chunks = {split: read_chunks(path, columns, None, rules, watch(path)) for split, path in files.items()}
    return _reading(entities, relations, chunks, "numeric_triples.tsv.gz, entity_to_id, relation_to_id")


def _pykeen_names(path: Path, noun: str) -> list[str]:
    def rows() -> Iterator[tuple[int, str, str]]:
        for row in reader:
            if len(row) != 2:
                raise InputError(f"{path}:{reader.line_num}: got {len(row)} columns, expected id and label")
            yield reader.line_num, row[0], row[1]

    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.reader(file, delimiter="\t")
            header = next(reader, [])
            if header != ["id", "label"]:
                raise InputError(f"{path}:1: the header is {header}, expected id and label")
            return id_map(rows(), path, noun)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
