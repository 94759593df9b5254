"""Where a job runs: on this machine alone, or on several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from dglkge.config import Config
from dglkge.distributed.ip_config import Machine
from dglkge.launch.kept_process import Executor
from dglkge.launch.local_job import LocalJob, are_all_local, local_interfaces
from dglkge.launch.process_plan import Host, JobSettings, Places, PlannedProcess
from dglkge.launch.remote.cluster import Cluster
from dglkge.launch.remote.session import SshSettings
from dglkge.launch.script_config import Needs


class Site:
    """This machine alone where ip_config names no other, else all machines; each attempt decides anew.

    Parameters
    ----------
    ssh : SshSettings
    python : str
        The interpreter on the machines of several.
    folder : str
        Where the processes run.
    has_own_disks : bool
        Whether files are brought to the machines and back; then also this one gets a copy.
    job : str
        Names the job in the leases of run folders.
    """

    def __init__(
        self, ssh: SshSettings, python: str, folder: str, has_own_disks: bool = False, job: str = ""
    ) -> None:
        self._has_own_disks = has_own_disks
        self._ssh = ssh
        self._python = python
        self._folder = folder
        self._name = job
        self._job: LocalJob | Cluster = LocalJob(folder)

    def connect(self, machines: Sequence[Machine], is_locked: bool) -> list[Host]:
        """Reach the machines of ip_config and hold them for the job.

        Raises
        ------
        InputError
            If ip_config does not make sense. What is wrong on machines, :meth:`check` raises.
        """
        is_alone = are_all_local(machines, local_interfaces()) and not self._has_own_disks
        if isinstance(self._job, LocalJob) != is_alone:
            self._job.close()
            if is_alone:
                self._job = LocalJob(self._folder)
            else:
                self._job = Cluster(self._ssh, self._python, self._folder, self._name)
        return self._job.connect(machines, is_locked)

    def send_files(
        self, command: Sequence[str], config: Config | None, part_config: str | None, places: Places
    ) -> None:
        """Bring the machines what they need where they share no disk."""
        if isinstance(self._job, Cluster) and self._has_own_disks:
            self._job.send_files(command, config, part_config, places)

    def bring_files(self, output: Path | None, log_dir: Path, places: Places) -> None:
        """Bring back what a job has written where the machines share no disk."""
        if isinstance(self._job, Cluster) and self._has_own_disks:
            self._job.bring_files(output, log_dir, places)

    def bringing_versions(
        self, output: Path | None, places: Places, say: Callable[[str], None], seconds: float
    ) -> contextlib.AbstractContextManager[None]:
        """Bring published versions while the job runs, where the machines share no disk."""
        if isinstance(self._job, Cluster) and self._has_own_disks and output is not None and seconds:
            return self._job.bringing_versions(output, places, say, seconds)
        return contextlib.nullcontext()

    def check(self, hosts: Sequence[Host], settings: JobSettings, needs: Needs) -> None:
        """Look for all that would keep the job from running.

        Raises
        ------
        InputError
            With every problem of every machine.
        """
        self._job.check(hosts, settings, needs)

    def plan(self, hosts: Sequence[Host], settings: JobSettings) -> list[PlannedProcess]:
        """Plan the job; its rendezvous port is free now."""
        return self._job.plan(hosts, settings)

    def warnings(self) -> list[str]:
        """Return what was found that is no obstacle."""
        return self._job.warnings()

    def write_job_files(self, log_dir: Path, hosts: Sequence[Host]) -> None:
        """Make the log folder and its ip_config.txt on machines that are not this one."""
        self._job.write_job_files(log_dir, hosts)

    def executor(self) -> Executor:
        """Return what runs processes there."""
        return self._job.executor()

    def close(self) -> None:
        """Let the machines go."""
        self._job.close()
