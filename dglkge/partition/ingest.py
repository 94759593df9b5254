"""Reads the triples of all splits as arrays of ids, which follow the order of the names.

Blocks of the files are parsed and numbered on all cores, in any order. Rows are collected in the order of the
files, so the result does not depend on the number of threads. Arrow and the compiled loops run without
Python's lock, so threads do, and names need no copies between processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dglkge.data.text_format import ROLES, WEIGHT, Columns
from dglkge.data.triples import BLOCK_BYTES, Block, TripleFile
from dglkge.errors import InputError
from dglkge.kernels.triple_rows import renumber
from dglkge.partition.column_order import column_order_advice
from dglkge.partition.name_index import NameIndex, NameList
from dglkge.partition.rows import CollectedRows, distinct_below, map_in_order, pieces

CHUNK_ROWS = 1 << 16
"""Triples of a chunk of formats other than tables: bounds the strings that are in memory at a time."""

Chunks = Mapping[str, Iterable[Mapping[str, Any]]]
"""Pieces of the triples of each split: for each role a column of Arrow's strings, or of integers."""

IdsOf = Callable[[str, Any], np.ndarray]
"""Returns the ids (n,) of the column of a role; several threads call it."""

Numbered = tuple[np.ndarray, np.ndarray | None]
"""Ids (n, 3) int32 of a block, and weights (n,) float32 if it has any."""

_FileBlock = tuple[str, TripleFile, "Block | None"]
"""Split, file and block of it; None behind the last one."""

Place = Callable[[str, int], str]
"""Returns where a row of a split is, for messages."""

Watch = Callable[[Path], Callable[[int], None]]
"""Returns, for a file, the function to call with the number of its bytes read so far."""

_MIN_BLOCK_BYTES = 1 << 20
_BLOCKS_A_WORKER = 2
_BYTES_A_BYTE = 4
"""Memory for each byte of a block of text: the text, Arrow's arrays and the ids."""


@dataclass
class IdTriples:
    """Triples as ids, before entities have types.

    Attributes
    ----------
    entities, relations : sequence of str
        The names of id 0, 1, 2, ...
    splits : dict of str to (n, 3) int32
        Head, relation and tail of each split.
    weights : dict of str to (n,) float32
        The weights of each split; empty where there are none.
    """

    entities: Sequence[str]
    relations: Sequence[str]
    splits: dict[str, np.ndarray]
    weights: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Reading:
    """The triples of an input, and what goes into the data set with them.

    Attributes
    ----------
    triples : IdTriples
        All splits.
    types : (list of str, (n,) int32), optional
        The entity types, and the index of each entity's type.
    columns : Columns, optional
        The columns that were read, if the input is a table.
    place : callable, optional
        Returns where a triple is in the input, given its split and row.
    write_side_files : callable
        Writes files into the data set's folder, given the names of its entities.
    figures : dict
        Counts and the prefixes, for the report.
    notes : list of str
        Lines about them for people.
    """

    triples: IdTriples
    types: tuple[list[str], np.ndarray] | None = None
    columns: Columns | None = None
    place: Place | None = None
    write_side_files: Callable[[Path, Sequence[str]], None] = lambda folder, entities: None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def ingest_names(source: Chunks | SplitFiles, folder: Path | None = None) -> IdTriples:
    """Read all splits of triples of names.

    Parameters
    ----------
    source : mapping of str to chunks, or SplitFiles
    folder : Path, optional
        Folder for temporary files of the ids, 12 bytes a triple; by default they are in memory.

    Raises
    ------
    InputError
        If a name holds a character that the dataset's files cannot hold.
    """
    entities, relations = NameIndex(), NameIndex()
    index = {"head": entities, "relation": relations, "tail": entities}
    # First ids by appearance in one pass, then renumbering in place: the names are sorted once, not the
    # triples.
    splits, weights = _collect(source, lambda role, column: index[role].add(column), folder)
    entity_names, entity_places = entities.in_order()
    relation_names, relation_places = relations.in_order()
    check_names(entity_names, "entity", "\n")
    check_names(relation_names, "relation", "\n\t")
    num_workers = source.num_workers if isinstance(source, SplitFiles) else 1

    def renumbered(piece: np.ndarray) -> None:
        renumber(np.asarray(piece), entity_places, relation_places)

    for triples in splits.values():
        for _ in map_in_order(renumbered, (piece for _, (piece,) in pieces(triples)), num_workers):
            pass
    return IdTriples(entity_names, relation_names, splits, weights)


def ingest_ids(
    source: Chunks | SplitFiles,
    entity_names: list[str] | None,
    relation_names: list[str] | None,
    columns: Columns | None = None,
    folder: Path | None = None,
) -> IdTriples:
    """Read all splits of triples of integer ids.

    Parameters
    ----------
    source : mapping of str to chunks, or SplitFiles
    entity_names, relation_names : list of str, optional
        The id maps. Without one, the names are the integers, and every integer up to the largest must occur.
    columns : Columns, optional
        The order in which the columns were read, for the error message.
    folder : Path, optional
        As for :func:`ingest_names`.

    Raises
    ------
    InputError
        If integers are missing among those that occur, and no id map allows it.
    """
    splits, weights = _collect(source, lambda role, column: column.to_numpy(), folder)
    try:
        if entity_names is None:
            entity_names = _dense_names(splits, (0, 2), "entity")
        if relation_names is None:
            relation_names = _dense_names(splits, (1,), "relation")
    except InputError as error:
        # Integers in a wrong order often leave gaps; then the maps that the message asks for would not help.
        advice = column_order_advice(splits, columns or Columns())
        if advice is None:
            raise
        raise InputError(f"{error}; {advice}") from error
    return IdTriples(entity_names, relation_names, splits, weights)


def _collect(
    source: Chunks | SplitFiles, ids_of: IdsOf, folder: Path | None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the ids (n, 3) int32 and the weights (n,) float32 of each split; without weights no entry."""
    if isinstance(source, SplitFiles):
        splits = source.collect(ids_of, folder)
    else:
        splits = {split: _FileRows(folder) for split in source}
        for split, chunks in source.items():
            for chunk in chunks:
                splits[split].append(*_numbered(chunk, ids_of))
    weights = {split: rows.weights.array() for split, rows in splits.items() if rows.has_weights}
    return {split: rows.triples.array() for split, rows in splits.items()}, weights


def _numbered(columns: Mapping[str, Any], ids_of: IdsOf) -> Numbered:
    triples = np.empty((len(columns[ROLES[0]]), 3), np.int32)
    for place, role in enumerate(ROLES):
        triples[:, place] = ids_of(role, columns[role])
    weights = columns[WEIGHT].to_numpy().astype(np.float32) if WEIGHT in columns else None
    return triples, weights


def check_names(names: Sequence[str], noun: str, forbidden: str) -> None:
    """Raise InputError if a name holds one of the forbidden characters."""
    for character in forbidden:
        if isinstance(names, NameList) and not names.has_byte(ord(character)):
            continue
        for name in names:
            if character in name:
                raise InputError(
                    f"the {noun} name {name!r} holds {character!r}, which no dataset file can hold"
                )


def _dense_names(splits: Mapping[str, np.ndarray], columns: tuple[int, ...], noun: str) -> list[str]:
    ids = distinct_below(list(splits.values()), *columns)
    num_ids = int(ids[-1]) + 1
    advice = f"give --{noun}-map if there are more than occur, or --ids names if these are names"
    if num_ids > len(columns) * sum(map(len, splits.values())):
        raise InputError(
            f"the {noun} ids reach {num_ids - 1}, more than there are fields to hold them: {advice}"
        )
    if len(ids) < num_ids:
        first = int(np.flatnonzero(ids != np.arange(len(ids)))[0])
        raise InputError(
            f"{num_ids - len(ids)} of the {noun} ids 0 to {num_ids - 1} never occur, "
            f"the first is {first}: {advice}"
        )
    return [str(id_) for id_ in range(num_ids)]


def name_chunk(columns: Sequence[Sequence[str]]) -> dict[str, pa.Array]:
    """Return heads, relations and tails as a chunk."""
    return {role: pa.array(column, pa.string()) for role, column in zip(ROLES, columns)}


def renamed(triples: IdTriples, entities: Sequence[str], relations: Sequence[str]) -> IdTriples:
    """Return the triples with other names: ids follow the order of the new ones.

    Parameters
    ----------
    triples : IdTriples
        Its arrays are changed in place.
    entities, relations : sequence of str
        The new name of each id, all different.
    """
    entity_names, entity_places = _in_order(entities)
    relation_names, relation_places = _in_order(relations)
    for rows in triples.splits.values():
        rows[:, 0] = entity_places[rows[:, 0]]
        rows[:, 1] = relation_places[rows[:, 1]]
        rows[:, 2] = entity_places[rows[:, 2]]
    return IdTriples(entity_names, relation_names, triples.splits, triples.weights)


def _in_order(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    order = sorted(range(len(names)), key=names.__getitem__)
    places = np.empty(len(names), dtype=np.int32)
    places[order] = np.arange(len(names), dtype=np.int32)
    return [names[id_] for id_ in order], places


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def bytes_at_a_time(max_memory: int, num_workers: int) -> int:
    """Return the size of a block for which all that are in memory take a quarter of the limit, if possible.

    Parameters
    ----------
    max_memory : int
        In bytes.
    num_workers : int
    """
    wanted = max_memory // (4 * _BYTES_A_BYTE * _BLOCKS_A_WORKER * num_workers)
    return min(max(wanted, _MIN_BLOCK_BYTES), BLOCK_BYTES)


@dataclass(frozen=True)
class SplitFiles:
    """The files of all splits.

    Attributes
    ----------
    files : mapping of str to sequence of TripleFile
        For each split.
    watch : callable
        Returns, for a file, the function to call with the number of its bytes read so far.
    num_workers : int
        Number of blocks that are parsed at a time.
    """

    files: Mapping[str, Sequence[TripleFile]]
    watch: Watch
    num_workers: int = 1

    def collect(self, ids_of: IdsOf, folder: Path | None) -> dict[str, _FileRows]:
        """Return the rows of each split.

        Parameters
        ----------
        ids_of : callable
        folder : Path or None
            Folder for temporary files; None: in memory.

        Raises
        ------
        InputError
            If a file is wrong: that of the first wrong file.
        """
        splits = {split: _FileRows(folder) for split in self.files}

        def numbered(item: _FileBlock) -> tuple[_FileBlock, Numbered | None]:
            split, file, block = item
            return item, None if block is None else _numbered(file.arrays(block), ids_of)

        for (split, file, block), numbers in map_in_order(numbered, self._blocks(), self.num_workers):
            if block is not None and numbers is not None:
                splits[split].append(*numbers)
            # Empty lines at the end are in no block.
            position = file.path.stat().st_size if block is None else block.position
            self.watch(file.path)(position)
        return splits

    def _blocks(self) -> Iterator[_FileBlock]:
        """Yield the blocks of all files, and None behind the last one of each."""
        for split, files in self.files.items():
            for file in files:
                yield from ((split, file, block) for block in file.blocks())
                yield split, file, None


class _FileRows:
    """Ids and weights of a split."""

    def __init__(self, folder: Path | None) -> None:
        self.triples = CollectedRows(folder, (3,), np.int32)
        self.weights = CollectedRows(folder, (), np.float32)
        self.has_weights = False

    def append(self, triples: np.ndarray, weights: np.ndarray | None) -> None:
        self.triples.append(triples)
        if weights is not None:
            self.has_weights = True
            self.weights.append(weights)
