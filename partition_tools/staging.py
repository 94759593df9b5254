"""A dataset appears under its name at once and complete, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dglkge.data.dataset import read_description
from dglkge.data.dataset_files import DESCRIPTION
from dglkge.errors import InputError

PENDING_DESCRIPTION = f".{DESCRIPTION}"
_LOCK = ".lock"


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
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise InputError(f"the output {output} exists and is no folder")
    if output.exists() and any(output.iterdir()):
        if not overwrite:
            raise InputError(f"the output {output} exists; choose another, or give --overwrite")
        try:
            read_description(output)
        except InputError as error:
            raise InputError(f"--overwrite replaces only a dataset, and {output} is none: {error}") from error
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the output's parent folder {parent} cannot be made: {error.strerror}") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"the output's parent folder {parent} is not writable")


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
    """
    check_output(output, overwrite)
    output = output.absolute()
    folder = output.with_name(f".{output.name}.partial")
    folder.mkdir(exist_ok=True)
    with open(folder / _LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another run is writing {output} (it holds {folder})") from error
        try:
            _remove_all_but_lock(folder)
            yield folder
            check_output(output, overwrite)
            _replace(output, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _remove_all_but_lock(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _replace(output: Path, folder: Path) -> None:
    old = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    (folder / _LOCK).unlink()
    if output.exists():
        output.rename(old)
    (folder / PENDING_DESCRIPTION).rename(folder / DESCRIPTION)
    folder.rename(output)
    shutil.rmtree(old, ignore_errors=True)
