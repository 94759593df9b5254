"""A dataset appears under its name at once and complete, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dglkge.data.dataset import read_description
from dglkge.data.dataset_files import DESCRIPTION
from dglkge.errors import DglkgeError, InputError

PENDING_DESCRIPTION = f".{DESCRIPTION}"
_LOCK = ".lock"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk that is full, and of a user who may write no more to it."""


class OutputError(DglkgeError):
    """The dataset cannot be written: the disk is full, or fails. No other input would mend it."""


def check_output(output: Path, overwrite: bool) -> None:
    """Check that a dataset may be written there, and make the parent folder.

    Parameters
    ----------
    output : Path
        The dataset folder to be.
    overwrite : bool
        Whether a dataset that lies there may be replaced.

    Raises
    ------
    InputError
        If something lies there that must stay, or its parent folder cannot be made or takes no files.
    """
    try:
        _check_target(output, overwrite)
    except OSError as error:
        raise InputError(f"the output {output} cannot be used: {error.strerror}") from error
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the output's parent folder {parent} cannot be made: {error.strerror}") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"the output's parent folder {parent} is not writable")


def _check_target(output: Path, overwrite: bool) -> None:
    """Check what lies at the output."""
    try:
        mode = output.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        raise InputError(f"the output {output} exists and is no folder")
    if any(output.iterdir()):
        if not overwrite:
            raise InputError(f"the output {output} exists; choose another, or give --overwrite")
        try:
            read_description(output)
        except InputError as error:
            raise InputError(f"--overwrite replaces only a dataset, and {output} is none: {error}") from error


@contextmanager
def staged(output: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder beside the output, and rename it to the output when the block ends well.

    The block writes the description under :data:`PENDING_DESCRIPTION`; it gets its name last, so that the
    folder of a run that was killed never loads.

    On an exception the folder is removed. A killed run leaves it, under a name beginning with a dot, and the
    next run for the same output removes it; a lock on a file inside says whether its run still lives.

    Raises
    ------
    InputError
        If the output must stay (see :func:`check_output`), or another run is writing it.
    OutputError
        If a file cannot be written.
    """
    check_output(output, overwrite)
    output = output.absolute()
    folder = output.with_name(f".{output.name}.partial")
    with _locked(output, folder):
        try:
            _restore(output)
            check_output(output, overwrite)
            _remove_all_but_lock(folder)
            yield folder
            check_output(output, overwrite)
            _replace(output, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise OutputError(f"cannot write {output}: {error.strerror}") from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _locked(output: Path, folder: Path) -> Iterator[None]:
    """Make the temporary folder and lock it; the lock ends with the process, however that ends."""
    try:
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise InputError(
            f"another file is where its temporary folder would be: {folder}; "
            "remove it, or choose another output"
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        lock = open(folder / _LOCK, "a")
    except OSError as error:
        if made:
            folder.rmdir()
        raise _unusable(folder, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another run is writing {output} (it holds {folder})") from error
        yield


def _unusable(folder: Path, error: OSError) -> DglkgeError:
    """Return the error of a temporary folder: of a full disk, or of a place that takes none."""
    if error.errno in NO_ROOM:
        return OutputError(f"cannot write {folder}: {error.strerror}")
    return InputError(f"the temporary folder {folder} cannot be used: {error.strerror}")


def _remove_all_but_lock(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _replaced(output: Path) -> Path:
    """Name of a dataset that is being replaced."""
    return output.with_name(f".{output.name}.replaced")


def _restore(output: Path) -> None:
    """Give a dataset its name back, if the run that replaced it was killed before the new one had it."""
    if not output.exists() and _replaced(output).is_dir():
        _replaced(output).rename(output)


def _replace(output: Path, folder: Path) -> None:
    """Give the folder its name; where that fails, what lay there before stays."""
    old = _replaced(output)
    shutil.rmtree(old, ignore_errors=True)
    (folder / _LOCK).unlink()
    (folder / PENDING_DESCRIPTION).rename(folder / DESCRIPTION)
    replaces = output.exists()
    if replaces:
        output.rename(old)
    try:
        folder.rename(output)
    except BaseException:
        if replaces:
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)
