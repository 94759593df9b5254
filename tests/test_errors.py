"""The errors that users see: kinds, and the text of an unknown name."""

from __future__ import annotations

import errno
import os

import pytest

from dglkge.errors import (
    CheckpointError,
    DglkgeError,
    InputError,
    JobError,
    NotReadyError,
    StorageError,
    exit_status_of,
    unknown_name,
    write_error,
)


def test_kinds():
    """A command's exit status hangs on these: input errors are 2, others are failures."""
    assert issubclass(InputError, DglkgeError) and issubclass(JobError, DglkgeError)
    assert issubclass(CheckpointError, InputError)
    assert not issubclass(JobError, InputError)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError(), 2),
        (CheckpointError(), 2),
        (NotReadyError(), 2),
        (JobError(), 1),
        (StorageError(), 1),
        (ZeroDivisionError(), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(), 0),
        (SystemExit("words"), 1),
    ],
)
def test_exit_statuses(error, status):
    """Only bad input is 2, after which nothing is started again."""
    assert exit_status_of(error) == status


@pytest.mark.parametrize(
    ("number", "status"),
    [("ENOSPC", 1), ("EDQUOT", 1), ("EIO", 1), ("EFBIG", 1), ("EACCES", 2), ("EROFS", 2)],
)
def test_what_cannot_be_written(number, status):
    """A full or broken disk is no bad input; a path without rights is."""
    code = getattr(errno, number)
    error = write_error("cannot write a", OSError(code, os.strerror(code)))
    assert (str(error), exit_status_of(error)) == (f"cannot write a: {os.strerror(code)}", status)


def test_h5py_errors_without_a_number():
    """h5py's message may carry the number in its text alone."""
    error = write_error("cannot write a", OSError("Can't write data (errno = 28)"))
    assert (str(error), exit_status_of(error)) == ("cannot write a: Can't write data (errno = 28)", 1)


@pytest.mark.parametrize(
    "got, known, message",
    [
        ("softmx", ["softmax", "nll"], "'softmx'; did you mean 'softmax'? known: 'nll', 'softmax'"),
        ("zzz", ["softmax", "nll"], "'zzz'; known: 'nll', 'softmax'"),
        ("zzz", [], "'zzz'; known: "),
        ("ab", ["abc", "abd"], "'ab'; did you mean 'abd' or 'abc'? known: 'abc', 'abd'"),
    ],
)
def test_unknown_name(got, known, message):
    error = unknown_name("loss", got, known)
    assert isinstance(error, InputError)
    assert str(error) == f"unknown loss {message}"


def test_unknown_name_among_many_is_short():
    known = [f"/m/{number:05d}" for number in range(30_000)]
    far = str(unknown_name("entity", "Paris", known[:1000], limit=2))
    assert far == "unknown entity 'Paris'; 1000 are known, among them '/m/00000', '/m/00001'"
    near = str(unknown_name("entity", "/m/000123", known[:1000], limit=2))
    assert near.startswith("unknown entity '/m/000123'; did you mean '/m/") and near.count("'") == 6


def test_unknown_name_reads_any_iterable():
    assert str(unknown_name("loss", "b", iter(["a"]))) == "unknown loss 'b'; known: 'a'"
