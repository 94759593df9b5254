"""Locks on files and folders between processes of one machine, with a limit."""

from __future__ import annotations

import fcntl
import time
from typing import IO, Any

POLL_SECONDS = 0.05


def wait_for_lock(file: int | IO[Any], seconds: float) -> bool:
    """Take the exclusive lock of an open file or folder.

    The kernel releases it when the file is closed or the process ends, however it ends.

    Parameters
    ----------
    file : int or file object
        An open file, or the descriptor of an open folder: locking the folder itself leaves no file behind.
    seconds : float
        Limit of the wait.

    Returns
    -------
    bool
        False if another process has held the lock for that time.

    Raises
    ------
    OSError
        If the file system has no locks.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)
