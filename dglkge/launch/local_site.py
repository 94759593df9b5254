"""Site of a job on this machine alone, a job's place on a machine, and checks that remote agents use too."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from dglkge.config import Config
from dglkge.distributed.ip_config import Machine, write_ip_config
from dglkge.distributed.jobs import JobEntry, Registration, live_jobs, register_lock
from dglkge.errors import InputError, NotReadyError
from dglkge.launch import script_runner
from dglkge.launch.gpus import usable_gpus
from dglkge.launch.ports import check_server_ports, find_master_port, find_server_ports
from dglkge.launch.process_plan import Host, JobSettings, Places, PlannedProcess, plan_processes
from dglkge.launch.script_config import MachineNeeds, Needs, check_part_config
from dglkge.launch.shared_memory import (
    SHARED_MEMORY_FOLDER,
    check_shared_memory,
    remove_job_segments,
    remove_stale_segments,
    wait_for_watchdogs,
)
from dglkge.launch.table_files import TableFolder, roomy_folder, usual_folders
from dglkge.launch.watched_process import LocalExecutor
from dglkge.planning.control_groups import cores_to_use, quota_of_cores


def local_interfaces() -> dict[str, str]:
    """Return this machine's IPv4 addresses, each with its network interface."""
    return {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use: affinity and quota of its control groups."""
    # Not os.cpu_count(): a container or scheduler may allow fewer cores than the machine has.
    return cores_to_use(os.sched_getaffinity(0), quota_of_cores())


def locate_hosts(machines: Sequence[Machine], interfaces: Mapping[str, str], num_cores: int) -> list[Host]:
    """Return the host of a job that runs on this machine alone.

    Parameters
    ----------
    machines : sequence of Machine
        The lines of ip_config.txt; their addresses are this machine's.
    interfaces : mapping of str to str
        Addresses of this machine and their interfaces; all of 127.0.0.0/8 belongs to it too.
    num_cores : int
        Cores of this machine.

    Returns
    -------
    list of Host
        One host.

    Raises
    ------
    InputError
        If a name has no IPv4 address, or if there are several.
    """
    resolved = [resolve(machine.address) for machine in machines]
    if len(machines) > 1:
        raise InputError(
            f"ip_config names this machine {len(machines)} times ({', '.join(resolved)}): the shared memory "
            "of two DGL machines on one host would collide; give one line and partition into one part"
        )
    # 127.0.0.2 and others are no addresses of an interface, but all of them are reached by the loopback.
    loopback = interfaces.get("127.0.0.1", "lo")
    return [
        Host(address, machine.port, num_cores, interfaces.get(address, loopback))
        for address, machine in zip(resolved, machines)
    ]


def are_all_local(machines: Sequence[Machine], interfaces: Mapping[str, str]) -> bool:
    """Whether every machine is this one, so that no SSH is needed.

    Raises
    ------
    InputError
        If a name has no IPv4 address.
    """
    return all(is_local(resolve(machine.address), interfaces) for machine in machines)


def is_local(address: str, interfaces: Mapping[str, str]) -> bool:
    """Whether an IPv4 address is this machine's own."""
    return address in interfaces or ipaddress.IPv4Address(address).is_loopback


def resolve(address: str) -> str:
    """Return the IPv4 address of a host name (DGL's sockets take only numbers).

    Raises
    ------
    NotReadyError
        If the name has no IPv4 address.
    """
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise NotReadyError(f"no IPv4 address for host {address!r} of ip_config: {error.strerror}") from None
    return str(found[0][4][0])


logger = logging.getLogger(__name__)


def clear_machine(job: str = "", folder: str = SHARED_MEMORY_FOLDER) -> None:
    """Wait for the watchdogs of ended jobs and of this job's attempts, and remove what those have left.

    Raises
    ------
    NotReadyError
        If a watchdog does not end.
    """
    wait_for_watchdogs(job, folder)
    # Of earlier attempts: their processes have ended.
    removed = remove_job_segments(job, folder) + remove_stale_segments(folder)
    if removed:
        logger.info("removed %d segments of shared memory that a killed job had left", len(removed))


RECORD_BYTES = 2**17
"""Room in shared memory for the entry of a job and the records of its watchdogs, a few pages each."""


class MachineJob:
    """A job on this machine: its registration, ports, plan and tables; for launchers and their agents.

    Attributes
    ----------
    note : str
        Where the tables are, if they are files; else empty.
    """

    def __init__(self) -> None:
        self._registration: Registration | None = None
        self._tables: TableFolder | None = None
        self.note = ""

    @property
    def job(self) -> str:
        """Id of the registered job; empty without one."""
        return self._registration.entry.job if self._registration is not None else ""

    def register(self, entry: JobEntry) -> None:
        """Register the job, or prepare the machine for its next attempt.

        Raises
        ------
        NotReadyError
            If another job has the same run folder, or processes of an ended one do not end.
        """
        if self._registration is None:
            self._registration = Registration(entry)
        self._remove_tables()
        clear_machine(self.job)

    def choose_server_ports(self, address: str, num_servers: int) -> int:
        """Return the first of free ports for the servers; other jobs that register here keep theirs.

        Raises
        ------
        NotReadyError
            If there are none.
        """
        with register_lock():
            others = [entry for entry in live_jobs() if entry.job != self.job]
            first = find_server_ports(address, num_servers, {port for each in others for port in each.ports})
            if self._registration is not None:
                self._registration.update(ports=tuple(range(first, first + num_servers)))
        return first

    def claim(self, needs: MachineNeeds) -> str:
        """Check that the plan fits beside those of other jobs, enter it, and make the folder of tables.

        Returns
        -------
        str
            Folder of the tables, if they are files; empty: they are in shared memory.

        Raises
        ------
        NotReadyError
            If the tables fit neither into shared memory nor, where that is possible, into a folder.
        """
        self.note = ""
        shared, memory = needs.shared_memory_bytes, needs.memory_bytes
        with register_lock():
            base, reason = self._base_of_tables(needs)
            if base is not None:
                check_shared_memory(needs.structure_bytes + RECORD_BYTES, self.job)
                in_files, shared = shared - needs.structure_bytes, needs.structure_bytes
                memory -= in_files
                self.note = f"tables are files in {base} ({in_files / 1e9:.2f} GB): {reason}"
            if self._registration is None:
                return ""
            if base is not None:
                self._tables = TableFolder(base, self.job)
            self._registration.update(shared_memory_bytes=shared, memory_bytes=memory)
        return "" if self._tables is None else str(self._tables.path)

    def _base_of_tables(self, needs: MachineNeeds) -> tuple[Path | None, str]:
        """Return the folder in which tables shall be files, and why; None for shared memory."""
        reason = "tables.storage is disk"
        if needs.storage != "disk":
            try:
                check_shared_memory(
                    needs.shared_memory_bytes and needs.shared_memory_bytes + RECORD_BYTES, self.job
                )
                return None, ""
            except NotReadyError as error:
                reason = str(error)
                if not needs.structure_bytes:  # a script of another project: how it shares is unknown
                    raise
        needed = needs.shared_memory_bytes - needs.structure_bytes
        folders = [Path(folder) for folder in needs.table_folders] or usual_folders(needs.storage == "disk")
        base = roomy_folder(folders, needed)
        if base is None:
            raise NotReadyError(
                f"{reason}; files take {needed / 1e9:.2f} GB, and none of {', '.join(map(str, folders))} has "
                "that room: give another tables.folder"
            )
        return base, reason

    def _remove_tables(self) -> None:
        """Remove the files of tables of the attempt before."""
        if self._tables is not None:
            self._tables.remove()
            self._tables = None

    def release(self) -> None:
        """Remove the tables, end the registration."""
        self._remove_tables()
        if self._registration is not None:
            self._registration.release()
            self._registration = None


class LocalSite:
    """This machine alone, without SSH: an implementation of :class:`dglkge.launch.site.Site`.

    Parameters
    ----------
    folder : str
        Working folder of the processes.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._job = MachineJob()
        self._table_folder = ""

    def connect(self, machines: Sequence[Machine], entry: JobEntry | None) -> list[Host]:
        """Find this machine in ip_config, and register the job.

        Raises
        ------
        InputError
            If ip_config has it several times, or another job has the same run folder.
        """
        hosts = locate_hosts(machines, local_interfaces(), usable_cores())
        gpus = usable_gpus()
        hosts = [dataclasses.replace(host, gpus=gpus) for host in hosts]
        if entry is not None:
            self._job.register(entry)
        return hosts

    def with_ports(self, hosts: Sequence[Host], machines: Sequence[Machine], num_servers: int) -> list[Host]:
        """Choose free ports for the servers if ip_config gives none.

        Raises
        ------
        NotReadyError
            If there are none.
        """
        return [
            host
            if machine.has_port
            else dataclasses.replace(host, port=self._job.choose_server_ports(host.address, num_servers))
            for host, machine in zip(hosts, machines)
        ]

    def check(self, hosts: Sequence[Host], settings: JobSettings, needs: Needs) -> None:
        """Check for problems that would keep the job from running.

        Raises
        ------
        InputError
            If the partition file does not fit, a port is not free, or shared memory is too small.
        """
        self._table_folder = self._job.claim(needs.on_machine(0))
        if settings.part_config is not None:
            check_part_config(Path(settings.part_config), len(hosts))
        for host in hosts:
            check_server_ports(host.address, host.port, settings.num_servers)

    def send_files(
        self, command: Sequence[str], config: Config | None, part_config: str | None, places: Places
    ) -> None:
        """Do nothing: the files are on this machine."""

    def fetch_files(self, output: Path | None, log_dir: Path, places: Places) -> None:
        """Do nothing: the files are on this machine."""

    def fetching_versions(
        self, output: Path | None, places: Places, report: Callable[[str], None], seconds: float
    ) -> contextlib.AbstractContextManager[None]:
        """Do nothing: the files are on this machine."""
        return contextlib.nullcontext()

    def plan(self, hosts: Sequence[Host], settings: JobSettings) -> list[PlannedProcess]:
        """Plan a job with this interpreter and a rendezvous port that is free now.

        Raises
        ------
        InputError
            If no port is free.
        """
        server_ports = range(hosts[0].port, hosts[0].port + settings.num_servers)
        # Chosen at each attempt: another program may have taken the port of the attempt before.
        master_port = find_master_port(hosts[0].address, server_ports)
        runner = (sys.executable, str(Path(script_runner.__file__).resolve()))
        hosts = [dataclasses.replace(host, table_folder=self._table_folder) for host in hosts]
        return plan_processes(hosts, settings, master_port, runner, os.environ)

    def warnings(self) -> list[str]:
        """Return where the tables are, if they are files."""
        return [*filter(None, [self._job.note])]

    def write_job_files(self, log_dir: Path, hosts: Sequence[Host]) -> None:
        """Do nothing: the launcher's own log folder is the job's."""

    def executor(self) -> LocalExecutor:
        """Return what runs processes here."""
        return LocalExecutor(self._folder, self._job.job)

    def close(self) -> None:
        """End the registration."""
        self._job.release()


def write_job_files(log_dir: Path, hosts: Sequence[Host]) -> None:
    """Create the log folder with an ip_config.txt in the form that DGL's own parser reads.

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
