"""Memory of the processes of a job, with a /proc made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dglkge.distributed.process_memory import find_servers, memory_of
from dglkge.distributed.world import World
from dglkge.training.process import ProcessUsage

PAGE = os.sysconf("SC_PAGE_SIZE")


def add(proc: Path, pid: int, resident: int, shared: int, started: int = 5, **variables: str) -> None:
    """Make the folder of a process."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "statm").write_text(f"999 {resident} {shared} 1 0 7 0\n")
    (folder / "stat").write_text(f"{pid} (a ) b) S " + " ".join(["1"] * 18) + f" {started} 1 1\n")
    (folder / "environ").write_bytes(
        b"".join(f"{key}={value}\0".encode() for key, value in variables.items())
    )


def server(number: int, job: str = "j") -> dict[str, str]:
    return {"DGL_ROLE": "server", "DGL_SERVER_ID": str(number), "DGLKGE_JOB": job, "A": "b=c"}


def test_servers_of_the_job_are_found_and_not_their_children(tmp_path: Path) -> None:
    add(tmp_path, 10, 1, 1, **server(0))
    add(tmp_path, 9, 1, 1, 8, **server(0))  # its child, after the numbers began anew
    add(tmp_path, 11, 1, 1, **server(1))
    add(tmp_path, 12, 1, 1, **server(2, "other"))
    add(tmp_path, 13, 1, 1, **{**server(3), "DGL_ROLE": "client"})
    (tmp_path / "14").mkdir()
    (tmp_path / "meminfo").touch()
    assert find_servers("j", tmp_path) == {0: 10, 1: 11}
    assert find_servers("", tmp_path) == {}


def test_memory_of_a_process_that_has_ended_is_unknown(tmp_path: Path) -> None:
    add(tmp_path, 10, 7, 3)
    assert memory_of(10, tmp_path) == (7 * PAGE, 3 * PAGE)
    assert memory_of(11, tmp_path) == (0, 0)
    (tmp_path / "10" / "statm").write_text("")
    assert memory_of(10, tmp_path) == (0, 0)


def test_the_sum_over_trainers_of_two_machines_has_every_process(tmp_path: Path) -> None:
    """Two machines with two trainers and a server each; every machine has a /proc of its own."""
    total = np.zeros((6, 3))
    for rank in range(4):
        proc = tmp_path / str(rank)
        add(proc, os.getpid(), 100 + rank, 50)
        add(proc, 70000000, 20 + rank, 10, **server(rank // 2))
        world = World(rank, 4, rank % 2, 2, launched=True, job="j")
        usage = ProcessUsage(world, 1, proc)
        total += usage.measure(1000 + rank)
    described = usage.describe(total)
    assert described == {
        **{
            f"trainer {rank}": {
                "machine": rank // 2,
                "memory_bytes": (100 + rank) * PAGE,
                "shared_bytes": 50 * PAGE,
                "bytes_sent": 1000 + rank,
            }
            for rank in range(4)
        },
        "server 0": {"machine": 0, "memory_bytes": 20 * PAGE, "shared_bytes": 10 * PAGE},
        "server 1": {"machine": 1, "memory_bytes": 22 * PAGE, "shared_bytes": 10 * PAGE},
    }
