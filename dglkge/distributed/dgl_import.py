"""Makes ``import dgl`` work with any torch; the standard library only.

Only ``dgl.graphbolt`` binds dgl 2.1.0 to a torch version: its import raises for any torch but 2.0.0 to 2.2.1.
``dgl.distributed`` imports it by name and uses it with ``use_graphbolt=True`` alone. So this module puts an
empty module in its place. ``dglkge/__init__.py`` installs it, hence ``import dglkge`` comes before
``import dgl``. Scripts under ``dglkge-launch``, which may import nothing of ours, get it by
``dglkge/launch/script_runner.py``. Processes that a process starts by multiprocessing get it before they
import the script again.

It also puts off ``dgl.data``, of which DGL needs files only: its data sets import pandas, requests and
parts of scipy, a quarter of a second of processor time in each process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

DGL_VERSION = "2.1.0"
"""The last release of DGL with wheels for Linux on the package index."""
NO_WHEEL_FROM = (3, 13)
"""The first Python for which it has none."""

SEGMENTS_VARIABLE = "DGLKGE_SEGMENTS"
"""Beginning of the names of all shared memory of one attempt of a job."""
TABLE_FOLDER_VARIABLE = "DGLKGE_TABLE_FOLDER"
"""Folder of the tables of one attempt of a job on a machine, if they are files."""

PACKAGE = "dgl.distributed"
GRAPHBOLT = "dgl.graphbolt"
DATA_SETS = "dgl.data"

REASON = (
    "use_graphbolt=True needs dgl.graphbolt, whose libraries in dgl 2.1.0 are for torch 2.0.0 to 2.2.1; "
    "here it is an empty module, so that DGL works with any torch; allowed: use_graphbolt=False"
)


class GraphBoltError(ImportError):
    """GraphBolt was asked for, and is not there."""


class _Loader:
    """Loads the empty module."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make the module, with the one name that DGL uses."""
        module = types.ModuleType(spec.name, REASON)
        # DGL tests graphs for this class: none is of it.
        module.FusedCSCSamplingGraph = type("FusedCSCSamplingGraph", (), {})  # type: ignore[attr-defined]
        module.__getattr__ = _missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Prepare the processes that this one starts."""
        # DGL is being imported, and has imported multiprocessing by now.
        _hand_on()


class Finder:
    """Finds an empty ``dgl.graphbolt``, and prepares ``dgl.distributed`` once it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of these modules, None for others."""
        if name == "dgl":
            # Without it DGL writes ~/.dgl/config.json, which fails where the home folder is read-only and
            # races where several processes start at once.
            os.environ.setdefault("DGLBACKEND", "pytorch")
        if name == GRAPHBOLT:
            return importlib.machinery.ModuleSpec(name, _Loader())  # type: ignore[arg-type]
        if name not in (PACKAGE, DATA_SETS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            if name == DATA_SETS:
                spec.loader.exec_module = _at_first_use(execute)  # type: ignore
                return spec

            def execute_and_prepare(module: types.ModuleType) -> None:
                execute(module)
                # Where a script asks for GraphBolt DGL would fail at a file that is not there.
                for name in ("initialize", "load_partition", "partition_graph"):
                    setattr(module, name, _without_graphbolt(getattr(module, name)))
                name_segments()

            spec.loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Prepare this process, and those that it starts by multiprocessing, for ``import dgl``."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    if PACKAGE in sys.modules:
        name_segments()


def require_dgl(user: str) -> None:
    """Raise InputError for `user`, e.g. ``"dglkge train"``, if DGL is absent or older than 2.1."""
    import importlib.metadata

    from dglkge.errors import InputError

    try:
        version = importlib.metadata.version("dgl")
    except importlib.metadata.PackageNotFoundError:
        version = "" if importlib.util.find_spec("dgl") is None else DGL_VERSION
    if [int(number) for number in re.findall(r"\d+", version)[:2]] < [2, 1]:
        present = f"dgl {version} is" if version else "it is not"
        then = " and dglkge-engine" if sys.version_info >= NO_WHEEL_FROM else ""
        raise InputError(
            f"{user} needs dgl {DGL_VERSION}, and {present} installed here: pip install 'dglkge[train]'{then}"
        )


def name_segments() -> None:
    """Give DGL's shared memory the names of the job, if our launcher started this process."""
    if prefix := os.environ.get(SEGMENTS_VARIABLE, ""):
        memory: Any = importlib.import_module("dglkge.distributed.dgl_memory")
        memory.install(prefix, table_folder(), os.environ.get("DGL_IP_CONFIG", ""))


def table_folder() -> str:
    """Return the folder of this job's tables, if they are files; empty: they are in shared memory."""
    return os.environ.get(TABLE_FOLDER_VARIABLE, "")


def _missing(name: str) -> NoReturn:
    """Refuse what is not in the empty module; the machinery of imports asks for names with underscores."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise GraphBoltError(REASON)


def _at_first_use(execute: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    """Return a function that executes a module when a name is asked for that it does not have yet."""

    def put_off(module: types.ModuleType) -> None:
        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            with contextlib.suppress(AttributeError):
                del module.__getattr__
            execute(module)
            return getattr(module, name)

        module.__getattr__ = find  # type: ignore

    return put_off


def _without_graphbolt(function: Callable[..., Any]) -> Callable[..., Any]:
    import inspect  # takes .01 s, and DGL has imported it

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if signature.bind(*arguments, **options).arguments.get("use_graphbolt"):
            raise GraphBoltError(REASON)
        return function(*arguments, **options)

    return call


def _hand_on() -> None:
    """Let new interpreters import dglkge before they import the script of this process again.

    multiprocessing sends them a dict by pickle; to load a class of ours from it, they import this package.
    """
    spawn: Any = importlib.import_module("multiprocessing.spawn")
    prepare = spawn.get_preparation_data
    if getattr(prepare, "hands_on_dglkge", False):
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"dglkge": Finder, **prepare(name)}

    get_preparation_data.hands_on_dglkge = True  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data
