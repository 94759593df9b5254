"""Which addresses are this machine's, and which clusters one machine can be."""

from __future__ import annotations

import socket

import pytest

from dglkge.distributed.ip_config import Machine
from dglkge.errors import InputError
from dglkge.launch.local_site import (
    are_all_local,
    is_local,
    local_interfaces,
    locate_hosts,
    resolve,
    usable_cores,
)
from dglkge.launch.process_plan import Host

INTERFACES = {"127.0.0.1": "lo", "10.1.2.3": "eth0"}


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1", Host("127.0.0.1", 30050, 4, "lo")),
        ("127.0.0.9", Host("127.0.0.9", 30050, 4, "lo")),
        ("10.1.2.3", Host("10.1.2.3", 30050, 4, "eth0")),
    ],
)
def test_local(address: str, host: Host) -> None:
    """An address of this machine gives one host with the interface that holds it."""
    assert locate_hosts([Machine(address)], INTERFACES, 4) == [host]


def test_host_name_becomes_its_address() -> None:
    """DGL's sockets take only numbers."""
    assert locate_hosts([Machine("localhost", 20000)], INTERFACES, 1) == [Host("127.0.0.1", 20000, 1, "lo")]
    assert resolve("10.9.8.7") == "10.9.8.7"


def test_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without an address is an error with its name."""

    def fail(*_args: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        InputError, match="no IPv4 address for host 'nowhere' of ip_config: Name or service not known"
    ):
        resolve("nowhere")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1"], True),
        (["localhost", "10.1.2.3"], True),
        (["10.1.2.4"], False),
        (["10.1.2.3", "10.1.2.4"], False),
    ],
)
def test_all_local(addresses: list[str], expected: bool) -> None:
    """One foreign address makes it a job on several machines."""
    assert are_all_local([Machine(address) for address in addresses], INTERFACES) is expected


def test_two_addresses_of_one_machine() -> None:
    """They would collide in shared memory, so they are refused with that reason."""
    with pytest.raises(
        InputError, match=r"names this machine 2 times \(127.0.0.1, 10.1.2.3\): the shared memory"
    ):
        locate_hosts([Machine("127.0.0.1"), Machine("10.1.2.3")], INTERFACES, 1)


def test_this_machine() -> None:
    """The loopback address is always ours, and there is a core to run on."""
    assert is_local("127.0.0.1", {})
    assert not is_local("192.0.2.1", local_interfaces())
    assert all(name for name in local_interfaces().values())
    assert usable_cores() >= 1
