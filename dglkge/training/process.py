"""Memory and traffic of each process of a job, for the records of training, and which one shows bars."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from dglkge.distributed.jobs import PROC, find_servers, memory_of
from dglkge.distributed.world import World

COLUMNS = ("memory_bytes", "shared_bytes", "bytes_sent")
"""Resident memory, the part of it that other processes may share, bytes sent to other machines."""


@dataclass
class ProcessUsage:
    """Measures this process and, on the first trainer of a machine, the machine's servers.

    Each trainer fills its rows of one array for all processes. Reports sum over the trainers anyway, and that
    sum is the exchange.

    Attributes
    ----------
    num_servers : int
        Servers of each machine.
    proc : Path
        Folder of the processes; for tests.
    """

    world: World
    num_servers: int
    proc: Path = PROC

    def __post_init__(self) -> None:
        # Looked up once: a server that ends is not replaced within a job.
        has_servers = self.num_servers and self.world.is_machine_leader
        self._servers = find_servers(self.world.job, self.proc) if has_servers else {}

    def measure(self, bytes_sent: int) -> npt.NDArray[np.float64]:
        """Return an array (processes, 3) with this trainer's rows filled: trainers first, then servers."""
        world = self.world
        found = np.zeros((world.world_size + self.num_servers * world.num_machines, len(COLUMNS)))
        found[world.rank] = (*memory_of(os.getpid(), self.proc), bytes_sent)
        for number, pid in self._servers.items():
            row = world.world_size + number
            if row < len(found):
                found[row, :2] = memory_of(pid, self.proc)
        return found

    def describe(self, total: npt.NDArray[np.float64]) -> dict[str, dict[str, Any]]:
        """Return the sum over all trainers as a mapping of process name to its numbers and its machine."""
        world = self.world
        described: dict[str, dict[str, Any]] = {}
        for row, values in enumerate(total.tolist()):
            server = row - world.world_size
            is_trainer = server < 0
            name = f"trainer {row}" if is_trainer else f"server {server}"
            machine = row // world.trainers_per_machine if is_trainer else server // self.num_servers
            # Servers answer inside of DGL, which does not count bytes.
            numbers = zip(COLUMNS if is_trainer else COLUMNS[:2], map(int, values))
            described[name] = {"machine": machine, **dict(numbers)}
        return described


def memory_bytes() -> int:
    """Return this process's share of its memory: pages shared by n processes count 1/n; 0 if unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0  # a kernel before 4.14, or a container that hides it
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@functools.lru_cache(maxsize=1)
def memory_bytes_in(second: int) -> int:
    """Return :func:`memory_bytes` once for many short epochs of a second: the kernel walks all pages."""
    return memory_bytes()


def open_bar(is_shown: bool, **options: Any) -> tqdm[Any]:
    """Return a progress bar on stderr; one that is not shown if stderr's terminal has been closed."""
    try:
        return tqdm(disable=not is_shown, **options)
    except OSError:
        return tqdm(disable=True, **options)


def wants_bar(setting: str, world: World) -> bool:
    """Return whether this trainer shows progress bars: rank 0 does.

    Parameters
    ----------
    setting : str
        ``always``, ``never``, or ``auto``: on a terminal.
    """
    watched = world.shows_progress or sys.stderr.isatty()
    return world.rank == 0 and (setting == "always" or (setting == "auto" and watched))
