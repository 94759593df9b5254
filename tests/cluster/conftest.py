"""Clusters of real hosts, each with its own network, process ids, shared memory, working folder and sshd."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cluster_hosts import ClusterHost, cluster_hosts, what_is_missing
from tests import warm


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
