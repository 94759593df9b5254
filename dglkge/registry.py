"""Registries of components, and the user's modules that register more of them.

A component (a score function, a loss, an optimizer, ...) declares its own facts: the line of help, and
everything that planning, checkpoints and training need. They read the facts through :func:`registry_of`, so
there is no other list of component names.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from dglkge.errors import InputError, unknown_name

T = TypeVar("T")

HOMES = {
    "score function": "dglkge.model.score_functions:SCORE_FUNCTIONS",
    "loss": "dglkge.model.losses:LOSSES",
    "regularizer": "dglkge.model.regularizers:REGULARIZERS",
    "optimizer": "dglkge.model.choices:OPTIMIZERS",
    "negative sampler": "dglkge.model.choices:NEGATIVE_SAMPLERS",
    "objective": "dglkge.model.choices:OBJECTIVES",
    "row transform": "dglkge.model.choices:ROW_TRANSFORMS",
    "logger": "dglkge.training.callbacks:LOGGERS",
    "callback": "dglkge.training.callbacks:CALLBACKS",
}
"""Noun to the module and name of its registry. Texts and no imports: the configuration and the launcher read
this file and import no component. These modules import neither torch nor numba before they compute."""


class Registry(Generic[T]):
    """Names to objects of one kind, registered in code or declared as entry points of installed packages.

    Parameters
    ----------
    noun : str
        Kind of the registered objects, for error messages, e.g. ``"score function"``.
    family : callable, optional
        Returns the member of a systematic name that is not registered, such as ``affine_cos``, None for any
        other name. These members are found but not listed.
    also : sequence of str
        Modules with further members, imported when the registry is first read: they import the registry's
        own module, which therefore cannot import them.
    values : sequence of str
        Further names that a configuration may have, which stand for a choice among the members; messages
        about unknown names list them.

    Examples
    --------
    >>> shapes: Registry[type] = Registry("shape")
    >>> @shapes.register("circle")
    ... class Circle: ...
    >>> shapes.get("circle") is Circle
    True
    """

    def __init__(
        self,
        noun: str,
        family: Callable[[str], T | None] | None = None,
        also: Sequence[str] = (),
        values: Sequence[str] = (),
    ) -> None:
        self.noun = noun
        self._members: dict[str, T] = {}
        self._family = family or (lambda name: None)
        self.is_open = family is not None
        self._also = list(also)
        self._values = tuple(values)
        # dglkge.score_functions, dglkge.losses, ...
        self._group = f"dglkge.{noun.replace(' ', '_')}{'es' if noun.endswith('s') else 's'}"

    def _complete(self) -> None:
        """Import the modules that are still missing."""
        # Removed first: an import that reads the registry must not import its own module again.
        while self._also:
            importlib.import_module(self._also.pop(0))
        if self._group:
            group, self._group = self._group, ""
            for entry in _entry_points(tuple(sys.path)).select(group=group):
                try:
                    member = entry.load()
                except Exception as error:  # another package's code: anything can be raised
                    source = f"the entry point {entry.name} = {entry.value} of {group}"
                    raise InputError(f"cannot load {source} ({_reason(error)})") from error
                # Unless it has registered itself.
                self._members.setdefault(entry.name, member)

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under a name.

        Raises
        ------
        ValueError
            If the name is taken; two members under one name are a mistake in the code, not in the input.
        """

        def add(member: T) -> T:
            if name in self._members:
                raise ValueError(f"the {self.noun} {name!r} is registered already")
            self._members[name] = member
            return member

        return add

    def get(self, name: str) -> T:
        """Return the member of that name.

        Raises
        ------
        InputError
            If the name is not registered; the message lists the known ones.
        """
        self._complete()
        if name in self._members:
            return self._members[name]
        member = self._family(name)
        if member is None:
            raise unknown_name(self.noun, name, [*self._members, *self._values])
        return member

    def items(self) -> list[tuple[str, T]]:
        """Return (name, member) of all members, in the order of registration."""
        self._complete()
        return list(self._members.items())

    def __contains__(self, name: object) -> bool:
        self._complete()
        return name in self._members or (isinstance(name, str) and self._family(name) is not None)

    def __iter__(self) -> Iterator[str]:
        self._complete()
        return iter(sorted(self._members))

    def __len__(self) -> int:
        self._complete()
        return len(self._members)


@functools.lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> Any:
    """Entry points of all groups: each search opens files of every installed package."""
    return importlib.metadata.entry_points()


def registry_of(noun: str) -> Registry[Any]:
    """Return the registry of a kind of components, a key of :data:`HOMES`."""
    module, _, name = HOMES[noun].partition(":")
    return getattr(importlib.import_module(module), name)


def recorded_imports(config: Mapping[str, Any]) -> list[str]:
    """Return the modules that a saved configuration names; none if the field is absent or of another type."""
    names = config.get("imports", [])
    return [name for name in names if isinstance(name, str)] if isinstance(names, (list, tuple)) else []


def import_modules(modules: Iterable[str]) -> None:
    """Import modules of the user, which register components of their own.

    Parameters
    ----------
    modules : iterable of str
        Each is the name of a module, searched in the current folder too, or a path that ends in ``.py``. A
        module that is imported already is not run again.
    """
    for module in modules:
        try:
            if module.endswith(".py"):
                _import_file(module)
            else:
                _import_name(module)
        except InputError:
            raise
        except Exception as error:  # the module is the user's code: anything can be raised
            raise InputError(
                f"cannot import {module!r} ({_reason(error)}); --import takes the name of a module, sought "
                f"in {os.getcwd()} too, or the path of a .py file"
            ) from error


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _import_file(path: str) -> None:
    """Import a file under a name of its path, unless a module of that file is there."""
    real = os.path.realpath(path)
    for known in list(sys.modules.values()):
        if os.path.realpath(getattr(known, "__file__", None) or os.devnull) == real:
            # E.g. the training script itself, or the module imported by its name. A second run would register
            # its components twice.
            return
    # The name is that of the file and its place: two files named layers.py are two modules.
    name = f"{os.path.splitext(os.path.basename(real))[0]}_{hashlib.sha256(real.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, real)
    if spec is None or spec.loader is None or not os.path.isfile(real):
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    # Entered before it runs: dataclasses look their module up in sys.modules.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _import_name(name: str) -> None:
    """Import a module by name, also from the current folder, which installed commands do not search."""
    folder = os.getcwd()
    # Appended, not inserted first: a file of the user must not hide an installed module of the same name.
    is_searched = folder in sys.path
    if not is_searched:
        sys.path.append(folder)
    try:
        importlib.import_module(name)
    finally:
        if not is_searched:
            sys.path.remove(folder)


class _Deferred(types.ModuleType):
    """A module that is imported when an attribute of it is used first."""

    def __getattr__(self, name: str) -> Any:
        # doctest, inspect and others look for these in every module.
        if name.startswith("__"):
            raise AttributeError(name)
        module = importlib.import_module(self.__name__)
        # A copy of the names: later look-ups find them here and do not call this method.
        self.__dict__.update(module.__dict__)
        return getattr(module, name)


def deferred(module: str) -> Any:
    """Return a module that is imported when it is used first.

    Used for torch by the files that declare components. The launcher, ``dglkge plan`` and the documentation
    read only the facts of components; torch would cost them 200 MB and seconds.
    """
    return _Deferred(module)
