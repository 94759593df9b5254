"""Locks on files and folders between processes of one machine, with a limit."""

from __future__ import annotations

import errno
import fcntl
import logging
import time
from typing import IO, Any

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
"""Errors of file systems without locks; NFS has none of folders, and says EBADF."""


def try_lock(file: int | IO[Any]) -> bool:
    """Take the exclusive lock of an open file or folder, without waiting.

    The kernel releases it when the file is closed or the process ends, however it ends. Where the file system
    has no locks it counts as taken, with a warning: what is written must have a name of its own until it is
    complete. Hosts that share a disk may not see each other's locks either.

    Parameters
    ----------
    file : int or file object
        An open file, or the descriptor of an open folder: locking the folder itself leaves no file behind.

    Returns
    -------
    bool
        False if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "the file system of %s has no locks (%s): start no two commands that write there at once",
            getattr(file, "name", "a folder"),
            error.strerror,
        )
    return True


def wait_for_lock(file: int | IO[Any], seconds: float) -> bool:
    """Take the exclusive lock of an open file or folder, waiting for so many seconds; see :func:`try_lock`.

    Returns
    -------
    bool
        False if another process has held the lock for that time.
    """
    end = time.monotonic() + seconds
    while not try_lock(file):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True
