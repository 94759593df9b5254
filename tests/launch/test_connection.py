"""The launcher's end of a node program: calls of its tasks, and what is told when it is gone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dglkge.distributed.jobs import JobEntry, live_jobs
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.launch.background import wait
from dglkge.launch.remote.connection import NodeConnection, open_node
from dglkge.launch.remote.ssh import SshSettings
from tests.launch.conftest import node_program


def call(session: NodeConnection, task: str, *seconds: float, **arguments: Any) -> Any:
    return wait(session.call(task, *seconds, **arguments))


def test_every_obstacle_is_found(shared_session: NodeConnection, tmp_path: Path, free_port: int) -> None:
    partition = tmp_path / "ring.json"
    partition.write_text('{"num_parts": 1, "part-0": {"part_graph": "part0/graph.dgl"}}')
    question = {
        "servers": ("192.0.2.7", 65535, 2),
        "num_processes": 2,
        "folder": "/no/such/folder",
        "script": "train.py",
        "partition": (str(partition), 0, 1),
        "needs": {"shared_memory_bytes": 10**18},
    }
    problems = [text for text, _ in call(shared_session, "check", **question)["problems"]]
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
    answer = call(shared_session, "check", **{**question, "partition": ("ring.json", 0, 1)})
    assert answer["problems"] == [] and len(answer["fingerprint"]) == 64


def test_job_files_and_failed_tasks(shared_session: NodeConnection, tmp_path: Path) -> None:
    """ip_config.txt as DGL reads it, in a folder that is made; an error is an answer, and not the end."""
    with pytest.raises(InputError, match="write_job_files failed: TypeError"):
        call(shared_session, "write_job_files")
    with pytest.raises(InputError, match="cannot write logs to /proc/x"):
        call(shared_session, "write_job_files", log_dir="/proc/x", machines=[])
    folder = tmp_path / "a" / "b"
    machines = [["10.0.0.1", 5], ["10.0.0.2", 6]]
    call(shared_session, "write_job_files", log_dir=str(folder), machines=machines)
    assert (folder / "ip_config.txt").read_text() == "10.0.0.1 5\n10.0.0.2 6\n"
    assert len(list(folder.iterdir())) == 1


def test_jobs_side_by_side(session: NodeConnection) -> None:
    """A second job is taken, with other ports, unless it has the same run folder; an entry ends with it."""
    first, second = (JobEntry(new_nonce(), run="/runs/one", host="here", launcher_pid=7) for _ in range(2))
    question = {"address": "127.0.0.1", "num_servers": 3}
    call(session, "register", entry=first.to_dict())
    call(session, "register", entry=first.to_dict())  # its next attempt
    port = call(session, "choose_server_ports", **question)
    with node_program() as other:
        words = f"/runs/one is in use: another job writes there, job {first.job} "
        with pytest.raises(InputError, match=words):
            call(other, "register", entry=second.to_dict())
        call(other, "register", entry={**second.to_dict(), "run": "/runs/two"})
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
    program.kill()
    with pytest.raises(InputError, match="could not run there: status -9"):
        call(session, "describe")
    assert not session.is_alive


def test_a_silent_node_program_is_killed_at_the_end(session: NodeConnection) -> None:
    assert call(session, "describe")
    program = process_of_program()
    program.suspend()
    wait(session.close())
    assert not program.is_running()


NO_SSH = "the launcher's machine cannot start 'ssh', which reaches here: No such file or directory; install"
HERE = "here, the launcher's machine: cannot start {}: {}; give the path of another interpreter with --python"


@pytest.mark.parametrize(
    ("ssh", "python", "message"),
    [
        (SshSettings(), sys.executable, NO_SSH),
        (None, "/no/such/python", HERE.format("/no/such/python", "No such file or directory")),
        (None, "/", HERE.format("/", "Permission denied")),
    ],
)
def test_what_cannot_be_started(tmp_path, monkeypatch, ssh, python, message) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError) as caught:
        open_node("here", ssh, python, {})
    assert str(caught.value).startswith(message)
