"""Nodes that connect to the launcher by TCP: authentication, losses, ends. All on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dglkge import __version__
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.background import wait
from dglkge.launch.remote.connection import Events, RunningProcess, forwarded_environment
from dglkge.launch.remote.file_transfer import copy_files
from dglkge.launch.remote.node_place import NodePlace
from dglkge.launch.remote.protocol import GREETING, RefusedError, authenticate_launcher, read_secret
from dglkge.launch.remote.rendezvous import Rendezvous, connect, listen
from tests.launch.conftest import ROOT, TIMEOUT_SECONDS, outcome, planned_process

SECRET = b"a secret of more than sixteen bytes"


class _Hub:
    def __init__(self, port: int) -> None:
        self.port = port
        self.reports: list[str] = []
        self.nodes = Rendezvous(
            NodePlace(0, 2, "127.0.0.1", port), SECRET, TIMEOUT_SECONDS, self.reports.append
        )
        self.started: list[subprocess.Popen[str]] = []

    def start_node(self, secret: bytes = SECRET, *options: str) -> subprocess.Popen[str]:
        place = ["--node_rank", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{self.port}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DGLKGE_SECRET": secret.decode(), "ODD": "it's"}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        command = [sys.executable, "-m", "dglkge.cli.launch", *place, *options, "train.py"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        node = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        self.started.append(node)
        return node

    def start(self, code: str) -> tuple[RunningProcess, Events]:
        events = Events()
        code = f"import os; os.execvp('sh', ['sh', '-c', {code!r}])"
        planned = planned_process("trainer", 0, "127.0.0.1", code)
        return wait(self.nodes.connection(1).start([planned], "/", events))[0], events

    def await_pid(self, process: RunningProcess, events: Events) -> psutil.Process:
        for _, changes in events.take(TIMEOUT_SECONDS):
            process.apply(**changes)
        return psutil.Process(process.pid)

    def start_and_await_node(self) -> subprocess.Popen[str]:
        node = self.start_node()
        wait(self.nodes.await_nodes())
        return node

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.reports
            time.sleep(0.02)


@pytest.fixture
def hub(free_port: int) -> Iterator[_Hub]:
    opened = _Hub(free_port)
    yield opened
    wait(opened.nodes.close())
    for node in opened.started:
        children = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.communicate()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive


def test_a_job_of_two_nodes(hub: _Hub, tmp_path: Path) -> None:
    """Its processes have its environment, without the secret; it ends with the status of the job."""
    node = hub.start_and_await_node()
    assert wait(hub.nodes.connection(1).call("describe"))["versions"]["dglkge"] == __version__
    content = os.urandom(9 << 20)
    (tmp_path / "here").write_bytes(content)
    copy = copy_files(hub.nodes.connection(1), str(tmp_path), str(tmp_path / "there"), ["here"])
    assert wait(copy) == 1 and (tmp_path / "there" / "here").read_bytes() == content
    process, events = hub.start("echo $ODD$DGLKGE_SECRET$TORCHELASTIC_USE_AGENT_STORE; exit 5")
    assert (outcome(process, events), process.status) == (b"it's\n", 5)
    wait(hub.nodes.end(7, "trainer 0 ended with status 7"))
    output = node.communicate(timeout=TIMEOUT_SECONDS)[0]
    # Told the end, it is not lost, even if it leaves before the launcher closes.
    hub.wait_for(lambda: not hub.nodes._nodes)
    wait(hub.nodes.close())
    assert not any("is lost" in report for report in hub.reports)
    assert node.returncode == 7
    assert "[launcher] the job has ended: trainer 0 ended with status 7\n" in output


def test_a_node_that_falls_silent(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dglkge.launch.remote.protocol.HEARTBEAT_TIMEOUT_SECONDS", 3.0)
    node = hub.start_and_await_node()
    session = hub.nodes.connection(1)
    process, events = hub.start("exec sleep 600")
    hub.await_pid(process, events)
    node.send_signal(signal.SIGSTOP)
    hub.wait_for(lambda: any("is lost" in line for line in hub.reports))
    why = "no heartbeat for 3 s"
    assert hub.reports[-1] == f"node 1 (127.0.0.1) is lost: {why}"
    outcome(process, events)
    assert (process.status, process.error) == (255, why)
    with pytest.raises(NotReadyError, match=f"cannot be reached by its node's dglkge-launch: {why}"):
        hub.nodes.connection(1)
    with pytest.raises(NotReadyError, match=why):
        wait(session.call("describe"))
    node.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_launcher_that_is_lost(is_reset: bool, hub: _Hub) -> None:
    node = hub.start_and_await_node()
    if is_reset:
        connection = hub.nodes.connection(1).writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    child = hub.await_pid(*hub.start("exec sleep 600"))
    wait(hub.nodes.close())
    output = node.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert node.returncode == 255
    where = f"127.0.0.1:{hub.port}"
    assert f"the launcher at {where} is lost: the connection ended; this node's part ends" in output
    assert not child.is_running()


def test_dripping_connections(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a byte now and then holds no place for longer than a handshake may take."""
    monkeypatch.setattr("dglkge.launch.remote.protocol.HANDSHAKE_SECONDS", 1.0)
    with socket.create_connection(("127.0.0.1", hub.port), TIMEOUT_SECONDS) as connection:
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < start + TIMEOUT_SECONDS:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - start < 5


def test_a_wrong_secret(hub: _Hub) -> None:
    node = hub.start_node(b"another secret of many bytes")
    output = node.communicate(timeout=TIMEOUT_SECONDS)[0]
    words = "wrong secret: --secret_file or DGLKGE_SECRET must be the same on all nodes"
    assert node.returncode == 2
    assert output == f"dglkge-launch: error: node 0 at 127.0.0.1:{hub.port} refuses node 1: {words}\n"
    assert hub.reports == [f"warning: refused a connection from 127.0.0.1: {words}"]
    hub.nodes._seconds = 0.0
    missing = rf"^node 1 of 2 did not connect to 127.0.0.1:{hub.port} within 0 s \(--rendezvous_seconds\); "
    with pytest.raises(NotReadyError, match=f"{missing}connected: 0; refused 127.0.0.1: {words}$"):
        wait(hub.nodes.await_nodes())


def test_a_launcher_that_does_not_know_the_secret() -> None:

    async def authenticate(sent: bytes) -> None:
        launcher_end, node_end = socket.socketpair()
        with node_end:
            node_end.sendall(sent)
            reader, writer = await asyncio.open_connection(sock=launcher_end)
            try:
                await authenticate_launcher((reader, writer), SECRET)
            finally:
                writer.close()

    with pytest.raises(RefusedError, match="wrong secret"):
        asyncio.run(authenticate(GREETING + bytes(64)))
    with pytest.raises(RefusedError, match="it is no dglkge-launch of this version .greeting b'HTTP/1.1"):
        asyncio.run(authenticate(b"HTTP/1.1 400 Bad Request"))


@pytest.mark.parametrize("sent", [b"", b"x" * 100_000])
def test_foreign_connections(hub: _Hub, sent: bytes) -> None:
    """Whatever connects, it gets a random number and no proof; nodes are served after it."""
    with socket.create_connection(("127.0.0.1", hub.port), TIMEOUT_SECONDS) as connection:
        received = b""
        # The hub may hang up before it has read all.
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(4096):
                received += data
    assert received.startswith(GREETING) and received[len(GREETING) + 32 :] in (b"", bytes(32))
    hub.start_and_await_node()


def connect_node(place: NodePlace, seconds: float = 5.0) -> None:
    asyncio.run(connect(place, SECRET, seconds, lambda _: None))


def test_nodes_that_do_not_fit(hub: _Hub, free_port: int) -> None:
    for rank, nodes, words in (
        (1, 3, "refuses node 1: it is started for 3 nodes, node 0 for 2"),
        (0, 2, "refuses node 0: it has rank 0; allowed are 1 to 1, node 0 is the launcher"),
    ):
        with pytest.raises(RefusedError, match=words):
            connect_node(NodePlace(rank, nodes, "127.0.0.1", hub.port))
    hub.start_and_await_node()
    node = hub.start_node(SECRET, "--rendezvous_seconds", "1")
    output = node.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert "within 1 s (--rendezvous_seconds): node 1 is connected already, from 127.0.0.1" in output
    words = f"no launcher of node 0 at 127.0.0.1:{free_port + 1} within 0 s .*: Conn.* refused"
    with pytest.raises(NotReadyError, match=words):
        connect_node(NodePlace(1, 2, "127.0.0.1", free_port + 1), seconds=0.0)


def test_stop_signals_of_a_node(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dglkge.launch.stop_signals.FORWARD_SECONDS", 0.0)
    monkeypatch.setattr("dglkge.launch.stop_signals._received", [])  # other tests' signals
    received: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        node = hub.start_node()
        # Before this line the node ends at the first signal.
        while "connected to" not in node.stdout.readline():
            assert node.poll() is None
        node.send_signal(signal.SIGTERM)
        hub.wait_for(lambda: bool(received))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert hub.reports[-1] == "node 1 (127.0.0.1) received SIGTERM: stopping the job"
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=TIMEOUT_SECONDS)
    assert node.returncode == 1
    hub.wait_for(lambda: "is lost: stopped by a second signal, SIGTERM" in hub.reports[-1])


def test_where_a_rendezvous_listens(hub: _Hub, free_port: int) -> None:
    """For a service or an address before a NAT on all interfaces, IPv4 included; not at a port in use."""
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with listen(host, free_port + 1), socket.create_connection(("127.0.0.1", free_port + 1), 5):
            pass
    message = f"port {hub.port} of the rendezvous 127.0.0.1 is in use on this machine"
    with pytest.raises(NotReadyError, match=message):
        listen("127.0.0.1", hub.port)


def test_ipv6(free_port: int) -> None:
    try:
        nodes = Rendezvous(NodePlace(0, 2, "::1", free_port), SECRET, 10.0, lambda _: None)
    except (OSError, InputError):
        pytest.skip("this machine has no IPv6 loopback")
    try:
        with pytest.raises(RefusedError, match="sockets are IPv4 only: give this"):
            connect_node(NodePlace(1, 2, "::1", free_port))
    finally:
        wait(nodes.close())


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o640)
    with pytest.raises(InputError, match="other users can read the file of --secret_file: its mode is 640"):
        read_secret(str(path))
    path.chmod(0o600)
    assert read_secret(str(path)) == b"0123456789abcdef"
    monkeypatch.setenv("DGLKGE_SECRET", "0123456789abcdef")
    assert read_secret(None) == b"0123456789abcdef" and "DGLKGE_SECRET" not in os.environ
    with pytest.raises(InputError, match="need a shared secret"):
        read_secret(None)
    monkeypatch.setenv("DGLKGE_SECRET", "short")
    with pytest.raises(InputError, match="of DGLKGE_SECRET has 5 bytes; expected at least 16"):
        read_secret(None)
    with pytest.raises(InputError, match="cannot read --secret_file /no/such"):
        read_secret("/no/such")
    assert forwarded_environment({"DGLKGE_SECRET": "x", "DGLKGE_Y": "z"}) == {"DGLKGE_Y": "z"}
