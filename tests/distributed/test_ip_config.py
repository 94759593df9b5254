"""ip_config.txt: what is accepted, what is refused with which words, and what DGL reads of what we write."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.distributed.addresses import DEFAULT_PORT, Machine, read_ip_config, write_ip_config
from dglkge.errors import InputError

FIRST, SECOND = Machine("10.0.0.1"), Machine("10.0.0.2")
ACCEPTED = [
    ("10.0.0.1", [FIRST]),
    ("10.0.0.1\n10.0.0.2\n", [FIRST, SECOND]),
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
    ("10.0.0", 1, "'10.0.0' is no IPv4 address"),
    ("010.0.0.1.2", 1, "is no IPv4 address"),
    ("0.0.0.0", 1, "0.0.0.0 is the address of no single machine"),
    ("224.0.0.1", 1, "224.0.0.1 is the address of no single machine"),
    ("255.255.255.255", 1, "is the address of no single machine"),
    ("::1 30050", 1, "IPv4 only, so give the machine"),
    ("10.0.0.1:30050", 1, "a port stands apart"),
    ("-node", 1, "'-node' is neither an IPv4 address nor a host name"),
    ("no/de", 1, "is neither an IPv4 address nor a host name"),
    ("n\u00f6de", 1, "is neither an IPv4 address nor a host name"),
    ("$(reboot)", 1, "is neither an IPv4 address nor a host name"),
    ("10.0.0.1 http", 1, "'http' is no port; expected a whole number of 1 to 65535"),
    ("10.0.0.1 0", 1, "'0' is no port"),
    ("10.0.0.1 65536", 1, "'65536' is no port"),
    ("10.0.0.1 30050.5", 1, "'30050.5' is no port"),
    ("10.0.0.1 \u0663", 1, "is no port"),
    ("10.0.0.1 30050 0", 1, "'0' is no number of servers"),
    ("10.0.0.1 30050 two", 1, "'two' is no number of servers"),
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
    assert FIRST.port == DEFAULT_PORT == 30050
    for text, expected in ACCEPTED:
        path.write_bytes(text.encode())
        machines = read_ip_config(path)
        assert machines == expected, text
        write_ip_config(path, machines)
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
        read_ip_config(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


def test_files_that_name_no_machine(path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.txt: No such file .*; expected one line 'ip \[port\]'"):
        read_ip_config(path)
    with pytest.raises(InputError, match="Is a directory"):
        read_ip_config(path.parent)
    for text in ("", "\n\n", "# nothing but words\n"):
        path.write_text(text)
        with pytest.raises(InputError, match="names no machine"):
            read_ip_config(path)
    path.write_bytes(b"10.0.0.1\n\xff\xfe")
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 9\)"):
        read_ip_config(path)
