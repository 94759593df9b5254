"""Imports torch, DGL and dglkge once, and runs what clients ask for in copies of itself.

``python -m tests.warm.server SOCKET`` says ``ready`` and its number when it listens, imports for the first
client, and ends with its standard input. It never starts a thread, which copies would not have. A copy can be
such a server too. It leaves :func:`serve` with the function that it has to run.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

PRELOADED = (
    "torch.distributed",
    "torch._dynamo",
    "dglkge",  # before DGL
    "dgl.distributed",
    "dglkge.training.trainer",
    "dglkge.model.functions.bilinear",
    "dglkge.model.functions.dense",
    "dglkge.model.functions.projected",
    "dglkge.optim.optimizers",
    "dglkge.cli.launch",
    "dglkge.cli.main",
    "dglkge.cli.common",
    "dglkge.inference.exports.import_tables",
    "dglkge.inference.truth",
    "dglkge.training.elastic",
    "dglkge.tuning.tune",
    "encodings.ascii",
    "encodings.utf_8_sig",
    "multiprocessing.synchronize",
    "pydantic._internal._serializers",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)
NAMESPACES = ("net", "uts", "mnt", "pid")
"""Of the hosts of tests/cluster; the last one holds for children only."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
RESET = (*FORWARDED, signal.SIGCHLD)
MOST_STREAMS = 16
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Request:
    """What a client wants to be run."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    ignored: list[int]
    streams: list[int]


class Become(BaseException):
    """Unwinds a copy to the top of the program, with what it has to run."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__()
        self.action = action


def serve(path: str) -> Callable[[], Any]:
    """Answer clients until standard input ends; return in copies only, with what they have to run."""
    # A Ctrl-C is for the tests, which end this process then; copies have the signals of their clients.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"ready %d\n" % os.getpid())
    os.dup2(2, 1)
    if listener in select.select([0, listener], [], [])[0]:
        import_all()
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process: pid and client
    while True:
        clients = {client.fileno(): descriptor for descriptor, (_, client) in running.items()}
        ready, _, _ = select.select([0, listener, *running, *clients], [], [])
        if 0 in ready:
            for pid, _ in running.values():
                _kill(pid)
            os._exit(0)
        for descriptor in ready:
            if descriptor in running:
                pid, client = running.pop(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(descriptor)
                with client, contextlib.suppress(OSError):
                    client.sendall(b"%d\n" % status)
        for number in set(ready) & clients.keys():
            if clients[number] in running:
                _pass_on(*running[clients[number]])
        if listener in ready:
            client, _ = listener.accept()
            # The kernel gives the number that the process has here, from wherever it has connected.
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            request, descriptors = _receive(client)
            LOOPS.load()
            pid = os.fork()
            if pid == 0:
                # Closed by number in the copy: objects that close them again would close what has the number
                # by then.
                for connection in (listener, client, *(other for _, other in running.values())):
                    connection.detach()
                return _copy(request, descriptors, struct.unpack("3i", peer)[0])
            for descriptor in descriptors:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = pid, client


class CachedLoops:
    """The compiled loops that other processes left on disk: what is loaded here, copies need not load."""

    def __init__(self) -> None:
        self._loops: list[Any] = []
        self._times: dict[str, int] = {}

    def find(self) -> None:
        """Note the loops of the imported modules."""
        from numba.core.dispatcher import Dispatcher

        modules = [vars(module) for name, module in sys.modules.items() if name.startswith("dglkge.")]
        loops = {id(value): value for names in modules for value in names.values()}
        self._loops = [
            loop for loop in loops.values() if isinstance(loop, Dispatcher) and _has_own_code(loop)
        ]

    def load(self) -> None:
        """Load what has come into the folders of the cache since the last time; never compile."""
        before = self._times
        folders = {loop._cache.cache_path for loop in self._loops}
        self._times = {folder: os.stat(folder).st_mtime_ns for folder in folders if os.path.isdir(folder)}
        for loop in self._loops:
            folder = loop._cache.cache_path
            if self._times.get(folder) != before.get(folder):
                with contextlib.suppress(Exception):  # a damaged file, which copies report
                    load_all(loop)


def _has_own_code(loop: Any) -> bool:
    return loop._cache.cache_path is not None and not loop.targetoptions.get("forceinline")


def load_all(loop: Any) -> None:
    """Load the machine code of a loop as numba's dispatcher does; code of other sources is none."""
    for signature, *_ in loop._cache._cache_file._load_index():
        code = None if signature in loop.overloads else loop._cache._load(signature, loop.targetctx)
        if code is not None:
            loop.targetctx.insert_user_function(code.entry_point, code.fndesc, [code.library])
            loop.add_overload(code)


LOOPS = CachedLoops()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _pass_on(pid: int, client: socket.socket) -> None:
    """Send the signals that a client has received to its process; SIGKILL if the client was killed."""
    data = client.recv(4096)
    for number in data.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, int(number))
    if not data:
        _kill(pid)


def _receive(client: socket.socket) -> tuple[Request, list[int]]:
    client.settimeout(30)
    _, ancillary, _, _ = client.recvmsg(1, socket.CMSG_SPACE(4 * MOST_STREAMS))
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    text = b""
    while not text.endswith(b"\n"):
        text += client.recv(65536)
    client.settimeout(None)
    return Request(**json.loads(text)), list(descriptors)


def _copy(request: Request, streams: Sequence[int], client: int) -> Callable[[], Any]:
    server = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    try:
        enter_host(client)
    except OSError:  # the client was killed meanwhile, or may not
        traceback.print_exc()
        os._exit(1)
    os.setsid()
    # First out of the way of the numbers that they shall have.
    beyond = max(request.streams) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in streams]
    for number, descriptor in zip(request.streams, moved):
        os.dup2(descriptor, number)
    become(request)
    if request.arguments[0] == "--serve":
        return lambda: serve_too(request.arguments[1])
    if request.arguments[0].endswith("/script_runner.py"):
        return lambda: run_script(request.arguments)
    return lambda: run_python(request.arguments)


def enter_host(client: int) -> None:
    """Join the namespaces of a client, if it is on a host of its own; returns in a process that is there."""
    other = [name for name in NAMESPACES if _namespace(client, name) != _namespace(os.getpid(), name)]
    if not other:
        return
    for descriptor in [os.open(f"/proc/{client}/ns/{name}", os.O_RDONLY) for name in other]:
        if _LIBC.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    if "pid" not in other:
        return
    alive, held = os.pipe()
    os.set_blocking(alive, False)
    child = os.fork()
    if child:
        _stand_for(child, held)
    os.close(held)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(BlockingIOError):  # the other end is open: its holder lives, and we end with it
        os.read(alive, 1)
        os._exit(1)


def _namespace(pid: int, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def _stand_for(child: int, held: int) -> NoReturn:
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    # Only the process itself shall keep pipes open: a reader waits for their end.
    os.closerange(0, held)
    os.closerange(held + 1, 4096)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def become(request: Request) -> None:
    """Take over what a new program starts with: environment, folder, signals, streams, random numbers."""
    environment, ignored = request.environment, request.ignored
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in request.streams:
            with contextlib.suppress(OSError):  # that of the list
                os.close(number)
    signal.set_wakeup_fd(-1)
    for number in RESET:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.folder)
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(environment)
    replaced = set(before.split(os.pathsep))
    added = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[1:] = added + [entry for entry in sys.path[1:] if entry not in replaced]
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = _stream(1, unbuffered, "strict")
    sys.stderr = _stream(2, unbuffered, "backslashreplace")
    if not sys.stderr.isatty():
        sys.stderr.reconfigure(line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    np.random.seed()  # noqa: NPY002  what the copy shares with all others


def _stream(descriptor: int, unbuffered: bool, errors: str) -> io.TextIOWrapper:
    binary, is_terminal = open(descriptor, "wb", closefd=False), os.isatty(descriptor)
    return io.TextIOWrapper(binary, "utf-8", errors, line_buffering=is_terminal, write_through=unbuffered)


def serve_too(path: str) -> NoReturn:
    raise Become(serve(path))


def run_python(arguments: list[str]) -> None:
    """Run a script or module as ``python`` would; what it starts with ``sys.executable`` are copies too."""
    from dglkge.launch import script_runner

    if arguments[0] == "--plain":
        arguments = arguments[1:]
        del os.environ["DGLKGE_TEST_WARM_SOCKET"]
    else:
        sys.executable = str(Path(os.environ["DGLKGE_TEST_WARM_SOCKET"]).with_name("python"))
    if arguments[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[1], sys.modules["__main__"].__dict__)
        return
    if arguments[0].endswith("/build_graph.py"):
        arguments = [*arguments[:2], str(os.getppid())]  # it ends with its parent, and this with its client
    if arguments[0] == "-m":
        sys.modules.pop(arguments[1], None)  # it shall run, as __main__
    script_runner.run(arguments)


def run_script(arguments: list[str]) -> None:
    from dglkge.launch import script_runner

    sys.argv = arguments
    script_runner.main()


def import_all() -> None:
    if PRELOADED[-1] in sys.modules:
        return
    gc.disable()
    for module in PRELOADED:
        __import__(module)
    LOOPS.find()
    LOOPS.load()
    if threading.active_count() > 1:
        raise RuntimeError(f"imports have started threads: {threading.enumerate()}")
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # numba's would touch, and so copy, most of what they are about
    gc.collect()
    gc.freeze()  # copies look for garbage among what is theirs
    gc.enable()


def main() -> None:
    """Serve; in copies run what they have to."""
    action = serve(sys.argv[1])
    while True:
        try:
            action()
        except Become as error:
            action = error.action
        except BaseException as error:
            end(error)
        else:
            end(None)


def end(error: BaseException | None) -> NoReturn:
    """End as the interpreter does, but without taking modules apart, which takes as long as a small job."""
    from dglkge.errors import exit_status_of
    from dglkge.launch import script_runner

    # The interpreter has no status of its own for bad input.
    has_own_status = error is None or isinstance(error, (SystemExit, KeyboardInterrupt))
    status = exit_status_of(error or SystemExit()) if has_own_status else 1
    if isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    elif error is not None:
        script_runner.print_error(error)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
