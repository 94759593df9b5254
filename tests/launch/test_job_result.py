"""Statuses in numbers, in words, in JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from dglkge.launch.job_result import JobResult, ProcessResult, describe_process, describe_status, exit_status


@pytest.mark.parametrize(
    ("status", "expected"), [(0, 0), (1, 1), (125, 125), (143, 143), (-9, 137), (-15, 143), (-2, 130)]
)
def test_exit_status(status: int, expected: int) -> None:
    """A process's own status is passed on; signals become what a shell makes of them."""
    assert exit_status(status) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (3, "ended with status 3"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (-9, "was killed by signal 9 (SIGKILL) [kill -9, or the kernel was out of memory: see dmesg]"),
        (-7, "was killed by signal 7 (SIGBUS) [often /dev/shm is full: see df -h /dev/shm]"),
        (143, "ended with status 143, which says: stopped on request, start me again"),
        (-40, "was killed by signal 40"),
    ],
)
def test_words(status: int, expected: str) -> None:
    """Signals have their names, and the usual cause where there is one."""
    assert describe_status(status) == expected


def test_process_name() -> None:
    """A process that never ran has no number."""
    assert describe_process("trainer 1", 12, "10.0.0.1") == "trainer 1 (pid 12) on 10.0.0.1"
    assert describe_process("trainer 1", None, "10.0.0.1") == "trainer 1 on 10.0.0.1"


def test_summary_is_json() -> None:
    """The summary survives JSON."""
    process = ProcessResult("trainer 0", "127.0.0.1", 12, 0, "/logs/trainer-0.log")
    result = JobResult(0, None, 1.5, "/logs", (process,))
    assert json.loads(json.dumps(asdict(result))) == {
        "is_interrupted": False,
        "status": 0,
        "reason": None,
        "seconds": 1.5,
        "log_dir": "/logs",
        "processes": [
            {
                "name": "trainer 0",
                "address": "127.0.0.1",
                "pid": 12,
                "status": 0,
                "log": "/logs/trainer-0.log",
            }
        ],
    }
