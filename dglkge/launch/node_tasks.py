"""Tasks of a node program, which the launcher calls by name: facts, checks, files, the job's registration."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge import __version__
from dglkge.distributed.ip_config import Machine, write_ip_config
from dglkge.errors import InputError, NotReadyError
from dglkge.launch import script_runner
from dglkge.launch.gpus import usable_gpus
from dglkge.launch.machine import (
    MachineJob,
    allow_open_files,
    clean_up,
    is_local,
    local_interfaces,
    usable_cores,
)
from dglkge.launch.ports import check_server_ports, find_master_port
from dglkge.launch.remote import host_files
from dglkge.launch.script_config import MachineNeeds, check_part, check_part_config

COMPARED_PACKAGES = ("dgl", "torch")


def describe_machine(python: str = sys.executable) -> dict[str, Any]:
    """Return facts for the plan (cores, GPUs, interfaces, runner), and versions to compare."""
    # From the packages' metadata: importing dgl and torch would take seconds on each machine.
    versions = {name: _installed_version(name) for name in COMPARED_PACKAGES}
    return {
        "versions": {"python": ".".join(map(str, sys.version_info[:2])), "dglkge": __version__, **versions},
        "interfaces": local_interfaces(),
        "num_cores": usable_cores(),
        "gpus": usable_gpus(),
        "runner": [python, str(Path(script_runner.__file__).resolve())],
    }


@dataclass(frozen=True)
class Check:
    """What the launcher wants to know of a machine before a job starts on it.

    Attributes
    ----------
    address, port, num_servers
        Of the servers.
    folder : str
        Working folder of the processes.
    script : str or None
        A file that must exist; relative to the folder.
    part_config : str or None
        DGL's partition file, relative to the folder.
    part_id, num_parts : int
        The machine's own partition (None: not to be checked), and how many there must be.
    num_processes : int
        Of the job.
    needs : mapping
        Fields of :class:`MachineNeeds`.
    """

    address: str
    port: int
    num_servers: int
    folder: str
    script: str | None
    part_config: str | None
    part_id: int | None
    num_parts: int
    num_processes: int
    needs: Mapping[str, Any]


def check_machine(held: MachineJob, question: Check) -> dict[str, Any]:
    """Check for all problems that would keep a job from running on this machine.

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
    attempt(_check_address, question.address)
    attempt(_check_folder, question.folder, question.script)
    attempt(check_server_ports, question.address, question.port, question.num_servers)
    attempt(allow_open_files, question.num_processes)
    table_folder = attempt(held.claim, MachineNeeds(**question.needs))
    # Compared between machines: partitions of two runs of the partitioner do not fit each other.
    fingerprint = None
    if question.part_config is not None:
        partition = Path(question.folder, question.part_config)
        fingerprint = attempt(_check_partition, partition, question.part_id, question.num_parts)
    return {
        "problems": problems,
        "fingerprint": fingerprint,
        "table_folder": table_folder or "",
        "note": held.note,
    }


def write_job_files(log_dir: str, machines: Sequence[Sequence[Any]]) -> None:
    """Create the log folder with the job's ip_config.txt; several machines may share it.

    Raises
    ------
    InputError
        If it cannot be written.
    """
    folder = Path(log_dir)
    # Renamed into its place: machines with a shared disk write the same file at the same time.
    temporary = folder / f"ip_config.txt.{os.uname().nodename}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_ip_config(temporary, [Machine(address, port) for address, port in machines])
        os.replace(temporary, folder / "ip_config.txt")
    except OSError as error:
        raise InputError(f"cannot write logs to {log_dir}: {error.strerror}") from None


def _installed_version(package: str) -> str | None:
    """Return the public part of a package's version (not ``+cpu``), without importing it."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_address(address: str) -> None:
    """Raise InputError for an address of another machine.

    DGL (``rpc_client.get_local_machine_id``) would silently take this machine for machine 0.
    """
    interfaces = local_interfaces()
    if not is_local(address, interfaces):
        raise InputError(
            f"none of its interfaces has the address {address} that ip_config gives it "
            f"(it has {', '.join(sorted(interfaces))})"
        )


def _check_folder(folder: str, script: str | None) -> None:
    """Check that the working folder and the script exist."""
    if not os.path.isdir(folder):
        raise InputError(f"has no folder {folder}; give another --workspace, or --sync to have it made")
    if script is not None and not os.path.isfile(os.path.join(folder, script)):
        raise InputError(f"has no script {os.path.join(folder, script)}; --sync brings it there")


def _check_partition(path: Path, part_id: int | None, num_parts: int) -> str:
    """Check the machine's own partition; return a fingerprint of the partition file."""
    check_part_config(path, num_parts)
    if part_id is not None:
        check_part(path, part_id)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def node_tasks(job: MachineJob, python: str) -> dict[str, Callable[..., Any]]:
    """Return the tasks of a node program by name, given its job and the interpreter of its processes."""
    return {
        "describe": functools.partial(describe_machine, python),
        "release": job.release,
        "choose_server_ports": job.choose_server_ports,
        "choose_master_port": find_master_port,
        "check": lambda **fields: check_machine(job, Check(**fields)),
        "write_job_files": write_job_files,
        "clean_up": clean_up,
        "list_files": host_files.list_files,
        "stale_files": host_files.stale_files,
        "make_staging": host_files.make_staging,
        "read_block": host_files.read_block,
        "write_block": host_files.write_block,
        "place_folder": host_files.place_folder,
        "place_files": host_files.place_files,
    }
