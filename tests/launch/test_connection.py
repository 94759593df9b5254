"""The launcher's end of a node program: calls of its tasks, and what is told when it is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dglkge import __version__
from dglkge.distributed.jobs import JobEntry, live_jobs
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.launch.connection import NodeConnection, close_all, open_node
from dglkge.launch.machine import local_interfaces, usable_cores
from dglkge.launch.ssh import SshSettings
from tests.launch.conftest import ROOT

CHECK = {
    "address": "127.0.0.1",
    "port": 1,
    "num_servers": 1,
    "folder": "/no/such/folder",
    "script": "train.py",
    "part_config": None,
    "part_id": 0,
    "num_parts": 1,
    "num_processes": 2,
    "needs": {},
}


@pytest.fixture
def session() -> Iterator[NodeConnection]:
    """An agent on this machine."""
    opened = open_node("here", None, sys.executable, {"PYTHONPATH": str(ROOT), "ODD": "it's"})
    yield opened
    opened.close()


def test_description(session: NodeConnection) -> None:
    """What a plan depends on, as it is here."""
    described = session.call("describe")
    assert described["num_cores"] == usable_cores()
    assert described["interfaces"] == local_interfaces()
    assert described["versions"]["dglkge"] == __version__
    assert described["versions"]["python"] == ".".join(map(str, sys.version_info[:2]))
    assert described["runner"][0] == sys.executable
    assert Path(described["runner"][1]).name == "script_runner.py"


def test_every_obstacle_is_found(session: NodeConnection, tmp_path: Path) -> None:
    """Address, folder, ports, shared memory and partition are looked at, whatever the others say."""
    (tmp_path / "ring.json").write_text('{"num_parts": 1, "part-0": {"part_graph": "part0/graph.dgl"}}')
    question = {
        **CHECK,
        "address": "192.0.2.7",
        "port": 65535,
        "num_servers": 2,
        "part_config": str(tmp_path / "ring.json"),
        "needs": {"shared_memory_bytes": 10**18},
    }
    answer = session.call("check", **question)
    texts = " | ".join(text for text, _ in answer["problems"])
    assert len(answer["problems"]) == 5
    assert "none of its interfaces has the address 192.0.2.7 that ip_config gives it (it has " in texts
    assert "has no folder /no/such/folder" in texts
    assert "2 servers from port 65535 on pass the highest port" in texts
    assert "the tables need 1000000000.00 GB of shared memory, /dev/shm has " in texts
    assert f"partition 0 is not whole: {tmp_path}/part0/graph.dgl is missing" in texts


def test_nothing_in_the_way(session: NodeConnection, tmp_path: Path, free_port: int) -> None:
    """A machine that is ready has no problems, and says which partition file it has."""
    (tmp_path / "train.py").touch()
    (tmp_path / "part0").mkdir()
    (tmp_path / "part0" / "graph.dgl").touch()
    (tmp_path / "ring.json").write_text('{"num_parts": 1, "part-0": {"part_graph": "part0/graph.dgl"}}')
    question = {**CHECK, "port": free_port, "folder": str(tmp_path), "part_config": "ring.json"}
    answer = session.call("check", **question)
    assert answer["problems"] == []
    assert len(answer["fingerprint"]) == 64


def test_job_files(session: NodeConnection, tmp_path: Path) -> None:
    """ip_config.txt as DGL reads it, in a folder that is made."""
    session.call(
        "write_job_files", log_dir=str(tmp_path / "a" / "b"), machines=[["10.0.0.1", 5], ["10.0.0.2", 6]]
    )
    assert (tmp_path / "a" / "b" / "ip_config.txt").read_text() == "10.0.0.1 5\n10.0.0.2 6\n"
    assert len(list((tmp_path / "a" / "b").iterdir())) == 1


def test_failed_tasks(session: NodeConnection) -> None:
    """What a task raises is an answer; the agent goes on."""
    with pytest.raises(InputError, match="write_job_files failed: TypeError"):
        session.call("write_job_files")
    with pytest.raises(InputError, match="cannot write logs to /proc/x"):
        session.call("write_job_files", log_dir="/proc/x", machines=[])
    assert session.call("describe")


def test_jobs_side_by_side(session: NodeConnection) -> None:
    """A second job is taken, unless it has the same run folder; an entry ends with its agent."""
    first, second = (JobEntry(new_nonce(), run="/runs/one", host="here", launcher_pid=7) for _ in range(2))
    session.call("register", entry=first.to_dict())
    session.call("register", entry=first.to_dict())  # its next attempt
    other = open_node("here", None, sys.executable, {"PYTHONPATH": str(ROOT)})
    try:
        with pytest.raises(
            InputError, match=f"/runs/one is in use: another job writes there, job {first.job} "
        ):
            other.call("register", entry=second.to_dict())
        other.call("register", entry={**second.to_dict(), "run": "/runs/two"})
        assert {first.job, second.job} <= {entry.job for entry in live_jobs()}
        session.close()
        assert first.job not in {entry.job for entry in live_jobs()}
    finally:
        other.close()


def test_ports_that_two_jobs_choose(session: NodeConnection) -> None:
    """Ports that a job has chosen and not yet taken are no other's."""
    other = open_node("here", None, sys.executable, {"PYTHONPATH": str(ROOT)})
    try:
        chosen = []
        for agent in (session, other):
            agent.call("register", entry=JobEntry(new_nonce()).to_dict())
            chosen.append(agent.call("choose_server_ports", address="127.0.0.1", num_servers=3))
        assert not set(range(chosen[0], chosen[0] + 3)) & set(range(chosen[1], chosen[1] + 3))
    finally:
        other.close()


def agent_process() -> psutil.Process:
    """Return the agent that this process has started."""
    children = psutil.Process().children()
    (agent,) = [child for child in children if "launch.node_program" in " ".join(child.cmdline())]
    return agent


def test_agent_that_is_gone(session: NodeConnection) -> None:
    """A dead agent is noticed, in asking as well as in between."""
    assert session.call("describe")
    agent = agent_process()
    agent.kill()
    with pytest.raises(InputError, match="could not run there: status -9"):
        session.call("describe")
    assert not session.is_alive


def test_silent_agent(session: NodeConnection) -> None:
    """An answer has a time limit."""
    assert session.call("describe")
    agent = agent_process()
    agent.send_signal(signal.SIGSTOP)
    with pytest.raises(InputError, match=r"did not answer within 0\.1 s"):
        session.call("describe", 0.1)
    agent.send_signal(signal.SIGCONT)
    assert session.call("list_files", folder="/no/such/folder") == []  # and not the late answer
    agent.send_signal(signal.SIGSTOP)
    close_all([session])
    assert not agent.is_running()


def test_no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names the program and the machine that was to be reached."""
    monkeypatch.setenv("PATH", str(tmp_path))
    message = (
        "the launcher's machine cannot start 'ssh', which reaches 192.0.2.7: No such file or directory; "
        "install OpenSSH's client"
    )
    with pytest.raises(InputError) as caught:
        open_node("192.0.2.7", SshSettings(), sys.executable, {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("python", "reason"), [("/no/such/python", "No such file or directory"), ("/", "Permission denied")]
)
def test_an_interpreter_that_does_not_exist_here(python: str, reason: str) -> None:
    """On this machine no shell says so."""
    message = (
        f"here, the launcher's machine: cannot start {python}: {reason}; "
        "give the path of another interpreter with --python"
    )
    with pytest.raises(InputError) as caught:
        open_node("here", None, python, {})
    assert str(caught.value) == message


def test_environment_and_greetings(tmp_path: Path) -> None:
    """The interpreter gets our variables; lines of a login shell before the answers do no harm."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "Welcome"; echo "[1]"\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    session = open_node("here", None, str(program), environment)
    try:
        assert session.call("describe")["versions"]["dglkge"] == __version__
    finally:
        session.close()
