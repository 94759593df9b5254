"""ip_config.txt and ports: what is accepted, refused with which words, read by DGL; who listens."""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from dglkge.distributed import addresses, dgl_compat
from dglkge.distributed.addresses import Machine, hold_usable_address, listening_ports, wait_until_listening
from dglkge.errors import InputError

FIRST, SECOND = Machine("10.0.0.1"), Machine("10.0.0.2")
ACCEPTED = [
    ("10.0.0.1", [FIRST]),
    ("10.0.0.1 20000 4", [Machine("10.0.0.1", 20000, 4)]),
    ("\n\n  10.0.0.1\t 20000  \n\n\t\n", [Machine("10.0.0.1", 20000)]),
    ("# the cluster\n10.0.0.1 # the first\n#10.0.0.9\n10.0.0.2 1#x\n", [FIRST, Machine("10.0.0.2", 1)]),
    ("10.0.0.1 20000\r\n\r\n10.0.0.2\r\n", [Machine("10.0.0.1", 20000), SECOND]),
    ("\ufeff10.0.0.1\n", [FIRST]),
    ("localhost 65535", [Machine("localhost", 65535)]),
    ("node-1.cluster_a.example.\n", [Machine("node-1.cluster_a.example.")]),
]
REFUSED = [
    ("10.0.0.1 1 2 3", 1, "got 4 fields ('10.0.0.1 1 2 3'); expected 'ip [port [num_servers]]'"),
    ("10.0.0.1\n\n# x\n10.0.0.300\n", 4, "'10.0.0.300' is no IPv4 address"),
    ("010.0.0.1.2", 1, "is no IPv4 address"),
    ("0.0.0.0", 1, "0.0.0.0 is the address of no single machine"),
    ("::1 30050", 1, "IPv4 only, so give the machine"),
    ("10.0.0.1:30050", 1, "a port stands apart"),
    ("-node", 1, "'-node' is neither an IPv4 address nor a host name"),
    ("$(reboot)", 1, "is neither an IPv4 address nor a host name"),
    ("10.0.0.1 http", 1, "'http' is no port; expected a whole number of 1 to 65535"),
    ("10.0.0.1 65536", 1, "'65536' is no port"),
    ("10.0.0.1 \u0663", 1, "is no port"),
    ("10.0.0.1 30050 0", 1, "'0' is no number of servers"),
    ("10.0.0.1\n10.0.0.2\n10.0.0.1 20000\n", 3, "address 10.0.0.1 was given in line 1 already"),
    ("node\nNODE.\n", 2, "address NODE. was given in line 1 already"),
    ("10.0.0.1 1 2\n10.0.0.2 1 3\n", 2, "asks for 3 servers where 10.0.0.1 asks for 2"),
    ("10.0.0.1 1 2\n10.0.0.2 1\n", 2, "asks for no certain number of servers where 10.0.0.1 asks for 2"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ip_config.txt"


def test_every_harmless_spelling_gives_the_machines_in_the_order_of_the_lines(path: Path) -> None:
    """And DGL's own parser, which knows no blank lines and no third column, finds them in our file."""
    rpc = pytest.importorskip("dgl.distributed.rpc", reason="dgl is not installed")
    assert FIRST.port == addresses.DEFAULT_PORT == 30050
    for text, expected in ACCEPTED:
        path.write_bytes(text.encode())
        machines = addresses.read_ip_config(path)
        assert machines == expected, text
        addresses.write_ip_config(path, machines)
        assert path.read_text() == "".join(f"{machine.address} {machine.port}\n" for machine in expected)
        if "localhost" not in text and "example" not in text:
            servers = rpc.read_ip_config(str(path), 2)
            assert [servers[i][:3] for i in servers] == [
                [number, machine.address, machine.port + server_id]
                for number, machine in enumerate(machines)
                for server_id in range(2)
            ]


@pytest.mark.parametrize("text, line, message", REFUSED)
def test_a_malformed_line_is_named(path: Path, text: str, line: int, message: str) -> None:
    path.write_bytes(text.encode())
    with pytest.raises(InputError) as caught:
        addresses.read_ip_config(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.txt: No such file .*; expected one line 'ip \[port\]'"),
        (b"# nothing but words\n", "names no machine"),
        (b"10.0.0.1\n\xff\xfe", r"not UTF-8 text \(byte 9\)"),
    ],
)
def test_files_that_name_no_machine(path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        addresses.read_ip_config(path)


def test_all_ports_are_waited_for(tmp_path: Path) -> None:
    with socket.socket() as first, socket.socket() as second:
        for server in (first, second):
            server.bind(("127.0.0.1", 0))
        ports = [first.getsockname()[1], second.getsockname()[1]]
        assert not listening_ports() & set(ports)
        first.listen()
        assert listening_ports() & set(ports) == {ports[0]} and listening_ports([tmp_path / "tcp"]) == set()
        assert wait_until_listening(ports[:1], timeout_seconds=0)
        assert not wait_until_listening(ports, timeout_seconds=0.05)
        later = threading.Timer(0.1, second.listen)
        later.start()
        assert wait_until_listening(ports, timeout_seconds=30)
        later.join()
    assert not listening_ports() & set(ports)


def test_a_port_that_is_held_goes_to_nobody_but_who_shares_it() -> None:
    """As DGL does: it sets SO_REUSEADDR. The kernel gives a held port to no connection."""
    address, holder = hold_usable_address("127.0.0.1")
    place = ("127.0.0.1", int(address.removeprefix("127.0.0.1:")))
    with holder:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        with socket.create_server(place) as dgl_socket, socket.create_connection(place) as client:
            assert dgl_socket.accept()[1] == client.getsockname()


def test_where_no_way_leads_to_the_machine_loopback_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = OSError(errno.ENETUNREACH, "Network is unreachable")
    no_route = type("NoRoute", (socket.socket,), {"connect": Mock(side_effect=unreachable)})
    monkeypatch.setattr(addresses.socket, "socket", no_route)
    address, holder = hold_usable_address("192.0.2.1")
    holder.close()
    assert address.startswith("127.0.0.1:")


def test_dgl_calls_own_clients_once_they_listen_and_others_after_a_moment() -> None:
    calls = Mock()
    server = SimpleNamespace(time=time, rpc=SimpleNamespace(connect_receiver=calls.connect))
    with socket.socket() as client:
        client.bind(("127.0.0.1", 0))
        own, other = ("127.0.0.1", str(client.getsockname()[1]), 5, 0), ("192.0.2.1", "30050", 0, 0)
        later = threading.Timer(0.1, lambda: (calls.listen(), client.listen()))
        with dgl_compat.without_sleep(server, calls.sleep):
            server.time.sleep(3)
            server.time.sleep(1)
            later.start()
            for address in (own, other, other):
                server.rpc.connect_receiver(*address)
        later.join()
    connected = [call.connect(*address) for address in (own, other, other)]
    pause = call.sleep(dgl_compat.REMOTE_PAUSE_SECONDS)
    assert calls.mock_calls == [call.sleep(1), call.listen(), connected[0], pause, *connected[1:]]
    assert server.time is time and server.rpc.connect_receiver is calls.connect
