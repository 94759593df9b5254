"""Rows in bfloat16 for compiled loops: numba has no such type, so they are 16-bit words here.

A bfloat16 number is the upper half of a float32 number; narrowing rounds to nearest, ties to even, as torch
does. A NaN stays NaN if a bit of its payload is set in the upper half, as in every NaN that arithmetic makes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dglkge.kernels.jit import FAST_MATH, compiled_inline, intrinsic, ir, overload, types


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


def store_row(row: np.ndarray, scale: Any, out: np.ndarray) -> None:
    """Write scale times a row, both float32, to a row of float32 or of bfloat16 words."""
    raise NotImplementedError("for compiled loops only")


def load_row(row: np.ndarray, out: np.ndarray) -> None:
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
