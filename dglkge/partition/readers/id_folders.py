"""Reads files of id and name, and the data set folders of DGL-KE, OpenKE and PyKEEN; the ids are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dglkge.data.dataset_files import SPLITS, TRAIN
from dglkge.data.text_format import ROLES, Columns, RowRules, TextFormat, is_id, numbered_lines, text_format
from dglkge.data.triples import TripleFile
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, unknown_name
from dglkge.partition.ingest import IdMaps, IdTriples, Reading, Watch, ingest, table_chunks
from dglkge.partition.options import Options

PYKEEN_TRIPLES = "numeric_triples.tsv.gz"
_HTR = Columns(("head", "tail", "relation"))


@dataclass(frozen=True)
class IdFolder:
    """A data set folder with id maps: its name for people, the file of each split, and its reader."""

    layout: str
    files: dict[str, Path]
    read: Callable[[Watch, Options], Reading]


def find_pykeen(folder: Path) -> IdFolder | None:
    """Return PyKEEN's triples factory in a folder, or the factories of a data set, or None."""
    if (folder / PYKEEN_TRIPLES).is_file():
        return pykeen_folder({TRAIN: folder})
    folders = {split: folder / name for split, name in zip(SPLITS, ("training", "validation", "testing"))}
    folders = {split: path for split, path in folders.items() if (path / PYKEEN_TRIPLES).is_file()}
    return pykeen_folder(folders) if TRAIN in folders else None


def pykeen_folder(factories: Mapping[str, Path]) -> IdFolder:
    """Return the reader of the folders that ``TriplesFactory.to_path_binary`` wrote, one for each split."""
    files = {split: factories[split] / PYKEEN_TRIPLES for split in SPLITS if split in factories}
    return IdFolder("PyKEEN triples factories", files, lambda watch, _: _read_pykeen(factories, files, watch))


def find_openke(folder: Path) -> IdFolder | None:
    """Return OpenKE's files in a folder (``train2id.txt``, ``entity2id.txt``, ...), or None."""
    files = _splits(folder, "{}2id.txt")
    if TRAIN not in files or not _has(folder, "entity2id.txt", "relation2id.txt"):
        return None
    return IdFolder("OpenKE's files", files, lambda watch, _: _read_openke(folder, files, watch, True))


def find_dglke(folder: Path) -> IdFolder | None:
    """Return DGL-KE's files of a built-in data set, or None.

    Those are ``train.txt`` with ``entities.dict`` and ``relations.dict``, or (Freebase) with ids and with
    ``entity2id.txt`` and ``relation2id.txt``.
    """
    files = _splits(folder, "{}.txt")
    if TRAIN not in files:
        return None
    if _has(folder, "entities.dict", "relations.dict"):
        return IdFolder("DGL-KE's files", files, lambda watch, _: _read_dicts(folder, files, watch))
    if _has(folder, "entity2id.txt", "relation2id.txt") and _are_ids(_first_line(files[TRAIN])):
        layout = "DGL-KE's files of Freebase (head, tail, relation)"
        return IdFolder(layout, files, lambda watch, _: _read_openke(folder, files, watch, False))
    return None


def _splits(folder: Path, pattern: str) -> dict[str, Path]:
    paths = {split: folder / pattern.format(split) for split in SPLITS}
    return {split: path for split, path in paths.items() if path.is_file()}


def _has(folder: Path, *names: str) -> bool:
    return all((folder / name).is_file() for name in names)


def read_pairs(
    path: Path, nouns: tuple[str, str], more_columns: bool = False, text: TextFormat | None = None
) -> Iterator[tuple[int, str, str]]:
    """Yield line number and two fields of lines, separated by a tab, or by a comma in a ``.csv`` file.

    The file may be compressed. A line may have more columns, if so said, which are not read. ``nouns`` are
    the names of the fields, for messages.

    Raises
    ------
    InputError
        If the file is missing, empty, not UTF-8 or has a line with another number of columns.
    """
    text = text or text_format(path, None)
    # Line by line and not by Arrow: these files are small, and errors need the line number.
    for number, line in numbered_lines(path):
        if line == "":
            continue
        try:
            fields = text.split(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from error
        if len(fields) < 2 or (len(fields) > 2 and not more_columns):
            raise InputError(f"{path}:{number}: got {len(fields)} columns, expected {' and '.join(nouns)}")
        if "" in fields[:2]:
            raise InputError(f"{path}:{number}: the {nouns[fields.index('')]} is empty")
        yield number, fields[0], fields[1]


def read_id_map(path: Path, noun: str) -> list[str]:
    """Return the names by id of lines of integer id and name, in any order, as :func:`id_map` checks them."""
    return id_map(read_pairs(path, (f"{noun} id", f"{noun} name")), path, noun)


def read_id_maps(options: Options) -> IdMaps | None:
    """Return the maps that the options name; None if the triples are of names."""
    if not options.integer_ids:
        return None
    paths = (("entity", options.entity_map), ("relation", options.relation_map))
    return IdMaps(*(read_id_map(path, noun) if path else None for noun, path in paths))


def id_map(rows: Iterable[tuple[int, str, str]], path: Path, noun: str) -> list[str]:
    """Return the names by id of rows of line number, integer id and name.

    Raises
    ------
    InputError
        If the ids are not 0 to n - 1, each once, or two have the same name.
    """
    names: dict[int, str] = {}
    line_of_name: dict[str, int] = {}
    for line, id_text, name in rows:
        if not is_id(id_text):
            raise InputError(f"{path}:{line}: the {noun} id is {id_text!r}, expected an integer from 0")
        if int(id_text) in names:
            raise InputError(f"{path}:{line}: the {noun} id {int(id_text)} stands here a second time")
        if (before := line_of_name.setdefault(name, line)) != line:
            raise InputError(f"{path}:{line}: the {noun} name {name!r} stands here and in line {before}")
        names[int(id_text)] = name
    if not names:
        raise InputError(f"{path}: the file is empty")
    missing = next((id_ for id_ in range(len(names)) if id_ not in names), None)
    if missing is not None:
        raise InputError(f"{path}: {len(names)} {noun} ids reach {max(names)}, but {missing} is missing")
    return [names[id_] for id_ in range(len(names))]


def _first_line(path: Path) -> list[str]:
    """Return the fields of the first line."""
    return next(numbered_lines(path))[1].split()


def _are_ids(fields: list[str]) -> bool:
    return len(fields) == 3 and all(text.isascii() and text.isdigit() for text in fields)


def _reading(
    maps: IdMaps, files: Mapping[str, TripleFile], watch: Watch, layout: str, is_named: bool = False
) -> Reading:
    """Read the triples of a folder: of ids, or of the names of its maps."""
    chunks = table_chunks({split: [file] for split, file in files.items()}, watch)
    triples = ingest(chunks, None if is_named else maps)
    if is_named:
        triples = _with_ids(triples, maps, files)
    return Reading(triples, figures={"layout": layout})


def _with_ids(triples: IdTriples, maps: IdMaps, files: Mapping[str, TripleFile]) -> IdTriples:
    """Return triples of names with the ids that the names have in the maps."""
    entities = Vocabulary(maps.entities or [], "entity")
    relations = Vocabulary(maps.relations or [], "relation")
    kinds = (triples.entities, entities), (triples.relations, relations)
    for column, (read, known) in enumerate((*kinds, kinds[0])):
        ids = known.find(read)
        for split, rows in triples.splits.items():
            numbers = ids[rows[:, column]]
            if (numbers < 0).any():
                row = int((numbers < 0).argmax())
                error = unknown_name(known.noun, read[rows[row, column]], known.names)
                raise InputError(f"{files[split].places([row])[row]}: {error}")
            rows[:, column] = numbers
    return IdTriples(entities.names, relations.names, triples.splits)


def _read_dicts(folder: Path, files: Mapping[str, Path], watch: Watch) -> Reading:
    """Read ``entities.dict`` (id, name), ``relations.dict`` and triples of names, or of ids."""
    entities = read_id_map(folder / "entities.dict", "entity")
    relations = read_id_map(folder / "relations.dict", "relation")
    maps, first = IdMaps(entities, relations), _first_line(files[TRAIN])
    # A name may be a number: ids only if the first triple cannot be one of names.
    is_named = not _are_ids(first) or (first[1] in relations and {first[0], first[2]} <= set(entities))
    rules = RowRules() if is_named else maps.rules
    tables = {split: TripleFile(path, rules=rules) for split, path in files.items()}
    layout = f"entities.dict, relations.dict and triples of {'names' if is_named else 'ids'}"
    return _reading(maps, tables, watch, layout, is_named)


def _read_openke(folder: Path, files: Mapping[str, Path], watch: Watch, counted: bool) -> Reading:
    """Read ``entity2id.txt``, ``relation2id.txt`` and lines of head, tail and relation ids, after a count."""
    maps = IdMaps(*(_counted_names(folder / f"{noun}2id.txt", noun) for noun in ("entity", "relation")))
    counts, tables = {}, {}
    for split, path in files.items():
        lines = [line for _, line in islice(numbered_lines(path), 1 + counted)]
        if counted:
            counts[split] = _count_in(path, lines[0])
        delimiter = "\t" if "\t" in lines[-1] else " "
        tables[split] = TripleFile(path, _HTR, delimiter, maps.rules, skip_first=counted)
    reading = _reading(maps, tables, watch, "entity2id.txt, relation2id.txt, head tail relation")
    for split, count in counts.items():
        rows = len(reading.triples.splits[split])
        if rows != count:
            raise InputError(f"{files[split]}:1: it says {count} triples, the file has {rows}")
    return reading


def _count_in(path: Path, line: str) -> int:
    text = line.strip()
    if not is_id(text):
        raise InputError(f"{path}:1: got {line[:80]!r}, expected the number of lines that follow")
    return int(text)


def _counted_names(path: Path, noun: str) -> list[str]:
    """Read a file of a count line and lines of name and id; return the names by id."""
    lines = numbered_lines(path)
    count = _count_in(path, next(lines)[1])

    def rows() -> Iterator[tuple[int, str, str]]:
        for number, line in lines:
            if line:
                # A name may have spaces, an id has none.
                name, space, id_text = line.rstrip().rpartition("\t" if "\t" in line else " ")
                if not space or not name:
                    raise InputError(f"{path}:{number}: got {line[:80]!r}, expected {noun} name and id")
                yield number, id_text, name.rstrip()

    names = id_map(rows(), path, noun)
    if len(names) != count:
        raise InputError(f"{path}:1: it says {count} names, the file has {len(names)}")
    return names


def _read_pykeen(factories: Mapping[str, Path], files: Mapping[str, Path], watch: Watch) -> Reading:
    """Read the gzipped tables of PyKEEN's factories; ``base.pth`` has nothing that they lack."""
    maps = {}
    for split, folder in factories.items():
        entities = _pykeen_names(folder / "entity_to_id.tsv.gz", "entity")
        maps[split] = entities, _pykeen_names(folder / "relation_to_id.tsv.gz", "relation")
        if maps[split] != maps[TRAIN]:
            raise InputError(f"{folder}: its ids are not those of {factories[TRAIN]} (inductive data?)")
    columns, names = Columns(ROLES, {role: role for role in ROLES}), IdMaps(*maps[TRAIN])
    tables = {split: TripleFile(path, columns, rules=names.rules) for split, path in files.items()}
    return _reading(names, tables, watch, "numeric_triples.tsv.gz, entity_to_id, relation_to_id")


def _pykeen_names(path: Path, noun: str) -> list[str]:
    # Its writer quotes fields, unlike the text of other files with tabs.
    rows = read_pairs(path, ("id", "label"), text=TextFormat("\t", quoted=True))
    _, *header = next(rows, (1,))
    if header != ["id", "label"]:
        raise InputError(f"{path}:1: the header is {header}, expected id and label")
    return id_map(rows, path, noun)
