"""What the tests inherit from whoever starts them, put right before the first test.

They get the signals that every program starts with, which a shell's background or ``nohup`` changes, a
standard input, and where the kernel allows it a ``/dev/shm`` of their own, without the memory of other jobs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import os
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
SWITCH = "DGLKGE_TEST_SHARED_MEMORY"
"""Environment variable; ``shared`` keeps the tests in the machine's shared memory."""

SHARED_FOLDER = "DGLKGE_TEST_FOLDER"
"""Environment variable with the folder of what all workers of a session use."""

LOWEST_PORT, HIGHEST_PORT = 10000, 29000

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER of <linux/sched.h>
_RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES = 0x4000, 1 << 18, 2, 4  # MS_* of <linux/mount.h>
_CAPABILITY_VERSION = 0x20080522


def reset_signals_and_input() -> None:
    """Undo what tests cannot work with: SIGTERM or SIGCHLD ignored, signals blocked, no standard input.

    An ignored SIGINT or SIGHUP stays ignored: it was meant for other processes. See :func:`foreground`.
    """
    for number in (signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.fstat(0)
    except OSError:  # the next file that is opened would become the standard input of all processes
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)


@contextlib.contextmanager
def foreground() -> Iterator[None]:
    """Let Ctrl-C and a hangup reach what this process starts; a hangup does not end the tests themselves.

    A program starts with the default for each signal that has a handler here.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda *_: None}
    ignored = [number for number in handlers if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def background() -> Iterator[None]:
    """Start processes with SIGINT and SIGHUP ignored, as ``nohup`` and ``&`` of a script do."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_ports(num_ports: int = 1) -> int:
    """Return the first of so many consecutive ports that nothing listens on, drawn at random.

    They lie below those of torch's rendezvous and DGL's servers, and below the range from which the kernel
    takes ports for connections: one of those may be gone before its use.
    """
    while True:
        first = random.SystemRandom().randrange(LOWEST_PORT, HIGHEST_PORT - num_ports)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + num_ports):
                stack.enter_context(socket.socket()).bind(("", port))
            return first


@contextlib.contextmanager
def shared_folder() -> Iterator[None]:
    """Make the folder of what all workers use; a session inside another uses the other's."""
    if SHARED_FOLDER in os.environ:
        yield
        return
    folder = os.environ[SHARED_FOLDER] = tempfile.mkdtemp(prefix="dglkge-tests-")
    try:
        yield
    finally:
        del os.environ[SHARED_FOLDER]
        shutil.rmtree(folder, ignore_errors=True)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that one worker fills with ``make(folder)``; others wait for that, and only read."""
    if SHARED_FOLDER not in os.environ:  # outside of pytest
        session = contextlib.ExitStack()
        session.enter_context(shared_folder())
        atexit.register(session.close)
    folder = Path(os.environ[SHARED_FOLDER], name)
    done = folder.with_name(f"{name}.done")
    with open(folder.with_name(f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that has failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def use_private_shared_memory() -> str | None:
    """Give this process, and all that it starts, a ``/dev/shm`` of its own; return why that failed, or None.

    Root makes a mount namespace. An ordinary user makes one inside a user namespace, in which he is himself,
    and gives the powers that he has there away again: tests of unwritable folders must see them so.
    """
    if os.environ.get(SWITCH) == "shared":
        return f"{SWITCH} is 'shared'"
    if os.geteuid() != 0 and len(os.listdir("/proc/self/task")) > 1:
        return "no shared memory of the tests' own could be made: this process has threads already"
    child = os.fork()  # tries it: half of it done is worse than nothing
    if child == 0:
        status = errno.EINVAL
        try:
            _make_private_shared_memory()
            status = 0
        except OSError as error:
            status = error.errno or errno.EINVAL
        finally:
            os._exit(status)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        return f"no shared memory of the tests' own could be made: {os.strerror(number)}"
    _make_private_shared_memory()
    return None


def _make_private_shared_memory() -> None:
    """Enter namespaces with a new ``/dev/shm``; raise OSError where the kernel refuses that."""
    libc = ctypes.CDLL(None, use_errno=True)
    is_root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    _call(libc.unshare, _NEW_MOUNTS if is_root else _NEW_MOUNTS | _NEW_USERS)
    if not is_root:
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "wb") as file:
                file.write(text.encode())
    _call(libc.mount, None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)
    flags = ctypes.c_ulong(_NO_SUID | _NO_DEVICES)
    _call(libc.mount, b"tmpfs", SHARED_MEMORY.encode(), b"tmpfs", flags, b"mode=1777")
    if not is_root:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        _call(libc.capset, header, (ctypes.c_uint32 * 6)())


def _call(function: ctypes._FuncPointer, *arguments: object) -> None:
    """Call a function of the C library; raise its error."""
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
