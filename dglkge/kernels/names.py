"""Names as bytes in Arrow's layout: hashing, a hash table, and keys to sort by."""

from __future__ import annotations

import numpy as np

from dglkge.kernels.hashing import mix_word
from dglkge.kernels.jit import compiled, compiled_inline

_ROWS_AHEAD = 256


@compiled_inline
def word_at(data: np.ndarray, begin: int, end: int) -> np.uint64:
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
def hash_names(offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Return a hash of each name, "(n,) uint64".

    Parameters
    ----------
    offsets : np.ndarray
        "(n + 1,)" integers: name i is ``data[offsets[i] : offsets[i + 1]]``.
    data : np.ndarray
        "(m,) uint8".
    """
    hashes = np.empty(offsets.shape[0] - 1, np.uint64)
    for i in range(hashes.shape[0]):
        begin, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        state = np.uint64(end - begin)
        for place in range(begin, end, 8):
            state = mix_word(state ^ word_at(data, place, end))
        hashes[i] = state
    return hashes


@compiled
def group_by_low_bits(hashes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows grouped by the lowest bits of their hashes, and the start of each group.

    Returns
    -------
    rows : np.ndarray
        "(n,) int32".
    starts : np.ndarray
        "(2 ** bits + 1,) int64".
    """
    mask = np.uint64((1 << bits) - 1)
    starts = np.zeros((1 << bits) + 1, np.int64)
    for i in range(hashes.shape[0]):
        starts[np.int64(hashes[i] & mask) + 1] += 1
    starts = np.cumsum(starts)
    next_place = starts[:-1].copy()
    rows = np.empty(hashes.shape[0], np.int32)
    for i in range(hashes.shape[0]):
        group = np.int64(hashes[i] & mask)
        rows[next_place[group]] = i
        next_place[group] += 1
    return rows, starts


@compiled
def intern_names(
    rows: np.ndarray,
    hashes: np.ndarray,
    offsets: np.ndarray,
    data: np.ndarray,
    bits: int,
    shard: int,
    slots: np.ndarray,
    known_offsets: np.ndarray,
    known_data: np.ndarray,
    num_known: int,
    ids: np.ndarray,
) -> int:
    """Look up names in a hash table of names, and add those that are new.

    Parameters
    ----------
    rows : np.ndarray
        "(k,) int32": the names to look up.
    hashes, offsets, data : np.ndarray
        As of :func:`hash_names`, of all names of the block.
    bits, shard : int
        The id of name j of the table is ``j << bits | shard``. The lowest bits of hashes are not used for
        places: they are equal within a table.
    slots : np.ndarray
        "(2 ** s,) uint64": upper half of the hash, and number of the name plus 1; 0 where a place is free.
        Changed; there must be room for all rows, as there must be in the arrays of names.
    known_offsets, known_data : np.ndarray
        The names of the table, changed.
    num_known : int
        The number of names in the table.
    ids : np.ndarray
        "(n,) int32", changed at the rows.

    Returns
    -------
    int
        The number of names in the table now.
    """
    mask = slots.shape[0] - 1
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    near = np.zeros(_ROWS_AHEAD, np.int64)
    for first in range(0, rows.shape[0], _ROWS_AHEAD):
        last = min(first + _ROWS_AHEAD, rows.shape[0])
        # Loads that do not depend on each other come first, so that the processor waits for many cache misses
        # at a time and not for one after the other.
        for i in range(first, last):
            near[i - first] = np.int64(
                slots[np.int64((hashes[rows[i]] & low) >> np.uint64(bits)) & mask] & low
            )
        for i in range(last - first):
            near[i] = known_offsets[max(near[i] - 1, 0)]
        for i in range(last - first):
            near[i] = known_data[near[i]]
        for i in range(first, last):
            row = rows[i]
            code = hashes[row]
            begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
            place = np.int64((code & low) >> np.uint64(bits)) & mask
            found = np.int64(-1)
            while found < 0:
                slot = slots[place]
                if slot == np.uint64(0):
                    found = np.int64(num_known)
                    start = known_offsets[num_known]
                    for at in range(end - begin):
                        known_data[start + at] = data[begin + at]
                    num_known += 1
                    known_offsets[num_known] = start + end - begin
                    slots[place] = (code >> half << half) | np.uint64(num_known)
                elif slot >> half == code >> half:
                    one = np.int64(slot & low) - 1
                    start, stop = known_offsets[one], known_offsets[one + 1]
                    same = stop - start == end - begin
                    for at in range(0, end - begin, 8):
                        same &= word_at(known_data, start + at, stop) == word_at(data, begin + at, end)
                    if same:
                        found = one
                place = (place + 1) & mask
            ids[row] = found << bits | shard
    return num_known


@compiled
def fill_slots(hashes: np.ndarray, bits: int, slots: np.ndarray) -> None:
    """Enter the names of a table into empty slots; the table is as of :func:`intern_names`."""
    mask = slots.shape[0] - 1
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    for i in range(hashes.shape[0]):
        code = hashes[i]
        place = np.int64((code & low) >> np.uint64(bits)) & mask
        while slots[place] != np.uint64(0):
            place = (place + 1) & mask
        slots[place] = (code >> half << half) | np.uint64(i + 1)


@compiled
def shared_prefix(offsets: np.ndarray, data: np.ndarray) -> int:
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
def words_of(names: np.ndarray, offsets: np.ndarray, data: np.ndarray, skip: int) -> np.ndarray:
    """Return eight bytes of each of some names, behind the first ``skip``, as numbers that sort alike."""
    words = np.empty(names.shape[0], np.uint64)
    for i in range(names.shape[0]):
        words[i] = word_at(data, offsets[names[i]] + skip, offsets[names[i] + 1])
    return words


@compiled
def sorted_within(groups: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Sort an order by group; members of a group keep their order.

    Parameters
    ----------
    groups : np.ndarray
        "(n,) int64": ascending numbers from 0 of the groups.
    order : np.ndarray
        "(n,) int64": a permutation.
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
