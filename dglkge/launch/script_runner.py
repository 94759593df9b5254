"""Runs the user's script so that a trainer that fails also exits.

This file is a program of its own, run by its path with the standard library only:
``script_runner.py script.py args...`` or ``script_runner.py -m package.module args...``.

DGL registers ``exit_client`` with ``atexit`` (all versions): a barrier of all trainers without a timeout. A
trainer that raised would block there until the others exit, which wait for it, and no launcher could see that
it failed. So this program skips that handler in a failed process, and only that one: other exit handlers run,
and the status is the one that the interpreter would have given.

DGL's shared memory has no name of the job either. As soon as the script has imported ``dgl.distributed``,
this program installs ``dglkge/distributed/dgl_memory.py``, which gives it one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Sequence

INTERRUPTED_STATUS = 130
EXIT_HANDLERS_SECONDS = 3.0
DGL_PACKAGE = "dgl.distributed"
SEGMENTS_VARIABLE = "DGLKGE_SEGMENTS"
TABLE_FOLDER_VARIABLE = "DGLKGE_TABLE_FOLDER"
"""Set by the launcher: beginning of the names of the job's shared memory, and folder of tables in files."""


class DglFinder(importlib.abc.MetaPathFinder):
    """Finds ``dgl.distributed`` as usual, and installs the job's names once it has been imported.

    Parameters
    ----------
    prefix : str
        Beginning of the names.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the usual spec of the package, whose loader installs the names afterwards."""
        if name != DGL_PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: types.ModuleType) -> None:
                execute(module)
                install_names(self._prefix)

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def install_names(prefix: str) -> None:
    """Give DGL's shared memory in this process the names of the job."""
    if importlib.util.find_spec("dglkge") is None:
        # Last: nothing of the script's may be hidden by it.
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))
    importlib.import_module("dglkge.distributed.dgl_memory").install(
        prefix, os.environ.get(TABLE_FOLDER_VARIABLE, ""), os.environ.get("DGL_IP_CONFIG", "")
    )


def prepare_names() -> None:
    """Install the job's names now or after the import of DGL, if our launcher started this process."""
    prefix = os.environ.get(SEGMENTS_VARIABLE, "")
    if not prefix:
        return
    if DGL_PACKAGE in sys.modules:
        install_names(prefix)
    else:
        sys.meta_path.insert(0, DglFinder(prefix))


def run(arguments: list[str]) -> None:
    """Run a script or module as ``__main__``, as ``python`` itself would.

    Parameters
    ----------
    arguments : list of str
        ``[script, *args]`` or ``["-m", module, *args]``.
    """
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


def exit_status(error: BaseException) -> int:
    """Return the status that the interpreter gives to an uncaught exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_STATUS
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


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
    prepare_names()
    try:
        run(sys.argv[1:])
    except BaseException as error:
        status = exit_status(error)
        # A normal end keeps DGL's handler: its barrier lets all trainers leave together.
        if status == 0:
            raise
        print_error(error)
        exit_without_dgl_shutdown(status)


if __name__ == "__main__":
    main()
