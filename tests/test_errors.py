"""Errors that users see, registries of names, and locks where the file system has none."""

from __future__ import annotations

import errno
import fcntl
import os
import sys

import pytest

from dglkge.errors import (
    CheckpointError,
    InputError,
    JobError,
    NotReadyError,
    StorageError,
    exit_status_of,
    unknown_name,
    write_error,
)
from dglkge.file_lock import try_lock, wait_for_lock
from dglkge.registry import Registry, import_modules


def test_exit_statuses():
    """Only bad input is 2, after which nothing is started again."""
    ends = {0: [SystemExit()], 1: [JobError(), StorageError(), ZeroDivisionError(), SystemExit("words")]}
    ends |= {2: [InputError(), CheckpointError(), NotReadyError()], 130: [KeyboardInterrupt()]}
    for status, errors in {**ends, 143: [SystemExit(143)]}.items():
        assert [exit_status_of(error) for error in errors] == [status] * len(errors)


def test_what_cannot_be_written():
    """A full or broken disk is no bad input; a path without rights is. h5py has the number in its text."""
    numbers = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG), 1)
    numbers |= dict.fromkeys((errno.EACCES, errno.EROFS), 2)
    causes = [(OSError(number, os.strerror(number)), status) for number, status in numbers.items()]
    for cause, status in [*causes, (OSError("Can't write data (errno = 28)"), 1)]:
        error = write_error("cannot write a", cause)
        assert str(error) == f"cannot write a: {cause.strerror or cause}" and exit_status_of(error) == status


@pytest.mark.parametrize(
    "got, known, message",
    [
        ("softmx", ["softmax", "nll"], "'softmx'; did you mean 'softmax'? known: 'nll', 'softmax'"),
        ("zzz", ["softmax", "nll"], "'zzz'; known: 'nll', 'softmax'"),
        ("zzz", [], "'zzz'; known: "),
        ("b", iter(["a"]), "'b'; known: 'a'"),
        ("ab", ["abc", "abd"], "'ab'; did you mean 'abd' or 'abc'? known: 'abc', 'abd'"),
    ],
)
def test_unknown_name(got, known, message):
    assert str(unknown_name("loss", got, known)) == f"unknown loss {message}"


def test_unknown_name_among_many_is_short():
    known = [f"/m/{number:05d}" for number in range(30_000)]
    far = str(unknown_name("entity", "Paris", known[:1000], limit=2))
    assert far == "unknown entity 'Paris'; 1000 are known, among them '/m/00000', '/m/00001'"
    near = str(unknown_name("entity", "/m/000123", known[:1000], limit=2))
    assert near.startswith("unknown entity '/m/000123'; did you mean '/m/") and near.count("'") == 6


def test_members_are_found_by_name_and_registered_once():
    shapes = Registry("shape")
    members = {name: shapes.register(name)(type(name, (), {})) for name in ("square", "circle")}
    assert shapes.get("circle") is members["circle"] and shapes.get("square") is members["square"]
    assert list(shapes) == ["circle", "square"] and len(shapes) == 2
    assert len(Registry("colour")) == 0 and list(Registry("colour")) == []
    with pytest.raises(InputError, match="^unknown shape 'sqare'; did you mean 'square'. known: 'circle', '"):
        shapes.get("sqare")
    with pytest.raises(ValueError, match=r"^the shape 'circle' is registered already$"):
        shapes.register("circle")(int)
    marker = object()
    assert shapes.register("marker")(marker) is shapes.get("marker") is marker


@pytest.mark.parametrize("is_searched", [True, False])
def test_an_import_leaves_the_search_path_as_it_was(tmp_path, monkeypatch, is_searched):
    """The current folder is searched last, and keeps its place where it is searched anyway."""
    name = f"own_module_{is_searched}".lower()
    (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path = [str(tmp_path), *sys.path] if is_searched else [item for item in sys.path if item != str(tmp_path)]
    monkeypatch.setattr(sys, "path", list(path))
    import_modules([name])
    assert name in sys.modules
    assert sys.path == path


@pytest.mark.parametrize("lock", [try_lock, lambda file: wait_for_lock(file, 0.1)])
def test_a_file_system_without_locks(lock, tmp_path, monkeypatch, caplog):
    """Commands go on with a warning; any other failure of the disk is an error."""

    def fail(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with open(tmp_path / "lock", "w") as file:
        number = errno.ENOLCK
        assert lock(file)
        assert f"the file system of {tmp_path}/lock has no locks (No locks available)" in caplog.text
        number = errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            lock(file)
        number = errno.EWOULDBLOCK
        assert not lock(file)
