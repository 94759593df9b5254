"""Site of a job on this machine alone, the lock on a machine, and checks that remote agents use too."""

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
from typing import Callable

import psutil

from dglkge.config import Config
from dglkge.distributed.ip_config import Machine, is_read_by_dgl, write_ip_config
from dglkge.errors import InputError, NotReadyError
from dglkge.launch import script_runner
from dglkge.launch.ports import check_server_ports, describe_pid, find_master_port
from dglkge.launch.process_plan import Host, JobSettings, Places, PlannedProcess, plan_processes
from dglkge.launch.script_config import Needs, check_part_config
from dglkge.launch.shared_memory import (
    SHARED_MEMORY_FOLDER,
    check_shared_memory,
    dgl_segments,
    remove_stale_segments,
    segment_names,
    segment_users,
    stale_segments,
    wait_for_watchdogs,
)
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


@contextlib.contextmanager
def lock_machine(folder: str = SHARED_MEMORY_FOLDER) -> Iterator[None]:
    """Lock the machine's shared memory for one job; remove segments that killed jobs have left.

    The lock is on the folder itself: it needs no file, the kernel releases it when the process ends, and it
    has the same scope as the shared memory (containers with a folder of their own do not share it).

    Parameters
    ----------
    folder : str
        Folder of POSIX shared memory.

    Raises
    ------
    NotReadyError
        If another job holds the lock (the message names its launcher), or processes of one do not end.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NotReadyError(f"cannot open {folder}, where DGL's tables lie: {error.strerror}") from None
    try:
        try:
            # Python opens files with O_CLOEXEC: children do not inherit the lock, so it ends with the
            # launcher.
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
    """Wait for the watchdogs of earlier jobs and attempts, and remove segments of killed ones.

    The caller must hold the machine's lock.

    Raises
    ------
    NotReadyError
        If a watchdog does not end.
    """
    wait_for_watchdogs(folder)
    removed = remove_stale_segments(folder)
    if removed:
        logger.info("removed %d segments of shared memory that a killed job had left", len(removed))


def machine_lock_owner(folder: str = SHARED_MEMORY_FOLDER) -> int | None:
    """Return the pid that holds the lock of :func:`lock_machine`; 0 in another container, None if free.

    Reads the kernel's list of locks (man 5 proc_locks), without a lock of its own.
    """
    status = os.stat(folder)
    # The form of a file in /proc/locks: major and minor number in hex, inode in decimal.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == device:
                return max(0, int(fields[4]))
    return None


def _describe_holder(folder: str) -> str:
    """Describe the process that holds the lock."""
    pid = machine_lock_owner(folder)
    return describe_pid(pid) if pid else "its process cannot be seen from here"


class LocalSite:
    """This machine alone, without SSH: an implementation of :class:`dglkge.launch.site.Site`.

    Parameters
    ----------
    folder : str
        Working folder of the processes.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._held = contextlib.ExitStack()
        self._is_held = False

    def connect(self, machines: Sequence[Machine], is_locked: bool) -> list[Host]:
        """Find this machine in ip_config, and lock it for the job.

        Raises
        ------
        InputError
            If ip_config has it several times, or another job holds the lock.
        """
        hosts = locate_hosts(machines, local_interfaces(), usable_cores())
        if is_locked and self._is_held:
            clear_machine()  # of segments of the attempt before
        elif is_locked:
            self._held.enter_context(lock_machine())
            self._is_held = True
        return hosts

    def check(self, hosts: Sequence[Host], settings: JobSettings, needs: Needs) -> None:
        """Check for problems that would keep the job from running.

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
        return plan_processes(hosts, settings, master_port, runner, os.environ)

    def warnings(self) -> list[str]:
        """Return warnings about shared memory."""
        return shared_memory_warnings()

    def write_job_files(self, log_dir: Path, hosts: Sequence[Host]) -> None:
        """Do nothing: the launcher's own log folder is the job's."""

    def executor(self) -> LocalExecutor:
        """Return what runs processes here."""
        return LocalExecutor(self._folder)

    def close(self) -> None:
        """Release the lock."""
        self._held.close()
        self._is_held = False


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


def shared_memory_warnings() -> list[str]:
    """Return warnings about DGL's shared memory that exists before the job.

    Returns
    -------
    list of str
        About other jobs (started without this launcher), and about segments that no process has mapped.
    """
    segments = dgl_segments(segment_names()) - stale_segments()  # removed at the lock
    users = segment_users(segments)
    warnings = [
        f"another DGL job may run on this machine and share its tables: {describe_pid(pid)}"
        for pid in sorted(set(users.values()))
    ]
    stale = sorted(segments - users.keys())
    if stale:
        some = ", ".join(stale[:3]) + (", ..." if len(stale) > 3 else "")
        warnings.append(
            f"{len(stale)} shared-memory segments of an earlier DGL job lie in /dev/shm, used by no process "
            f"({some}); remove them, or DGL takes over those of equal names"
        )
    return warnings


def find_unreadable_arguments(ip_config: Path, command: Sequence[str], folder: Path) -> list[str]:
    """Warn if an argument of the script is an ip_config.txt that this launcher reads and DGL does not.

    Scripts for DGL's launcher pass the file to ``dgl.distributed.initialize`` themselves.

    Parameters
    ----------
    ip_config : Path
        The file that the launcher read.
    command : sequence of str
        The script and its arguments.
    folder : Path
        Working folder of the script.
    """
    # Arguments may have the form --ip_config=FILE: the part behind "=" is compared.
    named = [word for word in command[1:] if folder / word.rpartition("=")[2] == ip_config]
    if not named or is_read_by_dgl(ip_config):
        return []
    return [
        f"the script is given {named[0]}, where DGL's own parser stops at the first blank line, comment or "
        "third column; unless the script reads the variable DGL_IP_CONFIG, keep to lines 'ip port'"
    ]
