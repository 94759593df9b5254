"""One job per machine: DGL's names of shared memory carry no job's name, so two jobs would share tables."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator

from dglkge.errors import NotReadyError
from dglkge.launch.keeper_records import await_keepers, remove_leftovers
from dglkge.launch.ports import describe_process
from dglkge.launch.shared_memory import SHARED_MEMORY_FOLDER

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def hold_machine(folder: str = SHARED_MEMORY_FOLDER) -> Iterator[None]:
    """Hold the machine's shared memory for one job; what killed jobs have left there is removed.

    The lock is on the folder itself: it leaves no file, ends with its holder however that ends, and reaches
    exactly as far as the shared memory does (containers with a folder of their own do not see each other).

    Parameters
    ----------
    folder : str
        Where POSIX shared memory lies.

    Raises
    ------
    NotReadyError
        If another job holds it (the message names its launcher), or processes of one do not end.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NotReadyError(f"cannot open {folder}, where DGL's tables lie: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotReadyError(
                f"another job runs on this machine ({_describe_holder(folder)}): the names of DGL's "
                "shared memory do not tell jobs apart, so two would overwrite each other; "
                "wait for it or end it"
            ) from None
        clear_machine(folder)
        yield
    finally:
        os.close(descriptor)


def clear_machine(folder: str = SHARED_MEMORY_FOLDER) -> None:
    """Wait for the keepers of earlier jobs and attempts, and remove what killed ones have left.

    Only the holder of the machine may call it.

    Raises
    ------
    NotReadyError
        If a keeper does not end.
    """
    await_keepers(folder)
    removed = remove_leftovers(folder)
    if removed:
        logger.info("removed %d segments of shared memory that a killed job had left", len(removed))


def machine_holder(folder: str = SHARED_MEMORY_FOLDER) -> int | None:
    """Return the process that holds a folder of shared memory; 0 where it cannot be seen from here.

    Returns None if no process holds it. Reads the kernel's list of locks (man 5 proc_locks) and takes none.
    """
    status = os.stat(folder)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == device:
                return max(0, int(fields[4]))
    return None


def _describe_holder(folder: str) -> str:
    """Name the process that holds the lock, where it can be seen."""
    pid = machine_holder(folder)
    return describe_process(pid) if pid else "its process cannot be seen from here"
