"""The order of training as pure functions: it belongs to triples, not to machines.

``position = permute(triple_id; seed, epoch)`` is a keyed bijection on [0, n). Global batch s is the window
[s·G, (s+1)·G) of positions. Every process computes any part of the order alone, nothing is shuffled in
memory, and progress is one integer.

An epoch walks the edge sets in order. Position p of an epoch lies in one set, and inside of it the keyed
permutation of :mod:`dglkge.sampling.triple_order` gives the triple, as for a single set. Triples are held out
by another keyed permutation, which does not depend on the epoch: the first h of its positions are never
trained. No list of triples is made, and every process computes the same order alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dglkge.kernels.hashing import combine, walk_all
from dglkge.typing import Ids, Mask

# Even, so that each half is changed equally often (see walk_all).
NUM_ROUNDS = 6
# Domain separation: the streams of the order and of the negatives share the seed, not the key.
_ORDER_KEY = 0x0EDE


def num_batches(num_triples: int, batch_size: int) -> int:
    """Return the number of global batches in an epoch; the last one may be short."""
    return -(-num_triples // batch_size)


def window(batch: int, batch_size: int, num_triples: int) -> Ids:
    """Return the positions (B,) of a global batch."""
    return np.arange(batch * batch_size, min((batch + 1) * batch_size, num_triples), dtype=np.int64)


def permute(triple_ids: Ids, num_triples: int, seed: int, epoch: int, forward: bool = True) -> Ids:
    """Return the position of each triple in the order of an epoch.

    A generalized Feistel network over mixed radices (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains", method 3) on [0, a·b) with a·b just above n; values outside [0, n) walk the cycle.
    ``forward`` is False for the inverse.
    """
    result = np.array(triple_ids, dtype=np.int64)
    walk_all(result, num_triples, *halves(num_triples), round_keys(seed, epoch), forward)
    return result


def inverse_permute(positions: Ids, num_triples: int, seed: int, epoch: int) -> Ids:
    """Return the triple at each position of an epoch: the inverse of :func:`permute`."""
    return permute(positions, num_triples, seed, epoch, forward=False)


def halves(num: int) -> tuple[int, int]:
    """Return the sizes (a, b) of the two halves of a value, with a b just above the number of values."""
    # a b exceeds num by less than a, about sqrt(num): a value leaves [0, num) with probability below 1 / b,
    # so cycle walking almost never repeats.
    a = max(1, math.isqrt(num))
    return a, -(-num // a)


@lru_cache(maxsize=8)
def round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return the keys of the rounds, (NUM_ROUNDS,)."""
    return np.array([combine(_ORDER_KEY, seed, epoch, turn) for turn in range(NUM_ROUNDS)], np.uint64)


# Domain separation: the streams of the sets and of the held-out triples share the seed, not the key.
_SET_KEY = 0x5E75
_HELD_OUT_KEY = 0x4E1D


@dataclass(frozen=True)
class EdgeSet:
    """One of the sets of training triples that an epoch walks over: ascending rows in ``train.npy``."""

    name: str
    triple_ids: range | Ids

    def at(self, places: Ids) -> Ids:
        """Return the triples at places of the set."""
        ids = self.triple_ids
        return places + ids.start if isinstance(ids, range) else ids[places]


class TripleOrder:
    """Positions of an epoch to triples.

    Parameters
    ----------
    sets : sequence of EdgeSet
        In the order of an epoch.
    held_out : float
        Share of each set that is never trained, below 1; at least one triple if it is above 0.

    Attributes
    ----------
    num_held_out : (num_sets,) int64
        Triples of each set that are never trained.

    Examples
    --------
    >>> order = TripleOrder([EdgeSet("a", range(0, 10)), EdgeSet("b", range(10, 15))], seed=1, held_out=0.2)
    >>> order.num_positions
    12
    >>> ids = order.triple_ids(np.arange(12), epoch=3)
    >>> bool((ids[:8] < 10).all()), bool((ids[8:] >= 10).all())
    (True, True)
    >>> sorted([*ids.tolist(), *order.held_out(0).tolist(), *order.held_out(1).tolist()]) == list(range(15))
    True
    """

    def __init__(self, sets: Sequence[EdgeSet], seed: int, held_out: float = 0.0) -> None:
        self.sets, self._seed = list(sets), seed
        sizes = np.array([len(edge_set.triple_ids) for edge_set in sets], np.int64)
        self.num_held_out = np.minimum(np.ceil(sizes * held_out).astype(np.int64), sizes)
        self._bounds = np.append(0, np.cumsum(sizes - self.num_held_out))

    @property
    def num_positions(self) -> int:
        """Number of triples that an epoch trains."""
        return int(self._bounds[-1])

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the first position of a set, and the one behind its last."""
        return int(self._bounds[number]), int(self._bounds[number + 1])

    def triple_ids(self, positions: Ids, epoch: int) -> Ids:
        """Return the triple at each position (m,) of an epoch."""
        numbers = np.searchsorted(self._bounds[1:], positions, side="right")
        triples = np.empty(len(positions), np.int64)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            first, end = self.range_of(number)
            # The first set has the seed itself: a single one is walked as it was before there were several.
            seed = self._seed if number == 0 else _as_seed(combine(_SET_KEY, self._seed, number))
            places = inverse_permute(positions[here] - first, end - first, seed, epoch)
            if self.num_held_out[number]:
                places = self._scattered(number, places + self.num_held_out[number])
            triples[here] = self.sets[number].at(places)
        return triples

    def held_out(self, number: int, chunk: int = 0, num_chunks: int = 1) -> Ids:
        """Return the triples of a set that are never trained; those of one of its chunks."""
        held = int(self.num_held_out[number])
        places = np.arange(held * chunk // num_chunks, held * (chunk + 1) // num_chunks, dtype=np.int64)
        return self.sets[number].at(self._scattered(number, places))

    def made_of(self) -> tuple[Any, ...]:
        """Return what the trained triples of a data set depend on, as JSON gives it back."""
        seed = self._seed if self.num_held_out.any() else None
        sets = zip(self.sets, self.num_held_out.tolist())
        return seed, *([edge_set.name, len(edge_set.triple_ids), held] for edge_set, held in sets)

    def is_trained(self, number: int, places: Ids) -> Mask:
        """Return whether the triples at places (n,) of a set are trained, that is, not held out."""
        positions = permute(places, *self._held_out_order(number))
        return positions >= self.num_held_out[number]

    def _scattered(self, number: int, places: Ids) -> Ids:
        """Return places in a set; the first of these are held out, in every epoch and on every machine."""
        return inverse_permute(places, *self._held_out_order(number))

    def _held_out_order(self, number: int) -> tuple[int, int, int]:
        """Return size, key and epoch 0 of the permutation that begins with the held-out triples of a set."""
        edge_set = self.sets[number]
        # By name: a set has the same triples held out wherever it stands in the list.
        key = _as_seed(combine(_HELD_OUT_KEY, self._seed, zlib.crc32(edge_set.name.encode())))
        return len(edge_set.triple_ids), key, 0


def _as_seed(key: int) -> int:
    """Return a hash as a seed of :mod:`dglkge.sampling.triple_order`."""
    return int(key) & 0x7FFFFFFF


@dataclass(frozen=True)
class Pass:
    """One chunk of one edge set: the part of an epoch after which a version may be committed.

    Where sets or chunks are no multiples of the batch size, a batch with triples of several passes belongs to
    the first of them; the others may have no batch of their own.
    """

    edge_set: int
    chunk: int
    first_batch: int
    end_batch: int


def plan_passes(ranges: Sequence[tuple[int, int]], num_chunks: int, batch_size: int) -> list[Pass]:
    """Return the passes of an epoch: chunks of each set of positions, which follow one another from 0 on.

    Examples
    --------
    >>> [(part.first_batch, part.end_batch) for part in plan_passes([(0, 95), (95, 100)], 2, 10)]
    [(0, 5), (5, 10), (10, 10), (10, 10)]
    """
    passes: list[Pass] = []
    for number, (first, end) in enumerate(ranges):
        for chunk in range(num_chunks):
            position = first + (end - first) * (chunk + 1) // num_chunks
            done = passes[-1].end_batch if passes else 0
            # Rounded up: a pass ends with the batch that has its last triple.
            passes.append(Pass(number, chunk, done, num_batches(position, batch_size)))
    return passes
