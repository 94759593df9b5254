"""Clusters of real hosts, each with its own network, process ids, shared memory, working folder and sshd."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import psutil
import pytest

from cluster_faults import ALLOWED_SECONDS, seconds_until
from cluster_hosts import ClusterHost, cluster_hosts, what_is_missing
from tests import warm

END_SECONDS = 240


def end_all(hosts: Sequence[ClusterHost], *jobs: subprocess.Popen[bytes]) -> None:
    while processes := [process for host in hosts for process in host.processes()]:
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                process.kill()
    for job in jobs:
        job.kill()
        job.wait()


def finish(hosts: Sequence[ClusterHost], *jobs: subprocess.Popen[bytes]) -> list[int]:
    """Wait for the end of commands, and until nothing runs on the hosts; return the commands' statuses."""
    try:
        statuses = [job.wait(END_SECONDS) for job in jobs]
        assert seconds_until(lambda: not any(host.processes() for host in hosts)) <= ALLOWED_SECONDS
    finally:
        end_all(hosts, *jobs)
    return statuses


def sets(settings: Mapping[str, object]) -> list[str]:
    """Return the words that give a command some settings."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="session")
def hosts_can_be_made() -> None:
    """Skip, with the reason, where this machine cannot make hosts."""
    reason = what_is_missing()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")


@pytest.fixture(scope="module")
def two_hosts(hosts_can_be_made: None) -> Iterator[list[ClusterHost]]:
    """Two hosts for the tests of a module, which leave nothing running on them; the launcher runs on one."""
    with cluster_hosts(2) as hosts:
        yield hosts


@pytest.fixture
def warm_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and trainers of the test's jobs need not import torch and DGL, three CPU seconds each."""
    monkeypatch.setenv("PYTHONPATH", warm.runners(os.environ)["PYTHONPATH"])
