"""A control group with a limit of memory, in which a benchmark runs a job; versions 1 and 2."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from dglkge.errors import InputError
from dglkge.planning.host import PROCESS, control_groups

LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
PEAK_FILES = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
SWAP_LIMITS = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
END_SECONDS = 30.0
"""Time in which killed processes of a group must be gone."""


class MemoryGroup:
    """A group of processes that share a limit of memory: their own pages, and the page cache that they fill.

    It is a context manager. At the end its processes are killed and the group is removed.

    Parameters
    ----------
    limit_bytes : int
    process : Path
        The folder of this process in ``/proc``.

    Raises
    ------
    InputError
        If this process may make no such group.

    Attributes
    ----------
    path : Path
    version : int
    """

    def __init__(self, limit_bytes: int, process: Path = PROCESS) -> None:
        self.limit_bytes = limit_bytes
        problems = []
        # From the mount point down: the group of this process belongs to whoever made it, and in version 2 a
        # group with processes can have no groups below it that are limited.
        for version, parent in reversed([*control_groups("memory", process)]):
            try:
                self.path, self.version = self._make(parent, version), version
                return
            except OSError as error:
                problems.append(f"{parent}: {error.strerror}")
        raise InputError(
            "cannot make a control group with a limit of memory: "
            + ("; ".join(problems) or "no hierarchy with the memory controller is mounted")
        )

    def _make(self, parent: Path, version: int) -> Path:
        """Make the group below one that exists."""
        group = Path(tempfile.mkdtemp(prefix="dglkge-benchmark-", dir=parent))
        try:
            if version == 2 and not (group / LIMIT_FILES[2]).exists():
                (parent / "cgroup.subtree_control").write_text("+memory")
            (group / LIMIT_FILES[version]).write_text(str(self.limit_bytes))
            # A limit without one on swap would measure the swap. The file is absent where there is none.
            with contextlib.suppress(OSError):
                (group / SWAP_LIMITS[version]).write_text(str(0 if version == 2 else self.limit_bytes))
        except OSError:
            group.rmdir()
            raise
        return group

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in the group."""
        # The shell joins and then becomes the command, so that the process keeps its id.
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", join, str(self.path), *command]

    def processes(self) -> list[int]:
        """Return the ids of the processes in the group."""
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]

    def kill(self) -> None:
        """Kill all processes of the group, and wait until they are gone.

        Raises
        ------
        RuntimeError
            If some are still there after :data:`END_SECONDS`.
        """
        end = time.monotonic() + END_SECONDS
        while pids := self.processes():
            if time.monotonic() > end:
                raise RuntimeError(f"processes {pids} in {self.path} did not end in {END_SECONDS:g} s")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def peak_bytes(self) -> int:
        """Return the most memory that the group has held; 0 if the kernel does not say."""
        with contextlib.suppress(OSError):
            return int((self.path / PEAK_FILES[self.version]).read_text())
        return 0

    def out_of_memory_kills(self) -> int:
        """Return how often the kernel has killed a process of the group for memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        with contextlib.suppress(OSError):
            for line in (self.path / name).read_text().splitlines():
                word, _, number = line.partition(" ")
                if word == "oom_kill":
                    return int(number)
        return 0

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.kill()
        finally:
            self._remove()

    def _remove(self) -> None:
        """Remove the group; the kernel may take a moment to count it as empty."""
        for _ in range(100):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)
        self.path.rmdir()
