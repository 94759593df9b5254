"""Agent of the launcher on a machine: a small RPC server over stdin and stdout, which also registers the job.

stdin has one JSON object per line, ``{"id": number, "do": name of a task, ...arguments}``; an empty line is a
heartbeat. stdout has one reply for each, with its id and ``ok`` or ``error``. The agent exits, and ends
the registration, at the end of stdin or after HEARTBEAT_TIMEOUT_SECONDS without a line.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge import __version__
from dglkge.distributed.ip_config import Machine, write_ip_config
from dglkge.distributed.jobs import JobEntry
from dglkge.errors import DglkgeError, InputError
from dglkge.launch import script_runner
from dglkge.launch.gpus import usable_gpus
from dglkge.launch.local_site import (
    MachineJob,
    is_local,
    local_interfaces,
    usable_cores,
)
from dglkge.launch.ports import check_server_ports, find_master_port
from dglkge.launch.remote import host_files, run_copies
from dglkge.launch.script_config import MachineNeeds, check_part, check_part_config
from dglkge.launch.shared_memory import remove_job_segments, remove_stale_segments
from dglkge.launch.watchdog import HEARTBEAT_TIMEOUT_SECONDS

COMPARED_PACKAGES = ("dgl", "torch")


def describe_machine() -> dict[str, Any]:
    """Return facts for the plan (cores, GPUs, interfaces, runner), and versions to compare."""
    # From the packages' metadata: importing dgl and torch would take seconds on each machine.
    versions = {name: _installed_version(name) for name in COMPARED_PACKAGES}
    return {
        "versions": {"python": ".".join(map(str, sys.version_info[:2])), "dglkge": __version__, **versions},
        "interfaces": local_interfaces(),
        "num_cores": usable_cores(),
        "gpus": usable_gpus(),
        "runner": [sys.executable, str(Path(script_runner.__file__).resolve())],
    }


def check_machine(
    held: MachineJob,
    address: str,
    port: int,
    num_servers: int,
    folder: str,
    script: str | None,
    part_config: str | None,
    part_id: int,
    num_parts: int,
    needs: Mapping[str, Any],
) -> dict[str, Any]:
    """Check for all problems that would keep a job from running on this machine.

    Parameters
    ----------
    held : MachineJob
        The job on this machine.
    address, port, num_servers
        Of the servers.
    folder : str
        Working folder of the processes.
    script : str or None
        A file that must exist; relative to the folder.
    part_config : str or None
        DGL's partition file, relative to the folder.
    part_id, num_parts : int
        The machine's own partition, and how many there must be.
    needs : mapping
        Fields of :class:`MachineNeeds`.

    Returns
    -------
    dict
        ``problems``, a list of sentences; ``fingerprint`` of the partition file or None; ``table_folder`` of
        the tables if they are files, else empty, and ``note`` about it.
    """
    problems: list[str] = []

    def attempt(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        # A check that fails does not keep the others from running.
        except InputError as error:
            problems.append(str(error))
            return None

    # All checks run, so that the user gets all problems of a machine at once.
    attempt(_check_address, address)
    attempt(_check_folder, folder, script)
    attempt(check_server_ports, address, port, num_servers)
    table_folder = attempt(held.claim, MachineNeeds(**needs))
    # Compared between machines: partitions of two runs of the partitioner do not fit each other.
    fingerprint = None
    if part_config is not None:
        fingerprint = attempt(_check_partition, Path(folder, part_config), part_id, num_parts)
    return {
        "problems": problems,
        "fingerprint": fingerprint,
        "table_folder": table_folder or "",
        "note": held.note,
    }


def choose_master_port(address: str, avoid: Sequence[int]) -> int:
    """Return a free port of this machine for torch's rendezvous."""
    return find_master_port(address, avoid)


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


def clean_up(held: MachineJob) -> list[str]:
    """Remove shared memory of an ended job on this machine."""
    return remove_job_segments(held.job) + remove_stale_segments()


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


def _check_partition(path: Path, part_id: int, num_parts: int) -> str:
    """Check the machine's own partition; return a fingerprint of the partition file."""
    check_part_config(path, num_parts)
    check_part(path, part_id)
    return hashlib.sha256(path.read_bytes()).hexdigest()


TASKS: Mapping[str, Callable[..., Any]] = {
    "describe": describe_machine,
    "choose_master_port": choose_master_port,
    "write_job_files": write_job_files,
    "list_files": host_files.list_files,
    "stale_files": host_files.stale_files,
    "make_staging": host_files.make_staging,
    "place_folder": host_files.place_folder,
    "place_files": host_files.place_files,
    "describe_copy": run_copies.describe_copy,
    "note_origin": run_copies.note_origin,
    "hold_version": run_copies.hold_version,
    "drop_hold": run_copies.drop_hold,
}


def serve(requests: int, answers: int) -> None:
    """Serve requests until the end of stdin or a heartbeat timeout.

    Parameters
    ----------
    requests, answers : int
        File descriptors.
    """
    pending = b""
    job = MachineJob()

    def register(entry: Mapping[str, Any]) -> None:
        """Register the job, or prepare for its next attempt."""
        job.register(JobEntry.from_dict(entry))

    with contextlib.ExitStack() as held:
        held.callback(job.release)
        tasks: dict[str, Callable[..., Any]] = {
            **TASKS,
            "register": register,
            "check": functools.partial(check_machine, job),
            "clean_up": functools.partial(clean_up, job),
            "choose_server_ports": job.choose_server_ports,
        }
        # Without this timeout an agent would keep the entry after the launcher's machine has lost power.
        while select.select([requests], [], [], HEARTBEAT_TIMEOUT_SECONDS)[0]:
            try:
                data = os.read(requests, 65536)
            except OSError:  # the connection was reset
                return
            if not data:
                return
            # Requests run one after the other. While one runs, heartbeats wait in the pipe and then count at
            # once.
            *lines, pending = (pending + data).split(b"\n")
            for line in filter(None, lines):
                answer = json.dumps(_answer(tasks, json.loads(line))).encode() + b"\n"
                while answer:
                    answer = answer[os.write(answers, answer) :]


def _answer(tasks: Mapping[str, Callable[..., Any]], request: dict[str, Any]) -> dict[str, Any]:
    """Run one task and return its reply."""
    name, number = request.pop("do"), request.pop("id")
    try:
        return {"id": number, "ok": tasks[name](**request)}
    except DglkgeError as error:
        return {"id": number, "error": str(error)}
    # A defect in one task must not end the agent: the job's entry would be gone.
    except Exception as error:
        return {"id": number, "error": f"{name} failed: {error!r}"}


def main() -> None:
    """Serve the launcher over stdin and stdout; prints of other code go to stderr."""
    # Libraries and login shells print to file descriptor 1. Replies have a descriptor of their own.
    answers = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(0, answers)
    sys.exit(0)


if __name__ == "__main__":
    main()
