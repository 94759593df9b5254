"""Pseudo-random numbers as a function of a key and a counter, and hash tables of names.

Every process computes any of the numbers by itself. The bits are the outputs of SplitMix64 (Steele, Lea and
Flood 2014): state = key + position * gamma, mixed. Row dropout (:func:`drop_numbers`) draws from them too: by
a key, the row's id and the column. So does the keyed permutation of the training order (:func:`walk_all`).

Names are bytes in Arrow's layout: they are hashed, entered into a table, and sorted by keys of eight bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from dglkge.kernels.jit import compiled, compiled_inline, compiled_unaliased

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def stream_key(*words: int | str) -> ndarray:
    """Return a 64-bit key of a list of words without "/", (1,) uint64.

    Examples
    --------
    >>> bool(stream_key(7, "person") == stream_key(7, "place"))
    False
    """
    # Not hash(): Python salts it in each process, and all processes need the same key.
    digest = hashlib.blake2b("/".join(str(word) for word in words).encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def row_keys(key: ndarray, ids: ndarray) -> ndarray:
    """Return one key for each id, (n,) uint64."""
    return split_mix(key + ids.astype(np.uint64) * GOLDEN_GAMMA)


def column_bits(keys: ndarray, num_columns: int) -> ndarray:
    """Return 64 random bits for each key and column, (n, num_columns) uint64."""
    return split_mix(keys[:, None] + np.arange(1, num_columns + 1, dtype=np.uint64) * GOLDEN_GAMMA)


def in_range(bits: ndarray, limit: int) -> ndarray:
    """Map 64 random bits each to whole numbers int64 in [0, limit), uniformly; the limit is at most 2**63.

    The upper 64 bits of the 128-bit product with the limit (Lemire 2019). Probabilities of any two numbers
    differ by at most limit / 2**64 of themselves: 5e-11 at 10**9 entities.
    """
    return upper_half(bits, np.uint64(limit)).astype(np.int64)


def upper_half(bits: Any, limit: np.uint64) -> Any:
    """Return the upper 64 bits of the 128-bit products of words with a limit, uint64."""
    # No 128-bit product: the sum of four products of 32-bit halves, with their carries.
    half, low_bits = np.uint64(32), np.uint64(0xFFFFFFFF)
    high, low = bits >> half, bits & low_bits
    limit_high, limit_low = limit >> half, limit & low_bits
    first, second = high * limit_low, low * limit_high
    carried = (low * limit_low >> half) + (first & low_bits) + (second & low_bits)
    return high * limit_high + (first >> half) + (second >> half) + (carried >> half)


def split_mix(states: Any) -> Any:
    """Return SplitMix64's output for each state, uint64; overflow wraps around."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


mix_word = compiled_inline(split_mix)
""":func:`split_mix` for one word, compiled: numpy warns of every overflow of a single number."""

_upper_word = compiled_inline(upper_half)


# Sums are taken as Python integers and masked: numpy warns of overflow of a single uint64.
_MASK = (1 << 64) - 1


def combine(*parts: int) -> int:
    """Hash whole numbers, in their order, into one 64-bit key."""
    key = np.uint64(0)
    for part in parts:
        key = mix_word(np.uint64((int(key) + int(GOLDEN_GAMMA) + part) & _MASK))
    return int(key)


def words(key: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return one 64-bit word for each counter (n,) int64 under a key from :func:`combine`: (n,) uint64."""
    return split_mix(counters.astype(np.uint64) * GOLDEN_GAMMA + np.uint64(key))


def below(key: int, count: int, limit: int) -> npt.NDArray[np.int64]:
    """Draw ``count`` whole numbers int64 from [0, limit), uniformly: see :func:`in_range`."""
    numbers = np.empty(count, np.int64)
    _fill_below(np.uint64(key), np.uint64(limit), numbers)
    return numbers


@compiled
def _fill_below(key: np.uint64, limit: np.uint64, numbers: ndarray) -> None:
    """Write what :func:`below` draws, (count,) int64: one call, where numpy takes forty for few numbers."""
    for place in range(len(numbers)):
        numbers[place] = np.int64(_upper_word(mix_word(key + np.uint64(place) * GOLDEN_GAMMA), limit))


@compiled
def drop_numbers(rows: ndarray, ids: ndarray, key: np.uint64, limit: np.uint16, scale: np.float32) -> None:
    """Set numbers of rows (n, D) float32 with some ids (n,) to 0 and scale the others, in place.

    A number is kept where its 16 random bits are at least ``limit``.
    """
    words = np.empty(-(-rows.shape[1] // 4), np.uint64)
    # Four numbers of 16 bits from each word, the lowest bits first.
    bits = words.view(np.uint16)
    # Two loops without branches: the processor draws eight words, and masks 16 numbers, at a time.
    for row in range(len(rows)):
        _draw_words(mix_word(key + np.uint64(ids[row]) * GOLDEN_GAMMA), words)
        _scale_kept(rows[row], bits, limit, scale)


@compiled_unaliased
def _draw_words(state: np.uint64, words: ndarray) -> None:
    """Draw the random words of a row."""
    for place in range(len(words)):
        words[place] = mix_word(state + np.uint64(place + 1) * GOLDEN_GAMMA)


@compiled_unaliased
def _scale_kept(row: ndarray, bits: ndarray, limit: np.uint16, scale: np.float32) -> None:
    """Multiply each number of a row by the scale or by 0."""
    for column in range(len(row)):
        row[column] *= scale if bits[column] >= limit else np.float32(0)


@compiled
def walk_all(values: ndarray, num: int, a: int, b: int, keys: ndarray, forward: bool) -> None:
    """Permute each value "(n,) int64" of [0, num), in place; backwards by the inverse permutation.

    A Feistel network permutes [0, a b) with a b >= num, value = right * a + left, by a key "uint64" of each
    round. Values outside [0, num) are permuted again until they are inside (cycle walking), which is a
    bijection of [0, num).
    """
    for i in range(values.shape[0]):
        value = values[i]
        while True:
            left, right = value % a, value // a
            for turn in range(keys.shape[0]):
                number = turn if forward else keys.shape[0] - 1 - turn
                if number % 2 == 0:
                    drawn = _draw(keys[number], right, a)
                    # The inverse adds a - drawn instead of subtracting: operands of % stay non-negative.
                    left = (left + (drawn if forward else a - drawn)) % a
                else:
                    drawn = _draw(keys[number], left, b)
                    right = (right + (drawn if forward else b - drawn)) % b
            value = right * a + left
            if value < num:
                break
        values[i] = value


@compiled
def _draw(key: Any, value: Any, limit: Any) -> Any:
    """Return the round function of a value: one word of the keyed hash, modulo the limit."""
    word = mix_word(np.uint64(value) * GOLDEN_GAMMA + key)
    # One bit is dropped, so that the word fits into int64 as a non-negative number.
    return np.int64((word >> np.uint64(1)) % np.uint64(limit))


_ROWS_AHEAD = 256


@compiled_inline
def word_at(data: ndarray, begin: int, end: int) -> np.uint64:
    """Return eight bytes from a place on as one big-endian number; zeros follow the end of the name."""
    if begin + 8 <= data.shape[0]:
        # LLVM makes one load of it; what belongs to the next name is shifted out, without a branch.
        word = np.uint64(0)
        for place in range(8):
            word |= np.uint64(data[begin + place]) << np.uint64(8 * (7 - place))
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
    rows: ndarray, names: tuple, bits: int, shard: int,
    slots: ndarray, known: tuple, num_known: int, ids: ndarray,
) -> int:  # fmt: skip
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
            number = np.int64(-1)
            while number < 0:
                if slot == np.uint64(0):
                    number = np.int64(num_known)
                    begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
                    start = known_offsets[num_known]
                    for at in range(end - begin):
                        known_data[start + at] = data[begin + at]
                    num_known += 1
                    known_offsets[num_known] = start + end - begin
                    slots[place, 0] = (code >> half << half) | np.uint64(num_known)
                    slots[place, 1] = second
                elif slot >> half == code >> half and slots[place, 1] == second:
                    number = np.int64(slot & low) - 1
                place = (place + 1) & mask
                slot = slots[place, 0]
            ids[row] = number << bits | shard
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
def words_of(offsets: ndarray, data: ndarray, skip: int) -> ndarray:
    """Return eight bytes of each name, behind the first ``skip``, as numbers that sort alike."""
    words = np.empty(offsets.shape[0] - 1, np.uint64)
    for i in range(words.shape[0]):
        words[i] = word_at(data, offsets[i] + skip, offsets[i + 1])
    return words
