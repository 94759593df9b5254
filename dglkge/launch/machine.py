"""This machine and a job's place on it: facts, checks, registration, ports, tables, shared memory.

:func:`node_tasks` are what the launcher calls by name in a node program.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import ipaddress
import itertools
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from dglkge import __version__
from dglkge.data.dataset_files import check_partition, partial_path
from dglkge.distributed.addresses import DEFAULT_PORT, Machine, is_own_address, write_ip_config
from dglkge.distributed.jobs import JobEntry, Registration, job_of_segment, live_jobs, register_lock
from dglkge.distributed.world import JOB_VARIABLE
from dglkge.errors import InputError, NotReadyError, os_errors
from dglkge.launch import script_runner, table_storage
from dglkge.launch.ports import check_server_ports, find_master_port, free_ports
from dglkge.launch.process_plan import VISIBLE_VARIABLE
from dglkge.launch.remote import file_transfer
from dglkge.launch.table_storage import MachineNeeds
from dglkge.planning.host import cores_to_use, quota_of_cores


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


DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
"""Where the driver has a folder for each GPU; counted where ``nvidia-smi`` is missing."""

LIST_SECONDS = 10.0
"""Limit for ``nvidia-smi -L``, which initializes the driver."""


def usable_gpus() -> tuple[str, ...]:
    """Return the GPUs that trainers on this machine may use, each as ``CUDA_VISIBLE_DEVICES`` names it.

    Neither CUDA nor torch is loaded.
    """
    return find_gpus(os.environ) if torch_has_cuda() else ()


def find_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of this machine that an environment allows."""
    count, allowed = _count_gpus(environment), environment.get(VISIBLE_VARIABLE)

    def is_gpu(word: str) -> bool:
        return bool(word) and (re.fullmatch(r"-?\d+", word) is None or 0 <= int(word) < count)

    words = map(str, range(count)) if allowed is None else map(str.strip, allowed.split(","))
    # As CUDA reads the list: it ends at the first number of no GPU, such as -1.
    return tuple(itertools.takewhile(is_gpu, words)) if count else ()


def _count_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs on this machine."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    try:
        if program is None:
            return len(os.listdir(DRIVER_FOLDER))
        done = subprocess.run(
            [program, "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIST_SECONDS,
            env=dict(environment)
        )  # fmt: skip
        return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
    except (OSError, subprocess.TimeoutExpired):  # a driver that does not answer: no GPU to train on
        return 0


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built with CUDA, from its version file; loading it takes 1 s."""
    spec = importlib.util.find_spec("torch")
    with contextlib.suppress(OSError):
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            return re.search(r"^cuda\b[^=\n]*= *['\"]", text, re.MULTILINE) is not None
    return False


FILES_OF_PROCESS = 64
"""Open files of a launcher, node program or trainer besides those for the other processes of a job."""


def allow_open_files(num_processes: int) -> None:
    """Raise the limit of this process and its children as far as a job of so many processes needs it.

    A trainer has a connection to each process, the launcher its log. Raises InputError if the highest limit
    that this user may set is too low.
    """
    needed = FILES_OF_PROCESS + num_processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        words = f"each process of a job of {num_processes} needs {needed} open files, and the limit is {hard}"
        remedy = "raise it (ulimit -n, LimitNOFILE of systemd), or start fewer trainers"
        raise InputError(f"{words}: {remedy}")
    # A sandbox may forbid it; then a later open shows the limit.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def machine_addresses(machines: Sequence[Machine]) -> list[str]:
    """Return the IPv4 address of each machine.

    Raises
    ------
    NotReadyError
        If a name has no IPv4 address.
    InputError
        If two have the same address, or a loopback address is among several.
    """
    addresses: list[str] = []
    for machine in machines:  # DGL's sockets take only numbers
        with os_errors(NotReadyError, f"no IPv4 address for host {machine.address!r} of ip_config"):
            entries = socket.getaddrinfo(machine.address, None, socket.AF_INET, socket.SOCK_STREAM)
            addresses.append(str(entries[0][4][0]))
    if len(machines) > 1 and all(map(is_own_address, addresses)):
        raise InputError(
            f"ip_config names this machine {len(machines)} times ({', '.join(addresses)}): the shared memory "
            "of two DGL machines on one host would collide; give one line and partition into one part"
        )
    for address, machine in zip(addresses, machines):
        if ipaddress.IPv4Address(address).is_loopback and len(machines) > 1:
            words = f"ip_config names {machine.address} among {len(machines)} machines: the others cannot"
            raise InputError(f"{words} reach a loopback address; give the machine's address on their network")
        if addresses.count(address) > 1:
            raise InputError(f"ip_config names {address} {addresses.count(address)} times, under other names")
    return addresses


def has_variable(process: psutil.Process, name: str, value: str) -> bool:
    """Whether a process was started with a variable; False if it has ended or is another user's."""
    with contextlib.suppress(psutil.Error):
        deadline = time.monotonic() + EXEC_SECONDS
        # After execve the kernel shows neither its command line nor its environment for a moment.
        while not process.cmdline() and process.exe() and time.monotonic() < deadline:
            time.sleep(0.001)
        return bool(process.environ().get(name) == value)
    return False


EXEC_SECONDS = 1.0
"""Limit of the wait for a process that has just been started to show its environment."""

ENTRY_BYTES = 2**16
"""Room in shared memory for the entry of a job."""

ENDING_SECONDS = 15.0
"""Limit of the wait for node programs that end the processes of a lost launcher; they take 8 s at most."""

KILL_SECONDS = 5.0
"""Time for processes to end after SIGKILL; one that a dead disk blocks in the kernel is then left alone."""

POLL_SECONDS = 0.1


def wait_for_end(find: Callable[[], list[int]], seconds: float, whose: str, what: str = "pid") -> None:
    """Wait until no pids of processes are found; raises NotReadyError with them after some seconds."""
    deadline = time.monotonic() + seconds
    while pids := find():
        if time.monotonic() >= deadline:
            words = f"have not ended on this machine after {seconds:g} s ({what} {', '.join(map(str, pids))})"
            raise NotReadyError(f"processes of {whose} {words}; end them")
        time.sleep(POLL_SECONDS)


def wait_for_ending_jobs(job: str = "", seconds: float = ENDING_SECONDS) -> None:
    """Wait for jobs whose launcher is lost: their processes hold ports, memory and files of their run.

    An earlier node program of `job` counts too. Raises NotReadyError if one still runs after the timeout.
    """

    def ending() -> list[int]:
        entries = [entry for entry in live_jobs() if entry.owner == os.geteuid()]
        return [entry.pid for entry in entries if entry.is_ending or entry.job == job]

    wait_for_end(ending, seconds, "an earlier job", "its node program: pid")


def clean_up(job: str, table_folder: str = "") -> list[str]:
    """Remove what ended jobs, and `job`, which has no processes at present, have left on this machine.

    Processes and a folder of tables are left only if its node program was killed. Returns the segments of
    shared memory that were removed.
    """

    def kill_processes() -> list[int]:
        processes = [process for process in psutil.process_iter() if has_variable(process, JOB_VARIABLE, job)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return [process.pid for process in processes]

    if job:
        with contextlib.suppress(NotReadyError):
            wait_for_end(kill_processes, KILL_SECONDS, "the job")
    if job_of_segment(Path(table_folder).name) == job:
        shutil.rmtree(table_folder, ignore_errors=True)
    return table_storage.remove_segments(job)


class MachineJob:
    """A job on this machine: its registration, ports, planned memory and tables."""

    def __init__(self) -> None:
        self._registration: Registration | None = None
        self._tables = contextlib.ExitStack()

    @property
    def entry(self) -> JobEntry:
        """Entry of the registered job; an empty one without it."""
        return JobEntry("") if self._registration is None else self._registration.entry

    def register(self, entry: JobEntry) -> None:
        """Register the job, or prepare the machine for its next attempt; raises NotReadyError."""
        if self._registration is None:
            wait_for_ending_jobs(entry.job)
            self._registration = Registration(entry)
        self.update(ports=())  # those of the attempt before
        self._tables.close()
        clean_up(self.entry.job)

    def update(self, **changes: Any) -> None:
        """Change fields of the entry, if the job is registered; it is not in a dry run."""
        if self._registration is not None:
            self._registration.update(**changes)

    def choose_server_ports(self, address: str, num_servers: int) -> int:
        """Return the first of free ports in a row for the servers, from 30050 to 30549.

        Other jobs that register here keep theirs. Raises NotReadyError if there are none.
        """
        words = f"{num_servers} free port(s) {{}} on {address} for the servers"
        with register_lock():
            first = free_ports(address, DEFAULT_PORT, num_servers, self._ports_of_others(), words)
            self.update(ports=tuple(range(first, first + num_servers)))
        return first

    def choose_master_port(self, address: str, avoid: Sequence[int]) -> int:
        """Return a free port for torch's rendezvous, which binds it seconds later; others keep theirs."""
        with register_lock():
            port = find_master_port(address, self._ports_of_others().union(avoid))
            self.update(ports=(*self.entry.ports, port))
        return port

    def _ports_of_others(self) -> set[int]:
        return {port for entry in live_jobs() if entry.job != self.entry.job for port in entry.ports}

    def claim(self, needs: MachineNeeds) -> tuple[str, str]:
        """Check that the plan fits beside those of other jobs, enter it, and make the folder of tables.

        Returns the folder and a note about it: empty if the tables are in shared memory, the folder also in
        a dry run. Raises NotReadyError if they fit neither there nor, where that is possible, into a folder.
        """
        shared, memory, folder, note = needs.shared_memory_bytes, needs.memory_bytes, "", ""
        with register_lock():
            base, reason = self._base_of_tables(needs)
            if base is not None:
                table_storage.check_shared_memory(needs.structure_bytes + ENTRY_BYTES, self.entry.job)
                in_files, shared = shared - needs.structure_bytes, needs.structure_bytes
                memory -= in_files
                note = f"tables are files in {base} ({in_files / 1e9:.2f} GB): {reason}"
                if self._registration is not None:
                    tables = table_storage.TableFolder(base, self.entry.job)
                    self._tables.callback(tables.remove)
                    folder = str(tables.path)
            self.update(shared_memory_bytes=shared, memory_bytes=memory)
        return folder, note

    def _base_of_tables(self, needs: MachineNeeds) -> tuple[Path | None, str]:
        """Return the folder in which tables shall be files, and why; None for shared memory."""
        reason, shared = "tables.storage is disk", needs.shared_memory_bytes
        if needs.storage != "disk":
            try:
                table_storage.check_shared_memory(shared and shared + ENTRY_BYTES, self.entry.job)
                return None, ""
            except NotReadyError as error:
                reason = str(error)
                if not needs.structure_bytes:  # a script of another project: how it shares is unknown
                    raise
        folders = [Path(folder) for folder in needs.table_folders]
        folders = folders or table_storage.usual_folders(on_disk=needs.storage == "disk")
        return table_storage.roomy_folder(folders, shared - needs.structure_bytes, f"{reason}; "), reason

    def release(self) -> None:
        """Remove tables and shared memory, end the registration."""
        self._tables.close()
        if self._registration is not None:
            clean_up(self.entry.job)
            self._registration.release()
            self._registration = None


COMPARED_PACKAGES = ("dgl", "torch")


def describe_machine(python: str = sys.executable) -> dict[str, Any]:
    """Return facts for the plan (cores, GPUs, interfaces, runner), and versions to compare."""
    # From the packages' metadata: importing dgl and torch would take seconds on each machine.
    versions: dict[str, str | None] = dict.fromkeys(COMPARED_PACKAGES)
    for name in COMPARED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name).partition("+")[0]  # not +cpu
    return {
        "versions": {"python": ".".join(map(str, sys.version_info[:2])), "dglkge": __version__, **versions},
        "interfaces": local_interfaces(),
        "num_cores": usable_cores(),
        "gpus": usable_gpus(),
        "runner": [python, str(Path(script_runner.__file__).resolve())],
    }


def check_machine(
    held: MachineJob,
    *,
    servers: tuple[str, int, int],
    num_processes: int,
    folder: str,
    script: str | None,
    partition: tuple[str, int | None, int] | None,
    needs: Mapping[str, Any],
) -> dict[str, Any]:
    """Check for all problems that would keep a job from running on this machine.

    Parameters
    ----------
    held : MachineJob
    servers : tuple
        Address of the machine's servers, port of the first, and their number.
    num_processes : int
        Of the job.
    folder, script : str
        Working folder of the processes, and a file that must exist, relative to it.
    partition : tuple or None
        DGL's partition file, relative to the folder; the machine's own part (None: not to be checked); and
        how many parts there must be.
    needs : mapping
        Fields of :class:`MachineNeeds`.

    Returns
    -------
    dict
        ``problems``, a list of sentences, each with whether it is bad input; ``fingerprint`` of the partition
        file or None; ``table_folder`` of the tables if they are files, else empty, and ``note`` about it.
    """
    problems: list[tuple[str, bool]] = []

    def attempt(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        # A check that fails does not keep the others from running.
        except InputError as error:
            problems.append((str(error), not isinstance(error, NotReadyError)))
            return None

    # All checks run, so that the user gets all problems of a machine at once.
    if not is_own_address(servers[0]):
        # DGL (rpc_client.get_local_machine_id) would silently take this machine for machine 0.
        words = f"none of its interfaces has the address {servers[0]} that ip_config gives it "
        problems.append((f"{words}(it has {', '.join(sorted(local_interfaces()))})", True))
    if not os.path.isdir(folder):
        words = f"has no folder {folder}; give another --workspace, or --sync to have it made"
        problems.append((words, True))
    elif script is not None and not os.path.isfile(os.path.join(folder, script)):
        problems.append((f"has no script {os.path.join(folder, script)}; --sync brings it there", True))
    attempt(check_server_ports, *servers)
    attempt(allow_open_files, num_processes)
    table_folder, note = attempt(held.claim, MachineNeeds(**needs)) or ("", "")
    fingerprint = None
    if partition is not None:
        path, part_id, num_parts = partition
        fingerprint = attempt(check_partition, Path(folder, path), part_id, num_parts)
    return {"problems": problems, "fingerprint": fingerprint, "note": note, "table_folder": table_folder}


def write_job_files(log_dir: str, machines: Sequence[Sequence[Any]]) -> None:
    """Create the log folder with the job's ip_config.txt; several machines may share it."""
    path = Path(log_dir, "ip_config.txt")
    with os_errors(InputError, f"cannot write logs to {log_dir}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into its place: machines with a shared disk write the same file at the same time.
        write_ip_config(partial_path(path), [Machine(address, port) for address, port in machines])
        partial_path(path).replace(path)


def node_tasks(job: MachineJob, python: str) -> dict[str, Callable[..., Any]]:
    """Return the tasks of a node program by name, given its job and the interpreter of its processes."""
    return {
        "describe": functools.partial(describe_machine, python),
        "choose_server_ports": job.choose_server_ports,
        "choose_master_port": job.choose_master_port,
        "check": functools.partial(check_machine, job),
        "write_job_files": write_job_files,
        "clean_up": clean_up,
        **file_transfer.TASKS,
    }
