"""Names and original ids of entities and relations, and relations at the times of triples.

The line of a name in its file is its original id.

A *relation at a time* is a relation of its own to all code that batches, filters and ranks triples: its
number is ``relation * num_times + time``. Only its row is made of two, see
:mod:`dglkge.model.functions.bilinear`. A data set without times has the one time 0, and its numbers are those
of the relations.
"""

from __future__ import annotations

import datetime
import itertools
import mmap
import re
from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.errors import InputError, os_errors, unknown_name
from dglkge.typing import Relation

GRANULARITIES = {"day": 10, "month": 7, "year": 4}
"""Characters of an ISO 8601 date that stay, by granularity."""

MAX_PAIRS = 1 << 27
"""Most relations at a time: each takes some words of memory in every trainer."""

_CLOCK = r"[T ](?:[01]\d|2[0-3])(?::[0-5]\d){0,2}(?:\.\d+)?Z?"
_DATE = re.compile(rf"(\d{{4}})(?:-(\d\d)(?:-(\d\d)(?:{_CLOCK})?)?)?")
_INTEGER = re.compile(r"-?\d{1,18}")


def in_time_order(stamps: Sequence[str], granularity: str | None = None) -> tuple[list[str], np.ndarray]:
    """Return the distinct times in their order, and the place (n,) int32 of each stamp among them.

    Stamps are all integers, or all ISO 8601 dates of one form, which a member of :data:`GRANULARITIES` cuts.

    Raises
    ------
    InputError
        If a stamp is neither, forms are mixed, or integers should be cut.

    Examples
    --------
    >>> in_time_order(["10", "9"])[0]
    ['9', '10']
    >>> in_time_order(["2014-05-01", "2014-01-31", "2014-05-09"], "month")[0]
    ['2014-01', '2014-05']
    """
    are_integers = bool(stamps) and _INTEGER.fullmatch(stamps[0]) is not None and len(stamps[0]) != 4
    are_integers = are_integers or all(_INTEGER.fullmatch(stamp) for stamp in stamps)
    if are_integers and granularity is None:
        for stamp in stamps:
            if not _INTEGER.fullmatch(stamp):
                raise _no_time(stamp, stamps[0])
        keys = np.array([int(stamp) for stamp in stamps], np.int64)
        order = np.argsort(keys)
        if (np.diff(keys[order]) == 0).any():
            raise InputError("two texts of the time column are one integer; allowed: one text for each time")
        return [stamps[place] for place in order], np.argsort(order).astype(np.int32)
    length = GRANULARITIES[granularity] if granularity else None
    for stamp in stamps:
        if not _is_date(stamp) or len(stamp[:length]) != len(stamps[0][:length]):
            raise _no_time(stamp, stamps[0])
    # Of one form: the order of the texts is that of the times.
    if length is not None and stamps and len(stamps[0]) < length:
        raise InputError(f"the time {stamps[0]!r} has no {granularity}; allowed: a coarser granularity")
    cut = [stamp[:length] for stamp in stamps]
    times = sorted(set(cut))
    number = {time: place for place, time in enumerate(times)}
    return times, np.array([number[time] for time in cut], np.int32)


def time_spans(
    stamps: Sequence[str], granularity: str | None = None
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the distinct times in their order, and the first and last place (n,) int32 of each stamp.

    Stamps are times as of :func:`in_time_order`, or intervals of two with ``/`` between them, both included.

    Raises
    ------
    InputError
        As :func:`in_time_order`, or if an interval ends before it begins.

    Examples
    --------
    >>> times, first, last = time_spans(["2001/2003", "2002"])
    >>> times, first.tolist(), last.tolist()
    (['2001', '2002', '2003'], [0, 1], [2, 1])
    """
    ends = [(stamp.partition("/")[0], stamp.rpartition("/")[2]) for stamp in stamps]
    points = sorted({point for pair in ends for point in pair})
    times, places = in_time_order(points, granularity)
    place_of = dict(zip(points, places.tolist()))
    spans = np.array([[place_of[point] for point in pair] for pair in ends], np.int32).reshape(-1, 2)
    wrong = np.flatnonzero(spans[:, 0] > spans[:, 1])
    if len(wrong):
        raise InputError(f"the interval {stamps[wrong[0]]!r} ends before it begins")
    return times, spans[:, 0], spans[:, 1]


def granularity_of(times: Sequence[str], stamps: Sequence[str]) -> str | None:
    """Return the granularity that cuts stamps to the form of times; None where there is none, or of integers.

    Examples
    --------
    >>> granularity_of(["2014-05", "2014-06"], ["2014-05", "2014-06", "2014-07-31"])
    'month'
    """
    if all(_INTEGER.fullmatch(point) for stamp in stamps for point in stamp.split("/")):
        return None
    return {length: name for name, length in GRANULARITIES.items()}.get(len(times[0]))


def _is_date(stamp: str) -> bool:
    """Return whether a text is a date of the calendar, perhaps with a time of the day."""
    match = _DATE.fullmatch(stamp)
    try:
        return match is not None and bool(datetime.date(*map(int, match.groups("1"))))
    except ValueError:
        return False


def _no_time(stamp: str, first: str) -> InputError:
    return InputError(
        f"the time is {stamp!r} and another {first!r}; allowed: all integers, or all ISO 8601 dates "
        "of one form (2014, 2014-05, 2014-05-31, 2014-05-31T12:30), or intervals of two (2014-05/2014-07)"
    )


def label_at(relation: str, time: str) -> str:
    """Return the name of a relation at a time, such as ``visits @ 2014-05-01``."""
    return f"{relation} @ {time}"


def limit_pairs(num_relations: int, num_times: int) -> None:
    """Raise InputError for more relations at a time than :data:`MAX_PAIRS`."""
    num_pairs = num_relations * num_times
    if num_pairs > MAX_PAIRS:
        raise InputError(
            f"{num_relations:,} relations at {num_times:,} times are {num_pairs:,}; allowed: up to "
            f"{MAX_PAIRS:,}, e.g. by a coarser --time-granularity of dglkge data build"
        )


def extended(ids: np.ndarray, num_times: int) -> np.ndarray:
    """Return an id map of relations (R,) as that of relations at a time (R * num_times,).

    Examples
    --------
    >>> extended(np.array([1, 0]), 3).tolist()
    [3, 4, 5, 0, 1, 2]
    """
    if num_times == 1:
        return ids
    return (np.asarray(ids)[:, np.newaxis] * num_times + np.arange(num_times)).reshape(-1)


NAMES_BLOCK_BYTES = 1 << 24


@dataclass(eq=False, repr=False)
class Vocabulary:
    """An ordered list of distinct names; the name of id 0, 1, 2, ... The noun is for error messages."""

    names: Sequence[str]
    noun: str

    @cached_property
    def _ids(self) -> MutableMapping[str, int]:
        # Built at the first lookup by name: training has no such lookup, and the dict is large.
        return {name: id_ for id_, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, id_: int) -> str:
        return self.names[id_]

    def __contains__(self, name: object) -> bool:
        return name in self._ids

    def id(self, name: str) -> int:
        """Return the id of a name; the InputError of an unknown one shows the nearest known ones."""
        id_ = self._ids.get(name)
        if id_ is None:
            raise unknown_name(self.noun, name, self.names)
        return id_

    def ids(self, names: Iterable[str]) -> np.ndarray:
        """Return the ids of names, (n,) int64."""
        return np.array([self.id(name) for name in names], dtype=np.int64)

    def find(self, names: Iterable[str]) -> np.ndarray:
        """Return the ids of names, -1 for an unknown one; (n,) int64."""
        return np.array([self._ids.get(name, -1) for name in names], dtype=np.int64)

    def extended(self, names: Sequence[str]) -> Vocabulary:
        """Return this vocabulary with further names, in little time: both share the index of the old ones."""
        made = Vocabulary([*self.names, *names], self.noun)
        new = {name: id_ for id_, name in enumerate(names, start=len(self))}
        made._ids = ChainMap(new, self._ids)
        return made

    def save(self, path: Path) -> None:
        """Write one name per line, in UTF-8; the line number, from 0, is the id."""
        # newline="" keeps "\n" on every platform: the fingerprint covers the bytes.
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.writelines(name + "\n" for name in self.names)

    @classmethod
    def load(cls, path: Path, noun: str) -> Vocabulary:
        """Read a file of :meth:`save`."""
        return cls(read_lines(path), noun)


class MappedNames(Sequence[str]):
    """The lines of a file of :meth:`Vocabulary.save`, read when they are asked for.

    A name takes 8 bytes of memory; the page cache holds what was read. A damaged file is an InputError.
    """

    def __init__(self, path: Path) -> None:
        with os_errors(InputError, f"cannot read {path}"), open(path, "rb") as file:
            # An empty file cannot be mapped.
            size = file.seek(0, 2)
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        ends = [np.zeros(1, np.int64)]
        while (start := int(ends[-1][-1])) < size:
            # Whole lines, so that no character is cut; a line of more bytes than a block is read as a whole.
            end = self._bytes.rfind(b"\n", start, start + NAMES_BLOCK_BYTES) + 1
            end = end or self._bytes.find(b"\n", start) + 1
            if not end:
                raise InputError(f"{path} is cut off: its last line has no end")
            block = self._bytes[start:end]
            _decoded(path, block, start)
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + start + 1)
        self._ends = np.concatenate(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[line] for line in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        return self._bytes[self._ends[place] : self._ends[place + 1] - 1].decode("utf-8")


class RelationVocabulary:
    """An ordered list of relations; a relation's place is its original id.

    With times, in their order, an id is that of a relation at a time, see :mod:`dglkge.data.vocabulary`.

    Attributes
    ----------
    relations : list of Relation
        By id.
    timeless : list of Relation
        The relations that were given: each has a row.
    times : sequence of str
    labels : Vocabulary
        Label of each relation: its name, or ``name (lhs → rhs)`` where the name joins several pairs of
        entity types.
    """

    def __init__(self, relations: Sequence[Relation], times: Sequence[str] = ()) -> None:
        self.times = times
        self.timeless = self.relations = list(relations)
        limit_pairs(len(self.timeless), self.num_times)
        if times:
            every = itertools.product(self.timeless, times)
            self.relations = [Relation(label_at(r.name, time), r.lhs, r.rhs) for r, time in every]
        ids: dict[str, list[int]] = {}
        for id_, relation in enumerate(self.relations):
            ids.setdefault(relation.name, []).append(id_)
        # A label identifies a relation alone, while names repeat where one joins several pairs of types.
        labels = [f"{r.name} ({r.lhs} → {r.rhs})" if len(ids[r.name]) > 1 else r.name for r in self.relations]
        self._ids_of_name, self.labels = ids, Vocabulary(labels, "relation")

    def __len__(self) -> int:
        return len(self.relations)

    def __getitem__(self, id_: int) -> Relation:
        return self.relations[id_]

    def ids_of(self, label_or_name: str) -> list[int]:
        """Return the ids of all relations with a name, or of the one with a label; none is an InputError."""
        ids = self._ids_of_name.get(label_or_name)
        if ids is None and self.times and any(relation.name == label_or_name for relation in self.timeless):
            times = f"from {self.times[0]} to {self.times[-1]}"
            raise InputError(f"relation {label_or_name!r} has times, {times}; say which")
        return [self.labels.id(label_or_name)] if ids is None else ids

    def at(self, name: str | None, time: str | None) -> list[int]:
        """Return the ids of relations of a name, or of all, at a time, or at all; none is an InputError."""
        if time is not None and time not in self.times:
            raise unknown_name("time", time, self.times)
        names = [relation.name for relation in self.timeless]
        if name is not None and name not in names:
            raise unknown_name("relation", name, sorted(set(names)))
        rows = [row for row, known in enumerate(names) if name in (None, known)]
        times = range(self.num_times) if time is None else [list(self.times).index(time)]
        return [row * self.num_times + number for row in rows for number in times]

    def id(self, label_or_name: str, lhs: str | None = None, rhs: str | None = None) -> int:
        """Return the id of a relation.

        Parameters
        ----------
        label_or_name : str
            Its label, or its name together with as much of the entity types as makes it unique.
        lhs, rhs : str, optional
            Entity types of its heads and of its tails.

        Raises
        ------
        InputError
            If there is no such relation, or the name alone is ambiguous.
        """
        ids = self.ids_of(label_or_name)
        named = [(id_, self.relations[id_]) for id_ in ids]
        fitting = [id_ for id_, known in named if lhs in (None, known.lhs) and rhs in (None, known.rhs)]
        if len(fitting) == 1:
            return fitting[0]
        none = f"does not join {lhs or 'any'} → {rhs or 'any'}; known"
        problem = "joins several pairs of entity types; say which" if fitting else none
        labels = ", ".join(repr(self.labels[id_]) for id_ in ids)
        raise InputError(f"relation {label_or_name!r} {problem}: {labels}")

    @property
    def num_times(self) -> int:
        """Number of times; 1 where relations have none."""
        return max(1, len(self.times))

    def save(self, path: Path) -> None:
        """Write one relation per line, whatever the time: name, lhs and rhs, separated by tabs."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.writelines(f"{r.name}\t{r.lhs}\t{r.rhs}\n" for r in self.timeless)

    @classmethod
    def load(cls, path: Path, times: Sequence[str] = ()) -> RelationVocabulary:
        """Read a file of :meth:`save`."""
        relations = []
        for number, line in enumerate(read_lines(path), start=1):
            fields = line.split("\t")
            if len(fields) != 3:
                raise InputError(f"{path}:{number}: got {len(fields)} fields, expected name, lhs and rhs")
            relations.append(Relation(*fields))
        return cls(relations, times)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file in which every line, the last too, ends in a line feed."""
    with os_errors(InputError, f"cannot read {path}"):
        # Split at "\n" only: str.splitlines would also split names at other Unicode line ends.
        *lines, rest = _decoded(path, path.read_bytes()).split("\n")
    # The end of the last line tells a whole file from one that was cut off.
    if rest:
        raise InputError(f"{path} is cut off: its last line has no end")
    return lines


def _decoded(path: Path, content: bytes, start: int = 0) -> str:
    """Decode a part of a file that begins at a byte of it; raises InputError if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {start + error.start}") from error
