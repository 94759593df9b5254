"""Compiles loops with numba and caches the machine code on disk. No other module imports numba.

Numba keeps machine code beside the source file, or else in the user's cache folder, and checks that this one
file is unchanged. A loop also contains the loops of other files that it calls, so each entry of the cache
here holds a digest of all files with compiled loops and counts for those only. The cache is optional: without
a folder to write to, on a full disk or with a damaged cache file, loops are compiled in memory.

The processes of a job start together and need the same loops. One of them compiles the loops of a file while
the others wait for its machine code.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

# "as": the names that other modules import from here.
import numba
from numba import carray as carray
from numba import extending
from numba import types as types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.cgutils import ir as ir
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock

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
        return _SOURCES_DIGEST, super().reduce(data)

    def rebuild(self, target_context: Any, reduced_data: Any) -> Any:
        """Return the compiled function; None if its sources were others: it is compiled again then."""
        digest, code = reduced_data
        return super().rebuild(target_context, code) if digest == _SOURCES_DIGEST else None


class _CompileLock:
    """Lock of a source file while its loops are compiled, held any number of times by one process.

    A process that holds it may wait for another file's: loops call those of files that their own imports, so
    processes do not wait in a circle. The lock only saves work: a process that waits for too long, or whose
    file system has no locks, compiles too. Numba's own lock keeps the other threads of the process away.
    """

    #: Limit of a wait, in seconds: more than any file's loops take to compile on a busy machine.
    limit = 120.0

    def __init__(self, path: str) -> None:
        self.path = path
        self.num_held = 0
        self.file: IO[bytes] | None = None

    def take(self) -> None:
        """Wait until no other process compiles loops of the file."""
        self.num_held += 1
        if self.num_held > 1 or not self.limit:
            return
        end = time.monotonic() + self.limit
        try:
            self.file = open(self.path, "rb")
            while not _is_locked(self.file):
                if time.monotonic() > end:
                    logger.info("another process has compiled loops of %s for %g s", self.path, self.limit)
                    _CompileLock.limit = 0.0
                    return
                time.sleep(0.05)
        except OSError as error:
            logger.info("loops of %s are compiled without a lock: %s", self.path, error)
            if self.file is not None:
                self.file.close()
                self.file = None

    def release(self) -> None:
        """Let other processes compile, once it was released as often as it was taken."""
        self.num_held -= 1
        if self.num_held or self.file is None:
            return
        # Closing the file is not enough: a forked child may have inherited it.
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self.file.close()
        self.file = None


def _is_locked(file: IO[bytes]) -> bool:
    """Take the lock of a file, if no other process has it. The kernel releases it when a process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_LOCKS: dict[str, _CompileLock] = {}


def _identity_of(formula: Any) -> tuple[str, str, str]:
    """Module and name of a compiled function, and the digest of its source file."""
    function = formula.py_func
    source = Path(function.__code__.co_filename).read_bytes()
    return function.__module__, function.__qualname__, hashlib.sha256(source).hexdigest()


class _KernelCache(FunctionCache):
    """Numba's cache of a function; a file of it is valid for one state of all sources only."""

    _impl_class = _DigestedCode

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        path = function.__code__.co_filename
        self.lock = _LOCKS.setdefault(path, _CompileLock(path))
        self._formulas = [_identity_of(cell.cell_contents) for cell in function.__closure__ or ()]

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Numba would pickle the closure, and a compiled function in it has a random number of the
        process.
        """
        return sig, codegen.magic_tuple(), tuple(self._formulas)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function from the cache, None if it is absent or unreadable.

        If it is absent, the lock is held on return, and no other process has compiled the function meanwhile.
        """
        overload = self._load(sig, target_context)
        if overload is None and self._enabled:
            self.lock.take()
            overload = self._load(sig, target_context)
        return overload

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling a damaged file raises almost anything
            self._give_up(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
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

    def define_pipelines(self) -> Any:
        self.state.flags.noalias = True
        return super().define_pipelines()


def compiled(function: Callable, fastmath: set[str] = FAST_MATH, **options: Any) -> Callable:
    """Compile a loop with numba's nopython mode, cached on disk if there is a folder to write to.

    The compiled function releases the GIL.
    """
    loop: Any = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy", **options)(function)
    try:
        # numba's option cache=True does this with its own class.
        loop._cache = _KernelCache(function)
    except (RuntimeError, OSError):  # no folder that can be written, or a formula that was typed in
        logger.info("compiled loops are not cached: no folder to write to, or no source file")
    else:
        loop.compile = _compile_once(loop.compile, loop._cache.lock)
    return loop


def compiled_inline(function: Callable) -> Callable:
    """Compile a part of loops: LLVM inlines it into every caller, whatever its size.

    Otherwise results could depend on the state of the cache in the last bit. A caller's machine code holds a
    copy of each function that it calls, optimised once more together with the caller: products and sums may
    be fused differently. The symbols are weak, so the first definition in a process is used: the function's
    own code in a process that compiles, the caller's copy in one that loads the caller from the cache.
    """
    return compiled(function, forceinline=True)


def compiled_unaliased(function: Callable) -> Callable:
    """Compile a part of loops that writes to no array that it reaches through another argument too.

    As :func:`compiled_inline` otherwise. LLVM compares the pointers of such arrays, pair by pair, each time a
    vectorised loop is entered: more work than the loop itself if rows are short. Numba has C's promise
    ``restrict`` as a flag of its compiler only: see :class:`_Unaliased`.
    """
    return compiled(function, forceinline=True, pipeline_class=_Unaliased)


def compiled_with_reciprocals(function: Callable) -> Callable:
    """Compile a part of loops, unaliased, whose float32 divisions by square roots may be estimates.

    LLVM then takes the processor's estimate of 1 / sqrt(x) and refines it by one step of Newton's iteration,
    which is some units in the last place off and several times as fast.
    """
    return compiled(function, FAST_MATH | {"arcp", "afn"}, forceinline=True, pipeline_class=_Unaliased)


def _compile_once(compile_loop: Callable, lock: _CompileLock) -> Callable:
    """Wrap numba's function that loads or compiles a loop: it releases the lock that the cache has taken."""

    @functools.wraps(compile_loop)
    def compile_and_release(signature: Any) -> Any:
        with global_compiler_lock:
            num_held = lock.num_held
            try:
                return compile_loop(signature)
            finally:
                while lock.num_held > num_held:
                    lock.release()

    return compile_and_release
