"""Ports are tested by binding them, and their holders are named."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from dglkge.distributed.world import json_line
from dglkge.errors import InputError, NotReadyError
from dglkge.launch import machine
from dglkge.launch.ports import check_server_ports, find_master_port
from dglkge.launch.supervisor import (
    MOST_CHOICES,
    JobResult,
    ProcessResult,
    taken_port,
    with_ports_chosen_again,
)


def test_busy_port_names_its_holder(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the servers' ports is tried; another user's process is not named, but the port is."""
    for port in range(free_port, free_port + 3):
        words = rf"^port {port} on 127.0.0.1 is in use by pid {os.getpid()}: .*in ip_config.txt$"
        with socket.create_server(("127.0.0.1", port)), pytest.raises(InputError, match=words):
            check_server_ports("127.0.0.1", free_port, 3)
    check_server_ports("127.0.0.1", free_port, 3)
    monkeypatch.setattr(machine.psutil, "net_connections", Mock(side_effect=machine.psutil.AccessDenied))
    with socket.create_server(("127.0.0.1", free_port)):
        with pytest.raises(InputError, match="in use by another process"):
            check_server_ports("127.0.0.1", free_port, 1)


def test_port_of_an_ended_connection_is_free(free_port: int) -> None:
    """A job may follow the last one at once: the kernel's memory of its connections is no obstacle."""
    with socket.create_server(("127.0.0.1", free_port)) as server:  # sets SO_REUSEADDR
        with socket.create_connection(("127.0.0.1", free_port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server closes first: its end waits in TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", free_port))
    check_server_ports("127.0.0.1", free_port, 1)


def test_ports_that_cannot_be_taken() -> None:
    with pytest.raises(InputError, match="3 servers from port 65534 on pass the highest port, 65535"):
        check_server_ports("127.0.0.1", 65534, 3)
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1:80: Cannot assign requested add"):
        check_server_ports("192.0.2.1", 80, 1)


def test_master_port_is_free_and_avoids_the_servers() -> None:
    first = find_master_port("127.0.0.1", ())
    with socket.create_server(("", first)):
        with pytest.raises(NotReadyError, match="no free port from 29500 to 29999"):
            find_master_port("127.0.0.1", set(range(29500, 30000)) - {first})
        second = find_master_port("127.0.0.1", ())
    assert find_master_port("127.0.0.1", set(range(29500, 30000)) - {second}) == second
    # Jobs that start together must choose differently: no port is bound between the choice and torch's start.
    assert len({find_master_port("127.0.0.1", ()) for _ in range(20)}) > 10


def result(folder: Path, *processes: tuple[int, str], is_interrupted: bool = False) -> JobResult:
    ended = []
    for number, (status, text) in enumerate(processes):
        log = folder / f"trainer-{number}.log"
        log.write_text(text)
        ended.append(ProcessResult(f"trainer {number}", "127.0.0.1", 1, status, str(log)))
    return JobResult(1, "failed", 0.0, str(folder), tuple(ended), is_interrupted)


TAKEN = (75, "noise\ndglkge: port taken: 10.0.0.1:29500\n")


def test_a_taken_port_is_known_by_status_and_line(tmp_path: Path) -> None:
    """A user's script may end with 75, and it may write what it likes."""
    assert taken_port(result(tmp_path, (-15, ""), TAKEN)) == "10.0.0.1:29500"
    records = [json_line("trainer 0", "info", line) for line in TAKEN[1].splitlines()]
    assert taken_port(result(tmp_path, (75, "\n".join(records)))) == "10.0.0.1:29500"
    for other in [(75, "the user's own 75\n"), (1, TAKEN[1]), (0, TAKEN[1])]:
        assert taken_port(result(tmp_path, other)) is None
    ended = result(tmp_path, TAKEN)
    (tmp_path / "trainer-0.log").unlink()
    assert taken_port(ended) is None


def test_ports_are_chosen_again_within_a_limit_and_not_after_a_signal(tmp_path: Path) -> None:
    taken, good = result(tmp_path, TAKEN), JobResult(0, None, 1.0, "", ())
    stopped = result(tmp_path, TAKEN, is_interrupted=True)
    words = "10.0.0.1:29500 was taken by another program before the job could listen there: choosing ports "
    for results, num_runs in (([taken, taken, good], 3), ([taken] * 9, MOST_CHOICES), ([stopped], 1)):
        reports: list[str] = []
        run = iter(results).__next__
        assert with_ports_chosen_again(run, reports.append) is results[num_runs - 1]
        assert reports == [f"{words}again"] * (num_runs - 1)
