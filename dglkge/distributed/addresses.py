"""Addresses of a job: its machines, as ip_config.txt lists them, and the ports of its processes.

DGL's clients sleep for 3 s between attempts to connect, so a job whose clients come first starts seconds
late. A probing connection would not help: DGL counts every connection as a client. Waiting reads the kernel's
table of listening sockets instead.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dglkge.errors import InputError

DEFAULT_PORT = 30050
"""DGL's default port of a machine's first server; if a line has none the launcher chooses from here on."""

HIGHEST_PORT = 65535

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


@dataclass(frozen=True)
class Machine:
    """One line of ip_config.txt: an IPv4 address or host name as written; server i listens on ``port + i``.

    `num_servers` is DGL-KE's third column. Without a port in the line (`has_port`) the launcher finds a free
    one.
    """

    address: str
    port: int = DEFAULT_PORT
    num_servers: int | None = None
    has_port: bool = field(default=True, compare=False)


def read_ip_config(path: str | Path) -> list[Machine]:
    """Read the machines of a cluster; machine i holds partition i.

    Accepts blank lines, comments after ``#``, spaces at either end, a byte order mark and CR LF line ends.

    Parameters
    ----------
    path : str or Path
        A file of lines ``ip [port [num_servers]]``.

    Returns
    -------
    list of Machine

    Raises
    ------
    InputError
        If the file cannot be read or names no machine, if a line has another form, a bad or repeated
        address or a bad port, or if two lines ask for different numbers of servers (DGL runs equally
        many on every machine).
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}"
        raise InputError(f"{reason}; expected one line 'ip [port]' for each machine") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
    machines: list[Machine] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        where = f"{path}:{number}"
        machine = _parse_fields(fields, where)
        # Host names are equal regardless of case and of a final dot.
        name = machine.address.rstrip(".").lower()
        if (first := first_line.setdefault(name, number)) != number:
            raise InputError(f"{where}: address {machine.address} was given in line {first} already")
        if machines and machine.num_servers != machines[0].num_servers:
            raise InputError(
                f"{where}: asks for {machine.num_servers or 'no certain number of'} servers where "
                f"{machines[0].address} asks for {machines[0].num_servers or 'none'}; "
                "DGL runs equally many on every machine"
            )
        machines.append(machine)
    if not machines:
        raise InputError(f"{path} names no machine; expected one line 'ip [port]' for each")
    return machines


def write_ip_config(path: str | Path, machines: Sequence[Machine]) -> None:
    """Write machines as lines ``ip port``, the only form that DGL's own parser reads whole."""
    Path(path).write_text("".join(f"{machine.address} {machine.port}\n" for machine in machines), "utf-8")


def _parse_fields(fields: Sequence[str], where: str) -> Machine:
    """Convert the fields of one line; `where` is ``file:line``."""
    if len(fields) > 3:
        raise InputError(
            f"{where}: got {len(fields)} fields ({' '.join(fields)!r}); expected 'ip [port [num_servers]]'"
        )
    address = _address(fields[0], where)
    port = _number(fields[1], "port", where) if len(fields) > 1 else DEFAULT_PORT
    num_servers = _number(fields[2], "number of servers", where) if len(fields) > 2 else None
    return Machine(address, port, num_servers, has_port=len(fields) > 1)


def _address(text: str, where: str) -> str:
    """Read one field as an IPv4 address of one machine or a host name."""
    if ":" in text:
        raise InputError(
            f"{where}: {text!r} is neither an IPv4 address nor a host name: DGL's sockets are IPv4 only, "
            "so give the machine's IPv4 address or a name that has one; a port stands apart, after a space"
        )
    # "10.0.0.300" would pass as a host name and fail only at the resolver.
    if re.fullmatch(r"[0-9.]+", text):
        try:
            parsed = ipaddress.IPv4Address(text)
        except ValueError:
            raise InputError(f"{where}: {text!r} is no IPv4 address (four numbers of 0 to 255)") from None
        if parsed.is_unspecified or parsed.is_multicast or text == "255.255.255.255":
            raise InputError(f"{where}: {text} is the address of no single machine")
    elif _HOST_NAME.fullmatch(text) is None or len(text) > 253:
        raise InputError(f"{where}: {text!r} is neither an IPv4 address nor a host name")
    return text


def _number(text: str, noun: str, where: str) -> int:
    """Read one field as a whole number."""
    # At most 9 digits, before int() converts a text of any length.
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= HIGHEST_PORT):
        raise InputError(f"{where}: {text!r} is no {noun}; expected a whole number of 1 to {HIGHEST_PORT}")
    return int(text)


SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"
"""State of a listening socket in the kernel's tables (Linux, ``include/net/tcp_states.h``)."""

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 0.1

PORT_TAKEN_STATUS = 75
"""Exit status of a process that found its port in use before it trained anything (``EX_TEMPFAIL`` of
``sysexits.h``); the launcher starts the job again with other ports."""

PORT_TAKEN_MARK = "dglkge: port taken:"
"""Start of the last line of such a process, before the address. It distinguishes the process from a user's
script that ends with 75 for another reason."""


class PortTakenError(OSError):
    """A port that this process must listen on is in use by another program."""

    def __init__(self, address: str) -> None:
        super().__init__(errno.EADDRINUSE, f"{address} is in use by another program")
        self.address = address


def hold_usable_address(remote: str) -> tuple[str, socket.socket]:
    """Choose a free port on the address from which a machine is reached; return it and its socket.

    While the socket is open, the kernel gives the port to no other program. It does not listen and sets
    ``SO_REUSEADDR``, so DGL, which sets it too, can listen on the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            # A UDP connect only makes the kernel choose the route, and so the local address.
            route.connect((remote, 1))  # sends nothing
            host = route.getsockname()[0]
        except OSError:
            host = "127.0.0.1"  # no route: a machine without a network, where the job runs alone
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Before SO_REUSEADDR is set: with it the kernel may choose a port that another such socket has bound.
    holder.bind((host, 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return f"{host}:{holder.getsockname()[1]}", holder


def listening_ports(tables: Collection[Path] = SOCKET_TABLES) -> set[int]:
    """Return the TCP ports on which a process of this machine listens; empty if the tables are absent."""
    ports = set()
    for table in tables:
        # The first line is a header. A kernel without IPv6 has no second table.
        lines = table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else []
        for line in lines:
            _, local_address, _, state, *_ = line.split()
            if state == LISTENING:
                ports.add(int(local_address.rpartition(":")[2], 16))
    return ports


def wait_until_listening(ports: Collection[int], timeout_seconds: float) -> bool:
    """Wait until all of the ports have a listener; False after the timeout.

    The caller connects all the same, and reports the error of the connection.
    """
    start = time.monotonic()
    end = start + timeout_seconds
    while not set(ports) <= listening_ports():
        now = time.monotonic()
        if now >= end:
            return False
        # The kernel walks all of its table for each look, which takes milliseconds on a large machine.
        time.sleep(min(max(POLL_SECONDS, (now - start) / 10), LONGEST_POLL_SECONDS))
    return True


def is_own_address(address: str) -> bool:
    """Whether an IPv4 address is one of this machine's, which alone can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
