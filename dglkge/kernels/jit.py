"""Compiles loops with numba and caches the machine code on disk. No other module imports numba.

Numba keeps machine code beside the source file, or else in the user's cache folder, and checks that this one
file is unchanged. A loop also contains the loops of other files that it calls, so each entry of the cache
here holds a digest of all files with compiled loops and counts for those only. The cache is optional: without
a folder to write to, on a full disk or with a damaged cache file, loops are compiled in memory.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Callable

import numba
from numba import carray, extending, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.cgutils import ir
from numba.core.compiler import Compiler

__all__ = [
    "FAST_MATH",
    "carray",
    "compiled",
    "compiled_inline",
    "compiled_unaliased",
    "compiled_with_reciprocals",
    "intrinsic",
    "ir",
    "overload",
    "types",
]

logger = logging.getLogger(__name__)

# numba's types say that it is called as it is defined, which it is not.
intrinsic: Any = extending.intrinsic
overload: Any = extending.overload

#: Sums may be reordered (which vectorises them), products fused with sums, and the sign of zero ignored. NaN
#: and infinity keep their meaning ("nnan" and "ninf" are absent): the loops test for them.
FAST_MATH = {"reassoc", "contract", "nsz"}

_PACKAGE = Path(__file__).resolve().parents[1]


def _digest_of_sources(folder: Path) -> str:
    """Digest of the files below a folder that import this module: the sources of all compiled loops."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        if b"kernels.jit" in text or path == Path(__file__).resolve():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


#: Computed at import: a process keeps the code that it imported, and must not cache it under the digest of
#: files that were edited since.
_SOURCES_DIGEST = _digest_of_sources(_PACKAGE)


class _DigestedCode(CompileResultCacheImpl):
    """Contents of a cache file: machine code, and the digest of the sources that it was compiled from."""

    def reduce(self, data: Any) -> Any:
        """Return the tuple that is pickled for a compiled function."""
        return _SOURCES_DIGEST, super().reduce(data)

    def rebuild(self, target_context: Any, reduced_data: Any) -> Any:
        """Return the compiled function; None if its sources were others: it is compiled again then."""
        digest, code = reduced_data
        return super().rebuild(target_context, code) if digest == _SOURCES_DIGEST else None


class _KernelCache(FunctionCache):
    """Numba's cache of a function; a file of it is valid for one state of all sources only."""

    _impl_class = _DigestedCode

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function from the cache, None if it is absent or unreadable."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling a damaged file raises almost anything
            self._give_up(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled function to the cache."""
        try:
            super().save_overload(sig, data)
        except Exception as error:  # a full disk, a folder that was removed, a damaged index
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Disable the cache of this function."""
        self.disable()
        logger.info("compiled loops are not cached in %s: %r", self.cache_path, error)


class _Unaliased(Compiler):
    """Numba's compiler with the promise that arrays do not overlap."""

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


def compiled(function: Callable) -> Callable:
    """Compile a loop with numba, cached on disk if there is a folder to write to.

    Parameters
    ----------
    function : callable
        A function that numba's nopython mode compiles.

    Returns
    -------
    callable
        The compiled function; it releases the GIL.
    """
    return _compile(function)


def compiled_inline(function: Callable) -> Callable:
    """Compile a part of loops: LLVM inlines it into every caller, whatever its size.

    Otherwise results could depend on the state of the cache in the last bit. A caller's machine code holds a
    copy of each function that it calls, and LLVM has optimised that copy once more, together with the caller:
    products and sums may be fused differently. The symbols are weak, so the first definition in a process is
    used: the function's own code in a process that compiles, the caller's copy in one that loads the caller
    from the cache. Inlined code exists once. As :func:`compiled` otherwise.
    """
    return _compile(function, forceinline=True)


def compiled_unaliased(function: Callable) -> Callable:
    """Compile a part of loops that writes to no array that it reaches through another argument too.

    As :func:`compiled_inline` otherwise. A vectorised loop must not write to memory that it reads. LLVM
    compares the pointers, pair by pair, each time the loop is entered: more work than the loop itself if rows
    are short. Numba has C's promise ``restrict``, but only as a flag of its compiler: see
    :class:`_Unaliased`.
    """
    return _compile(function, forceinline=True, pipeline_class=_Unaliased)


def compiled_with_reciprocals(function: Callable) -> Callable:
    """Compile a part of loops whose float32 divisions by square roots may be estimates.

    LLVM then takes the processor's estimate of 1 / sqrt(x) and refines it by one step of Newton's iteration,
    which is some units in the last place off and several times as fast. As :func:`compiled_unaliased`
    otherwise.
    """
    fastmath = FAST_MATH | {"arcp", "afn"}
    return _compile(function, fastmath, forceinline=True, pipeline_class=_Unaliased)


def _compile(function: Callable, fastmath: set[str] = FAST_MATH, **options: Any) -> Callable:
    """Compile a loop with the options that all loops share."""
    loop: Any = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy", **options)(function)
    try:
        # numba's option cache=True does this with its own class.
        loop._cache = _KernelCache(function)
    except RuntimeError:  # neither the folder of the file nor the user's cache folder can be written
        logger.info("compiled loops are not cached: no folder to write to")
    return loop
