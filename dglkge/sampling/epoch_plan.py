"""The order of training as pure functions: it belongs to triples, not to machines.

``position = permute(triple_id; seed, epoch)`` is a keyed bijection on [0, n). Global batch s is the
window [s·G, (s+1)·G) of positions. Every process computes any part of the order alone, nothing is
shuffled in memory, and progress is one integer.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dglkge.kernels.hashing import combine
from dglkge.kernels.order import walk_all

# Even, so that each half is changed equally often (see walk_all).
NUM_ROUNDS = 6
# Domain separation: the streams of the order and of the negatives share the seed, not the key.
_ORDER_KEY = 0x0EDE


def num_batches(num_triples: int, batch_size: int) -> int:
    """Return the number of global batches in an epoch; the last one may be short."""
    return -(-num_triples // batch_size)


def window(batch: int, batch_size: int, num_triples: int) -> npt.NDArray[np.int64]:
    """Return the positions (B,) of a global batch."""
    return np.arange(batch * batch_size, min((batch + 1) * batch_size, num_triples), dtype=np.int64)


def permute(
    triple_ids: npt.NDArray[np.int64], num_triples: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the position of each triple in the order of an epoch.

    A generalized Feistel network over mixed radices (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains", method 3) on [0, a·b) with a·b just above n; values outside [0, n) walk the cycle.

    Parameters
    ----------
    triple_ids : (m,) int64, each in [0, num_triples)
    num_triples, seed, epoch : int

    Returns
    -------
    (m,) int64
    """
    return _walk(triple_ids, num_triples, seed, epoch, forward=True)


def inverse_permute(
    positions: npt.NDArray[np.int64], num_triples: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the triple at each position of an epoch: the inverse of :func:`permute`."""
    return _walk(positions, num_triples, seed, epoch, forward=False)


def _walk(
    values: npt.NDArray[np.int64], num: int, seed: int, epoch: int, forward: bool
) -> npt.NDArray[np.int64]:
    """Encrypt (or decrypt) until every value lies in [0, num)."""
    # a b exceeds num by less than a, about sqrt(num): a value leaves [0, num) with probability below 1 / b,
    # so cycle walking almost never repeats.
    a = max(1, math.isqrt(num))
    b = -(-num // a)
    result = np.array(values, dtype=np.int64)
    walk_all(result, num, a, b, _round_keys(seed, epoch), forward)
    return result


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return the keys of the rounds, (NUM_ROUNDS,)."""
    return np.array([combine(_ORDER_KEY, seed, epoch, turn) for turn in range(NUM_ROUNDS)], np.uint64)
