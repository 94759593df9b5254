"""Bytes that a disk has read and written, sampled over time."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

DEVICES = Path("/sys/dev/block")
MOUNTS = Path("/proc/self/mountinfo")
SECTOR_BYTES = 512
"""Unit of the kernel's counters, whatever the disk's own is (man 5 proc_diskstats)."""
SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Disk:
    """The block device of a file system.

    Attributes
    ----------
    name : str
        For example ``vda``; empty if the file system has no block device of its own.
    file_system : str
        For example ``ext4``.
    stat : Path or None
        The kernel's counters; None without a device.
    """

    name: str
    file_system: str
    stat: Path | None

    @classmethod
    def of(cls, folder: Path) -> Disk:
        """Find the disk of a folder, which must exist."""
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        kind = "unknown"
        for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == number:
                kind = rest.split()[0]
        place = DEVICES / number
        if not (place / "stat").is_file():
            return cls("", kind, None)
        return cls(place.resolve().name, kind, place / "stat")

    def __str__(self) -> str:
        return f"{self.name} ({self.file_system})" if self.name else self.file_system

    def counted(self) -> tuple[int, int]:
        """Return the bytes that were read from and written to the device since the machine started."""
        if self.stat is None:
            return 0, 0
        fields = self.stat.read_text().split()
        return SECTOR_BYTES * int(fields[2]), SECTOR_BYTES * int(fields[6])


class DiskTraffic:
    """Samples the counters of a disk in a thread; a context manager.

    They are those of the whole machine: nothing else should use the disk meanwhile.

    Parameters
    ----------
    disk : Disk
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._samples: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> DiskTraffic:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(10 * SAMPLE_SECONDS)
        self._sample()

    def between(self, start: float, end: float) -> tuple[int, int]:
        """Return the bytes read and written between two moments, in seconds since the epoch."""
        moments, read, written = zip(*self._samples)
        differences = (np.diff(np.interp([start, end], moments, counted))[0] for counted in (read, written))
        read_bytes, written_bytes = (round(float(value)) for value in differences)
        return read_bytes, written_bytes

    def _work(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        self._samples.append((time.time(), *self._disk.counted()))
