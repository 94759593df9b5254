"""The plan of a job: who gets which command, rank, variable."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace

import pytest

from dglkge.distributed.world import World
from dglkge.launch.process_plan import (
    SERVER,
    TRAINER,
    Host,
    JobSettings,
    choose_num_trainers,
    describe_plan,
    plan_processes,
    plan_to_dict,
)

RUNNER = ("python", "runner.py")
ONE = [Host("127.0.0.1", 30050, 2, "lo", RUNNER)]
TWO = [Host("10.0.0.1", 30050, 8, None, ("/a/python",)), Host("10.0.0.2", 30060, 4, None, RUNNER)]
SETTINGS = JobSettings(("train.py", "--lr", "1"), "/logs/ip_config.txt", num_trainers=2, log_dir="/logs")


def test_environment_of_one_machine() -> None:
    server, first, second = plan_processes(ONE, SETTINGS, 29500, {})
    shared = {
        "DGL_NUM_SAMPLER": "0",
        "DGL_NUM_CLIENT": "2",
        "DGL_IP_CONFIG": "/logs/ip_config.txt",
        "DGL_NUM_SERVER": "1",
        "DGL_GRAPH_FORMAT": "csc",
        "DGLKGE_LOG_DIR": "/logs",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert server.environment == shared | {"DGL_ROLE": "server", "DGL_SERVER_ID": "0"}
    client = shared | {
        "DGL_ROLE": "client",
        "DGL_DIST_MODE": "distributed",
        "DGL_GROUP_ID": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert first.environment == client | {"RANK": "0", "LOCAL_RANK": "0"}
    assert second.environment == client | {"RANK": "1", "LOCAL_RANK": "1"}
    assert [process.name for process in (server, first, second)] == ["server 0", "trainer 0", "trainer 1"]
    assert server.log_name == "server-0.log"
    entry = {"command": first.command, "environment": first.environment}
    assert plan_to_dict([first]) == [{"name": "trainer 0", "address": "127.0.0.1", **entry}]
    assert server.command == first.command == ("python", "runner.py", "train.py", "--lr", "1")


@pytest.mark.parametrize(("num_servers", "num_trainers", "num_samplers"), [(1, 1, 2), (3, 2, 0), (1, 5, 0)])
def test_several_machines(num_servers: int, num_trainers: int, num_samplers: int) -> None:
    """Ids run over all machines: servers as DGL numbers them, ranks machine by machine."""
    settings = replace(
        SETTINGS, num_servers=num_servers, num_trainers=num_trainers, num_samplers=num_samplers
    )
    plan = plan_processes(TWO, settings, 29500, {})
    servers = [process for process in plan if process.role == SERVER]
    trainers = [process for process in plan if process.role == TRAINER]
    assert plan == servers + trainers
    ids = [int(server.environment["DGL_SERVER_ID"]) for server in servers]
    assert ids == list(range(2 * num_servers))
    assert [server.address for server in servers] == ["10.0.0.1"] * num_servers + ["10.0.0.2"] * num_servers
    num_clients = str(num_trainers * (1 + num_samplers) * 2)
    assert {process.environment["DGL_NUM_CLIENT"] for process in plan} == {num_clients}
    assert {process.environment["DGL_NUM_SERVER"] for process in plan} == {str(num_servers)}
    for rank, trainer in enumerate(trainers):
        machine, local = divmod(rank, num_trainers)
        assert (trainer.number, trainer.address) == (rank, TWO[machine].address)
        assert trainer.command == (*TWO[machine].runner, "train.py", "--lr", "1")
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(machine),
            "WORLD_SIZE": str(2 * num_trainers),
            "MASTER_ADDR": "10.0.0.1",
            "OMP_NUM_THREADS": str(max(1, TWO[machine].num_cores // num_trainers)),
        }
        assert expected.items() <= trainer.environment.items()
        assert "GLOO_SOCKET_IFNAME" not in trainer.environment


def test_options_reach_the_environment() -> None:
    """Threads, format and partition file go where DGL reads them; --extra_envs stand above everything."""
    settings = replace(
        SETTINGS,
        num_omp_threads=7,
        num_server_threads=3,
        graph_format="csr,coo",
        part_config="/data/ring.json",
        extra_envs={"MASTER_PORT": "1", "MINE": "a b"},
    )
    server, trainer, _ = plan_processes(ONE, settings, 29500, {})
    assert (server.environment["OMP_NUM_THREADS"], trainer.environment["OMP_NUM_THREADS"]) == ("3", "7")
    expected = {"DGL_GRAPH_FORMAT": "csr,coo", "DGL_CONF_PATH": "/data/ring.json", **settings.extra_envs}
    assert expected.items() <= server.environment.items() & trainer.environment.items()


def test_conveniences_yield_to_the_users_environment() -> None:
    """What the user exported stays: the plan adds nothing above it; DGL's variables it does set."""
    inherited = {"GLOO_SOCKET_IFNAME": "eth7", "PYTHONUNBUFFERED": "", "RANK": "99"}
    plan = plan_processes(ONE, SETTINGS, 29500, inherited)
    names = {name for process in plan for name in process.environment}
    assert not {"GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED"} & names
    assert plan[-1].environment["RANK"] == "1"


def test_number_of_trainers() -> None:
    """One for each core of the smallest machine: at most 8, or within the user's limits."""
    for cores, by_default, within in (
        ([1], 1, 2), ([2], 2, 2), ([3], 3, 3), ([9], 8, 5), ([64, 4], 4, 4), ([], 8, 5)
    ):  # fmt: skip
        hosts = [Host(f"10.0.0.{i}", 1, count) for i, count in enumerate(cores)]
        assert (choose_num_trainers(hosts), choose_num_trainers(hosts, 2, 5)) == (by_default, within)
        assert choose_num_trainers(hosts, most=2) == min(2, by_default)
        assert choose_num_trainers(hosts, 2, 5, most=1) == within


def test_description_can_be_pasted_into_a_shell() -> None:
    hard = ("it's", 'a "b"', "$HOME `id`; exit", "", "new\nline", "*")
    settings = replace(SETTINGS, command=hard, extra_envs={"ODD": "x '$y"})
    plan = plan_processes([replace(ONE[0], runner=("printf", "%s\\0"))], settings, 29500, {})
    text = describe_plan(plan)
    assert "# server 0 on 127.0.0.1\nenv " in text
    assert "# trainer 1 on 127.0.0.1\nenv " in text
    output = subprocess.run(["sh", "-c", text], capture_output=True, check=True, text=True).stdout
    assert output.split("\0") == [*hard * 3, ""]
    assert f"ODD={shlex.quote(settings.extra_envs['ODD'])} " in text


def test_what_trainers_know_of_their_job() -> None:
    """What the plan says is what a trainer reads: its machine, whether they share a disk, the job's id."""
    for has_own_disks in (False, True):
        settings = replace(SETTINGS, has_own_disks=has_own_disks, job="a1b2")
        plan = plan_processes(TWO, settings, 29500, {})
        worlds = [World.detect(process.environment) for process in plan if process.role == TRAINER]
        assert [world.has_own_disk for world in worlds] == [has_own_disks] * 4
        assert [world.machine for world in worlds] == [0, 0, 1, 1]
        assert {world.job for world in worlds} == {"a1b2"}
