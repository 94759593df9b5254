"""Names as bytes in Arrow's layout: hashing, a hash table, and keys to sort by."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from dglkge.kernels.hashing import GOLDEN_GAMMA, mix_word
from dglkge.kernels.jit import compiled, compiled_inline

_ROWS_AHEAD = 256


@compiled_inline
def word_at(data: ndarray, begin: int, end: int) -> np.uint64:
    """Return eight bytes from a place on as one big-endian number; zeros follow the end of the name."""
    if begin + 8 <= data.shape[0]:
        # LLVM makes one load of it; what belongs to the next name is shifted out, without a branch.
        word = (
            np.uint64(data[begin]) << np.uint64(56)
            | np.uint64(data[begin + 1]) << np.uint64(48)
            | np.uint64(data[begin + 2]) << np.uint64(40)
            | np.uint64(data[begin + 3]) << np.uint64(32)
            | np.uint64(data[begin + 4]) << np.uint64(24)
            | np.uint64(data[begin + 5]) << np.uint64(16)
            | np.uint64(data[begin + 6]) << np.uint64(8)
            | np.uint64(data[begin + 7])
        )
        # Past the end of the name nothing is left: a shift of 64 bits is not defined.
        shift = np.uint64(8 * (8 - max(min(end - begin, 8), 1)))
        return word >> shift << shift if end > begin else np.uint64(0)
    word = np.uint64(0)
    for place in range(begin, min(begin + 8, end)):
        word |= np.uint64(data[place]) << np.uint64(8 * (7 - (place - begin)))
    return word


@compiled
def hash_names(offsets: ndarray, data: ndarray, keys: ndarray) -> ndarray:
    """Return two hashes of each name, "(n, 2) uint64", under two keys "uint64".

    Name i is ``data[offsets[i] : offsets[i + 1]]``; offsets "(n + 1,)" are integers, data is "(m,) uint8".
    """
    hashes = np.empty((offsets.shape[0] - 1, 2), np.uint64)
    for i in range(hashes.shape[0]):
        begin, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        first = keys[0] ^ np.uint64(end - begin)
        second = keys[1] ^ np.uint64(end - begin)
        for place in range(begin, end, 8):
            word = word_at(data, place, end)
            first = mix_word(first ^ word)
            second = mix_word(second + word * GOLDEN_GAMMA)
        hashes[i, 0] = first
        hashes[i, 1] = second
    return hashes


@compiled
def group_by_low_bits(hashes: ndarray, offsets: ndarray, bits: int) -> tuple[ndarray, ndarray, ndarray]:
    """Group names by the lowest bits of their first hashes; arguments are as of :func:`hash_names`.

    Returns the rows "(n,) int32" by group, the start of each group in them "(2 ** bits + 1,) int64", and the
    number of bytes of the names of each group.
    """
    mask = np.uint64((1 << bits) - 1)
    starts = np.zeros((1 << bits) + 1, np.int64)
    num_bytes = np.zeros(1 << bits, np.int64)
    for i in range(hashes.shape[0]):
        group = np.int64(hashes[i, 0] & mask)
        starts[group + 1] += 1
        num_bytes[group] += np.int64(offsets[i + 1]) - np.int64(offsets[i])
    starts = np.cumsum(starts)
    next_place = starts[:-1].copy()
    rows = np.empty(hashes.shape[0], np.int32)
    for i in range(hashes.shape[0]):
        group = np.int64(hashes[i, 0] & mask)
        rows[next_place[group]] = i
        next_place[group] += 1
    return rows, starts, num_bytes


@compiled
def intern_names(
    rows: ndarray,
    names: tuple,
    bits: int,
    shard: int,
    slots: ndarray,
    known: tuple,
    num_known: int,
    ids: ndarray,
) -> int:
    """Look up names in a hash table of names, add those that are new, and return the number of names in it.

    Two names are the same if 96 bits of their hashes are: the bytes of known names are not read, because they
    would be one more miss of the processor's cache, or two. That two of n names are taken for one has a
    probability of n ** 2 / 2 ** 97: 6e-16 with 10 ** 7 names.

    Parameters
    ----------
    rows : ndarray
        "(k,) int32": the names to look up.
    names : three ndarray
        Hashes, offsets and data as of :func:`hash_names`, of all names of the block.
    bits, shard : int
        The id of name j of the table is ``j << bits | shard``. The lowest bits of hashes are not used for
        places: they are equal within a table.
    slots : ndarray
        "(2 ** s, 2) uint64": first the upper half of the first hash, and number of the name plus 1; then the
        second hash. 0 first where a place is free. Changed; there must be room for all rows, as there must be
        in the arrays of names.
    known : two ndarray
        Offsets and data of the ``num_known`` names of the table, changed.
    ids : ndarray
        "(n,) int32", changed at the rows.
    """
    hashes, offsets, data = names
    known_offsets, known_data = known
    mask = slots.shape[0] - 1
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    near = np.zeros(_ROWS_AHEAD, np.uint64)
    for first in range(0, rows.shape[0], _ROWS_AHEAD):
        last = min(first + _ROWS_AHEAD, rows.shape[0])
        # Loads that do not depend on each other come first, so that the processor waits for many cache misses
        # at a time and not for one after the other.
        for i in range(first, last):
            near[i - first] = slots[np.int64((hashes[rows[i], 0] & low) >> np.uint64(bits)) & mask, 0]
        for i in range(first, last):
            row = rows[i]
            code, second = hashes[row, 0], hashes[row, 1]
            place = np.int64((code & low) >> np.uint64(bits)) & mask
            # What was read ahead holds unless the place was free: a name of these rows may have taken it.
            slot = near[i - first]
            if slot == np.uint64(0):
                slot = slots[place, 0]
            found = np.int64(-1)
            while found < 0:
                if slot == np.uint64(0):
                    found = np.int64(num_known)
                    begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
                    start = known_offsets[num_known]
                    for at in range(end - begin):
                        known_data[start + at] = data[begin + at]
                    num_known += 1
                    known_offsets[num_known] = start + end - begin
                    slots[place, 0] = (code >> half << half) | np.uint64(num_known)
                    slots[place, 1] = second
                elif slot >> half == code >> half and slots[place, 1] == second:
                    found = np.int64(slot & low) - 1
                place = (place + 1) & mask
                slot = slots[place, 0]
            ids[row] = found << bits | shard
    return num_known


@compiled
def fill_slots(hashes: ndarray, bits: int, slots: ndarray) -> None:
    """Enter the names of a table into empty slots; the table is as of :func:`intern_names`."""
    mask = slots.shape[0] - 1
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    for i in range(hashes.shape[0]):
        code = hashes[i, 0]
        place = np.int64((code & low) >> np.uint64(bits)) & mask
        while slots[place, 0] != np.uint64(0):
            place = (place + 1) & mask
        slots[place, 0] = (code >> half << half) | np.uint64(i + 1)
        slots[place, 1] = hashes[i, 1]


@compiled
def shared_prefix(offsets: ndarray, data: ndarray) -> int:
    """Return the number of bytes with which all names begin alike; there is at least one name."""
    length = int(offsets[1] - offsets[0])
    for i in range(1, offsets.shape[0] - 1):
        length = min(length, int(offsets[i + 1] - offsets[i]))
        same = 0
        while same < length and data[offsets[i] + same] == data[offsets[0] + same]:
            same += 1
        length = same
    return length


@compiled
def words_of(names: ndarray, offsets: ndarray, data: ndarray, skip: int) -> ndarray:
    """Return eight bytes of each of some names, behind the first ``skip``, as numbers that sort alike."""
    words = np.empty(names.shape[0], np.uint64)
    for i in range(names.shape[0]):
        words[i] = word_at(data, offsets[names[i]] + skip, offsets[names[i] + 1])
    return words


@compiled
def sorted_within(groups: ndarray, order: ndarray) -> ndarray:
    """Sort an order, a permutation, by ascending numbers from 0 of groups; members of a group keep their
    order.
    """
    next_place = np.zeros(groups[-1] + 2, np.int64)
    for group in groups:
        next_place[group + 1] += 1
    next_place = np.cumsum(next_place)
    found = np.empty(order.shape[0], np.int64)
    for i in order:
        found[next_place[groups[i]]] = i
        next_place[groups[i]] += 1
    return found
