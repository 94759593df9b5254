"""Nodes that connect to the launcher by TCP: authentication, channels, losses, ends. All on the loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dglkge import __version__
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.connection import NodeConnection
from dglkge.launch.node_place import NodePlace
from dglkge.launch.remote.channel import request_connection
from dglkge.launch.remote.file_transfer import Tree, fetch, send
from dglkge.launch.remote.handshake import Peer, RefusedError, introduce_node, read_secret
from dglkge.launch.remote.node import Node
from dglkge.launch.remote.rendezvous import Rendezvous, listen
from dglkge.launch.ssh import forwarded_environment
from tests.launch.conftest import ROOT, TIMEOUT_SECONDS

SECRET = b"a secret of more than sixteen bytes"


class _Hub:
    """A rendezvous of two nodes and what it has reported."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reports: list[str] = []
        self.nodes = Rendezvous("127.0.0.1", port, 2, SECRET, TIMEOUT_SECONDS, self.reports.append)
        self.started: list[subprocess.Popen[str]] = []

    def start_node(self, rank: int = 1, secret: bytes = SECRET, *options: str) -> subprocess.Popen[str]:
        """Start ``dglkge-launch`` for another node."""
        place = ["--node_rank", str(rank), "--nodes", "2", "--rendezvous", f"127.0.0.1:{self.port}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DGLKGE_SECRET": secret.decode(), "ODD": "it's"}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        node = subprocess.Popen(
            [sys.executable, "-m", "dglkge.cli.launch", *place, *options, "train.py"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(node)
        return node

    def session(self) -> NodeConnection:
        """Start an agent on node 1."""
        transport = self.nodes.transport(1)
        return NodeConnection("127.0.0.1", transport, transport.python, {})

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.reports
            time.sleep(0.02)


@pytest.fixture
def hub(free_port: int) -> Iterator[_Hub]:
    """A launcher that waits for one node."""
    opened = _Hub(free_port)
    yield opened
    opened.nodes.close()
    for node in opened.started:
        children = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.communicate()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive


def test_a_session_over_a_channel(hub: _Hub, tmp_path: Path) -> None:
    """The agent replies, files go there and back, and at the end the node has the status of the job."""
    node = hub.start_node()
    hub.nodes.await_nodes()
    session = hub.session()
    assert session.call("describe")["versions"]["dglkge"] == __version__
    here, there, back = (tmp_path / name for name in ("here", "there", "back"))
    here.mkdir()
    content = os.urandom(3 << 20)
    (here / "a b").write_bytes(content)
    assert send(session, Tree(str(here), str(there), ("a b",))) == 1
    assert fetch(session, str(there), str(back)) == 1
    assert (back / "a b").read_bytes() == content
    session.close()
    hub.nodes.end(7, "trainer 0 ended with status 7")
    output = node.communicate(timeout=TIMEOUT_SECONDS)[0]
    # Told the end, a node leaves, maybe before the launcher closes: it is not lost.
    hub.wait_for(lambda: not hub.nodes._nodes)
    hub.nodes.close()
    assert not any("is lost" in report for report in hub.reports)
    assert node.returncode == 7
    assert "[launcher] the job has ended: trainer 0 ended with status 7\n" in output


def _run(hub: _Hub, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command on node 1."""
    command = hub.nodes.transport(1).command("", words)
    return subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_SECONDS)


def test_commands(hub: _Hub) -> None:
    """Status, pipes and environment are those of the command; the secret is not in it."""
    hub.start_node()
    hub.nodes.await_nodes()
    done = _run(
        hub,
        "sh",
        "-c",
        "cat; echo bad >&2; echo $ODD$DGLKGE_SECRET$TORCHELASTIC_USE_AGENT_STORE; exit 5",
        stdin=b"x" * 200_000,
    )
    assert done.returncode == 5
    assert (done.stdout, done.stderr) == (b"x" * 200_000 + b"it's\n", b"bad\n")
    assert _run(hub, "sh", "-c", "kill -9 $$").returncode == 128 + 9
    missing = _run(hub, "/no/such/program")
    assert missing.returncode == 127
    assert missing.stderr == b"cannot start /no/such/program: No such file or directory\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_gets_no_channel(hub: _Hub) -> None:
    """The launcher's socket has no permissions; it serves its own user only."""
    hub.start_node()
    hub.nodes.await_nodes()
    name = hub.nodes.transport(1).name
    request_connection(name, 1).close()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            request_connection(name, 1)
        except OSError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_client_that_is_killed(hub: _Hub) -> None:
    """The command reaches the end of its stdin, as under sshd."""
    node = hub.start_node()
    hub.nodes.await_nodes()
    command = hub.nodes.transport(1).command("", ["cat"])
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client.stdin.write(b"x")
    client.stdin.flush()
    assert client.stdout.read(1) == b"x"
    (cat,) = psutil.Process(node.pid).children()
    client.kill()
    client.communicate()
    assert cat.wait(TIMEOUT_SECONDS) is None or not cat.is_running()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_lost(hub: _Hub, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session ends, a new channel is refused with the reason, and its agent exits."""
    monkeypatch.setattr("dglkge.launch.remote.rendezvous.HEARTBEAT_TIMEOUT_SECONDS", 3.0)
    node = hub.start_node()
    hub.nodes.await_nodes()
    session = hub.session()
    session.call("describe")
    children = psutil.Process(node.pid).children()
    os.kill(node.pid, number)
    hub.wait_for(lambda: any("is lost" in line for line in hub.reports))
    why = "its connection ended" if number == signal.SIGKILL else "no heartbeat for 3 s"
    assert hub.reports[-1] == f"node 1 (127.0.0.1) is lost: {why}"
    done = _run(hub, "true")
    assert (done.returncode, done.stderr.decode()) == (255, f"node 1 is not connected: {why}\n")
    if number == signal.SIGKILL:
        with pytest.raises(InputError, match="cannot be reached by its node's dglkge-launch: the connection"):
            session.call("describe")
        psutil.wait_procs(children, timeout=TIMEOUT_SECONDS)
        assert not any(child.is_running() for child in children)
        # A scheduler may start it again: the rank is free.
        hub.start_node()
        hub.nodes.await_nodes()
        assert _run(hub, "true").returncode == 0
    os.kill(node.pid, signal.SIGCONT)
    session.close()


def test_a_launcher_that_is_lost(hub: _Hub) -> None:
    """The node ends its commands and exits with status 255."""
    node = hub.start_node()
    hub.nodes.await_nodes()
    client = subprocess.Popen(hub.nodes.transport(1).command("", ["cat"]), stdin=subprocess.PIPE)
    hub.wait_for(lambda: bool(psutil.Process(node.pid).children()))
    (cat,) = psutil.Process(node.pid).children()
    hub.nodes.close()
    output = node.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert node.returncode == 255
    where = f"127.0.0.1:{hub.port}"
    assert f"the launcher at {where} is lost: the connection ended; this node's part ends" in output
    assert not cat.is_running()
    client.communicate(timeout=TIMEOUT_SECONDS)
    assert client.returncode == 255


def test_a_wrong_secret(hub: _Hub) -> None:
    """One line on both sides, status 2; no channel without the secret either."""
    node = hub.start_node(1, b"another secret of many bytes")
    output = node.communicate(timeout=TIMEOUT_SECONDS)[0]
    words = "wrong secret: --secret_file or DGLKGE_SECRET must be the same on all nodes"
    assert node.returncode == 2
    assert output == (f"dglkge-launch: error: node 0 at 127.0.0.1:{hub.port} refuses node 1: {words}\n")
    assert hub.reports == [f"warning: refused a connection from 127.0.0.1: {words}"]
    hub.nodes._seconds = 0.0
    with pytest.raises(NotReadyError) as caught:
        hub.nodes.await_nodes()
    assert str(caught.value) == (
        f"node 1 of 2 did not connect to 127.0.0.1:{hub.port} within 0 s (--rendezvous_seconds); connected: "
        f"0; refused 127.0.0.1: {words}"
    )


def test_a_launcher_that_does_not_know_the_secret() -> None:
    """A node runs nothing for a launcher that cannot prove that it knows the secret."""
    ours, theirs = socket.socketpair()

    def pretend() -> None:
        peer = Peer(theirs)
        peer.send({"dglkge": 1, "challenge": "00"})
        peer.receive()
        peer.send({"proof": "00"})

    thread = threading.Thread(target=pretend)
    thread.start()
    with ours, theirs, pytest.raises(RefusedError, match="wrong secret"):
        introduce_node(Peer(ours), SECRET, {})
    thread.join()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"{}\n",
        b"[1]\n",
        b'{"challenge": 1, "hello": 2, "proof": []}\n',
        b"x" * 100_000,
    ],
)
def test_foreign_connections(hub: _Hub, sent: bytes) -> None:
    """Whatever connects, it gets a challenge and no more; nodes are served after it."""
    with socket.create_connection(("127.0.0.1", hub.port), TIMEOUT_SECONDS) as connection:
        received = b""
        # The hub may hang up before it has read all of too long a line.
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(4096):
                received += data
    assert b"proof" not in received
    hub.start_node()
    hub.nodes.await_nodes()


@pytest.mark.parametrize(
    ("rank", "nodes", "message"),
    [
        (1, 3, "refuses node 1: it is started for 3 nodes, node 0 for 2"),
        (0, 2, "refuses node 0: it has rank 0; allowed are 1 to 1, node 0 is the launcher"),
    ],
)
def test_nodes_of_another_job(hub: _Hub, rank: int, nodes: int, message: str) -> None:
    """One line that names the difference."""
    place = NodePlace(rank, nodes, "127.0.0.1", hub.port)
    with pytest.raises(RefusedError, match=message):
        Node(place, SECRET, sys.executable, {}, hub.reports.append).run(5.0)


def test_two_nodes_of_one_rank(hub: _Hub) -> None:
    """The second waits for the first to be lost, within its limit."""
    hub.start_node()
    hub.nodes.await_nodes()
    place = NodePlace(1, 2, "127.0.0.1", hub.port)
    with pytest.raises(NotReadyError, match=r"within 0 s .*: node 1 is connected already, from 127\.0\.0\.1"):
        Node(place, SECRET, sys.executable, {}, hub.reports.append).run(0.0)


def test_a_launcher_that_does_not_come(free_port: int) -> None:
    """The wait has a limit."""
    reports: list[str] = []
    place = NodePlace(1, 2, "127.0.0.1", free_port)
    message = f"no launcher of node 0 at 127.0.0.1:{free_port} within 0 s .*: Connection refused"
    with pytest.raises(NotReadyError, match=message):
        Node(place, SECRET, sys.executable, {}, reports.append).run(0.0)


def test_stop_signals_of_a_node(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal to a node stops the job by the launcher; the second ends the node."""
    monkeypatch.setattr("dglkge.launch.stop_signals.FORWARD_SECONDS", 0.0)
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


def test_a_port_in_use(hub: _Hub) -> None:
    message = f"port {hub.port} of the rendezvous 127.0.0.1 is in use on this machine"
    with pytest.raises(NotReadyError, match=message):
        listen("127.0.0.1", hub.port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_hosts_that_are_not_this_machine(host: str, free_port: int) -> None:
    """A service or an address before a NAT: on all interfaces, IPv4 included."""
    with listen(host, free_port), socket.create_connection(("127.0.0.1", free_port), 5):
        pass


def test_ipv6(free_port: int) -> None:
    """The rendezvous may have an IPv6 address; the node's own must be IPv4."""
    try:
        listen("::1", free_port).close()
    except (OSError, InputError):
        pytest.skip("this machine has no IPv6 loopback")
    nodes = Rendezvous("::1", free_port, 2, SECRET, 10.0, lambda _: None)
    try:
        place = NodePlace(1, 2, "::1", free_port)
        with pytest.raises(RefusedError, match="sockets are IPv4 only: give this machine's IPv4 address"):
            Node(place, SECRET, sys.executable, {}, lambda _: None).run(5.0)
    finally:
        nodes.close()


def test_secrets(tmp_path: Path) -> None:
    """From a file or the environment; never forwarded to another process."""
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(InputError, match="other users can read the file of --secret_file: its mode is 640"):
        read_secret(str(tmp_path / "secret"), {})
    (tmp_path / "secret").chmod(0o600)
    assert read_secret(str(tmp_path / "secret"), {}) == b"0123456789abcdef"
    assert read_secret(None, {"DGLKGE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    with pytest.raises(InputError, match="need a shared secret"):
        read_secret(None, {})
    with pytest.raises(InputError, match="of DGLKGE_SECRET has 5 bytes; expected at least 16"):
        read_secret(None, {"DGLKGE_SECRET": "short"})
    with pytest.raises(InputError, match="cannot read --secret_file /no/such"):
        read_secret("/no/such", {})
    assert forwarded_environment({"DGLKGE_SECRET": "x", "DGLKGE_Y": "z"}) == {"DGLKGE_Y": "z"}
