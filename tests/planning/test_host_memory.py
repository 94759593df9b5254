"""What is there, from files made by hand; and what does not fit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from dglkge.planning import host
from dglkge.planning.host import HostMemory, available_memory, host_memory
from dglkge.planning.memory import PlannedHost, misfits

MIB = 2**20


def info(folder: Path, available_kib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal:  9999999 kB\nMemAvailable: {available_kib} kB\nHugePages_Total:   0\n")
    return path


def test_the_lower_of_the_kernels_estimate_and_the_groups_limit_counts(tmp_path, monkeypatch):
    for allowed, expected in ((None, 2 * MIB), (MIB, MIB), (3 * MIB, 2 * MIB), (0, 0)):
        monkeypatch.setattr(host, "free_memory", lambda process, found=allowed: found)
        assert available_memory(info(tmp_path, 2048)) == expected


def test_this_machine(tmp_path: Path) -> None:
    there = host_memory(tmp_path / "not" / "yet" / "there")
    assert 0 < there.memory_bytes <= psutil.virtual_memory().total
    assert there.disk_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    shared = os.statvfs("/dev/shm")
    assert there.shared_memory_bytes == pytest.approx(shared.f_bavail * shared.f_frsize, rel=0.05)


def planned(memory: int, shared: int, base: int, mapped: int) -> PlannedHost:
    return PlannedHost(0, (("all", memory),), shared, base, mapped, 0)


@pytest.mark.parametrize(
    "memory, shared, has_started, words",
    [
        (100, 10, False, []),
        (111, 10, False, ["111 B of memory are needed and 100 B are there"]),  # 10 of 121 are mapped files
        (131, 10, True, ["111 B of memory"]),  # 20 of base are there already
        (130, 10, True, ["110 B of memory"]),
        (120, 10, True, []),
        (50, 51, False, ["51 B of /dev/shm are needed and 50 B are there"]),
        (500, 51, False, ["of memory", "of /dev/shm"]),
    ],
)
def test_misfits(memory: int, shared: int, has_started: bool, words: list[str]) -> None:
    there = HostMemory(100, 50, 0)
    mapped = 10 if not has_started else 0
    found = misfits(planned(memory + mapped, shared, 20, mapped), there, has_started)
    assert len(found) == len(words)
    for text, word in zip(found, words):
        assert word in text


def test_tables_in_files_need_no_memory_of_their_own() -> None:
    memory = (("tables", 80), ("graph of DGL's servers", 10), ("batches and ranking", 30))
    host_ = PlannedHost(0, memory, 90, 0, 0, 0, structure_bytes=10, file_bytes=80)
    assert host_.memory_bytes == 120
    assert misfits(host_, HostMemory(40, 10, 0), in_files=True) == []  # batches, and the graph's structure
    assert misfits(host_, HostMemory(39, 10, 0), in_files=True) == [
        "40 B of memory are needed and 39 B are there"
    ]
    assert misfits(host_, HostMemory(119, 90, 0)) == ["120 B of memory are needed and 119 B are there"]
