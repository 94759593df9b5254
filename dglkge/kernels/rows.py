"""Compiled access to rows by their addresses, with prefetching, and rows of 16-bit numbers as words.

Numba has no bfloat16: such rows are 16-bit words here. A bfloat16 number is the upper half of a float32
number; narrowing rounds to nearest, ties to even, as torch does. A NaN stays NaN if a bit of its payload is
set in the upper half, as in every NaN that arithmetic makes.

Stochastic rounding takes one of the two neighbours x1 <= x < x2 of a number at random, x2 with probability
(x - x1) / (x2 - x1). So the mean of the rounded number is x, and steps that are smaller than the distance of
two neighbours are not lost (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015). A
number that has 16 bits already is its own neighbour and stays as it is.

With 16 random bits r, both types are the sum of the number and r in units of a last place that has 16 more
binary digits, cut off. Float32 has exactly 16 digits more than bfloat16. It has 13 more than float16, so the
upper 13 bits of r count. Float16 has equal distances of 2**-24 below 2**-14; digits below 2**-40 are cut off
there.

Random bits are a function of a key, a row and a column: column j of a row takes bits 16 (j mod 4) and up of
word j // 4 of the row (:func:`dglkge.kernels.hashing.column_bits`). Rows of words are "(N, D) uint16".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from dglkge.kernels.hashing import GOLDEN_GAMMA, column_bits, mix_word, row_keys
from dglkge.kernels.jit import FAST_MATH, carray, compiled, compiled_inline, intrinsic, ir, overload, types

CACHE_LINE_BYTES = 64
#: Distance in rows from the row in work to the row that is prefetched.
LOOKAHEAD = 4


@intrinsic
def pointer_to(typing_context: Any, address: Any, like: Any) -> Any:
    """Return an integer address as a pointer to the element type of the array ``like``."""
    pointer_type = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer_type))

    return pointer_type(address, like), generate


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an integer address, for writing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        # arguments of llvm.prefetch: address, for writing, into all levels of the cache, data
        builder.call(
            function, [builder.inttoptr(arguments[0], byte_pointer), number(1), number(3), number(1)]
        )
        return context.get_dummy_value()

    return types.void(types.intp), generate


@compiled_inline
def prefetch_bytes(address: int, num_bytes: int) -> None:
    """Prefetch some memory.

    The rows of a step are scattered over the table; without prefetching, cache misses take half of its time.
    """
    for offset in range(0, num_bytes, CACHE_LINE_BYTES):
        _prefetch(address + offset)


@compiled_inline
def prefetch_row(array: ndarray, row: int) -> None:
    """Prefetch a row of a contiguous "(N, D)" array."""
    prefetch_bytes(array.ctypes.data + row * array.strides[0], array.strides[0])


@compiled_inline
def row_at(address: int, dim: int, like: ndarray) -> ndarray:
    """Return the row at an address as a view "(dim,)" of the type of ``like``."""
    return carray(pointer_to(address, like), (dim,))


@compiled_inline
def prefetch_rows_at(addresses: ndarray, i: int, dim: int) -> None:
    """Prefetch the i-th of some float32 rows, if there is one."""
    if i < addresses.shape[0]:
        prefetch_bytes(addresses[i], 4 * dim)


@compiled
def copy_rows(addresses: ndarray, rows: ndarray) -> None:
    """Copy the rows at addresses (n,) to an array (n, dim)."""
    num, dim = rows.shape
    for i in range(num):
        prefetch_rows_at(addresses, i + LOOKAHEAD, dim)
        rows[i] = row_at(addresses[i], dim, rows)


@intrinsic
def bits_of(typing_context: Any, number: Any) -> Any:
    """Return the 32 bits of a float32 number as an unsigned integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typing_context: Any, bits: Any) -> Any:
    """Return the float32 number of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@compiled_inline
def narrow(number: Any) -> Any:
    """Round a float32 number to bfloat16."""
    bits = bits_of(number)
    # Just below half a unit in the last place, plus the kept part's last bit: ties go to even.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled_inline
def widen(word: Any) -> Any:
    """Return a bfloat16 number as float32, exactly."""
    return float_of(np.uint32(word) << np.uint32(16))


def store_row(row: ndarray, scale: Any, out: ndarray) -> None:
    """Write scale times a row, both float32, to a row of float32 or of bfloat16 words."""
    raise NotImplementedError("for compiled loops only")


def load_row(row: ndarray, out: ndarray) -> None:
    """Read a row of float32 or of bfloat16 words into a row of float32."""
    raise NotImplementedError("for compiled loops only")


@compiled_inline
def _unchanged(number: Any) -> Any:
    return number


# Typed by overload(): numba chooses the conversion when it compiles, so loops have no branch on the type.
@overload(store_row, jit_options={"fastmath": FAST_MATH, "forceinline": True})
def _store_row(row: Any, scale: Any, out: Any) -> Any:
    converted = narrow if out.dtype == types.uint16 else _unchanged

    def store(row: Any, scale: Any, out: Any) -> Any:
        for k in range(out.shape[0]):
            out[k] = converted(row[k] * scale)

    return store


@overload(load_row, jit_options={"forceinline": True})
def _load_row(row: Any, out: Any) -> Any:
    converted = widen if row.dtype == types.uint16 else _unchanged

    def load(row: Any, out: Any) -> Any:
        for k in range(out.shape[0]):
            out[k] = converted(row[k])

    return load


COLUMNS_A_WORD = 4
"""Columns that share the 64 bits of one hash."""

_EXPONENT, _MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
_QUIET = np.uint16(0x40)
"""Bit of a NaN's payload that the upper half of a float32 has: without one it would be infinity."""


@compiled_inline
def _widen_half(word: Any) -> Any:
    """Return a float16 number as float32, exactly."""
    sign = np.uint32(word & np.uint16(0x8000)) << np.uint32(16)
    magnitude = np.uint32(word & np.uint16(0x7FFF)) << np.uint32(13)
    # The exponents differ by 112; the product is exact, also of numbers below 2**-14.
    number = float_of(magnitude) * np.float32(2.0**112)
    bits = bits_of(number)
    if magnitude >= np.uint32(0x7C00 << 13):
        bits = magnitude | _EXPONENT
    return float_of(bits | sign)


@compiled
def widen_rows(words: ndarray, places: ndarray, is_half: bool, rows: ndarray) -> None:
    """Write rows of words (N, D) at some places (n,) as float32, from float16 or bfloat16; places are not
    checked.

    The plain twin is torch's own conversion: see :func:`dglkge.optim.narrow_rows.widen`.
    """
    for i in range(places.shape[0]):
        if i + LOOKAHEAD < places.shape[0]:
            prefetch_row(words, places[i + LOOKAHEAD])
        row, out = words[places[i]], rows[i]
        if is_half:
            for j in range(out.shape[0]):
                out[j] = _widen_half(row[j])
        else:
            for j in range(out.shape[0]):
                out[j] = widen(row[j])


@compiled_inline
def _round_bfloat16(bits: Any, noise: Any) -> Any:
    """Round the bits of a float32 number to bfloat16 by 16 random bits."""
    word = np.uint16((bits + np.uint32(noise)) >> np.uint32(16))
    if bits & _EXPONENT == _EXPONENT:
        # Infinity and NaN have no neighbours.
        word = np.uint16(bits >> np.uint32(16))
        if bits & _MAGNITUDE > _EXPONENT:
            word |= _QUIET
    return word


@compiled_inline
def _round_half(bits: Any, noise: Any) -> Any:
    """Round the bits of a float32 number to float16 by 16 random bits; from 65536 on it is infinite."""
    sign = np.uint16((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = bits & _MAGNITUDE
    exponent = magnitude >> np.uint32(23)
    if magnitude > _EXPONENT:
        return np.uint16(sign | np.uint16(0x7E00))
    if exponent < np.uint32(113):
        # In units of 2**-24, with 16 digits after the point; float32's numbers below 2**-126 are 0 there.
        mantissa = np.uint64((magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)) << np.uint64(16)
        shift = min(np.uint64(126) - np.uint64(exponent), np.uint64(63))
        return np.uint16(sign | np.uint16(((mantissa >> shift) + np.uint64(noise)) >> np.uint64(16)))
    word = ((magnitude + (np.uint32(noise) >> np.uint32(3))) >> np.uint32(13)) - np.uint32(112 << 10)
    return np.uint16(sign | np.uint16(min(word, np.uint32(0x7C00))))


@compiled
def round_rows(rows: ndarray, words: ndarray, places: ndarray, ids: ndarray, key: int, is_half: bool) -> None:
    """Round rows (n, D) float32 stochastically and write them to some places of words (N, D).

    The random bits depend on the key and the ids (n,). The plain twin is :func:`round_rows_plain`.
    """
    dim = rows.shape[1]
    random = np.empty(-(-dim // COLUMNS_A_WORD), np.uint64)
    noise = random.view(np.uint16)
    for i in range(places.shape[0]):
        if i + LOOKAHEAD < places.shape[0]:
            prefetch_row(words, places[i + LOOKAHEAD])
        row_key = mix_word(np.uint64(key) + np.uint64(ids[i]) * GOLDEN_GAMMA)
        for k in range(random.shape[0]):
            random[k] = mix_word(row_key + np.uint64(k + 1) * GOLDEN_GAMMA)
        row, out = rows[i], words[places[i]]
        if is_half:
            for j in range(dim):
                out[j] = _round_half(bits_of(row[j]), noise[j])
        else:
            for j in range(dim):
                out[j] = _round_bfloat16(bits_of(row[j]), noise[j])


def noise_of(ids: ndarray, dim: int, key: int) -> ndarray:
    """Return the 16 random bits of each number of some rows, "(n, dim) uint16"."""
    words = column_bits(row_keys(np.array([key], np.uint64), ids), -(-dim // COLUMNS_A_WORD))
    # The lowest bits first, as in the memory of a little-endian machine.
    return words.astype("<u8").view("<u2")[:, :dim]


def round_rows_plain(
    rows: ndarray, words: ndarray, places: ndarray, ids: ndarray, key: int, is_half: bool
) -> None:
    """Plain twin of :func:`round_rows`: the same bits, by whole arrays."""
    noise = noise_of(ids, rows.shape[1], key)
    bits = rows.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    if not is_half:
        rounded = ((bits.astype(np.uint64) + noise) >> np.uint64(16)).astype(np.uint16)
        kept = (bits >> np.uint32(16)).astype(np.uint16)
        rounded = np.where(magnitude < _EXPONENT, rounded, kept)
        words[places] = np.where(magnitude > _EXPONENT, rounded | _QUIET, rounded)
        return
    exponent = (magnitude >> np.uint32(23)).astype(np.uint64)
    mantissa = ((magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64) << np.uint64(16)
    shift = np.clip(126 - exponent.astype(np.int64), 0, 63).astype(np.uint64)
    small = ((mantissa >> shift) + noise) >> np.uint64(16)
    normal = (magnitude.astype(np.int64) + (noise >> 3)) >> 13
    large = np.minimum(normal - (112 << 10), 0x7C00)
    rounded = np.where(exponent < 113, small.astype(np.int64), large)
    rounded = np.where(magnitude > _EXPONENT, 0x7E00, rounded).astype(np.uint16)
    words[places] = rounded | (bits >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
