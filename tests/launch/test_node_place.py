"""A node's place from options, ip_config.txt and the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from dglkge.distributed.ip_config import Machine
from dglkge.errors import InputError
from dglkge.launch.node_place import DEFAULT_PORT, NodePlace, host_and_port, node_place

SLURM = {
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "cn[07-08]",
}
INTERFACES = {"127.0.0.1": "lo", "10.0.0.9": "ib0", "10.1.0.9": "eth0", "10.1.0.10": "eth0"}
GIVEN = {"node_rank": "0", "num_nodes": 2, "rendezvous": "a"}
LISTED = {"node_rank": "0", "has_ip_config": True}
MACHINES = [Machine("10.0.0.1"), Machine("10.0.0.2"), Machine("10.0.0.3")]


def place(environment: dict[str, str] | None = None, **options: Any) -> NodePlace | None:
    """Return the place for some options."""
    absent = dict.fromkeys(("node_rank", "num_nodes", "rendezvous", "address"))
    given: dict[str, Any] = {**absent, "has_ip_config": False, **options}
    return node_place(
        ip_config=lambda: MACHINES, environment=environment or {}, interfaces=INTERFACES, **given
    )


@pytest.mark.parametrize(
    ("options", "environment", "wanted"),
    [
        ({}, SLURM, None),  # an ordinary start inside a job of SLURM
        ({"node_rank": "2"}, {}, NodePlace(2, 3, "10.0.0.1", DEFAULT_PORT, None, True)),
        ({"node_rank": "2", "rendezvous": "other:5"}, {}, NodePlace(2, 3, "other", 5, None, True)),
        (
            {"node_rank": "1", "num_nodes": 2, "rendezvous": "[fd00::1]:7", "address": "10.0.0.9"},
            {},
            NodePlace(1, 2, "fd00::1", 7, "10.0.0.9"),
        ),
        ({"node_rank": "auto"}, SLURM, NodePlace(1, 2, "cn07", DEFAULT_PORT)),
        ({"node_rank": "auto", "rendezvous": "svc"}, SLURM, NodePlace(1, 2, "svc", DEFAULT_PORT)),
        ({"node_rank": "auto", "num_nodes": 3}, SLURM, NodePlace(1, 3, "cn07", DEFAULT_PORT)),
        (
            {"node_rank": "auto", "has_ip_config": True},
            SLURM,
            NodePlace(1, 3, "10.0.0.1", DEFAULT_PORT, None, True),
        ),
        (
            {"node_rank": "auto", "num_nodes": 2, "rendezvous": "kge-0.kge"},
            {"JOB_COMPLETION_INDEX": "1"},
            NodePlace(1, 2, "kge-0.kge", DEFAULT_PORT),
        ),
        (
            {"node_rank": "1", "num_nodes": 2, "rendezvous": "a", "address": "ib0"},
            {},
            NodePlace(1, 2, "a", DEFAULT_PORT, "10.0.0.9"),
        ),
        ({"node_rank": "0", "num_nodes": 1}, {}, NodePlace(0, 1, "127.0.0.1", DEFAULT_PORT)),
    ],
)
def test_place(options: dict[str, Any], environment: dict[str, str], wanted: NodePlace | None) -> None:
    assert place(environment, **options) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 2}, "--nodes needs --node_rank"),
        ({"address": "10.0.0.1"}, "--address needs --node_rank"),
        ({"node_rank": "3"}, "--node_rank 3 of 3 nodes; allowed are 0 to 2"),
        ({"node_rank": "0", "num_nodes": 2}, "--nodes needs --rendezvous host:port"),
        ({**LISTED, "num_nodes": 2}, "--nodes and --ip_config exclude"),
        ({"node_rank": "0", "address": "10.0.0.1"}, "--address and ip_config.txt exclude"),
        ({**GIVEN, "rendezvous": "a:b"}, "'a:b' is no host"),
        ({**GIVEN, "address": "::1"}, "DGL's sockets are IPv4 only"),
        ({**GIVEN, "address": "127.0.0.1"}, "no address at which"),
        ({**GIVEN, "address": "ib1"}, "it has lo 127.0.0.1, ib0 10.0.0.9, eth0 10.1.0.9"),
        ({**GIVEN, "address": "eth0"}, "eth0 has 2 IPv4 addresses; give one of 10.1.0.9, 10.1.0.10"),
        ({"node_rank": "auto"}, "no scheduler has set"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        place(**options)


@pytest.mark.parametrize("text", ["", ":5", "a:", "a:0", "a:65536", "[fd00::1]x", "[fd00::1]:"])
def test_hosts_and_ports_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="is no host"):
        host_and_port(text, 1)
