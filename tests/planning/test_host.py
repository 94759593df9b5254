"""Limits of control groups, what is there, from files made by hand, and what does not fit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from dglkge.planning import host
from dglkge.planning.host import HostMemory, available_memory, control_groups, cores_to_use, free_memory
from dglkge.planning.memory import PlannedHost, misfits

MIB = 2**20
NO_LIMIT = 9223372036854771712  # what version 1 shows


def process(folder: Path, groups: str, *mounts: str) -> Path:
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text("\n".join(["23 1 0:2 / / rw - ext4 /dev/vda rw", *mounts, ""]))
    return folder


def first(folder: Path, controllers: str, root: str = "/") -> str:
    return f"31 23 0:28 {root} {folder} rw,relatime shared:9 master:2 - cgroup cgroup rw,{controllers}"


def second(folder: Path, root: str = "/") -> str:
    return f"41 31 0:38 {root} {folder} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


def write(folder: Path, **texts: object) -> None:
    """Write files of a group; an underscore in a name stands for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_version_2_nested_groups_the_tightest_counts(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    me = process(tmp_path, "0::/pod/box\n", second(root))
    write(root, memory_stat="inactive_file 1")  # the root has no limit and no counters
    write(root / "pod/box", memory_max="max", memory_current=MIB, memory_stat="anon 5\ninactive_file 7")
    assert free_memory(me) is None
    files = f"anon 1\ninactive_file {6 * MIB}\nactive_file {4 * MIB}"
    write(root / "pod", memory_max=50 * MIB, memory_current=40 * MIB, memory_stat=files)
    assert free_memory(me) == 20 * MIB  # 50 - 40, and 10 of the 40 are files that can go
    write(root / "pod/box", memory_max=3 * MIB)
    assert free_memory(me) == 2 * MIB + 7
    write(root / "pod/box", memory_current=5 * MIB)
    assert free_memory(me) == 0


def test_version_1_has_other_names_and_no_word_for_unlimited(tmp_path: Path) -> None:
    root = tmp_path / "memory tree"
    mount = first(Path(str(root).replace(" ", "\\040")), "memory,hugetlb")
    me = process(tmp_path, "4:memory,hugetlb:/job\n1:cpu,cpuacct:/\n0::/\n", mount)
    statistics = f"inactive_file 1\ntotal_inactive_file {MIB - 3}\nactive_file 1\ntotal_active_file 3"
    unlimited = {"memory_limit_in_bytes": NO_LIMIT, "memory_usage_in_bytes": MIB, "memory_stat": statistics}
    for folder in (root, root / "job"):
        write(folder, **unlimited)
    assert free_memory(me) is None
    for folder, limit in ((root / "job", 4 * MIB), (root, 2 * MIB)):
        write(folder, memory_limit_in_bytes=limit)
        assert free_memory(me) == limit


def test_quota_of_both_versions(tmp_path: Path) -> None:
    root, unified = tmp_path / "cpu", tmp_path / "unified"
    me = process(tmp_path, "1:cpu,cpuacct:/job\n0::/\n", first(root, "cpu,cpuacct"), second(unified))
    for folder in (root, root / "job"):
        write(folder, cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    assert host.quota_of_cores(me) is None
    write(root / "job", cpu_cfs_quota_us=250000)
    assert host.quota_of_cores(me) == 2.5
    for text, expected in (("max 100000", 2.5), ("50000 100000", 0.5)):
        write(unified, cpu_max=text)
        assert host.quota_of_cores(me) == expected
    for cores, quota, expected in ((4, None, 4), (4, 8.0, 4), (4, 3.9, 3), (4, 0.1, 1), (1, 2, 1)):
        assert cores_to_use(range(cores), quota) == expected


def test_a_container_without_a_namespace_of_its_own(tmp_path: Path) -> None:
    """Its group is named from the host's root, and its mount begins at that group or anywhere else."""
    top = Path("/sys/fs/cgroup")
    for group, root, folders in (
        ("/docker/abc", "/docker/abc", (top,)),
        ("/docker/abc", "/elsewhere", (top,)),
        ("/docker/abc/sub", "/docker/abc", (top / "sub", top)),
    ):
        me = process(tmp_path, f"0::{group}", second(top, root))
        assert [*control_groups("memory", me)] == [(2, folder) for folder in folders]
    # a process that was moved out of its own namespace's root
    *_, (_, last) = control_groups("memory", process(tmp_path, "0::/../other", second(top)))
    assert last == top


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    write(tmp_path / "tree", memory_max="abc", memory_current="", cpu_max="1")
    for groups in (None, "", "0::/\n"):
        me = tmp_path / "none" if groups is None else process(tmp_path, groups, second(tmp_path / "tree"))
        assert free_memory(me) is None and host.quota_of_cores(me) is None


def test_the_lower_of_the_kernels_estimate_and_the_groups_limit_counts(tmp_path, monkeypatch):
    names = "MemFree Buffers Cached Shmem Active Inactive".split()
    lines = ["MemTotal: 9999999 kB", "MemAvailable: 2048 kB", *(f"{name}: 9 kB" for name in names)]
    (tmp_path / "meminfo").write_text("\n".join(lines))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    for allowed, expected in ((None, 2 * MIB), (MIB, MIB), (3 * MIB, 2 * MIB), (0, 0)):
        monkeypatch.setattr(host, "free_memory", lambda free=allowed: free)
        assert available_memory() == expected


def test_this_machine(tmp_path: Path) -> None:
    there = host.host_memory(tmp_path / "not" / "yet" / "there")
    assert 0 < there.memory_bytes <= psutil.virtual_memory().total
    assert there.disk_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    shared = os.statvfs("/dev/shm")
    assert there.shared_memory_bytes == pytest.approx(shared.f_bavail * shared.f_frsize, rel=0.05)


def test_misfits() -> None:
    for memory, shared, has_started, expected in (
        (100, 10, False, []),
        # 10 of 121 are mapped files
        (111, 10, False, ["111 B of memory are needed and 100 B are there"]),
        (131, 10, True, ["111 B of memory are needed and 100 B are there"]),  # 20 of base are there already
        (130, 10, True, ["110 B of memory are needed and 100 B are there"]),
        (120, 10, True, []),
        (50, 51, False, ["51 B of /dev/shm are needed and 50 B are there"]),
        (101, 51, False, ["101 B of memory are needed and 100 B are there",
                          "51 B of /dev/shm are needed and 50 B are there"]),
    ):  # fmt: skip
        mapped = 0 if has_started else 10
        planned = PlannedHost(0, (("all", memory + mapped),), shared, 20, mapped, 0)
        assert misfits(planned, HostMemory(100, 50, 0), has_started) == expected
    # Tables in files need no memory of their own.
    memory = (("tables", 80), ("graph of DGL's servers", 10), ("batches and ranking", 30))
    planned = PlannedHost(0, memory, 90, 0, 0, 0, structure_bytes=10, file_bytes=80)
    assert planned.memory_bytes == 120
    assert misfits(planned, HostMemory(40, 10, 0), in_files=True) == []  # batches, and the graph's structure
    (problem,) = misfits(planned, HostMemory(39, 10, 0), in_files=True)
    assert problem == "40 B of memory are needed and 39 B are there"
    assert misfits(planned, HostMemory(119, 90, 0)) == ["120 B of memory are needed and 119 B are there"]
