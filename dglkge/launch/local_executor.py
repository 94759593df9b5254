"""Runs the processes of a job on this machine, without SSH."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dglkge.launch import keeper
from dglkge.launch.keeper_records import remove_leftovers
from dglkge.launch.kept_process import KeptProcess
from dglkge.launch.process_plan import PlannedProcess
from dglkge.launch.shared_memory import remove_job_segments, segment_names


class Executor(Protocol):
    """Where the processes of a job run."""

    def start(self, planned: PlannedProcess) -> KeptProcess:
        """Start one process under a keeper."""
        ...

    def clean_up(self, segments: Mapping[str, set[str]]) -> list[str]:
        """Remove the shared memory that the ended job has left, by machine; return its names."""
        ...


class LocalExecutor:
    """This machine.

    Parameters
    ----------
    folder : str
        Where the processes run.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before = segment_names()

    def start(self, planned: PlannedProcess) -> KeptProcess:
        """Start one process under a keeper, with the environment of the launcher."""
        # -I -S: the keeper neither needs nor waits for anything of the user's Python
        keeper_command = [sys.executable, "-I", "-S", str(Path(keeper.__file__).resolve())]
        return KeptProcess(planned, keeper_command, self._folder, self._before)

    def clean_up(self, segments: Mapping[str, set[str]]) -> list[str]:
        """Remove the shared memory that the ended job has left."""
        return remove_job_segments(set().union(*segments.values()), self._before) + remove_leftovers()
