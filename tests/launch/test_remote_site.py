"""The machines of a job as the launcher sees them, with this machine for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dglkge import __version__
from dglkge.distributed.addresses import Machine
from dglkge.distributed.jobs import JobEntry, live_jobs
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.background import wait
from dglkge.launch.process_plan import Host, JobSettings, Places
from dglkge.launch.remote.connection import NodeConnection, open_node, ssh_client
from dglkge.launch.remote.remote_site import (
    RemoteSite,
    compare_fingerprints,
    compare_versions,
    describe_problems,
    planned_host,
)
from dglkge.launch.remote.synced_site import SyncedSite
from tests.launch.conftest import ROOT, node_program

ADDRESS = "127.0.0.1"
ENTRY = JobEntry(new_nonce())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteSite]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    opened = RemoteSite(ssh_client({}), sys.executable, str(tmp_path))
    yield opened
    opened.close()


def test_a_machine_that_goes_before_the_port_is_chosen(cluster: RemoteSite) -> None:
    """The error is one after which another attempt may be made, which clears what this one has left."""
    segment = Path(f"/dev/shm/dglkge-{ENTRY.job}-0~x")
    for _ in range(2):
        segment.touch()
        hosts = cluster.connect([Machine(ADDRESS, 1)], ENTRY)
        assert not segment.exists()
    process_of_program().kill()
    settings = JobSettings(command=("train.py",), num_trainers=1)
    with pytest.raises(NotReadyError, match=rf"^{sys.executable} could not run there: status -9$"):
        cluster.plan(hosts, settings)


def test_a_signal_that_another_thread_receives(cluster: RemoteSite) -> None:
    has_run, outcomes = threading.Event(), queue.Queue()

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
    lines = ["  10.0.0.2   port 30050 is in use", "  10.0.0.13  has no dgl", "  10.0.0.2   no room"]
    assert text.splitlines() == ["3 problems on 2 of 4 hosts; stopped", *lines]


def described(**versions: str | None) -> dict:
    return {"versions": {"python": "3.11", "dglkge": "1.0", "dgl": "1.1.3", "torch": "2.13.0", **versions}}


def test_other_versions() -> None:
    """dglkge is compared with the launcher's, all else with the first machine's; what is missing is named."""
    machines = {"a": described(dglkge="0.9"), "b": described(torch="2.2.1", dgl=None), "c": described()}
    problems = [("a", "has dglkge 0.9, the launcher has 1.0"), ("b", "has no dgl")]
    assert compare_versions(machines, "1.0") == [*problems, ("b", "has torch 2.2.1, a has 2.13.0")]
    assert compare_versions({"a": described(), "b": described()}, "1.0") == compare_versions({}, "1.0") == []


def test_a_dry_run_with_sync_compares_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("dglkge.launch.remote.remote_site.__version__", "0.1")
    settings = JobSettings(command=("train.py",), num_trainers=1)
    places = Places(tmp_path, tmp_path / "machine")
    opened = SyncedSite(ssh_client({}), sys.executable, str(tmp_path), places=places, repair=print)
    with contextlib.closing(opened) as site:
        hosts = site.connect([Machine(ADDRESS, 1)], None)
        text = f"1 hosts; nothing was started\n  {ADDRESS}  has dglkge {__version__}, the launcher has 0.1"
        with pytest.raises(NotReadyError, match=text):
            site.plan(hosts, settings)
        with pytest.raises(NotReadyError, match=text):
            site.send_files(settings.command, None, None)
    assert not (tmp_path / "machine").exists()


def test_partition_files() -> None:
    assert compare_fingerprints({"a": "1", "b": "1", "c": None}) == []
    ((address, text),) = compare_fingerprints({"a": None, "b": "1", "c": "2"})
    assert (address, "differs from that of b" in text) == ("c", True)


def test_interface_of_an_address() -> None:
    interfaces = {"127.0.0.1": "lo", "10.1.2.3": "eth0"}
    described = {"interfaces": interfaces, "gpus": [], "runner": ["python"], "num_cores": 4}
    for address, interface in {**interfaces, "127.0.0.9": "lo", "10.1.2.4": None}.items():
        host = planned_host(address, 20000, described)
        assert host == Host(address, 20000, 4, interface, ("python",))


def call(session: NodeConnection, task: str, *seconds: float, **arguments: Any) -> Any:
    return wait(session.call(task, *seconds, **arguments))


def test_every_obstacle_is_found(session: NodeConnection, tmp_path: Path, free_port: int) -> None:
    partition = tmp_path / "ring.json"
    partition.write_text('{"num_parts": 1, "part-0": {"part_graph": "part0/graph.dgl"}}')
    question = {"servers": ("192.0.2.7", 65535, 2), "num_processes": 2, "folder": "/no/such/folder"}
    question |= {"script": "train.py", "partition": (str(partition), 0, 1)}
    question |= {"needs": {"shared_memory_bytes": 10**18}}
    problems = [text for text, _ in call(session, "check", **question)["problems"]]
    expected = [
        "none of its interfaces has the address 192.0.2.7 that ip_config gives it (it has ",
        "has no folder /no/such/folder",
        "2 servers from port 65535 on pass the highest port",
        "the tables need 1000000000.00 GB of shared memory, /dev/shm has ",
        f"partition 0 is not whole: {tmp_path}/part0/graph.dgl is missing",
    ]
    assert len(problems) == len(expected)
    assert all(problem.startswith(words) for problem, words in zip(problems, expected))
    for name in ("train.py", "part0/graph.dgl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    question |= {"servers": ("127.0.0.1", free_port, 1), "folder": str(tmp_path), "needs": {}}
    answer = call(session, "check", **{**question, "partition": ("ring.json", 0, 1)})
    assert answer["problems"] == [] and len(answer["fingerprint"]) == 64


def test_jobs_side_by_side(session: NodeConnection) -> None:
    """A second job has other ports; an entry ends with its job; an error is an answer, and not the end."""
    first, second = JobEntry(new_nonce()), JobEntry(new_nonce())
    question = {"address": "127.0.0.1", "num_servers": 3}
    call(session, "register", entry=first.to_dict())
    call(session, "register", entry=first.to_dict())  # its next attempt
    port = call(session, "choose_server_ports", **question)
    with node_program() as other:
        with pytest.raises(InputError, match="register failed: TypeError"):
            call(other, "register")
        call(other, "register", entry=second.to_dict())
        assert {first.job, second.job} <= {entry.job for entry in live_jobs()}
        # Chosen, and not yet taken.
        assert abs(call(other, "choose_server_ports", **question) - port) >= 3
        master = call(session, "choose_master_port", address="127.0.0.1", avoid=[])
        all_others = [number for number in range(29500, 30000) if number != master]
        with pytest.raises(InputError, match="no free port from 29500 to 29999"):
            call(other, "choose_master_port", address="127.0.0.1", avoid=all_others)
        call(session, "register", entry=first.to_dict())  # each attempt chooses anew
        assert call(other, "choose_master_port", address="127.0.0.1", avoid=all_others) == master
        wait(session.close())
        assert first.job not in {entry.job for entry in live_jobs()}


def process_of_program() -> psutil.Process:
    children = psutil.Process().children()
    programs = [child for child in children if "launch.node_program" in " ".join(child.cmdline())]
    return max(programs, key=psutil.Process.create_time)


def test_a_node_program_that_is_gone(session: NodeConnection) -> None:
    assert call(session, "describe")
    program = process_of_program()
    program.suspend()
    with pytest.raises(InputError, match=r"did not answer within 0\.1 s"):
        call(session, "describe", 0.1)
    program.resume()
    assert call(session, "describe")
    program.suspend()
    wait(session.close())  # a silent one is killed at the end
    assert not program.is_running() and not session.is_alive


def test_what_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="^the launcher's machine cannot start 'ssh', which reaches here"):
        open_node("here", ssh_client({}), sys.executable)
    words = "^here, the launcher's machine: cannot start / .--python gives another.: Permission denied$"
    with pytest.raises(InputError, match=words):
        open_node("here", None, "/")
