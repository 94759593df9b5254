"""Runs the user's script so that a trainer that fails also exits.

This file is a program of its own, run by its path with the standard library only:
``script_runner.py script.py args...`` or ``script_runner.py -m package.module args...``.

DGL registers ``exit_client`` with ``atexit``: a barrier of all trainers without a timeout. A
trainer that raised would block there until the others exit, which wait for it, and no launcher could see that
it failed. So this program skips that handler in a failed process, and only that one: other exit handlers run,
and the status is the one that the interpreter would have given.

Where ``DGLKGE_FORK_SERVER`` is set it imports what servers and trainers need, once, and runs the script in
processes that are forked from it (``fork_server.py``).

The script may import DGL and nothing of ours. So this program imports ``dglkge/distributed/dgl_import.py``
first: with it DGL loads with any torch, and its shared memory has names of the job.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import io
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Mapping

EXIT_HANDLERS_SECONDS = 3.0

FORK_SERVER_VARIABLE = "DGLKGE_FORK_SERVER"
DGL_MODULES = ("torch.distributed", "dgl.distributed")
SERVER_MODULES = ("dglkge.training.script",)
TRAINER_MODULES = ("dglkge.training.trainer",)
"""What a process imports before it is forked; the last ones for scripts that use dglkge."""


def prepare_dgl() -> None:
    """Import dglkge, which prepares the import of DGL: with any torch, and with the job's names."""
    if importlib.util.find_spec("dglkge") is None:
        # Last: nothing of the script's may be hidden by it.
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
        sys.path.append(folder)
        # For the processes that the script starts.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    importlib.import_module("dglkge.distributed.dgl_import").install()


def fork_from_imports(arguments: list[str]) -> None:
    """Import what servers or trainers need; return in each forked process, or raise an import's error."""
    errors: list[BaseException] = []

    def prepare(environment: Mapping[str, str]) -> None:
        own_modules = SERVER_MODULES if environment.get("DGL_ROLE") == "server" else TRAINER_MODULES
        try:
            for module in (*DGL_MODULES, *(own_modules if uses_dglkge(arguments) else ())):
                importlib.import_module(module)
        except BaseException as error:
            errors.append(error)

    importlib.import_module("dglkge.launch.fork_server").serve(prepare)
    if errors:
        raise errors[0]


def uses_dglkge(arguments: list[str]) -> bool:
    """Whether a script seems to import dglkge: for one that does not, its modules would be loaded in vain."""
    if arguments[0] == "-m":
        return True
    try:
        with open(arguments[0], "rb") as file:
            return b"dglkge" in file.read()
    except OSError:
        return False


def run(arguments: list[str]) -> None:
    """Run ``[script, *args]`` or ``["-m", module, *args]`` as ``__main__``, as ``python`` itself would."""
    if arguments[0] == "-m":
        # As python does for -m; for a script, its own folder.
        sys.path[0] = os.getcwd()
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        sys.argv = arguments
        # Not runpy.run_path: it changes sys.argv[0] and removes __main__ before the exit handlers run.
        path = os.path.abspath(arguments[0])
        main_module = types.ModuleType("__main__")
        main_module.__file__ = path
        sys.modules["__main__"] = main_module
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main_module.__dict__)


def print_error(error: BaseException) -> None:
    """Print what the interpreter would have printed, without the frames of this file and runpy."""
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        return
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def exit_without_dgl_shutdown(status: int) -> None:
    """Run the exit handlers but DGL's, then exit, after EXIT_HANDLERS_SECONDS at the latest."""
    # Other exit handlers may block as well.
    timer = threading.Timer(EXIT_HANDLERS_SECONDS, os._exit, [status & 0xFF])
    timer.daemon = True
    timer.start()
    context = sys.modules.get("dgl.distributed.dist_context")
    if context is not None:
        # Only this one handler: others, such as that of logging, run as usual.
        atexit.unregister(context.exit_client)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads that are not daemons, and destructors, could block as well.
    os._exit(status & 0xFF)


def main() -> None:
    """Run the script or module of the command line."""
    # At exit Python looks for garbage among all that was imported, which takes .4 s after torch and DGL.
    atexit.register(gc.freeze)
    prepare_dgl()
    try:
        if FORK_SERVER_VARIABLE in os.environ:
            sys.path.pop(0)  # the folder of this file
            fork_from_imports(sys.argv[1:])
            sys.path.insert(0, "")
        run(sys.argv[1:])
    except BaseException as error:
        errors = importlib.import_module("dglkge.errors")
        if isinstance(error, sys.modules["dglkge.distributed.dgl_import"].GraphBoltError):
            error = errors.InputError(str(error))
        status = errors.exit_status_of(error)
        # A normal end keeps DGL's handler: its barrier lets all trainers leave together.
        if status == 0:
            raise
        if isinstance(error, errors.DglkgeError):
            # Raised on purpose: one line explains it.
            sys.stderr.write(f"dglkge: error: {error}\n")
        else:
            print_error(error)
        exit_without_dgl_shutdown(status)


if __name__ == "__main__":
    main()
