"""Free memory, shared memory, disk and processor time of a machine, within the limits of control groups.

Containers, SLURM, Kubernetes and systemd set these limits, of versions 1 and 2. A limit holds for a group and
all groups below it, so each group from this process's own one up to the mount point counts. A container may
show its group as the root.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from dglkge.distributed.jobs import Claims, claims_of_others

SHARED_MEMORY_FOLDER = Path("/dev/shm")
PROCESS = Path("/proc/self")

MOST_DEFAULT_TRAINERS = 8
"""Most trainers on one machine without the user's choice: each needs a few hundred megabytes."""

_UNLIMITED_BYTES = 2**62
"""Limits from here on are none: version 1 shows the largest number of pages instead of a word."""
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version: files of the limit and of what is used, and what begins the names of the statistics."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


class HostMemory(NamedTuple):
    """Free memory within the limit of this container, and room in ``/dev/shm`` and where the checkpoint goes.

    What other jobs of this machine will still take, ``claims``, is subtracted.
    """

    memory_bytes: int
    shared_memory_bytes: int
    disk_bytes: int
    claims: Claims = Claims()


def host_memory(output: str | Path, job: str = "") -> HostMemory:
    """Measure the free resources of this machine; the run's folder need not exist.

    What other jobs than the given one have planned is not free.
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


def available_memory() -> int:
    """Return the bytes that processes can still take: the kernel's estimate, or less in a container."""
    # MemAvailable, which counts page cache that the kernel can drop. In a container it is that of the whole
    # machine; the limit is the control group's.
    available = int(psutil.virtual_memory().available)
    allowed = free_memory()
    return available if allowed is None else min(available, allowed)


def control_groups(controller: str, process: Path = PROCESS) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each group that may limit this process, the innermost first.

    The controller is memory or cpu; both versions may be mounted. What is read: ``/proc/self/cgroup`` (man 7
    cgroups) and ``mountinfo`` (man 5 proc).
    """
    groups_of_process: dict[str, str] = {}
    for line in _text(process / "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        groups_of_process |= dict.fromkeys(names.split(","), path)
    for line in _text(process / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        is_first = kind[0] == "cgroup" and controller in kind[2].split(",")
        key = controller if is_first else "" if kind[0] == "cgroup2" else None
        if key is not None and key in groups_of_process:
            folders = _folders(groups_of_process[key], _unescaped(place[3]), Path(_unescaped(place[4])))
            yield from ((1 if is_first else 2, folder) for folder in folders)


def _folders(group: str, root: str, mount: Path) -> tuple[Path, ...]:
    """Return the folders of a group and of those above it; the mount shows the tree from `root` on."""
    # Without a namespace of its own a container's group is named from the host's root, which its mount does
    # not show: the mount then begins at the container's group.
    inside = os.path.relpath(group, root)
    parts = () if inside == "." or inside.startswith("..") else Path(inside).parts
    return tuple(mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1))


def _unescaped(text: str) -> str:
    """Return a path of mountinfo, where a space is ``\\040``."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def free_memory(process: Path = PROCESS) -> int | None:
    """Return the bytes that this process's control groups still allow; None without a limit.

    Page cache counts as free, as in the kernel's ``MemAvailable``: what was read twice can go as well.
    """
    free = []
    for version, folder in control_groups("memory", process):
        limit_file, used_file, prefix = _MEMORY_FILES[version]
        limit, used = _number(_text(folder / limit_file)), _number(_text(folder / used_file))
        if limit is None or used is None or limit >= _UNLIMITED_BYTES:
            continue
        lines = _text(folder / "memory.stat").splitlines()
        cached = (f"{prefix}inactive_file", f"{prefix}active_file")
        cache = sum(_number(line.partition(" ")[2]) or 0 for line in lines if line.startswith(cached))
        free.append(max(0, limit - used + cache))
    return min(free, default=None)


def quota_of_cores(process: Path = PROCESS) -> float | None:
    """Return the processor time that this process's control groups allow, in cores; None without a quota."""
    quotas = []
    for version, folder in control_groups("cpu", process):
        if version == 1:
            words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            words = _text(folder / "cpu.max").split()
        quota, period = (_number(word) for word in words) if len(words) == 2 else (None, None)
        # None: "max" of version 2, -1 of version 1, or a group without the controller.
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def cores_to_use(allowed: Collection[int], quota: float | None) -> int:
    """Return how many threads may compute at once, on the cores of the affinity within a quota.

    Examples
    --------
    >>> cores_to_use(range(8), None), cores_to_use(range(8), 2.5), cores_to_use(range(8), 0.5)
    (8, 2, 1)
    """
    # Rounded down: threads beyond the quota use it up early and then all stand still until the period ends.
    return len(allowed) if quota is None else max(1, min(len(allowed), math.floor(quota)))


def _text(path: Path) -> str:
    """Return the content of a file; empty if it is absent or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """Return a whole number that is not negative; None for any other text."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None
