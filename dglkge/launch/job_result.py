"""How a job ended, in words for people, a status for the shell and a summary for programs."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass

from dglkge.distributed.preemption import RESTART_STATUS

LIKELY_CAUSES = {
    signal.SIGKILL: "kill -9, or the kernel was out of memory: see dmesg",
    signal.SIGBUS: "often /dev/shm is full: see df -h /dev/shm",
}


@dataclass(frozen=True)
class ProcessResult:
    """How one process ended.

    Attributes
    ----------
    name, address, log : str
        Which it was, where it ran, where its log lies.
    pid : int or None
        None if it never ran.
    status : int or None
        Its status, or minus the number of the signal that ended it; None if it did not end in time.
    """

    name: str
    address: str
    pid: int | None
    status: int | None
    log: str


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes
    ----------
    status : int
        Exit status of the launcher.
    reason : str or None
        What went wrong, None if nothing did.
    seconds : float
        How long the job ran.
    log_dir : str
        Folder of the logs.
    processes : tuple of ProcessResult
    is_interrupted : bool
        Whether the launcher itself was told to stop.
    """

    status: int
    reason: str | None
    seconds: float
    log_dir: str
    processes: tuple[ProcessResult, ...]
    is_interrupted: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return the summary that ``--json`` prints."""
        return asdict(self)


def exit_status(status: int) -> int:
    """Return the launcher's status for that of a process: its own, or 128 + the signal, as shells do."""
    return 128 - status if status < 0 else status


def describe_status(status: int) -> str:
    """Say how a process ended, e.g. ``was killed by signal 9 (SIGKILL)``."""
    if status == RESTART_STATUS:
        return f"ended with status {status}, which says: stopped on request, start me again"
    if status >= 0:
        return f"ended with status {status}"
    number = -status
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"was killed by signal {number}"
    cause = LIKELY_CAUSES.get(signal.Signals(number))
    return f"was killed by signal {number} ({name})" + (f" [{cause}]" if cause else "")


def describe_process(name: str, pid: int | None, address: str) -> str:
    """Name a process for people, e.g. ``trainer 1 (pid 12) on 127.0.0.1``."""
    return f"{name} (pid {pid}) on {address}" if pid is not None else f"{name} on {address}"
