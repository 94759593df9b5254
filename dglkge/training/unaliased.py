"""Compiled functions whose array arguments lie apart, so that loops over many rows at once are vectorised.

Before a loop over vectors runs, it must be known that what it writes is not what it reads. LLVM tests that
for pairs of pointers when the loop is entered, which costs more than the loop itself where rows are short and
many. Numba knows the promise that C calls ``restrict``, but only as a flag of its compiler.
"""

from __future__ import annotations

from typing import Any, Callable

import numba
from numba.core.compiler import Compiler

from dglkge.optim.kernels import FAST_MATH


class _Unaliased(Compiler):
    """Numba's compiler with the promise."""

    def __init__(
        self,
        typingctx: Any,
        targetctx: Any,
        library: Any,
        args: Any,
        return_type: Any,
        flags: Any,
        locals: Any,
    ) -> None:
        flags.noalias = True
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)


def compiled_unaliased(function: Callable) -> Callable:
    """Compile a loop that writes to no array that it reaches through another argument too.

    As :func:`dglkge.optim.kernels.compiled` otherwise.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": FAST_MATH, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, pipeline_class=_Unaliased, **options)(function)
    except RuntimeError:  # numba found no folder that it may write its cache to
        return numba.njit(cache=False, pipeline_class=_Unaliased, **options)(function)
