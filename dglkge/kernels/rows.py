"""Compiled access to rows anywhere in memory by their addresses, with prefetching, and to rows in bfloat16.

Numba has no bfloat16: such rows are 16-bit words here. A bfloat16 number is the upper half of a float32
number; narrowing rounds to nearest, ties to even, as torch does. A NaN stays NaN if a bit of its payload is
set in the upper half, as in every NaN that arithmetic makes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

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


# Typed by overload(): numba chooses the variant when it compiles, so loops have no branch on the type.
@overload(store_row, jit_options={"fastmath": FAST_MATH, "forceinline": True})
def _store_row(row: Any, scale: Any, out: Any) -> Any:
    if out.dtype == types.uint16:

        def store(row: Any, scale: Any, out: Any) -> Any:
            for k in range(out.shape[0]):
                out[k] = narrow(row[k] * scale)

        return store

    def copy(row: Any, scale: Any, out: Any) -> Any:
        for k in range(out.shape[0]):
            out[k] = row[k] * scale

    return copy


@overload(load_row, jit_options={"forceinline": True})
def _load_row(row: Any, out: Any) -> Any:
    if row.dtype == types.uint16:

        def load(row: Any, out: Any) -> Any:
            for k in range(out.shape[0]):
                out[k] = widen(row[k])

        return load

    def copy(row: Any, out: Any) -> Any:
        for k in range(out.shape[0]):
            out[k] = row[k]

    return copy
