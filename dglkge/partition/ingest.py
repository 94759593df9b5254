"""Reads the triples of all splits as arrays of ids, which follow the order of the names.

Blocks of the files are parsed and numbered on all cores, in any order. Rows are collected in the order of the
files, so the result does not depend on the number of threads. Arrow and the compiled loops run without
Python's lock, so threads do, and names need no copies between processes.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dglkge.data.sorted_arrays import contains, spans
from dglkge.data.text_format import ROLES, TIME, WEIGHT, Columns, RowRules
from dglkge.data.triples import BLOCK_BYTES, TripleFile
from dglkge.data.vocabulary import granularity_of, limit_pairs, time_spans
from dglkge.errors import InputError
from dglkge.kernels.triple_rows import mapped
from dglkge.partition.name_index import MAX_NAMES, NameIndex, in_order, name_list
from dglkge.partition.rows import CollectedRows, distinct_below, map_in_order, pieces

CHUNK_ROWS = 1 << 16
"""Triples of a chunk of formats other than tables: bounds the strings that are in memory at a time."""

Arrays = dict[str, np.ndarray]
"""Arrays of each split."""

Types = tuple[list[str], np.ndarray]
"""The entity types, and the index (n,) int32 of each entity's."""

Chunk = Mapping[str, Any]
"""Some triples: for each role a column of Arrow's strings, or of integers."""

Chunks = Mapping[str, Iterable[Chunk | Callable[[], Chunk]]]
"""Pieces of the triples of each split, or functions that parse them, which several threads call."""

Place = Callable[[str, int], str]
"""Returns where a row of a split is, for messages."""

Watch = Callable[[Path, int], None]
"""Called with a file and the number of its bytes read so far."""

MIN_RELATIONS = 10
"""With fewer distinct values in the column of relations, nothing is suspicious."""

FAR_FEWER = 0.1
"""A column with at most this share of the distinct values of another has far fewer."""

_TRIPLE = "triple"
_MIN_BLOCK_BYTES = 1 << 20
_BLOCKS_A_WORKER = 2
_BYTES_A_BYTE = 4
"""Memory for each byte of a block of text: the text, Arrow's arrays and the ids."""


@dataclass
class IdTriples:
    """Triples as ids, before entities have types; names that a data set cannot hold are an InputError.

    Attributes
    ----------
    entities, relations : sequence of str
        The names of id 0, 1, 2, ...
    splits : dict of str to (n, 3) int32
        Head, relation at its time (see :mod:`dglkge.data.vocabulary`) and tail of each split.
    weights : dict of str to (n,) float32
        The weights of each split; empty where there are none.
    times : sequence of str
        The times in their order; empty where triples have none.
    in_order : bool
        Whether rows are those of the input: an interval makes several.
    """

    entities: Sequence[str]
    relations: Sequence[str]
    splits: Arrays
    weights: Arrays = field(default_factory=dict)
    times: Sequence[str] = ()
    in_order: bool = True

    def __post_init__(self) -> None:
        self.entities, self.relations = name_list(self.entities), name_list(self.relations)
        for noun, names, forbidden in (("entity", self.entities, "\n"), ("relation", self.relations, "\n\t")):
            for character in forbidden:
                place = pc.index(pc.match_substring(names.array, character), True).as_py()
                if place >= 0:
                    fault = f"the {noun} name {names[place]!r} holds {character!r}"
                    raise InputError(f"{fault}, which no dataset file can hold")

    @property
    def num_times(self) -> int:
        """Number of times; 1 where triples have none."""
        return max(1, len(self.times))


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
    integer_ids : bool
        Whether the names are the input's ids.
    candidates : mapping of str to (2, n, K) array
        For some splits the entities, as ids in their type, that each head and each tail is ranked among.
    parts, part_method
        The partition of each entity, (n,) int64, and how they were made, if the input has partitions.
    write_side_files : callable
        Writes files into the data set's folder, given the names of its entities.
    figures, notes
        Counts and the prefixes, for the report; lines about them for people.
    """

    triples: IdTriples
    types: Types | None = None
    columns: Columns | None = None
    place: Place | None = None
    integer_ids: bool = False
    candidates: Mapping[str, np.ndarray] = field(default_factory=dict)
    parts: np.ndarray | None = None
    part_method: str = ""
    write_side_files: Callable[[Path, Sequence[str]], None] = lambda folder, entities: None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class IdMaps:
    """Names by id, of triples of integer ids.

    Without them the names are the integers, and every integer up to the largest must occur.
    """

    entities: list[str] | None = None
    relations: list[str] | None = None

    @property
    def rules(self) -> RowRules:
        """What the rows of a file must hold."""
        ends = [len(names) if names else MAX_NAMES for names in (self.entities, self.relations)]
        return RowRules({"head": ends[0], "relation": ends[1], "tail": ends[0]})


def table_chunks(files: Mapping[str, Sequence[TripleFile]], watch: Watch) -> Chunks:
    """Return the blocks of the files of each split, to be parsed in any thread."""

    def chunks(split_files: Sequence[TripleFile]) -> Iterator[Callable[[], Chunk]]:
        for file in split_files:
            for block in file.blocks():
                yield partial(file.arrays, block)
                watch(file.path, block.position)
            # Empty lines at the end are in no block.
            watch(file.path, file.path.stat().st_size)

    return {split: chunks(split_files) for split, split_files in files.items()}


def ingest(
    source: Chunks,
    maps: IdMaps | None = None,
    columns: Columns | None = None,
    folder: Path | None = None,
    num_workers: int = 1,
    granularity: str | None = None,
    known_times: Sequence[str] = (),
) -> IdTriples:
    """Read all splits of triples of names, or of integer ids.

    Parameters
    ----------
    source : mapping of str to chunks
    maps : IdMaps, optional
        The triples are of integer ids.
    columns : Columns, optional
        The order in which the columns of ids were read, for the error message.
    folder : Path, optional
        Folder for temporary files of the ids, 12 bytes a triple; by default they are in memory.
    num_workers : int
        Number of chunks that are parsed and numbered at a time.
    granularity : str, optional
        Of the times; see :func:`dglkge.data.vocabulary.time_spans`.
    known_times : sequence of str
        Times of a data set, which count as well as those that occur; without a granularity these are cut to
        their form.

    Raises
    ------
    InputError
        If a name holds a character that the dataset's files cannot hold; if integers are missing among those
        that occur, and no id map allows it; if a time is none.
    """
    entities, relations, stamps = NameIndex(), NameIndex(), NameIndex()
    index = {"head": entities, "relation": relations, "tail": entities, TIME: stamps}
    if known_times:
        stamps.add(pa.array(known_times))

    def ids_of(role: str, column: Any) -> np.ndarray:
        return index[role].add(column) if maps is None or role == TIME else column.to_numpy()

    # First ids by appearance in one pass, then renumbering in place: the names are sorted once, not the
    # triples.
    splits, weights, times_of = _collect(source, ids_of, folder, num_workers)
    if maps is not None:
        triples = IdTriples(*_names_of_ids(splits, maps, columns or Columns()), splits, weights)
    else:
        (entity_names, of_entity), (relation_names, of_relation) = entities.in_order(), relations.in_order()
        triples = IdTriples(entity_names, relation_names, splits, weights)

        def renumber(piece: np.ndarray) -> None:
            rows = np.asarray(piece)
            mapped(rows, of_entity, of_relation, of_entity, rows)

        all_pieces = (piece for rows in splits.values() for _, (piece,) in pieces(rows))
        for _ in map_in_order(renumber, all_pieces, num_workers):
            pass
    return _at_times(triples, times_of, stamps, granularity, known_times)


def _at_times(
    triples: IdTriples, times_of: Arrays, stamps: NameIndex, granularity: str | None, known: Sequence[str]
) -> IdTriples:
    """Return triples of relations at their times, in place; without times they stay as they are.

    One at an interval becomes one at each time in it.
    """
    if not times_of:
        if granularity is not None:
            raise InputError("--time-granularity is given, and the triples have no time column (--columns)")
        return triples
    without = [split for split in triples.splits if split not in times_of]
    if without:
        raise InputError(f"the {without[0]} triples have no time column, and others have one")
    names, places = stamps.in_order()
    if known and granularity is None:
        granularity = granularity_of(known, names)
    times, first, last = time_spans(list(names), granularity)
    # Ids have 32 bits. Entity types may make more relations of these: the vocabulary compares again.
    limit_pairs(len(triples.relations), len(times))
    for split, rows in triples.splits.items():
        for _, (some, ids) in pieces(rows, times_of[split]):
            some[:, 1] = some[:, 1] * len(times) + first[places[ids]]
    if (first == last).all():
        return replace(triples, times=times)
    splits, weights = {}, {}
    for split, rows in triples.splits.items():
        stamp_ids = places[times_of[split]]
        sources, turns = spans(np.zeros_like(stamp_ids), last[stamp_ids] - first[stamp_ids] + 1)
        splits[split] = rows[sources]
        splits[split][:, 1] += turns.astype(np.int32)
        if split in triples.weights:
            weights[split] = triples.weights[split][sources]
    return replace(triples, splits=splits, weights=weights, times=times, in_order=False)


def _names_of_ids(splits: Arrays, maps: IdMaps, columns: Columns) -> tuple[list[str], list[str]]:
    """Return the names of the ids of entities and of relations; without a map the ids are the names."""
    try:
        entities = maps.entities or _dense_names(splits, (0, 2), "entity")
        return entities, maps.relations or _dense_names(splits, (1,), "relation")
    except InputError as error:
        # Integers in a wrong order often leave gaps; then the maps that the message asks for would not help.
        advice = column_order_advice(splits, columns)
        if advice is None:
            raise
        raise InputError(f"{error}; {advice}") from error


def _collect(
    source: Chunks, ids_of: Callable[[str, Any], np.ndarray], folder: Path | None, num_workers: int
) -> tuple[Arrays, Arrays, Arrays]:
    """Return ids (n, 3) int32, weights (n,) float32 and times (n,) int32 of each split; no entry without.

    Several threads call ``ids_of``, which returns the ids (n,) of the column of a role.
    """

    def numbered(piece: tuple[str, Chunk | Callable[[], Chunk]]) -> tuple[str, Arrays]:
        split, chunk = piece
        columns = chunk() if callable(chunk) else chunk
        ids = [ids_of(role, columns[role]).astype(np.int32, copy=False) for role in ROLES]
        arrays = {_TRIPLE: np.stack(ids, axis=1)}
        if WEIGHT in columns:
            arrays[WEIGHT] = columns[WEIGHT].to_numpy().astype(np.float32)
        if TIME in columns:
            arrays[TIME] = ids_of(TIME, columns[TIME])
        return split, arrays

    collected: dict[str, defaultdict[str, CollectedRows]]
    collected = {name: defaultdict(partial(CollectedRows, folder)) for name in (_TRIPLE, WEIGHT, TIME)}
    chunks = ((split, chunk) for split, split_chunks in source.items() for chunk in split_chunks)
    for split, arrays in map_in_order(numbered, chunks, num_workers):
        for role, values in arrays.items():
            collected[role][split].append(values)
    kinds = [{split: rows.array() for split, rows in kind.items()} for kind in collected.values()]
    return kinds[0], kinds[1], kinds[2]


def _dense_names(splits: Arrays, columns: tuple[int, ...], noun: str) -> list[str]:
    ids = distinct_below(list(splits.values()), *columns)
    num_ids = int(ids[-1]) + 1
    advice = f"give --{noun}-map if there are more than occur, or --ids names if these are names"
    if num_ids > len(columns) * sum(map(len, splits.values())):
        raise InputError(f"the {noun} ids reach {num_ids - 1}, more than there are fields for: {advice}")
    if len(ids) < num_ids:
        first = int(np.flatnonzero(ids != np.arange(len(ids)))[0])
        fault = f"{num_ids - len(ids)} of the {noun} ids 0 to {num_ids - 1} never occur, the first is {first}"
        raise InputError(f"{fault}: {advice}")
    return [str(id_) for id_ in range(num_ids)]


def name_chunks(rows: Iterator[tuple[str, str, str]]) -> Iterator[Chunk]:
    """Yield heads, relations and tails in chunks of :data:`CHUNK_ROWS`."""
    while block := list(islice(rows, CHUNK_ROWS)):
        yield {role: pa.array(column, pa.string()) for role, column in zip(ROLES, zip(*block))}


def renamed(triples: IdTriples, entities: Sequence[str], relations: Sequence[str]) -> IdTriples:
    """Return the triples, changed in place, with other names, all different; ids follow their order."""
    entity_names, entity_places = in_order(name_list(entities).array)
    relation_names, relation_places = in_order(name_list(relations).array)
    for rows in triples.splits.values():
        mapped(rows, entity_places, relation_places, entity_places, rows)
    return IdTriples(entity_names, relation_names, triples.splits, triples.weights)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def bytes_at_a_time(max_memory: int, num_workers: int) -> int:
    """Return the size of a block for which all in memory take a quarter of the limit, if possible."""
    share = max_memory // (4 * _BYTES_A_BYTE * _BLOCKS_A_WORKER * num_workers)
    return min(max(share, _MIN_BLOCK_BYTES), BLOCK_BYTES)


def column_order_advice(
    splits: Arrays, columns: Columns, entities: Sequence[str] = (), relations: Sequence[str] = ()
) -> str | None:
    """Return one line if another column looks like that of the relations, else None.

    The splits are as they were read, with the columns in that order. Triples of names come with the sorted
    names of their ids.
    """
    values = [distinct_below(list(splits.values()), column) for column in range(3)]
    if len(values[1]) < MIN_RELATIONS:
        return None
    counts = ", ".join(f"{len(numbers):,} {role}s" for numbers, role in zip(values, ROLES))
    are_integers = all(map(str.isdigit, chain(relations, entities)))
    if relations:
        values[1] = _as_entities(entities, relations)
    role = misplaced_relations(values, are_integers)
    if role is None:
        return None
    swap = {role: "relation", "relation": role}
    swapped = [swap.get(name, name) for name in columns.names or columns.order]
    if columns.names:
        swapped = [f"{name}={column}" for name, column in zip(swapped, columns.names.values())]
    advice = f"if what was read as {role} is the relation, give --columns {','.join(swapped)}"
    return f"the columns look as if they were in another order: {counts}; {advice}"


def misplaced_relations(values: Sequence[np.ndarray], are_integers: bool) -> str | None:
    """Return the role ("head", "tail") whose column looks like that of the relations, None if none does.

    Distinct values of each column are given; equal numbers stand for equal text. Names of relations differ
    from those of entities, ids from 0 (integers) do not.
    """
    heads, relations, tails = values
    for role, column, other in (("tail", tails, heads), ("head", heads, tails)):
        if are_integers:
            likeness = _jaccard(relations, other)
            is_like = likeness >= 0.5
            # What is not asked for below is not computed: the columns of entities are long.
            is_unlike = is_like and _jaccard(column, other) <= likeness / 2
        else:
            is_like = _shared(relations, other) >= 0.5 * len(relations)
            is_unlike = is_like and (contains(relations, column) | contains(other, column)).mean() <= 0.05
        # As many values as entities: a fourth of those in the other column, or more.
        is_as_large = 4 * len(relations) >= len(other)
        if len(column) <= FAR_FEWER * len(relations) and (is_like or is_as_large):
            return role
        # Of RDF, relations may be described as heads: then heads are far more than relations.
        if is_like and is_unlike and len(column) <= 5 * len(relations):
            return role
    return None


def _shared(first: np.ndarray, second: np.ndarray) -> int:
    few, many = sorted((first, second), key=len)
    return int(contains(many, few).sum())


def _jaccard(first: np.ndarray, second: np.ndarray) -> float:
    shared = _shared(first, second)
    return shared / (len(first) + len(second) - shared)


def _as_entities(entities: Sequence[str], relations: Sequence[str]) -> np.ndarray:
    """Return the relations' names as ids of the entities of that name, or as new ids; ascending."""
    ids = []
    for number, name in enumerate(relations):
        # Both are sorted; a dict of the entities would take more memory than the triples.
        place = bisect_left(entities, name)
        is_known = place < len(entities) and entities[place] == name
        ids.append(place if is_known else len(entities) + number)
    return np.sort(ids)
