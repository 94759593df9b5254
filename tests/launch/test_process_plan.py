"""The plan of a job: who gets which command, rank, variable."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dglkge.cli.launch import main
from dglkge.errors import InputError
from dglkge.launch import machine
from dglkge.launch.machine import find_gpus, torch_has_cuda
from dglkge.launch.process_plan import (
    SERVER,
    TRAINER,
    VISIBLE_VARIABLE,
    Host,
    JobSettings,
    choose_num_trainers,
    describe_plan,
    device_of_trainers,
    plan_processes,
)
from dglkge.launch.remote import remote_site
from tests.toy_kg import REPOSITORY

RUNNER = ("python", "runner.py")
ONE_MACHINE = [Host("127.0.0.1", 30050, 2, "lo", RUNNER)]
TWO_MACHINES = [Host("10.0.0.1", 30050, 8, None, ("/a/python",)), Host("10.0.0.2", 30060, 4, None, RUNNER)]
SETTINGS = JobSettings(("train.py", "--lr", "1"), num_trainers=2, log_dir="/logs")


@pytest.mark.parametrize(("num_servers", "num_trainers", "num_samplers"), [(1, 1, 2), (3, 2, 0)])
def test_several_machines(num_servers: int, num_trainers: int, num_samplers: int) -> None:
    """Ids run over all machines: servers as DGL numbers them, ranks machine by machine."""
    shared = {
        "DGL_NUM_SAMPLER": str(num_samplers),
        "DGL_NUM_CLIENT": str(num_trainers * (1 + num_samplers) * 2),
        "DGL_IP_CONFIG": "/logs/ip_config.txt",
        "DGL_NUM_SERVER": str(num_servers),
        "DGL_GRAPH_FORMAT": "csc",
        "DGLKGE_LOG_DIR": "/logs",
        "PYTHONUNBUFFERED": "1",
    }
    counts = {"num_servers": num_servers, "num_trainers": num_trainers, "num_samplers": num_samplers}
    plan = plan_processes(TWO_MACHINES, replace(SETTINGS, **counts), 29500, {})
    servers, trainers = plan[: 2 * num_servers], plan[2 * num_servers :]
    assert {process.role for process in servers} == {SERVER}
    assert {process.role for process in trainers} == {TRAINER} and len(trainers) == 2 * num_trainers
    for number, server in enumerate(servers):
        variables = {"DGL_ROLE": "server", "DGL_SERVER_ID": str(number), "OMP_NUM_THREADS": "1"}
        assert server.environment == shared | variables
    assert [server.address for server in servers] == ["10.0.0.1"] * num_servers + ["10.0.0.2"] * num_servers
    for rank, trainer in enumerate(trainers):
        machine, local = divmod(rank, num_trainers)
        assert (trainer.number, trainer.address) == (rank, TWO_MACHINES[machine].address)
        assert trainer.command == (*TWO_MACHINES[machine].runner, "train.py", "--lr", "1")
        assert trainer.environment == shared | {
            "DGL_ROLE": "client",
            "DGL_DIST_MODE": "distributed",
            "DGL_GROUP_ID": "0",
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(machine),
            "WORLD_SIZE": str(2 * num_trainers),
            "LOCAL_WORLD_SIZE": str(num_trainers),
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": str(max(1, TWO_MACHINES[machine].num_cores // num_trainers)),
        }


def test_options_reach_the_environment() -> None:
    """--extra_envs stand above everything; what the user exported stays, but for DGL's variables."""
    settings = replace(SETTINGS, num_omp_threads=7, num_server_threads=3, graph_format="csr,coo")
    settings = replace(
        settings, part_config="/data/ring.json", extra_envs={"MASTER_PORT": "1", "MINE": "a b"}
    )
    server, trainer, _ = plan_processes(ONE_MACHINE, settings, 29500, {})
    assert (server.environment["OMP_NUM_THREADS"], trainer.environment["OMP_NUM_THREADS"]) == ("3", "7")
    expected = {"DGL_GRAPH_FORMAT": "csr,coo", "DGL_CONF_PATH": "/data/ring.json", **settings.extra_envs}
    expected["GLOO_SOCKET_IFNAME"] = "lo"
    assert expected.items() <= server.environment.items() & trainer.environment.items()
    inherited = {"GLOO_SOCKET_IFNAME": "eth7", "PYTHONUNBUFFERED": "", "RANK": "99"}
    *_, last = plan_processes(ONE_MACHINE, SETTINGS, 29500, inherited)
    assert not {"GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED"} & last.environment.keys()
    assert last.environment["RANK"] == "1"


def test_description_can_be_pasted_into_a_shell() -> None:
    hard = ("it's", 'a "b"', "$HOME `id`; exit", "", "new\nline", "*")
    settings = replace(SETTINGS, command=hard, extra_envs={"ODD": "x '$y"})
    plan = plan_processes([replace(ONE_MACHINE[0], runner=("printf", "%s\\0"))], settings, 29500, {})
    text = describe_plan(plan)
    assert "# server 0 on 127.0.0.1\nenv " in text and "# trainer 1 on 127.0.0.1\nenv " in text
    output = subprocess.run(["sh", "-c", text], capture_output=True, check=True, text=True).stdout
    assert output.split("\0") == [*hard * 3, ""]
    assert f"ODD={shlex.quote(settings.extra_envs['ODD'])} " in text


FOUR = Host("10.0.0.1", 30050, 2, gpus=("0", "1", "2", "3"))
TWO = Host("10.0.0.2", 30050, 64, gpus=("5", "GPU-7f"))
NONE = Host("10.0.0.3", 30050, 64)


def with_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


LISTS_THREE = """\
test "$1" = -L || exit 2
echo 'GPU 0: NVIDIA A (UUID: GPU-11)'
echo 'GPU 1: NVIDIA A (UUID: GPU-22)'
echo '  MIG 1g.5gb     Device  0: (UUID: MIG-33)'
echo 'GPU 2: NVIDIA A (UUID: GPU-44)'"""


def test_gpus_that_the_environment_allows(tmp_path: Path) -> None:
    environment = with_nvidia_smi(tmp_path, LISTS_THREE)
    assert find_gpus(environment) == ("0", "1", "2")
    assert torch_has_cuda() == (torch.version.cuda is not None)
    gpus = {"": (), "2,0": ("2", "0"), " 1 , GPU-44 ": ("1", "GPU-44"), "0,-1,1": ("0",), "1,7,0": ("1",)}
    for visible, expected in {**gpus, "MIG-33": ("MIG-33",)}.items():
        assert find_gpus({**environment, VISIBLE_VARIABLE: visible}) == expected


def test_driver_folder_counts_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    for folder, names in (("gpus", ("0", "1")), ("no driver", ())):
        monkeypatch.setattr(machine, "DRIVER_FOLDER", tmp_path / folder)
        assert find_gpus({"PATH": str(tmp_path)}) == names
        assert find_gpus({"PATH": str(tmp_path), VISIBLE_VARIABLE: "1"}) == names[1:]


def test_driver_that_fails_or_hangs_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIST_SECONDS", 0.5)
    for script in ("echo 'NVIDIA-SMI has failed'; exit 9", "exec sleep 60"):
        assert find_gpus(with_nvidia_smi(tmp_path, script)) == ()


@pytest.mark.parametrize(
    ("hosts", "device", "limits", "expected"),
    [
        ([FOUR], "auto", (1, None), 4),
        ([FOUR, TWO], "cuda", (1, None), 2),
        ([FOUR], "cuda", (1, 3), 3),
        ([FOUR], "cpu", (1, None), 2),
        ([TWO, NONE], "auto", (1, None), 8),
        ([FOUR], "auto", (6, 6), 6),
        ([replace(FOUR, gpus=tuple(map(str, range(16))))], "cuda", (1, None), 16),
        ([], "cuda", (1, None), 8),
        # One for each core of the smallest machine, at most 8.
        ([NONE, replace(NONE, num_cores=3)], "auto", (1, None), 3),
        ([replace(NONE, num_cores=1)], "auto", (2, 5), 2),
        ([NONE], "auto", (1, None, 2), 2),
        ([NONE], "auto", (2, 5, 1), 5),
    ],
)
def test_number_of_trainers(hosts, device, limits, expected):
    lowest, highest, *most = limits
    assert choose_num_trainers(hosts, lowest, highest, device, *most) == expected


def environments(hosts: list[Host], device: str, num_trainers: int) -> list[str | None]:
    settings = JobSettings(("train.py",), num_trainers, num_servers=1)
    settings = replace(settings, device=device_of_trainers(device, hosts, num_trainers))
    plan = plan_processes(hosts, settings, 29500, {})
    return [process.environment.get(VISIBLE_VARIABLE) for process in plan]


def test_processes_see_their_own_gpu() -> None:
    assert environments([FOUR, TWO], "cuda", 2) == ["", "", "0", "1", "5", "GPU-7f"]
    assert environments([FOUR, TWO], "auto", 1) == ["", "", "0", "5"]
    # Too few for all: hidden, so that all trainers compute on the CPU.
    assert environments([FOUR, TWO], "auto", 3) == [""] * 8
    assert environments([FOUR, NONE], "auto", 1) == [""] * 4
    # No GPU, a script of another project, or the CPU: nothing changes.
    for hosts, device in (([NONE], "auto"), ([FOUR], ""), ([FOUR], "cpu"), ([FOUR], "cpu_staged")):
        assert environments(hosts, device, 2) == [None] * 3
    words = r"cuda and machine 10\.0\.0\.2 has 2 GPUs for 3 trainers; allowed: --num_trainers 2 or less"
    with pytest.raises(InputError, match=words):
        environments([FOUR, TWO], "cuda", 3)
    with pytest.raises(InputError, match=r"^training.device is cuda and machine 10\.0\.0\.3 has no GPU"):
        environments([NONE], "cuda", 2)


def test_launcher_plans_with_the_gpus_of_this_machine(tmp_path, monkeypatch, capsys):
    planned = remote_site.planned_host

    def host(address: str, port: int, described: Mapping[str, Any]) -> Host:
        return planned(address, port, {**described, "gpus": ("3", "1")})

    monkeypatch.setattr(remote_site, "planned_host", host)
    (tmp_path / "ip_config.txt").write_text("127.0.0.1 30050\n", encoding="utf-8")
    options = ["--ip_config", str(tmp_path / "ip_config.txt"), "--dry_run", "--json"]
    script = str(REPOSITORY / "examples" / "train.py")
    assert main([*options, script, "--set", "dataset=nowhere", "--set", "training.device=cuda"]) == 0
    plan = json.loads(capsys.readouterr().out)
    shown = [(process["name"], process["environment"][VISIBLE_VARIABLE]) for process in plan]
    assert shown == [("server 0", ""), ("trainer 0", "3"), ("trainer 1", "1")]
