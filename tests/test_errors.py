"""The errors that users see: kinds, and the text of an unknown name."""

from __future__ import annotations

import errno
import os

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
