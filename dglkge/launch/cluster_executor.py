"""Runs the processes of a job on several machines, those of others over SSH."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from dglkge.errors import InputError
from dglkge.launch import keeper
from dglkge.launch.host_session import HostSession
from dglkge.launch.kept_process import KeptProcess
from dglkge.launch.process_plan import PlannedProcess
from dglkge.launch.ssh_command import python_from_stdin

CLEAN_UP_SECONDS = 5.0


class ClusterExecutor:
    """Several machines, each with a session.

    Parameters
    ----------
    sessions : mapping of str to HostSession
        By address.
    before : mapping of str to list of str
        The shared memory that was on each machine before the job.
    folder : str
        Where the processes run.
    """

    def __init__(
        self, sessions: Mapping[str, HostSession], before: Mapping[str, list[str]], folder: str
    ) -> None:
        self._sessions = sessions
        self._before = before
        self._folder = folder
        self._program = Path(keeper.__file__).read_bytes()

    def start(self, planned: PlannedProcess) -> KeptProcess:
        """Start one process under a keeper, whose program travels with the request."""
        session = self._sessions[planned.address]
        environment = {**session.environment, **planned.environment}
        return KeptProcess(
            dataclasses.replace(planned, environment=environment),
            session.command(python_from_stdin(session.python, self._program)),
            self._folder,
            self._before[planned.address],
            self._program,
            is_remote=session.ssh is not None,
        )

    def clean_up(self, segments: Mapping[str, set[str]]) -> list[str]:
        """Remove what the job has left on each machine; keepers of lost machines do so themselves."""
        removed = []
        for address, names in segments.items():
            session = self._sessions[address]
            if session.is_alive:
                question = {"segments": sorted(names), "before": self._before[address]}
                try:
                    removed.append(session.ask("clean_up", CLEAN_UP_SECONDS, **question))
                except InputError:  # it went while we asked
                    continue
        return list(itertools.chain.from_iterable(removed))
