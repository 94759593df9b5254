"""Limit of open files (``ulimit -n``) of the launcher."""

from __future__ import annotations

import contextlib
import resource

from dglkge.errors import InputError

FILES_OF_PROCESS = 4
"""Three pipes to the watchdog of a process, and its log."""

FILES_OF_LAUNCHER = 32
"""All others: standard streams, the lock on the machine, files that are read, connections that are set up."""


def allow_open_files(num_processes: int) -> None:
    """Raise this process's limit as far as a job needs it; processes that it starts inherit the limit.

    Parameters
    ----------
    num_processes : int
        Processes of the job.

    Raises
    ------
    InputError
        If the highest limit that this user may set is too low.
    """
    needed = FILES_OF_PROCESS * num_processes + FILES_OF_LAUNCHER
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"the launcher of {num_processes} processes needs {needed} open files, and the limit is {hard}: "
            "raise it (ulimit -n, LimitNOFILE of systemd), or start fewer trainers"
        )
    with contextlib.suppress(
        OSError, ValueError
    ):  # a sandbox may forbid it; then a later open shows the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
