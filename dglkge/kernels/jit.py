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

__all__ = ["FAST_MATH", "carray", "compiled", "compiled_unaliased", "intrinsic", "ir", "overload", "types"]

logger = logging.getLogger(__name__)

intrinsic: Any = extending.intrinsic  # numba's types say that it is called as it is defined, which it is not
overload: Any = extending.overload

#: Reordering of sums is allowed (it vectorises them); NaN and infinity keep their meaning, the loops test for
#: them.
FAST_MATH = {"reassoc", "contract", "nsz"}

_PACKAGE = Path(__file__).resolve().parents[1]


def _digest_of_sources(folder: Path) -> str:
    """Digest of the files below a folder that use this module: all that machine code is made from."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        if b"kernels.jit" in text or path == Path(__file__).resolve():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


#: Taken when this module is imported: the code of a process stays as it was then, whatever becomes of the
#: files, and must not be cached as that of newer ones.
_SOURCES_DIGEST = _digest_of_sources(_PACKAGE)


class _DigestedCode(CompileResultCacheImpl):
    """Contents of a cache file: machine code, and the digest of the sources that it was made from."""

    def reduce(self, data: Any) -> Any:
        """Return what is written for a compiled function."""
        return _SOURCES_DIGEST, super().reduce(data)

    def rebuild(self, target_context: Any, reduced_data: Any) -> Any:
        """Return the compiled function, or None where it is made from other sources (it is then replaced)."""
        digest, code = reduced_data
        return super().rebuild(target_context, code) if digest == _SOURCES_DIGEST else None


class _KernelCache(FunctionCache):
    """Numba's cache of a function, whose files count for one state of all sources only."""

    _impl_class = _DigestedCode

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function from the cache, None where it has none."""
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
        """Use the cache of this function no more."""
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
    """Compile a loop with numba, cached on disk where there is a folder to write to.

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


def compiled_unaliased(function: Callable) -> Callable:
    """Compile a loop that writes to no array that it reaches through another argument too.

    As :func:`compiled` otherwise. Before a loop over vectors runs, it must be known that what it writes is
    not what it reads. LLVM tests that for pairs of pointers when the loop is entered, which costs more than
    the loop itself where rows are short and many. Numba knows the promise that C calls ``restrict``, but only
    as a flag of its compiler.
    """
    return _compile(function, pipeline_class=_Unaliased)


def _compile(function: Callable, **options: Any) -> Callable:
    """Compile a loop with the options that all loops share."""
    loop: Any = numba.njit(nogil=True, fastmath=FAST_MATH, error_model="numpy", **options)(function)
    try:
        loop._cache = _KernelCache(function)  # what numba's own option cache=True does, with its cache
    except RuntimeError:  # neither the folder of the file nor the user's cache folder can be written
        logger.info("compiled loops are not cached: no folder to write to")
    return loop
