"""Reads and writes ip_config.txt: the machines of a job, one line each."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
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
        if name in first_line:
            raise InputError(
                f"{where}: address {machine.address} was given in line {first_line[name]} already"
            )
        first_line[name] = number
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
    Path(path).write_text(
        "".join(f"{machine.address} {machine.port}\n" for machine in machines), encoding="utf-8"
    )


def _parse_fields(fields: Sequence[str], where: str) -> Machine:
    """Convert the fields of one line; `where` is ``file:line``."""
    if len(fields) > 3:
        raise InputError(
            f"{where}: got {len(fields)} fields ({' '.join(fields)!r}); expected 'ip [port [num_servers]]'"
        )
    _check_address(fields[0], where)
    port = _number(fields[1], 1, HIGHEST_PORT, "port", where) if len(fields) > 1 else DEFAULT_PORT
    num_servers = _number(fields[2], 1, HIGHEST_PORT, "number of servers", where) if len(fields) > 2 else None
    return Machine(fields[0], port, num_servers, has_port=len(fields) > 1)


def _check_address(address: str, where: str) -> None:
    """Raise InputError unless the text is an IPv4 address of one machine or a host name."""
    if ":" in address:
        raise InputError(
            f"{where}: {address!r} is neither an IPv4 address nor a host name: DGL's sockets are IPv4 only, "
            "so give the machine's IPv4 address or a name that has one; a port stands apart, after a space"
        )
    # "10.0.0.300" would pass as a host name and fail only at the resolver.
    looks_numeric = re.fullmatch(r"[0-9.]+", address) is not None
    if looks_numeric:
        try:
            parsed = ipaddress.IPv4Address(address)
        except ValueError:
            raise InputError(
                f"{where}: {address!r} is no IPv4 address; expected four numbers of 0 to 255"
            ) from None
        if parsed.is_unspecified or parsed.is_multicast or address == "255.255.255.255":
            raise InputError(f"{where}: {address} is the address of no single machine")
    elif _HOST_NAME.fullmatch(address) is None or len(address) > 253:
        raise InputError(f"{where}: {address!r} is neither an IPv4 address nor a host name")


def _number(text: str, lowest: int, highest: int, noun: str, where: str) -> int:
    """Read one field as a whole number within bounds."""
    # At most 9 digits, before int() converts a text of any length.
    if not (text.isascii() and text.isdigit() and len(text) < 10 and lowest <= int(text) <= highest):
        raise InputError(f"{where}: {text!r} is no {noun}; expected a whole number of {lowest} to {highest}")
    return int(text)
