"""How long the launcher waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How long a :class:`dglkge.launch.supervisor.Supervisor` waits.

    Attributes
    ----------
    failure_seconds : float
        From SIGTERM to SIGKILL once a process has failed.
    stop_seconds : float
        The same for trainers after Ctrl-C, SIGTERM or SIGHUP, or once one of them has left with status 143;
        they may need it to save their state.
    exit_seconds : float
        How long servers may outlast the trainers, or trainers a server that has left in good order.
    kill_seconds : float
        How long processes may take to die of SIGKILL.
    """

    failure_seconds: float = 3.0
    stop_seconds: float = 120.0
    exit_seconds: float = 30.0
    kill_seconds: float = 10.0
