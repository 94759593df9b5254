"""Free memory, shared memory and disk of a machine, and whether a plan fits into them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from dglkge.distributed.jobs import Claims, claims_of_others
from dglkge.planning.control_groups import PROCESS, free_memory
from dglkge.planning.memory import PlannedHost, readable

SHARED_MEMORY_FOLDER = Path("/dev/shm")
MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class HostMemory:
    """Free resources of a machine.

    Attributes
    ----------
    memory_bytes : int
        Memory that processes can still take, within the limit of this container.
    shared_memory_bytes : int
        Room in ``/dev/shm``.
    disk_bytes : int
        Room where the checkpoint goes.
    claims : Claims
        What other jobs of this machine will still take. It is subtracted from the figures above.
    """

    memory_bytes: int
    shared_memory_bytes: int
    disk_bytes: int
    claims: Claims = Claims()


def host_memory(output: str | Path, job: str = "") -> HostMemory:
    """Measure the free resources of this machine, without what other jobs have planned.

    Parameters
    ----------
    output : str or Path
        Folder of the run, which need not exist.
    job : str
        Id of the asking job, whose own plan is not subtracted.
    """
    folder = Path(output).resolve()
    # disk_usage needs an existing path: the nearest parent that exists is on the same file system.
    while not folder.exists():
        folder = folder.parent
    shared = SHARED_MEMORY_FOLDER
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    claims = claims_of_others(job, str(shared))
    return HostMemory(
        max(0, available_memory() - claims.memory_bytes),
        max(0, room - claims.shared_memory_bytes),
        shutil.disk_usage(folder).free,
        claims,
    )


def available_memory(info: Path = MEMORY_INFO, process: Path = PROCESS) -> int:
    """Return the bytes that processes can still take: the kernel's estimate, or less in a limited container.

    Parameters
    ----------
    info : Path
        ``/proc/meminfo``.
    process : Path
        The folder of the process in ``/proc``, which names its control groups.
    """
    lines = dict(line.split(":", 1) for line in info.read_text(encoding="ascii").splitlines())
    # MemAvailable counts page cache that the kernel can drop, which MemFree does not. Unit: KiB.
    available = int(lines["MemAvailable"].split()[0]) * 1024
    # In a container MemAvailable is that of the whole machine; the limit is the control group's.
    allowed = free_memory(process)
    return available if allowed is None else min(available, allowed)


def misfits(
    planned: PlannedHost, there: HostMemory, has_started: bool = False, in_files: bool = False
) -> list[str]:
    """Return the resources that a plan exceeds; mapped files can be dropped from memory and do not count.

    Parameters
    ----------
    planned : PlannedHost
    there : HostMemory
    has_started : bool
        Whether the processes run already, with their interpreters and libraries loaded.
    in_files : bool
        Whether tables are files: only the graph's structure is then in ``/dev/shm``.

    Returns
    -------
    list of str
        Empty if all fits.
    """
    needed = planned.needed_bytes(in_files) - (planned.base_bytes if has_started else 0)
    shared = planned.structure_bytes if in_files else planned.shared_memory_bytes
    found = []
    others = ""
    if there.claims.memory_bytes or there.claims.shared_memory_bytes:
        others = f" beside {there.claims.num_jobs} other job(s) (dglkge jobs)"
    if needed > there.memory_bytes:
        found.append(
            f"{readable(needed)} of memory are needed and {readable(there.memory_bytes)} are there{others}"
        )
    if shared > there.shared_memory_bytes:
        found.append(
            f"{readable(shared)} of {SHARED_MEMORY_FOLDER} are needed and "
            f"{readable(there.shared_memory_bytes)} are there{others}"
        )
    return found
