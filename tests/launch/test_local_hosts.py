"""Which addresses are this machine's, and which clusters one machine can be."""

from __future__ import annotations

import socket

import pytest

from dglkge.distributed.ip_config import Machine
from dglkge.errors import InputError, NotReadyError
from dglkge.launch.machine import is_local, local_interfaces, machine_addresses, usable_cores
from dglkge.launch.process_plan import Host
from dglkge.launch.remote.remote_site import planned_host

INTERFACES = {"127.0.0.1": "lo", "10.1.2.3": "eth0"}


def test_interface_of_an_address() -> None:
    described = {"interfaces": INTERFACES, "gpus": [], "runner": ["python"], "num_cores": 4}
    for address, interface in (
        ("127.0.0.1", "lo"), ("127.0.0.9", "lo"), ("10.1.2.3", "eth0"), ("10.1.2.4", None)
    ):  # fmt: skip
        host = planned_host(address, Machine(address, 20000), described)
        assert host == Host(address, 20000, 4, interface, ("python",))


def test_names_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL's sockets take only numbers; a name without an address is an error with its name."""
    assert machine_addresses([Machine("localhost", 20000)], INTERFACES) == ["127.0.0.1"]
    assert machine_addresses([Machine("10.9.8.7")], INTERFACES) == ["10.9.8.7"]

    def fail(*_args: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        NotReadyError, match="no IPv4 address for host 'nowhere' of ip_config: Name or service not known"
    ):
        machine_addresses([Machine("nowhere")], INTERFACES)


def test_two_addresses_of_one_machine() -> None:
    """They would collide in shared memory, so they are refused with that reason."""
    with pytest.raises(
        InputError, match=r"names this machine 2 times \(127.0.0.1, 10.1.2.3\): the shared memory"
    ):
        machine_addresses([Machine("127.0.0.1"), Machine("10.1.2.3")], INTERFACES)


def test_this_machine() -> None:
    assert is_local("127.0.0.1", {})
    assert not is_local("192.0.2.1", local_interfaces())
    assert all(name for name in local_interfaces().values())
    assert usable_cores() >= 1
