"""The jobs for SLURM, Kubernetes and Docker are well-formed, and the launcher takes their options."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dglkge.distributed.addresses import Machine
from dglkge.launch.arguments import parse_arguments
from dglkge.launch.remote.node import NodePlace, node_place

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SLURM = {"SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}


def place(words: list[str], environment: dict[str, str]) -> NodePlace | None:
    assert words[0] == "dglkge-launch"
    options, script = parse_arguments(words[1:])
    assert Path(script[0]).name == "train.py" and script[1:] == ("--config", "my.yaml")
    assert options.secret_file

    def read() -> list[Machine]:
        raise AssertionError("no ip_config.txt is needed")

    return node_place(options, read, {}, environment)


def load(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def shell_line(path: Path, beginning: str) -> list[str]:
    """Return the words of the one line of a shell script that begins so, which may be continued."""
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()]
    (line,) = [line for line in lines if line.startswith(beginning)]
    return shlex.split(line.partition("||")[0])


def test_slurm() -> None:
    words = shell_line(EXAMPLES / "slurm" / "job.sbatch", "srun ")
    node = place(words[words.index("dglkge-launch") :], {**SLURM, "SLURM_STEP_NODELIST": "cn[07-08]"})
    assert node == NodePlace(1, 2, "cn07", 29450)


def test_two_machines() -> None:
    options, script = parse_arguments(shell_line(EXAMPLES / "two_machines.sh", "dglkge-launch ")[1:])
    assert options.sync and options.ip_config == "$machines" and (EXAMPLES.parent / script[0]).is_file()


def test_kubernetes() -> None:
    """The extra of the Dockerfile exists, and the manifest's script is in the image."""
    spec = load(EXAMPLES / "kubernetes" / "jobset.yml")["spec"]
    (job,) = spec["replicatedJobs"]
    nodes = job["template"]["spec"]
    (container,) = nodes["template"]["spec"]["containers"]
    node = place(container["command"], {"JOB_COMPLETION_INDEX": "1"})
    host = f"kge-{job['name']}-0-0.{spec['network']['subdomain']}"
    assert node == NodePlace(1, nodes["completions"], host, 29450)
    assert nodes["completions"] == nodes["parallelism"] and nodes["completionMode"] == "Indexed"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in nodes["template"]["spec"]["volumes"]}
    text = (EXAMPLES / "kubernetes" / "Dockerfile").read_text(encoding="utf-8")
    assert "COPY . /opt/dglkge" in text and "/opt/dglkge[train]" in text
    assert "\ntrain = [" in (EXAMPLES.parent / "pyproject.toml").read_text(encoding="utf-8")


def test_docker() -> None:
    services = load(EXAMPLES / "docker" / "compose.yml")["services"]
    places = [place(shlex.split(service["command"]), {}) for service in services.values()]
    assert places == [NodePlace(rank, 2, "node0", 29450) for rank in range(len(services))]
