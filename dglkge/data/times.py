"""Time stamps of triples: their order, their granularity, and relations at a time.

A *relation at a time* is a relation of its own to all code that batches, filters and ranks triples: its
number is ``relation * num_times + time``. Only its row is made of two, see
:mod:`dglkge.model.functions.temporal`. A data set without times has the one time 0, and its numbers are those
of the relations.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

import numpy as np

from dglkge.errors import InputError
from dglkge.typing import Relation

GRANULARITIES = {"day": 10, "month": 7, "year": 4}
"""Characters of an ISO 8601 date that stay, by granularity."""

MAX_PAIRS = 1 << 27
"""Most relations at a time: each takes some words of memory in every trainer."""

_DATE = re.compile(r"(\d{4})(?:-(\d\d)(?:-(\d\d)(?:[T ]\d\d(?::\d\d){0,2}(?:\.\d+)?Z?)?)?)?")
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
    if match is None:
        return False
    try:
        datetime.date(int(match[1]), int(match[2] or 1), int(match[3] or 1))
    except ValueError:
        return False
    return True


def _no_time(stamp: str, first: str) -> InputError:
    return InputError(
        f"the time is {stamp!r} and another {first!r}; allowed: all integers, or all ISO 8601 dates "
        "of one form (2014, 2014-05, 2014-05-31, 2014-05-31T12:30), or intervals of two (2014-05/2014-07)"
    )


def label_at(relation: str, time: str) -> str:
    """Return the name of a relation at a time, such as ``visits @ 2014-05-01``."""
    return f"{relation} @ {time}"


def at_times(relations: Sequence[Relation], times: Sequence[str]) -> list[Relation]:
    """Return every relation at every time, by number; without times the relations."""
    if not times:
        return list(relations)
    return [Relation(label_at(one.name, time), one.lhs, one.rhs) for one in relations for time in times]


def extended(ids: np.ndarray, num_times: int) -> np.ndarray:
    """Return an id map of relations (R,) as that of relations at a time (R * num_times,).

    Examples
    --------
    >>> extended(np.array([1, 0]), 3).tolist()
    [3, 4, 5, 0, 1, 2]
    """
    if num_times == 1:
        return ids
    made: np.ndarray = (np.asarray(ids)[:, np.newaxis] * num_times + np.arange(num_times)).reshape(-1)
    return made
