"""Clusters of real hosts, each with its own network, process ids, shared memory, working folder and sshd."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

import psutil
import pytest

from cluster_hosts import ClusterHost, cluster_hosts, what_is_missing
from tests import warm


def end_all(hosts: Sequence[ClusterHost], *jobs: subprocess.Popen[bytes]) -> None:
    """Kill whatever runs on the hosts, and the commands that have started it."""
    while processes := [process for host in hosts for process in host.processes()]:
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                process.kill()
    for job in jobs:
        job.kill()
        job.wait()


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
