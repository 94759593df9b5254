"""The machines of a job as the launcher sees them, with this machine for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dglkge import __version__
from dglkge.distributed.addresses import Machine, is_own_address
from dglkge.distributed.jobs import JobEntry
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.machine import local_interfaces, machine_addresses, usable_cores
from dglkge.launch.process_plan import Host, JobSettings, Places
from dglkge.launch.remote.remote_site import (
    RemoteSite,
    compare_fingerprints,
    compare_versions,
    describe_problems,
    planned_host,
)
from dglkge.launch.remote.ssh import SshSettings
from dglkge.launch.remote.synced_site import SyncedSite
from tests.launch.conftest import ROOT

ADDRESS = "127.0.0.1"
ENTRY = JobEntry(new_nonce())
SEGMENTS = Path("/dev/shm")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteSite]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    opened = RemoteSite(SshSettings(), sys.executable, str(tmp_path))
    yield opened
    opened.close()


def test_each_attempt_clears_what_the_one_before_has_left(cluster: RemoteSite) -> None:
    """The job is registered from the first attempt on; other programs' segments stay."""
    segment, foreign = SEGMENTS / f"dglkge-{ENTRY.job}-0~x", SEGMENTS / f"{ENTRY.job}-kvdata-"
    foreign.touch()
    try:
        for _ in range(2):
            segment.touch()
            cluster.connect([Machine(ADDRESS, 1)], ENTRY)
            assert not segment.exists()
        segment.touch()
        cluster.clean_up([ADDRESS])
        assert foreign.exists() and not segment.exists()
    finally:
        foreign.unlink(missing_ok=True)
        segment.unlink(missing_ok=True)


def test_a_machine_that_goes_before_the_port_is_chosen(cluster: RemoteSite) -> None:
    """The error names the machine, and is one after which another attempt may be made."""
    hosts = cluster.connect([Machine(ADDRESS, 1)], ENTRY)
    children = psutil.Process().children()
    (agent,) = [child for child in children if "launch.node_program" in " ".join(child.cmdline())]
    agent.kill()
    settings = JobSettings(command=("train.py",), ip_config="ip_config.txt", num_trainers=1)
    with pytest.raises(NotReadyError) as caught:
        cluster.plan(hosts, settings)
    assert str(caught.value) == f"{sys.executable} could not run there: status -9"


def test_a_signal_that_another_thread_receives(cluster: RemoteSite) -> None:
    has_run = threading.Event()
    outcomes: queue.Queue[bool] = queue.Queue()

    def handler(_number: int, _frame: object) -> None:
        has_run.set()
        raise KeyboardInterrupt

    async def work(_address: str) -> None:
        await asyncio.sleep(1)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        outcomes.put(has_run.wait(10))

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster._run_all(work, [ADDRESS])
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcomes.get(timeout=20)


def test_every_problem_has_a_line() -> None:
    problems = [("10.0.0.2", "port 30050\nis in use"), ("10.0.0.13", "has no dgl"), ("10.0.0.2", "no room")]
    text = describe_problems([(address, InputError(words)) for address, words in problems], 4, "stopped")
    assert text.splitlines() == [
        "3 problems on 2 of 4 hosts; stopped",
        "  10.0.0.2   port 30050 is in use",
        "  10.0.0.13  has no dgl",
        "  10.0.0.2   no room",
    ]


def described(**versions: str | None) -> dict:
    return {"versions": {"python": "3.11", "dglkge": "1.0", "dgl": "1.1.3", "torch": "2.13.0", **versions}}


def test_other_versions() -> None:
    """dglkge is compared with the launcher's, all else with the first machine's; what is missing is named."""
    machines = {"a": described(dglkge="0.9"), "b": described(torch="2.2.1", dgl=None), "c": described()}
    assert compare_versions(machines, "1.0") == [
        ("a", "has dglkge 0.9, the launcher has 1.0"),
        ("b", "has no dgl"),
        ("b", "has torch 2.2.1, a has 2.13.0"),
    ]
    assert compare_versions({"a": described(), "b": described()}, "1.0") == compare_versions({}, "1.0") == []


def test_a_dry_run_with_sync_compares_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a start does before it sends a file."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("dglkge.launch.remote.remote_site.__version__", "0.1")
    settings = JobSettings(command=("train.py",), ip_config="ip_config.txt", num_trainers=1)
    with contextlib.closing(SyncedSite(SshSettings(), sys.executable, str(tmp_path))) as site:
        hosts = site.connect([Machine(ADDRESS, 1)], None)
        text = f"1 hosts; nothing was started\n  {ADDRESS}  has dglkge {__version__}, the launcher has 0.1"
        with pytest.raises(NotReadyError, match=text):
            site.plan(hosts, settings)
        with pytest.raises(NotReadyError, match=text):
            site.send_files(settings.command, None, None, Places(tmp_path, tmp_path / "machine"))
    assert not (tmp_path / "machine").exists()


def test_partition_files() -> None:
    """A machine with a file of another partitioning is named; one without a file is told of elsewhere."""
    assert compare_fingerprints({"a": "1", "b": "1", "c": None}) == []
    ((address, text),) = compare_fingerprints({"a": None, "b": "1", "c": "2"})
    assert (address, "differs from that of b" in text) == ("c", True)


INTERFACES = {"127.0.0.1": "lo", "10.1.2.3": "eth0"}


def test_interface_of_an_address() -> None:
    described = {"interfaces": INTERFACES, "gpus": [], "runner": ["python"], "num_cores": 4}
    for address, interface in (
        ("127.0.0.1", "lo"), ("127.0.0.9", "lo"), ("10.1.2.3", "eth0"), ("10.1.2.4", None)
    ):  # fmt: skip
        host = planned_host(address, Machine(address, 20000), described)
        assert host == Host(address, 20000, 4, interface, ("python",))


def test_names_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL's sockets take only numbers; a name without an address is an error with its name."""
    assert machine_addresses([Machine("localhost", 20000)]) == ["127.0.0.1"]
    assert machine_addresses([Machine("10.9.8.7")]) == ["10.9.8.7"]

    def fail(*_args: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        NotReadyError, match="no IPv4 address for host 'nowhere' of ip_config: Name or service not known"
    ):
        machine_addresses([Machine("nowhere")])


def test_two_addresses_of_one_machine() -> None:
    """They would collide in shared memory, so they are refused with that reason."""
    with pytest.raises(
        InputError, match=r"names this machine 2 times \(127.0.0.1, 127.0.0.9\): the shared memory"
    ):
        machine_addresses([Machine("127.0.0.1"), Machine("127.0.0.9")])


def test_this_machine() -> None:
    assert all(map(is_own_address, ["127.0.0.1", *local_interfaces()]))
    assert not is_own_address("192.0.2.1")
    assert all(name for name in local_interfaces().values())
    assert usable_cores() >= 1
