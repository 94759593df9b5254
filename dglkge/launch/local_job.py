"""A job on this machine: its plan, its files, and what stands in its way."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dglkge.distributed.ip_config import Machine, is_read_by_dgl, write_ip_config
from dglkge.errors import NotReadyError
from dglkge.launch import script_runner
from dglkge.launch.job_lock import clear_machine, hold_machine
from dglkge.launch.keeper_records import leftovers
from dglkge.launch.local_executor import LocalExecutor
from dglkge.launch.local_hosts import local_interfaces, locate_hosts, usable_cores
from dglkge.launch.part_config import check_part_config
from dglkge.launch.ports import check_server_ports, describe_process, find_master_port
from dglkge.launch.process_plan import Host, JobSettings, PlannedProcess, plan_processes
from dglkge.launch.script_config import Needs
from dglkge.launch.shared_memory import check_shared_memory, dgl_segments, segment_names, segment_users


class LocalJob:
    """The one machine of a job that needs no SSH; see :class:`dglkge.launch.cluster.Cluster`, its sibling.

    Parameters
    ----------
    folder : str
        Where the processes run.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._held = contextlib.ExitStack()
        self._is_held = False

    def connect(self, machines: Sequence[Machine], is_locked: bool) -> list[Host]:
        """Find this machine among those of ip_config, and hold it for the job.

        Raises
        ------
        InputError
            If it is there several times, or another job holds it.
        """
        hosts = locate_hosts(machines, local_interfaces(), usable_cores())
        if is_locked and self._is_held:
            clear_machine()  # of what the attempt before has left
        elif is_locked:
            self._held.enter_context(hold_machine())
            self._is_held = True
        return hosts

    def check(self, hosts: Sequence[Host], settings: JobSettings, needs: Needs) -> None:
        """Look for what would keep the job from running.

        Raises
        ------
        InputError
            If the partition file does not fit, a port is not free, or shared memory is too small.
        """
        check_shared_memory(needs.shared_memory_bytes.get(0, 0))
        if settings.part_config is not None:
            check_part_config(Path(settings.part_config), len(hosts))
        for host in hosts:
            check_server_ports(host.address, host.port, settings.num_servers)

    def plan(self, hosts: Sequence[Host], settings: JobSettings) -> list[PlannedProcess]:
        """Plan a job with this interpreter and a rendezvous port that is free now.

        Raises
        ------
        InputError
            If no port is free.
        """
        server_ports = range(hosts[0].port, hosts[0].port + settings.num_servers)
        master_port = find_master_port(hosts[0].address, server_ports)
        runner = (sys.executable, str(Path(script_runner.__file__).resolve()))
        return plan_processes(hosts, settings, master_port, runner, os.environ)

    def warnings(self) -> list[str]:
        """Return what was found that is no obstacle."""
        return find_leftovers()

    def write_job_files(self, log_dir: Path, hosts: Sequence[Host]) -> None:
        """Do nothing: the launcher's own log folder is the job's."""

    def executor(self) -> LocalExecutor:
        """Return what runs processes here."""
        return LocalExecutor(self._folder)

    def close(self) -> None:
        """Let the machine go."""
        self._held.close()
        self._is_held = False


def write_job_files(log_dir: Path, hosts: Sequence[Host]) -> None:
    """Make the log folder, with an ip_config.txt in it that DGL's own parser reads as we did.

    Raises
    ------
    NotReadyError
        If the folder cannot be written.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        write_ip_config(log_dir / "ip_config.txt", [Machine(host.address, host.port) for host in hosts])
    except OSError as error:
        raise NotReadyError(f"cannot write logs to {log_dir}: {error.strerror}") from None


def find_leftovers() -> list[str]:
    """Say which of DGL's shared memory is here before the job.

    Returns
    -------
    list of str
        Warnings: other jobs that use some (started without this launcher), and segments in nobody's use.
    """
    segments = dgl_segments(segment_names()) - leftovers()  # those are removed, by whoever holds the machine
    users = segment_users(segments)
    warnings = [
        f"another DGL job may run on this machine and share its tables: {describe_process(pid)}"
        for pid in sorted(set(users.values()))
    ]
    stale = sorted(segments - users.keys())
    if stale:
        some = ", ".join(stale[:3]) + (", ..." if len(stale) > 3 else "")
        warnings.append(
            f"{len(stale)} shared-memory segments of an earlier DGL job lie in /dev/shm, in nobody's use "
            f"({some}); remove them, or DGL takes over those of equal names"
        )
    return warnings


def find_unreadable_arguments(ip_config: Path, command: Sequence[str], folder: Path) -> list[str]:
    """Warn if the script is given an ip_config.txt that we read and DGL does not.

    Scripts for DGL's launcher hand the file to ``dgl.distributed.initialize`` themselves.

    Parameters
    ----------
    ip_config : Path
        The file that the launcher read.
    command : sequence of str
        The script and its arguments.
    folder : Path
        Where the script runs.
    """
    named = [word for word in command[1:] if folder / word.rpartition("=")[2] == ip_config]
    if not named or is_read_by_dgl(ip_config):
        return []
    return [
        f"the script is given {named[0]}, where DGL's own parser stops at the first blank line, comment or "
        "third column; unless the script reads the variable DGL_IP_CONFIG, keep to lines 'ip port'"
    ]
