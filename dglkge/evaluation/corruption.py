"""False triples drawn for true ones: one end replaced by an entity that makes no known triple."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dglkge.data.known_triples import KnownTriples
from dglkge.kernels.hashing import column_bits, in_range, row_keys, stream_key
from dglkge.typing import Relation, Side

Pools = Mapping[tuple[int, Side], np.ndarray]
"""By relation id and side: the entities that may take the place, ascending ids."""

Stream = Sequence[int | str]


@dataclass(frozen=True)
class Corruptions:
    """False triples.

    Attributes
    ----------
    triples : (m, 3) int64 array
        Head, relation and tail.
    source : (m,) int64 array
        Index of the true triple that each was drawn for.
    """

    triples: np.ndarray
    source: np.ndarray


def seen_entities(triples: np.ndarray) -> Pools:
    """Return the entities that occur on each side of each relation.

    As wrong answers these are harder than entities that no triple of the relation has (Socher et al. 2013,
    section 4.2).

    Parameters
    ----------
    triples : (n, 3) int64 array
        Usually the training triples.
    """
    pools = {}
    for side in Side:
        pairs = np.unique(triples[:, [1, side.column]], axis=0)
        relation_ids, first = np.unique(pairs[:, 0], return_index=True)
        for id_, group in zip(relation_ids.tolist(), np.split(pairs[:, 1], first[1:])):
            pools[id_, side] = group
    return pools


def draw_sides(num_triples: int, stream: Stream) -> np.ndarray:
    """Draw which triples are corrupted on the side of the tail, (n,) bool."""
    keys = row_keys(stream_key("corrupted side", *stream), np.arange(num_triples))
    return (keys >> np.uint64(63)).astype(bool)


def draw_corruptions(
    triples: np.ndarray,
    side: Side,
    num_each: int,
    relations: Sequence[Relation],
    num_entities: Mapping[str, int],
    known: KnownTriples,
    stream: Stream,
    pools: Pools | None = None,
) -> Corruptions:
    """Draw false triples with another entity on one side, uniformly among those that make no known triple.

    The draws depend only on the stream, the side and the triple's place.

    Parameters
    ----------
    triples : (n, 3) int64 array
        True triples.
    side : Side
        The side that is replaced.
    num_each : int
        Draws for each triple, with replacement.
    relations : sequence of Relation
        By relation id.
    num_entities : mapping of str to int
        Entities of each type.
    known : KnownTriples
        All known triples; a triple's own answer is excluded too.
    stream : sequence of int or str
        Key of the random numbers: the seed, and words that tell uses apart.
    pools : mapping, optional
        Entities to draw from; all of the type where there are none, or where the pool has none to draw.

    Returns
    -------
    Corruptions
        None for a triple where every entity of the type makes a known triple.
    """
    query, answers = known.answers(side, triples[:, side.anchor_column], triples[:, 1])
    ends = np.searchsorted(query, np.arange(len(triples) + 1))
    keys = row_keys(stream_key("corruptions", *stream, side.value), np.arange(len(triples)))
    bits = column_bits(keys, num_each)
    drawn = np.full((len(triples), num_each), -1, dtype=np.int64)
    for place, (relation_id, own) in enumerate(triples[:, [1, side.column]].tolist()):
        excluded = np.union1d(answers[ends[place] : ends[place + 1]], own)
        pool = None if pools is None else pools.get((relation_id, side))
        if pool is not None:
            excluded_here = np.flatnonzero(np.isin(pool, excluded, assume_unique=True))
            found = _draw(bits[place], len(pool), excluded_here)
            if found is not None:
                drawn[place] = pool[found]
                continue
        found = _draw(bits[place], num_entities[relations[relation_id].candidate_type(side)], excluded)
        if found is not None:
            drawn[place] = found
    source, column = np.nonzero(drawn >= 0)
    false = triples[source]
    false[:, side.column] = drawn[source, column]
    return Corruptions(false, source)


def _draw(bits: np.ndarray, size: int, excluded: np.ndarray) -> np.ndarray | None:
    """Map random bits to numbers in [0, size) without the excluded ones (ascending); None if none is left."""
    left = size - len(excluded)
    if left <= 0:
        return None
    numbers = in_range(bits, left)
    # Number u of those left is u plus the excluded numbers below it: the j-th excluded one has
    # excluded[j] - j numbers left before it.
    return numbers + np.searchsorted(excluded - np.arange(len(excluded)), numbers, side="right")
