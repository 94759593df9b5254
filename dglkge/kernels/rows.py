"""Compiled access to rows anywhere in memory by their addresses, with prefetching."""

from __future__ import annotations

from typing import Any

import numpy as np

from dglkge.kernels.jit import carray, compiled, compiled_inline, intrinsic, ir, types

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
            function,
            [builder.inttoptr(arguments[0], byte_pointer), number(1), number(3), number(1)],
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
def prefetch_row(array: np.ndarray, row: int) -> None:
    """Prefetch a row of a contiguous "(N, D)" array."""
    prefetch_bytes(array.ctypes.data + row * array.strides[0], array.strides[0])


@compiled_inline
def row_at(address: int, dim: int, like: np.ndarray) -> np.ndarray:
    """Return the row at an address as a view "(dim,)" of the type of ``like``."""
    return carray(pointer_to(address, like), (dim,))


@compiled_inline
def prefetch_rows_at(addresses: np.ndarray, i: int, dim: int) -> None:
    """Prefetch the i-th of some float32 rows, if there is one."""
    if i < addresses.shape[0]:
        prefetch_bytes(addresses[i], 4 * dim)


@compiled
def copy_rows(addresses: np.ndarray, rows: np.ndarray) -> None:
    """Copy the rows at addresses (n,) to an array (n, dim)."""
    num, dim = rows.shape
    for i in range(num):
        prefetch_rows_at(addresses, i + LOOKAHEAD, dim)
        rows[i] = row_at(addresses[i], dim, rows)
