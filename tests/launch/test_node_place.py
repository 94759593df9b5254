"""A node's place from options, ip_config.txt and the scheduler."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dglkge.distributed.addresses import Machine
from dglkge.errors import InputError
from dglkge.launch.remote.node import (
    DEFAULT_PORT,
    NodePlace,
    SchedulerPlace,
    first_host,
    host_and_port,
    node_place,
    scheduler_place,
)


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


SLURM = variables("SLURM_NODEID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=cn[07-08]")
INTERFACES = {"127.0.0.1": "lo", "10.0.0.9": "ib0", "10.1.0.9": "eth0", "10.1.0.10": "eth0"}
GIVEN = {"node_rank": "0", "nodes": 2, "rendezvous": "a"}
LISTED = {"node_rank": "0", "has_ip_config": True}
MACHINES = [Machine("10.0.0.1"), Machine("10.0.0.2"), Machine("10.0.0.3")]


def place(environment: dict[str, str] | None = None, **options: Any) -> NodePlace | None:
    absent = dict.fromkeys(("node_rank", "nodes", "rendezvous", "address"))
    namespace = argparse.Namespace(**{**absent, "has_ip_config": False, **options})
    return node_place(namespace, lambda: MACHINES, INTERFACES, environment or {})


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, SLURM, None),  # an ordinary start inside a job of SLURM
        ({"node_rank": "2"}, {}, NodePlace(2, 3, "10.0.0.1", DEFAULT_PORT, None, True)),
        ({"node_rank": "2", "rendezvous": "other:5"}, {}, NodePlace(2, 3, "other", 5, None, True)),
        (
            {**GIVEN, "rendezvous": "[fd00::1]:7", "address": "ib0"},
            {},
            NodePlace(0, 2, "fd00::1", 7, "10.0.0.9"),
        ),
        ({"node_rank": "auto"}, SLURM, NodePlace(1, 2, "cn07", DEFAULT_PORT)),
        ({"node_rank": "auto", "nodes": 3, "rendezvous": "svc"}, SLURM, NodePlace(1, 3, "svc", DEFAULT_PORT)),
        ({**LISTED, "node_rank": "auto"}, SLURM, NodePlace(1, 3, "10.0.0.1", DEFAULT_PORT, None, True)),
        ({**GIVEN, "node_rank": "auto"}, {"JOB_COMPLETION_INDEX": "1"}, NodePlace(1, 2, "a", DEFAULT_PORT)),
        ({**GIVEN, "address": "10.0.0.9"}, {}, NodePlace(0, 2, "a", DEFAULT_PORT, "10.0.0.9")),
        ({"node_rank": "0", "nodes": 1}, {}, NodePlace(0, 1, "127.0.0.1", DEFAULT_PORT)),
    ],
)
def test_place(options: dict[str, Any], environment: dict[str, str], expected: NodePlace | None) -> None:
    assert place(environment, **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 2}, "--nodes needs --node_rank"),
        ({"address": "10.0.0.1"}, "--address needs --node_rank"),
        ({"node_rank": "3"}, "--node_rank 3 of 3 nodes; allowed are 0 to 2"),
        ({"node_rank": "0", "nodes": 2}, "--nodes needs --rendezvous host:port"),
        ({**LISTED, "nodes": 2}, "--nodes and --ip_config exclude"),
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


def test_hosts_and_ports() -> None:
    places = [host_and_port(text, 7) for text in ("node1:29460", "fd00::1", "[fd00::1]:5")]
    assert places == [("node1", 29460), ("fd00::1", 7), ("fd00::1", 5)]
    for text in ("", ":5", "a:", "a:0", "a:65536", "[fd00::1]x", "[fd00::1]:"):
        with pytest.raises(InputError, match="is no host"):
            host_and_port(text, 1)


SRUN = variables("SLURM_NODEID=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_NNODES=4 SLURM_JOB_NODELIST=cn[07-10]")
TORCHRUN = variables("GROUP_RANK=2 RANK=2 LOCAL_RANK=0 GROUP_WORLD_SIZE=3 MASTER_ADDR=10.0.0.1")
MPIRUN = variables("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0")


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (SRUN, SchedulerPlace(1, 4, "cn07")),
        # srun --nodes=2 in a job of four: the step's nodes count
        (
            {**SRUN, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "cn09,cn10"},
            SchedulerPlace(1, 2, "cn09"),
        ),
        ({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "kge-workers-0-3"}, SchedulerPlace(3)),
        (TORCHRUN, SchedulerPlace(2, 3, "10.0.0.1")),
        (MPIRUN, SchedulerPlace(0, 2)),
        ({**SRUN, **TORCHRUN}, SchedulerPlace(2, 3, "10.0.0.1")),
        ({**SRUN, **MPIRUN}, SchedulerPlace(0, 2)),
    ],
)
def test_place_by_a_scheduler(environment: dict[str, str], place: SchedulerPlace) -> None:
    assert scheduler_place({"PATH": "/bin", **environment}) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {},
            r"no scheduler has set this node's rank; expected one of SLURM_NODEID \(SLURM\), JOB_COMPLETION",
        ),
        (
            {**SRUN, "SLURM_LOCALID": "1"},
            "SLURM_LOCALID is 1: SLURM has started several processes .*tasks-per",
        ),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, "torchrun --nproc-per-node=1"),
        ({**SRUN, "SLURM_NODEID": "x"}, "the variable SLURM_NODEID is 'x'; expected a whole number"),
        (
            {**SRUN, "SLURM_NNODES": "0"},
            "the variable SLURM_NNODES is '0'; expected a whole number of at least",
        ),
        ({**SRUN, "SLURM_STEP_ID": ""}, "on one of 4 nodes only; .* with srun --ntasks-per-node=1"),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID is 4 and SLURM_NNODES is 4; ranks count from 0"),
    ],
)
def test_variables_that_make_no_sense(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scheduler_place(environment)


def test_first_host_of_a_list_of_slurm() -> None:
    hosts = {
        "cn1": "cn1",
        "cn1,cn2": "cn1",
        "cn[1-3]": "cn1",
        "cn[007,009-012]": "cn007",
        "gpu-a[01-02],cn[1-3]": "gpu-a01",
        "rack[1-2]n[3,5].site": "rack1n3.site",
        "10.0.0.7": "10.0.0.7",
    }
    assert {node_list: first_host(node_list) for node_list in hosts} == hosts
