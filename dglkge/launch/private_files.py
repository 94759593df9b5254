"""Files with secrets and tokens."""

from __future__ import annotations

import os
from pathlib import Path

from dglkge.errors import InputError


def read_private(path: Path, option: str) -> bytes:
    """Read a file with a secret.

    Parameters
    ----------
    path : Path
    option : str
        The option that names it, for messages. They do not show the path: it may be a secret that was given
        in place of a file.

    Raises
    ------
    InputError
        If other users can read it.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise InputError(f"other users can read the file of {option}: its mode is {mode:o}; chmod 600 it")
        return file.read()
