"""ip_config.txt: what is accepted, what is refused with which words, and what DGL reads of what we write."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.distributed.ip_config import (
    DEFAULT_PORT,
    Machine,
    read_ip_config,
    write_ip_config,
)
from dglkge.errors import InputError


def _write(folder: Path, text: str | bytes) -> Path:
    """Write an ip_config.txt, byte for byte."""
    path = folder / "ip_config.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1", [Machine("10.0.0.1")]),
        ("10.0.0.1\n10.0.0.2\n", [Machine("10.0.0.1"), Machine("10.0.0.2")]),
        ("10.0.0.1 20000", [Machine("10.0.0.1", 20000)]),
        ("10.0.0.1 20000 4", [Machine("10.0.0.1", 20000, 4)]),
        ("\n\n  10.0.0.1\t 20000  \n\n\t\n", [Machine("10.0.0.1", 20000)]),
        (
            "# the cluster\n10.0.0.1 # the first\n#10.0.0.9\n10.0.0.2 1#x\n",
            [Machine("10.0.0.1"), Machine("10.0.0.2", 1)],
        ),
        (
            b"10.0.0.1 20000\r\n\r\n10.0.0.2 20000\r\n",
            [Machine("10.0.0.1", 20000), Machine("10.0.0.2", 20000)],
        ),
        (b"\xef\xbb\xbf10.0.0.1\n", [Machine("10.0.0.1")]),
        ("localhost 65535", [Machine("localhost", 65535)]),
        ("node-1.cluster_a.example.\n", [Machine("node-1.cluster_a.example.")]),
    ],
)
def test_accepted(tmp_path: Path, text: str | bytes, expected: list[Machine]) -> None:
    """Every harmless spelling gives the machines in the order of the lines."""
    assert read_ip_config(_write(tmp_path, text)) == expected


def test_default_port() -> None:
    """The port is DGL's own default."""
    assert Machine("10.0.0.1").port == DEFAULT_PORT == 30050


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
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
        ("10.0.0.1 -1", 1, "'-1' is no port"),
        ("10.0.0.1 30050.5", 1, "'30050.5' is no port"),
        ("10.0.0.1 \u0663", 1, "is no port"),
        ("10.0.0.1 30050 0", 1, "'0' is no number of servers"),
        ("10.0.0.1 30050 two", 1, "'two' is no number of servers"),
        ("10.0.0.1\n10.0.0.2\n10.0.0.1 20000\n", 3, "address 10.0.0.1 was given in line 1 already"),
        ("node\nNODE.\n", 2, "address NODE. was given in line 1 already"),
        ("10.0.0.1 1 2\n10.0.0.2 1 3\n", 2, "asks for 3 servers where 10.0.0.1 asks for 2"),
        ("10.0.0.1 1 2\n10.0.0.2 1\n", 2, "asks for no certain number of servers where 10.0.0.1 asks for 2"),
    ],
)
def test_refused_with_file_and_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    """A malformed line is an error that says where it stands and what was allowed."""
    path = _write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_ip_config(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but words\n"])
def test_no_machine(tmp_path: Path, text: str) -> None:
    """A file without machines is no cluster."""
    with pytest.raises(InputError, match="names no machine"):
        read_ip_config(_write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    """A missing file is named together with the reason and what it should hold."""
    with pytest.raises(InputError, match=r"absent\.txt: No such file .*; expected one line 'ip \[port\]'"):
        read_ip_config(tmp_path / "absent.txt")


def test_folder(tmp_path: Path) -> None:
    """A folder is no file."""
    with pytest.raises(InputError, match="Is a directory"):
        read_ip_config(tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    """Bytes that are no text are an error, not a traceback."""
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 9\)"):
        read_ip_config(_write(tmp_path, b"10.0.0.1\n\xff\xfe"))


def test_written_file_is_normal(tmp_path: Path) -> None:
    """What is written reads back as the same machines without the third column."""
    path = tmp_path / "clean.txt"
    write_ip_config(path, [Machine("10.0.0.1"), Machine("10.0.0.2", 20000, 3)])
    assert path.read_text() == "10.0.0.1 30050\n10.0.0.2 20000\n"
    assert read_ip_config(path) == [Machine("10.0.0.1"), Machine("10.0.0.2", 20000)]


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1 30050\n10.0.0.2\n",
        "10.0.0.1\r\n10.0.0.2 1\r\n",
        "10.0.0.1\n\n10.0.0.2\n",
        "10.0.0.1 1 2\n",
        "10.0.0.1 1\n\n",
        "\n10.0.0.1\n",
        "10.0.0.1",
        "10.0.0.1 # a\n",
        "#10.0.0.1\n10.0.0.2\n",
        "\ufeff10.0.0.1\n",
    ],
)
def test_dgl_reads_what_is_written(tmp_path: Path, text: str) -> None:
    """DGL's own parser, which knows no blank lines and no third column, finds all machines in our file."""
    rpc = pytest.importorskip("dgl.distributed.rpc", reason="dgl is not installed")
    machines = read_ip_config(_write(tmp_path, text))
    clean = tmp_path / "clean.txt"
    write_ip_config(clean, machines)
    servers = rpc.read_ip_config(str(clean), 2)
    assert [servers[i][:3] for i in servers] == [
        [machine_id, machine.address, machine.port + server_id]
        for machine_id, machine in enumerate(machines)
        for server_id in range(2)
    ]
