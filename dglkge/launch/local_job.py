"""A job on this machine: its plan, its files, the lock on the machine, and what stands in its way."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from dglkge.distributed.ip_config import Machine, is_read_by_dgl, write_ip_config
from dglkge.errors import InputError, NotReadyError
from dglkge.launch import script_runner
from dglkge.launch.kept_process import LocalExecutor
from dglkge.launch.ports import check_server_ports, describe_process, find_master_port
from dglkge.launch.process_plan import Host, JobSettings, PlannedProcess, plan_processes
from dglkge.launch.script_config import Needs, check_part_config
from dglkge.launch.shared_memory import (
    SHARED_MEMORY_FOLDER,
    await_keepers,
    check_shared_memory,
    dgl_segments,
    leftovers,
    remove_leftovers,
    segment_names,
    segment_users,
)


def local_interfaces() -> dict[str, str]:
    """Return this machine's IPv4 addresses and the network interface of each."""
    return {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def locate_hosts(machines: Sequence[Machine], interfaces: Mapping[str, str], num_cores: int) -> list[Host]:
    """Find the machines of a job that runs on this machine alone.

    Parameters
    ----------
    machines : sequence of Machine
        The lines of ip_config.txt; their addresses are this machine's.
    interfaces : mapping of str to str
        Addresses of this machine and their interfaces; all of 127.0.0.0/8 belongs to it besides.
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


class LocalJob:
    """The one machine of a job that needs no SSH; :class:`dglkge.launch.remote.cluster.Cluster` has several.

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
