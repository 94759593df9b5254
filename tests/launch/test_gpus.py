"""GPUs of a machine are found without CUDA, and every trainer gets one of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dglkge.cli.launch import main
from dglkge.distributed.addresses import Machine
from dglkge.errors import InputError
from dglkge.launch import machine
from dglkge.launch.machine import find_gpus, torch_has_cuda
from dglkge.launch.process_plan import (
    VISIBLE_VARIABLE,
    Host,
    JobSettings,
    choose_num_trainers,
    device_of_trainers,
    plan_processes,
)
from dglkge.launch.remote import remote_site
from tests.toy_kg import REPOSITORY

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
    for visible, expected in {
        "": (),
        "2,0": ("2", "0"),
        " 1 , GPU-44 ": ("1", "GPU-44"),
        "0,-1,1": ("0",),
        "1,7,0": ("1",),
        "MIG-33": ("MIG-33",),
    }.items():
        assert find_gpus({**environment, VISIBLE_VARIABLE: visible}) == expected


def test_driver_folder_counts_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    nothing = {"PATH": str(tmp_path)}
    for folder, names in (("gpus", ("0", "1")), ("no driver", ())):
        monkeypatch.setattr(machine, "DRIVER_FOLDER", tmp_path / folder)
        assert find_gpus(nothing) == names
        assert find_gpus({**nothing, VISIBLE_VARIABLE: "1"}) == names[1:]


@pytest.mark.parametrize(
    "script",
    ["echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9", "exec sleep 60"],
)
def test_driver_that_fails_or_hangs_has_no_gpu(script, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "LIST_SECONDS", 0.5)
    assert find_gpus(with_nvidia_smi(tmp_path, script)) == ()


def test_torch_is_asked_without_loading_it() -> None:
    assert torch_has_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize(
    ("hosts", "device", "limits", "expected"),
    [
        ([FOUR], "auto", (1, None), 4),
        ([FOUR, TWO], "cuda", (1, None), 2),
        ([FOUR], "cuda", (1, 3), 3),
        ([FOUR], "cpu", (1, None), 2),
        ([FOUR], "cpu_staged", (1, None), 2),
        ([FOUR], "", (1, None), 2),
        ([TWO, NONE], "auto", (1, None), 8),
        ([FOUR], "auto", (6, 6), 6),
        ([replace(FOUR, gpus=tuple(map(str, range(16))))], "cuda", (1, None), 16),
        ([], "cuda", (1, None), 8),
    ],
)
def test_one_trainer_for_each_gpu(hosts, device, limits, expected):
    assert choose_num_trainers(hosts, *limits, device) == expected


def environments(hosts: list[Host], device: str, num_trainers: int) -> list[str | None]:
    settings = JobSettings(("train.py",), "ip_config.txt", num_trainers, num_servers=1)
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


@pytest.mark.parametrize(
    ("hosts", "num_trainers", "words"),
    [
        ([FOUR, NONE], 1, r"machine 10\.0\.0\.3 has no GPU .* allowed there: cpu or auto"),
        ([FOUR, TWO], 3, r"machine 10\.0\.0\.2 has 2 GPUs for 3 trainers; allowed: --num_trainers 2 or less"),
    ],
)
def test_shortage_is_refused(hosts: list[Host], num_trainers: int, words: str) -> None:
    with pytest.raises(InputError, match="training.device is cuda and " + words):
        device_of_trainers("cuda", hosts, num_trainers)


@pytest.mark.parametrize("gpus", [("3", "1"), ()])
def test_launcher_plans_with_the_gpus_of_this_machine(tmp_path, monkeypatch, capsys, gpus):
    """Without one cuda is refused before anything starts."""
    planned = remote_site.planned_host

    def host(address: str, machine: Machine, described: Mapping[str, Any]) -> Host:
        return planned(address, machine, {**described, "gpus": gpus})

    monkeypatch.setattr(remote_site, "planned_host", host)
    (tmp_path / "ip_config.txt").write_text("127.0.0.1 30050\n", encoding="utf-8")
    options = ["--ip_config", str(tmp_path / "ip_config.txt"), "--dry_run", "--json"]
    script = str(REPOSITORY / "examples" / "train.py")
    status = main([*options, script, "--set", "dataset=nowhere", "--set", "training.device=cuda"])
    out, error = capsys.readouterr()
    if gpus:
        shown = [(process["name"], process["environment"][VISIBLE_VARIABLE]) for process in json.loads(out)]
        assert shown == [("server 0", ""), ("trainer 0", "3"), ("trainer 1", "1")]
    else:
        words = "dglkge-launch: error: training.device is cuda and machine 127.0.0.1 has no GPU"
        assert status == 2 and error.startswith(words) and error.count("\n") == 1
