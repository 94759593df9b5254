"""All known answers to a query: for masking negatives, filtered ranking and marks of predictions."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from dglkge.data.dataset_files import known_index_path, partial_files, replacing
from dglkge.data.partition_layout import load_array, new_array
from dglkge.data.sorted_arrays import is_first, place_by_group, sorted_distinct, spans
from dglkge.errors import InputError, JobError
from dglkge.file_lock import wait_for_lock
from dglkge.typing import Ids, Mask, Side

logger = logging.getLogger(__name__)

CHECKED_WORDS, MAX_CHECKED = 8 << 10, 1024
"""Of a block that opening reads and checks, and of such blocks, spread evenly: all of a file up to 64 MiB."""

LOCK_SECONDS = 3600.0
"""Limit of the wait for another process that builds the same index."""

_CHUNK_ROWS = 1 << 20
_RANDOM_ABOVE = 64 << 20
_LOW_BITS = np.uint64(32)
_INDEXED = (Side.TAIL, Side.HEAD)


@dataclass(frozen=True)
class Direction:
    """Sorted triples of one direction; ids of entities are below 2**31.

    Attributes
    ----------
    starts : (R + 1,) int64
        Range of the keys of each relation.
    keys : (n,) uint64
        Ascending within a relation: the given entity, with the answer in the lower half.
    """

    starts: np.ndarray
    keys: np.ndarray

    @cached_property
    def answers(self) -> np.ndarray:
        """The answers (n,) uint32, ascending within a query: a view of the keys."""
        return self.keys.view(np.uint32)[0 if np.little_endian else 1 :: 2]

    def runs(self, entity_ids: Ids, relation_ids: Ids) -> tuple[Ids, Ids]:
        """Return the first answer of each query and the number of its answers: two (Q,) int64."""
        entities, relations = np.asarray(entity_ids, np.int64), np.asarray(relation_ids, np.int64)
        bounds = np.concatenate([entities, entities + 1]).astype(np.uint64) << _LOW_BITS
        low, high = np.tile(self.starts[relations], 2), np.tile(self.starts[relations + 1], 2)
        first, end = np.split(_lower_bound(self.keys, low, high, bounds), 2)
        return first, end - first

    def gather(self, entity_ids: Ids, relation_ids: Ids) -> tuple[Ids, Ids]:
        """Return the query (M,) and the id (M,) of every answer, as int64."""
        query_index, places = spans(*self.runs(entity_ids, relation_ids))
        return query_index, self.answers[places].astype(np.int64)

    def first_answers(self) -> np.ndarray:
        """Return the place of the first answer of every query, (Q,) int64."""
        first = [np.empty(0, np.int64)]
        # The first key of each relation begins a query, also where the entity is that of the key before.
        begins = self.starts[:-1][np.diff(self.starts) > 0]
        for start in range(0, len(self.keys), _CHUNK_ROWS):
            entities = self.keys[start : start + _CHUNK_ROWS] >> _LOW_BITS
            is_new = is_first(entities)
            # The first key may go on with the query of the chunk before.
            is_new[0] = start == 0 or entities[0] != self.keys[start - 1] >> _LOW_BITS
            inside = slice(*np.searchsorted(begins, [start, start + _CHUNK_ROWS]))
            is_new[begins[inside] - start] = True
            first.append(np.flatnonzero(is_new) + start)
        return np.concatenate(first)

    def given(self, places: np.ndarray) -> np.ndarray:
        """Return the given entity of the query that each answer is of, int64; ``places`` are the answers'."""
        return (self.keys[places] >> _LOW_BITS).astype(np.int64)

    def anchors(self, relation_id: int) -> np.ndarray:
        """Return the given entities of a relation's queries, ascending."""
        keys = self.keys[self.starts[relation_id] : self.starts[relation_id + 1]]
        return np.unique(keys >> _LOW_BITS).astype(np.int64)

    def contain(self, entity_ids: Ids, relation_ids: Ids, answer_ids: Ids) -> Mask:
        """Return whether each query (Q,) has an answer (Q,): bool."""
        first, count = self.runs(entity_ids, relation_ids)
        answers = np.asarray(answer_ids, np.int64)
        place = _lower_bound(self.answers, first, first + count, answers)
        is_known = place < first + count
        is_known[is_known] = self.answers[place[is_known]] == answers[is_known]
        return is_known


def _lower_bound(values: np.ndarray, low: np.ndarray, high: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return for each range [low, high) of ascending values the first place not below its target."""
    if not len(values):
        return low
    # All queries take a step of the binary search at a time; numpy.searchsorted has one range for all.
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        middle = (low + high) >> 1
        is_below = (low < high) & (values[np.minimum(middle, len(values) - 1)] < targets)
        low, high = np.where(is_below, middle + 1, low), np.where(is_below, high, middle)
    return low


Index = dict[Side, Direction]
"""Both directions of some triples."""


def index_in_memory(triples: Sequence[np.ndarray], num_relations: int, sides: Sequence[Side]) -> Index:
    """Build directions of triples (n, 3) in this process's memory; duplicates count once."""
    counts = _count(triples, num_relations)
    index = {}
    for side in sides:
        room = np.empty(int(counts.sum()), np.uint64)
        starts = _fill(triples, side, counts, room)
        # Without duplicates the keys are a part of the room; the rest is given back where it is much.
        keys = room[: starts[-1]]
        index[side] = Direction(starts, keys.copy() if starts[-1] < 0.9 * len(room) else keys)
    return index


def _chunks(triples: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield rows (n, 3) of int64, a bounded number at a time."""
    for part in triples:
        for start in range(0, len(part), _CHUNK_ROWS):
            yield np.asarray(part[start : start + _CHUNK_ROWS], np.int64)


def _count(triples: Sequence[np.ndarray], num_relations: int) -> np.ndarray:
    """Return the number of triples of each relation, duplicates included."""
    counts = (np.bincount(chunk[:, 1], minlength=num_relations) for chunk in _chunks(triples))
    return sum(counts, np.zeros(num_relations, np.int64))


def _fill(triples: Sequence[np.ndarray], side: Side, counts: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Write the sorted distinct keys of a direction to the start of the room; returns ``starts``."""
    free = np.cumsum(counts) - counts
    for chunk in _chunks(triples):
        anchors, relations, answers = (chunk[:, column] for column in (side.anchor_column, 1, side.column))
        order, places = place_by_group(relations, free)
        room[places] = anchors[order] << 32 | answers[order]
    starts = np.zeros(len(counts) + 1, np.int64)
    end = 0
    for relation, (stop, count) in enumerate(zip(free.tolist(), counts.tolist())):
        keys = room[stop - count : stop]
        keys.sort()
        is_new = is_first(keys)
        if end < stop - count or not is_new.all():
            # Towards the front, over what duplicates left free. Never over keys that are still to be read.
            keys = keys[is_new]
            room[end : end + len(keys)] = keys
        starts[relation + 1] = end = end + len(keys)
    return starts


def open_known_index(
    dataset: Path, split: str, source: str, triples: np.ndarray, num_relations: int
) -> Index:
    """Map the index of a split; built by the first process that asks for it, while others wait.

    If the data set folder is not writable, the index is built in memory. ``source`` is the checksum of the
    triples (n, 3), as the data set's description has it.

    Raises
    ------
    JobError
        If another process still builds it at the limit.
    """
    path = known_index_path(dataset, split)
    about = zlib.crc32(json.dumps([source, split, len(triples), num_relations]).encode())
    try:
        return _map(path, about, num_relations)
    except InputError as fault:
        if path.exists():
            logger.info("the index of known answers is built again: %s", fault)
    try:
        with _locked(dataset, path):
            # The process that held the lock has built it meanwhile.
            with contextlib.suppress(InputError):
                return _map(path, about, num_relations)
            for remnant in path.parent.glob(partial_files(path.name)):
                if not os.path.exists(f"/proc/{remnant.name.split('.')[-2]}"):  # of a process that was killed
                    remnant.unlink(missing_ok=True)
            with replacing(path) as file:
                _write(Path(file.name), about, triples, num_relations)
            return _map(path, about, num_relations)
    except OSError as error:
        text = "each process builds its own index of known answers (%.0f MB): cannot write %s: %s"
        logger.warning(text, 16e-6 * len(triples), path, error.strerror or error)
        return index_in_memory([triples], num_relations, _INDEXED)


@contextlib.contextmanager
def _locked(folder: Path, path: Path) -> Iterator[None]:
    """Hold the lock of the folder; the kernel releases it when the process ends."""
    # The folder itself is locked: no lock file is left behind in a data set.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not wait_for_lock(handle, LOCK_SECONDS):
            limit = f"{LOCK_SECONDS:.0f} s (the limit): end it, or wait and start again"
            raise JobError(f"another process has been building {path} for {limit}")
        yield
    finally:
        os.close(handle)


def _write(path: Path, about: int, triples: np.ndarray, num_relations: int) -> None:
    """Write one array file: what it is of and its checksum, and of each direction the starts and the keys."""
    counts = _count([triples], num_relations)
    words = new_array(path, (1 + 2 * (num_relations + 1 + len(triples)),), np.dtype(np.uint64))
    for part, side in zip(np.split(words[1:], 2), _INDEXED):
        starts, keys = np.split(part, [num_relations + 1])
        starts[:] = _fill([triples], side, counts, keys)
    words[0] = about << 32 | _checksum(words)
    words.flush()


def _checksum(words: np.ndarray) -> int:
    """Return the checksum of blocks that are spread evenly, the last one among them."""
    step = CHECKED_WORDS * -(-len(words) // (CHECKED_WORDS * MAX_CHECKED))
    checksum = zlib.crc32(words[1:][-CHECKED_WORDS:].data)
    for start in range(1, len(words), step):
        checksum = zlib.crc32(words[start : start + CHECKED_WORDS].data, checksum)
    return checksum


def _map(path: Path, about: int, num_relations: int) -> Index:
    """Map a file and check it; raises InputError if it cannot be read, or is damaged or another one."""
    words = load_array(path, (None,), np.uint64)
    if words[0] != about << 32 | _checksum(words):
        raise InputError(f"{path} is damaged, or of other triples")
    if words.nbytes > _RANDOM_ABOVE:
        # Queries are random accesses: without read-ahead the kernel reads the pages that they touch only.
        words.base.madvise(mmap.MADV_RANDOM)  # type: ignore[union-attr]
    index = {}
    for part, side in zip(np.split(np.asarray(words)[1:], 2), _INDEXED):
        starts, keys = part[: num_relations + 1].view(np.int64), part[num_relations + 1 :]
        index[side] = Direction(starts, keys[: starts[-1]])
    return index


@dataclass(eq=False, repr=False)
class KnownTriples:
    """Known answers to (head, relation, ?) and (?, relation, tail).

    Of a data set's splits :meth:`dglkge.data.dataset.Dataset.known_triples` makes it: the triples are then in
    files that all processes of a machine map. Entity ids are counted per type. The relation fixes the types,
    so (entity, relation) is unambiguous.

    Parameters
    ----------
    triples : sequence of (n, 3) int64
        Head, relation and tail as original ids, to be indexed in memory. Duplicates count once.
    num_relations : int
    splits : sequence of callable
        Each returns the index of more triples; called at the first query of each side.
    """

    triples: Sequence[np.ndarray]
    num_relations: int
    splits: Sequence[Callable[[], Index]] = ()
    _directions: dict[Side, list[Direction]] = field(default_factory=dict, init=False)

    def answers(self, side: Side, entity_ids: Ids, relation_ids: Ids) -> tuple[Ids, Ids]:
        """Return every known answer to queries of entities (Q,) and relations (Q,), for one wanted side.

        Returns
        -------
        query_index : (M,) int64
            Which query an answer belongs to, ascending.
        answer_ids : (M,) int64
            The answers, ascending within a query.
        """
        parts = [direction.gather(entity_ids, relation_ids) for direction in self.directions(side)]
        parts = [(queries, answers) for queries, answers in parts if len(queries)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        queries, answers = (np.concatenate(columns) for columns in zip(*parts))
        # Few runs that ascend; a triple may stand in several splits.
        keys = sorted_distinct(queries << 32 | answers, kind="stable")
        return keys >> 32, keys & 0xFFFF_FFFF

    def runs(self, side: Side, entity_ids: Ids, relation_ids: Ids) -> tuple[Ids, Ids, np.ndarray]:
        """Return where the known answers to each query of :meth:`answers` are; of one split uncopied.

        Returns
        -------
        first, count : two (Q,) int64
        answer_ids : (n,) int64 or uint32
            Those of query i are ``answer_ids[first[i] : first[i] + count[i]]``, ascending.
        """
        directions = self.directions(side)
        if len(directions) == 1:
            first, count = directions[0].runs(entity_ids, relation_ids)
            return first, count, directions[0].answers
        queries, answers = self.answers(side, entity_ids, relation_ids)
        count = np.bincount(queries, minlength=len(entity_ids))
        return np.cumsum(count) - count, count, answers

    def contain(self, side: Side, entity_ids: Ids, relation_ids: Ids, answer_ids: Ids) -> Mask:
        """Return whether each answer (Q,) is a known one of its query (Q,): bool."""
        directions = self.directions(side)
        return np.any([some.contain(entity_ids, relation_ids, answer_ids) for some in directions], axis=0)

    def seen(self, side: Side, relation_id: int) -> np.ndarray:
        """Return the entities (n,) int64 that triples of a relation have on a side, ascending."""
        # They are the given entities where the other side is wanted.
        other = self.directions(side.other)
        return np.unique(np.concatenate([direction.anchors(relation_id) for direction in other]))

    def directions(self, side: Side) -> list[Direction]:
        """Return the sorted triples of each split, for one wanted side; opened or built at the first call."""
        if side not in self._directions:
            directions = [open_index()[side] for open_index in self.splits]
            if self.triples or not directions:
                # In memory: only the side that is asked for.
                directions.append(index_in_memory(self.triples, self.num_relations, [side])[side])
            self._directions[side] = directions
        return self._directions[side]
