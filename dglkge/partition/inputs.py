"""Inputs of a data set: options, files of each split, id maps and entity types."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.data.text_format import (
    EXTENSIONS,
    MAX_ID_DIGITS,
    Columns,
    codec,
    extension,
    open_binary,
    text_format,
)
from dglkge.errors import InputError, unknown_name
from dglkge.partition.readers.options import ReadingOptions, check_reading
from dglkge.typing import RELATION

METHODS = ("metis", "ldg", "random")

EXACT, IMPLIED = DROPPED_LEAKS = ("exact", "implied")
"""Values of ``--drop-leaks``."""


MIN_MEMORY = 64 * 10**6
"""Least value of ``--max-memory``: pieces of triples take tens of MB however few are read at a time."""

METIS_TRIPLE_BYTES = 250
"""Peak of METIS for each triple. Measured were 240 with 10^6 triples and 230 with 10^7, in four partitions:
``growth.py partition --partition_options "--num_parts 4"`` less the same with ``--method random``."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_memory(text: str) -> int:
    """Parse the ``--max-memory`` option: a number of bytes with a unit.

    Raises
    ------
    InputError
        If it is none.

    Examples
    --------
    >>> parse_memory("1.5GB"), parse_memory("512 MiB")
    (1500000000, 536870912)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise InputError(
            f"--max-memory is {text!r}, expected bytes with KB, MB, GB, KiB, MiB or GiB, e.g. 2GB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_metis_memory(num_triples: int, max_memory: int | None) -> int:
    """Return the bytes that METIS needs, and refuse what is not there.

    Raises
    ------
    InputError
        If that is more than the limit, or without a limit more than the machine has free.
    """
    needed = METIS_TRIPLE_BYTES * num_triples
    limit, where = max_memory, "--max-memory is"
    if limit is None:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        limit, where = int(found[1]) << 10 if found else needed, "the machine's free memory is"
    if needed > limit:
        raise InputError(
            f"METIS needs about {needed / 1e9:.1f} GB for {num_triples:,} triples, "
            f"{where} {limit / 1e9:.1f} GB: give --method ldg or random"
        )
    return needed


@dataclass(frozen=True)
class Options:
    """Options of a data set and its partitions.

    Attributes
    ----------
    num_parts : int
        Number of partitions.
    method : str
        ``"metis"``, ``"ldg"`` or ``"random"``.
    seed : int
        Of ``ldg`` and ``random``, of the relations' owners, of a split by fractions. METIS itself takes none.
    columns : Columns
        Where the parts of a triple stand.
    entity_types : Path, optional
        File of entity and type.
    integer_ids : bool
        Whether the triples are of integers from 0 instead of names.
    entity_map, relation_map : Path, optional
        Files of integer id and name.
    split : (float, float, float), optional
        Fractions of train, valid and test to split one set of triples into.
    overwrite : bool
        Whether to replace an existing data set.
    name : str, optional
        Name of the dataset; by default the output folder's.
    progress : bool, optional
        Whether to show progress on stderr; by default where that is a terminal.
    reading : ReadingOptions
        Options of formats other than tables, and of the format itself.
    strict_splits : float, optional
        Refuse triples of valid and test that stand in train, and more than this share that train implies.
    max_memory : int, optional
        Bytes that the triples may take in memory; names of entities and node ids come on top. By default as
        much as is free for METIS, and 512 MiB for anything else.
    drop_leaks : str, optional
        Leave out triples of valid and test that stand in train (``"exact"``), or also those that train
        implies (``"implied"``).
    num_workers : int, optional
        Threads that read and check triples; by default one for each core.
    """

    num_parts: int = 1
    method: str = "metis"
    seed: int = 0
    columns: Columns = Columns()
    entity_types: Path | None = None
    integer_ids: bool = False
    entity_map: Path | None = None
    relation_map: Path | None = None
    split: tuple[float, float, float] | None = None
    overwrite: bool = False
    name: str | None = None
    progress: bool | None = None
    reading: ReadingOptions = ReadingOptions()
    strict_splits: float | None = None
    drop_leaks: str | None = None
    max_memory: int | None = None
    num_workers: int | None = None


def check_options(options: Options) -> None:
    """Check the options before any triple is read.

    Raises
    ------
    InputError
        If a value is not allowed or a file is missing.
    """
    if options.method not in METHODS:
        raise unknown_name("partition method", options.method, METHODS)
    if options.num_parts < 1:
        raise InputError(f"the number of partitions is {options.num_parts}, expected 1 or more")
    if not 0 <= options.seed < 2**63:
        raise InputError(f"the seed is {options.seed}, expected 0 to 2**63 - 1")
    if options.strict_splits is not None and not 0 <= options.strict_splits <= 1:
        raise InputError(f"--strict-splits is {options.strict_splits:g}, expected a share from 0 to 1")
    if options.drop_leaks is not None and options.drop_leaks not in DROPPED_LEAKS:
        raise unknown_name("kind of leaks to drop", options.drop_leaks, DROPPED_LEAKS)
    if options.max_memory is not None and options.max_memory < MIN_MEMORY:
        raise InputError(f"--max-memory is {options.max_memory} bytes, expected 64MB or more")
    if options.num_workers is not None and options.num_workers < 1:
        raise InputError(f"--num-workers is {options.num_workers}, expected 1 or more")
    if (options.entity_map or options.relation_map) and not options.integer_ids:
        raise InputError("an entity or relation map was given, but the ids are not said to be integers")
    if options.entity_types is not None and options.reading.types_from is not None:
        raise InputError("entity types come from a file or from triples: give --entity-types or --types-from")
    check_reading(options.reading)
    for path in (options.entity_types, options.entity_map, options.relation_map):
        if path is not None and not path.is_file():
            raise InputError(f"{path}: there is no such file")


def check_num_parts(num_parts: int, counts: dict[str, int]) -> None:
    """Check that every partition can own a node of every type; DGL cannot store one that does not.

    Raises
    ------
    InputError
        If there are fewer entities of some type, or relations, than partitions.
    """
    for noun, count in counts.items():
        if num_parts > count:
            what = "relations" if noun == RELATION else f"entities of type {noun!r}"
            raise InputError(
                f"{num_parts} partitions are more than there are {what} ({count}): "
                "every partition must own at least one"
            )


_WORDS = {TRAIN: TRAIN, "training": TRAIN, VALID: VALID, "validation": VALID, "val": VALID, "dev": VALID}
_WORDS |= {TEST: TEST, "testing": TEST}


def find_sources(inputs: Sequence[Path]) -> dict[str, Path]:
    """Return the file of each split.

    Parameters
    ----------
    inputs : sequence of Path
        A folder with files named train, valid and test, or up to three files. Files with other names are
        taken as train, valid and test in their order.

    Returns
    -------
    dict of str to Path
        At least ``"train"``, in the order train, valid, test.

    Raises
    ------
    InputError
        If something is missing, or two files claim the same split.
    """
    for path in inputs:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
    if len(inputs) == 1 and inputs[0].is_dir():
        return _in_folder(inputs[0])
    folders = [str(path) for path in inputs if path.is_dir()]
    if folders:
        raise InputError(
            f"--input takes one folder or up to three files; got the folder {folders[0]} among others"
        )
    if len(inputs) > len(SPLITS):
        raise InputError(f"--input takes up to three files (train, valid, test), got {len(inputs)}")
    if len(inputs) == 1:
        return {TRAIN: inputs[0]}
    words = [split_of(path) for path in inputs]
    if not any(words):
        return dict(zip(SPLITS, inputs))
    if not all(words):
        unclear = inputs[words.index(None)]
        raise InputError(f"{unclear}: its name does not say which of train, valid and test it is, others' do")
    return one_each(list(inputs), "the files given")


def split_of(path: Path) -> str | None:
    """Return the split in a file's name (``train.tsv``, ``dev.txt.gz``, ``wiki-test.txt``), or None."""
    stem = path.stem if codec(path) else path.name
    # The last word before the extension counts: "train-2020-test.txt" is a test split.
    return _WORDS.get(re.split(r"[-_.]", Path(stem).stem.lower())[-1])


def _in_folder(folder: Path) -> dict[str, Path]:
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and extension(path) in EXTENSIONS]
    # Other files in the folder, for instance entity2id.txt, are ignored.
    sources = one_each([path for path in files if split_of(path)], str(folder))
    if TRAIN not in sources:
        raise InputError(
            f"{folder} has no file called train with one of the extensions {', '.join(EXTENSIONS)} "
            "(the text ones also with .gz or .bz2)"
        )
    return sources


def one_each(files: list[Path], place: str) -> dict[str, Path]:
    """Return the file of each split, by their names.

    Raises
    ------
    InputError
        If two files claim the same split.
    """
    found: dict[str, Path] = {}
    for path in files:
        split = split_of(path)
        if split in found:
            raise InputError(
                f"{place}: the {split} split is ambiguous: {found[split].name} and {path.name}; give files"
            )
        if split:
            found[split] = path
    return {split: found[split] for split in SPLITS if split in found}


def read_pairs(
    path: Path, nouns: tuple[str, str], more_columns: bool = False
) -> Iterator[tuple[int, str, str]]:
    """Read lines of two fields, separated by a tab, or by a comma in a ``.csv`` file; also compressed.

    Parameters
    ----------
    path : Path
        The file.
    nouns : (str, str)
        Names of the two fields, for error messages.
    more_columns : bool
        Whether a line may have more fields, which are ignored.

    Yields
    ------
    line_number, first, second

    Raises
    ------
    InputError
        If the file is missing, empty, not UTF-8 or has a line with another number of columns.
    """
    text = text_format(path, None)
    number = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(open_binary(file, path), start=1):
                # Line by line and not by Arrow: these files are small, and errors need the line number.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line == "":
                    continue
                fields = text.split(line)
                if len(fields) < 2 or (len(fields) > 2 and not more_columns):
                    raise InputError(
                        f"{path}:{number}: got {len(fields)} columns, expected {nouns[0]} and {nouns[1]}"
                    )
                if "" in fields[:2]:
                    raise InputError(f"{path}:{number}: the {nouns[fields.index('')]} is empty")
                yield number, fields[0], fields[1]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: byte {error.start + 1} of the line is not UTF-8") from error
    except ValueError as error:
        raise InputError(f"{path}:{number}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if number == 0:
        raise InputError(f"{path}: the file is empty")


def read_id_map(path: Path, noun: str) -> list[str]:
    """Read lines of integer id and name, in any order, and return the names by id.

    Raises
    ------
    InputError
        If the ids are not 0 to n - 1, each once, or two have the same name.
    """
    return id_map(read_pairs(path, (f"{noun} id", f"{noun} name")), path, noun)


def id_map(rows: Iterable[tuple[int, str, str]], path: Path, noun: str) -> list[str]:
    """Return the names by id of rows of line number, integer id and name.

    Raises
    ------
    InputError
        As :func:`read_id_map`.
    """
    names: dict[int, str] = {}
    line_of_name: dict[str, int] = {}
    for line, id_text, name in rows:
        if not (id_text.isascii() and id_text.isdigit() and len(id_text) <= MAX_ID_DIGITS):
            raise InputError(f"{path}:{line}: the {noun} id is {id_text!r}, expected an integer from 0")
        if int(id_text) in names:
            raise InputError(f"{path}:{line}: the {noun} id {int(id_text)} stands here a second time")
        if name in line_of_name:
            raise InputError(
                f"{path}:{line}: the {noun} name {name!r} stands here and in line {line_of_name[name]}"
            )
        names[int(id_text)] = name
        line_of_name[name] = line
    if not names:
        raise InputError(f"{path}: the file is empty")
    missing = next((id_ for id_ in range(len(names)) if id_ not in names), None)
    if missing is not None:
        raise InputError(f"{path}: {len(names)} {noun} ids reach {max(names)}, but {missing} is missing")
    return [names[id_] for id_ in range(len(names))]


DEFAULT_TYPE = "entity"
_TYPE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def types_of_entities(
    path: Path | None, entities: Sequence[str], integer_ids: bool
) -> tuple[list[str], np.ndarray]:
    """Return the types and the type of each entity.

    Parameters
    ----------
    path : Path or None
        Lines of entity and type (more columns are not read). None: one type, ``entity``.
    entities : sequence of str
        The names of all entities.
    integer_ids : bool
        Whether the file has the entities' integer ids instead of their names.

    Returns
    -------
    types : list of str
        The types that entities have, sorted.
    type_of : (n,) int32
        Index of each entity's type.

    Raises
    ------
    InputError
        If an entity has no type or two, or a type's name cannot be used.
    """
    if path is None:
        return [DEFAULT_TYPE], np.zeros(len(entities), dtype=np.int32)
    given: dict[str, str] = {}
    for line, entity, type_ in read_pairs(path, ("entity", "type"), more_columns=True):
        if given.setdefault(entity, type_) != type_:
            raise InputError(
                f"{path}:{line}: entity {entity!r} has type {type_!r}, a line before says {given[entity]!r}"
            )
        fault = type_name_fault(type_)
        if fault:
            raise InputError(f"{path}:{line}: {fault}")
    # With integer ids the file has the integers, although an id map may give other names.
    keys = [str(id_) for id_ in range(len(entities))] if integer_ids else list(entities)
    untyped = [key for key in keys if key not in given]
    if untyped:
        raise InputError(
            f"{path}: {len(untyped)} entities of the triples have no type, the first is {untyped[0]!r}"
        )
    types = sorted({given[key] for key in keys})
    index = {type_: place for place, type_ in enumerate(types)}
    return types, np.array([index[given[key]] for key in keys], dtype=np.int32)


def type_name_fault(name: str) -> str | None:
    """Return the reason why a name is not allowed for an entity type, or None."""
    # Types become names of files, of DGL's node types and of its edge types.
    if not _TYPE_NAME.fullmatch(name) or "__" in name:
        return f"the type {name!r} is not allowed: only letters, digits, '.', '-' and single '_' are"
    if name == RELATION:
        return f"the type {name!r} is not allowed: it is the name of the relations' table"
    return None
