"""The command line: where the launcher's options end and the script's begin, and a node's place by them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dglkge.distributed.addresses import Machine
from dglkge.errors import InputError
from dglkge.launch.arguments import build_parser, parse_arguments
from dglkge.launch.remote.node_place import RENDEZVOUS_PORT, NodePlace, first_host, host_and_port, node_place


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train.py"], ("train.py",)),
        (["train.py", "--num_trainers", "3", "-m", "x"], ("train.py", "--num_trainers", "3", "-m", "x")),
        (["--num_trainers", "3", "train.py", "--", "a b", "$c;'\""], ("train.py", "--", "a b", "$c;'\"")),
        (["--json", "-m", "package.module"], ("-m", "package.module")),
        (["--json", "--", "-odd name.py", "x"], ("-odd name.py", "x")),
        (["--extra_envs", "A=B", "C=d e=f", "train.py", "X=Y"], ("train.py", "X=Y")),
        (["--extra_envs", "train.py"], ("train.py",)),
    ],
)
def test_script_and_all_after_it_is_the_scripts(arguments: list[str], command: tuple[str, ...]) -> None:
    assert parse_arguments(arguments)[1] == command


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--num-trainers=2:5"], "num_trainers", (2, 5)),
        (["--ip-config=my-file.txt"], "ip_config", "my-file.txt"),
        (["--extra-envs", "A=b=c", "D=", "E=f g"], "extra_envs", {"A": "b=c", "D": "", "E": "f g"}),
        (["--extra_envs=A=b", "D=e"], "extra_envs", {"A": "b", "D": "e"}),
        # The value is not among the arguments, which every user of the machine can read.
        (["--extra_envs", "A=b", "API_KEY"], "extra_envs", {"A": "b", "API_KEY": "geheim=1"}),
        ([], "stop_seconds", 120),
        ([], "exit_seconds", 30),
        ([], "graph_format", "csc"),
    ],
)
def test_values_of_options(monkeypatch, arguments: list[str], name: str, value: object) -> None:
    monkeypatch.setenv("API_KEY", "geheim=1")
    options, command = parse_arguments([*arguments, "train.py", "API_KEY"])
    assert getattr(options, name) == value and command == ("train.py", "API_KEY")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was given; expected: dglkge-launch [options] script.py args..."),
        (["--num-tainers=2", "train.py"], "unknown option '--num_tainers'; did you mean '--num_trainers'"),
        (["--num_trainers", "0", "train.py"], "--num_trainers: '0' is no whole number of 1 to 4096"),
        (["--num_trainers", "1_0", "train.py"], "--num_trainers: '1_0' is no whole number of 1 to 4096"),
        (["--num_trainers", "3:2", "train.py"], "'3:2': the first number is above the second"),
        (["--num_trainers", "2:", "train.py"], "'' is no whole number of 1 to 4096"),
        (["--stop_seconds", "nan", "train.py"], "'nan' is no number of seconds from 0 to 86400"),
        (["--extra_envs=oops", "train.py"], "--extra_envs: oops has no value here; expected NAME=VALUE or"),
        (["--extra_envs=o.o=a", "train.py"], "--extra_envs: 'o.o' is no name of a variable"),
        (["-m"], "-m needs a module"),
    ],
)
def test_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arguments(arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_help_teaches(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["-h"])
    page = capsys.readouterr().out
    assert caught.value.code == 0 and page == build_parser().format_help()
    assert page.startswith("usage: dglkge-launch [options] script.py args...\n")
    assert "examples:" in page and "exit status:" in page
    assert all(action.help for action in build_parser()._actions)
    assert max(len(line) for line in page.splitlines()) <= 120


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


SRUN = variables("SLURM_NODEID=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_NNODES=4 SLURM_JOB_NODELIST=cn[07-10]")
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "cn09,cn10"}  # srun --nodes=2 in a job of four
TORCHRUN = variables("GROUP_RANK=2 RANK=2 LOCAL_RANK=0 GROUP_WORLD_SIZE=3 MASTER_ADDR=10.0.0.1")
MPIRUN = variables("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0")
INTERFACES = {"127.0.0.1": "lo", "10.0.0.9": "ib0", "10.1.0.9": "eth0", "10.1.0.10": "eth0"}
AUTO = {"node_rank": "auto"}
GIVEN = {"node_rank": "0", "nodes": 2, "rendezvous": "a"}
LISTED = {"node_rank": "0", "has_ip_config": True}
IPV6 = ("fd00::1", 7)
MACHINES = [Machine("10.0.0.1"), Machine("10.0.0.2"), Machine("10.0.0.3")]


def place(environment: dict[str, str] | None = None, **options: Any) -> NodePlace | None:
    absent = dict.fromkeys(("node_rank", "nodes", "rendezvous", "address"))
    namespace = argparse.Namespace(**{**absent, "has_ip_config": False, **options})
    return node_place(namespace, lambda: MACHINES, INTERFACES, environment or {})


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, SRUN, None),  # an ordinary start inside a job of SLURM
        ({"node_rank": "2"}, {}, NodePlace(2, 3, "10.0.0.1", RENDEZVOUS_PORT, None, True)),
        ({"node_rank": "2", "rendezvous": "other:5"}, {}, NodePlace(2, 3, "other", 5, None, True)),
        ({**GIVEN, "rendezvous": "[fd00::1]:7", "address": "ib0"}, {}, NodePlace(0, 2, *IPV6, "10.0.0.9")),
        (AUTO, SRUN, NodePlace(1, 4, "cn07", RENDEZVOUS_PORT)),
        (AUTO, {**SRUN, **STEP}, NodePlace(1, 2, "cn09", RENDEZVOUS_PORT)),
        (AUTO, TORCHRUN, NodePlace(2, 3, "10.0.0.1", RENDEZVOUS_PORT)),
        (AUTO, {**SRUN, **TORCHRUN}, NodePlace(2, 3, "10.0.0.1", RENDEZVOUS_PORT)),
        ({**AUTO, "rendezvous": "svc"}, MPIRUN, NodePlace(0, 2, "svc", RENDEZVOUS_PORT)),
        ({**AUTO, "nodes": 3, "rendezvous": "svc"}, SRUN, NodePlace(1, 3, "svc", RENDEZVOUS_PORT)),
        ({**LISTED, **AUTO}, SRUN, NodePlace(1, 3, "10.0.0.1", RENDEZVOUS_PORT, None, True)),
        ({**GIVEN, **AUTO}, {"JOB_COMPLETION_INDEX": "1"}, NodePlace(1, 2, "a", RENDEZVOUS_PORT)),
        ({**GIVEN, "address": "10.0.0.9"}, {}, NodePlace(0, 2, "a", RENDEZVOUS_PORT, "10.0.0.9")),
        ({"node_rank": "0", "nodes": 1}, {}, NodePlace(0, 1, "127.0.0.1", RENDEZVOUS_PORT)),
    ],
)
def test_place(options: dict[str, Any], environment: dict[str, str], expected: NodePlace | None) -> None:
    assert place(environment, **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 2}, "--nodes needs --node_rank"),
        ({"node_rank": "3"}, "--node_rank 3 of 3 nodes; allowed are 0 to 2"),
        ({"node_rank": "0", "nodes": 2}, "--nodes needs --rendezvous host:port"),
        ({**LISTED, "nodes": 2}, "--nodes and --ip_config exclude"),
        ({**GIVEN, "rendezvous": "a:b"}, "'a:b' is no host"),
        ({**GIVEN, "address": "::1"}, "DGL's sockets are IPv4 only"),
        ({**GIVEN, "address": "127.0.0.1"}, "no address at which"),
        ({**GIVEN, "address": "ib1"}, "it has lo 127.0.0.1, ib0 10.0.0.9, eth0 10.1.0.9"),
        ({**GIVEN, "address": "eth0"}, "eth0 has 2 IPv4 addresses; give one of 10.1.0.9, 10.1.0.10"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        place(**options)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, r"no scheduler has set this node's rank; expected one of SLURM_NODEID \(SLURM\), JOB_COMPL"),
        ({**SRUN, "SLURM_LOCALID": "1"}, "SLURM_LOCALID is 1: SLURM has started several .*tasks-per"),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, "torchrun --nproc-per-node=1"),
        ({**SRUN, "SLURM_NODEID": "x"}, "the variable SLURM_NODEID is 'x'; expected a whole number"),
        ({**SRUN, "SLURM_STEP_ID": ""}, "on one of 4 nodes only; .* with srun --ntasks-per-node=1"),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID is 4 and SLURM_NNODES is 4; ranks count from 0"),
    ],
)
def test_variables_that_make_no_sense(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        place(environment, node_rank="auto")


def test_hosts_and_ports() -> None:
    assert host_and_port("node1:29460", 7) == ("node1", 29460) and host_and_port("fd00::1", 7) == IPV6
    for text in ("", ":5", "a:", "a:0", "a:65536", "[fd00::1]x", "[fd00::1]:"):
        with pytest.raises(InputError, match="is no host"):
            host_and_port(text, 1)


def test_first_host_of_a_list_of_slurm() -> None:
    hosts = {"cn1": "cn1", "cn1,cn2": "cn1", "cn[1-3]": "cn1", "cn[007,009-012]": "cn007"}
    hosts |= {"gpu-a[01-02],cn[1-3]": "gpu-a01", "rack[1-2]n[3,5].site": "rack1n3.site"}
    assert {node_list: first_host(node_list) for node_list in hosts} == hosts
