"""A script written for DGL's own launcher, with real servers and trainers, under ours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from dglkge.distributed.jobs import job_of_segment, job_prefix, live_jobs
from dglkge.launch.table_storage import segment_names
from tests import warm
from tests.launch.conftest import ROOT, processes_in

if importlib.util.find_spec("dgl") is None:
    pytest.skip("dgl is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("toy_dgl_job.py")
BEGUN = ("rank 0 of 2 has begun", "rank 1 of 2 has begun")
ENDLESS = "1000000"


@pytest.fixture(scope="module")
def part_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ring")
    command = [*warm.python(), str(SCRIPT), "--partition", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=environment, stdout=subprocess.DEVNULL)
    return folder / "ring.json"


def foreign_segments() -> set[str]:
    names = {name for name in segment_names() if "ring" in name or "-kvdata-" in name}
    return {name for name in names if not job_of_segment(name)}


@pytest.fixture
def start(launch, part_config: Path):
    """Start the job as DGL's users do: the script itself gets the partition file and ip_config.txt."""
    before = foreign_segments()

    def go(options: list[str], *arguments: str, **environment: str):
        script_arguments = ["--part_config", str(part_config), "--ip_config", "ip_config.txt", *arguments]
        options = ["--num_trainers", "2", "--part_config", str(part_config), *options]
        return launch(options, SCRIPT, *script_arguments, **environment)

    yield go
    assert foreign_segments() == before


def test_runs_to_its_end(start) -> None:
    job = start(["--num_servers", "2", "--num_omp_threads", "1"])
    output = job.finish()
    assert job.launcher.returncode == 0, output
    for rank in (0, 1):
        assert f"[trainer {rank}] rank {rank} nodes 64 moved True threads 1\n" in output
    # A server that the trainers' exit handlers had not told to leave would be ended with a warning.
    assert "[launcher] all processes ended well after " in output and "warning" not in output
    assert processes_in(job.folder) == []


def test_sampler_processes(start, ip_config: Path) -> None:
    ip_config.write_text("127.0.0.1\n")
    options = ["--num_trainers", "1", "--num_samplers", "1", "--num_omp_threads", "1"]
    job = start(options, "--sample", PYTHONPATH=str(ROOT))
    output = job.finish()
    assert job.launcher.returncode == 0, output
    assert "[trainer 0] rank 0 sampled 64 of 64\n" in output
    assert processes_in(job.folder) == []


@pytest.mark.parametrize("victim", ["server 0", "trainer 1", "launcher"])
def test_kill_9_in_mid_run(start, victim: str) -> None:
    """The job ends, names who was killed, and leaves no process and no shared memory, all under its name."""
    job = start([], "--steps", ENDLESS)
    job.wait_for(*BEGUN)
    (entry,) = [entry for entry in live_jobs() if entry.launcher_pid == job.launcher.pid]
    names = {name for name in segment_names() if name.startswith(job_prefix(entry.job))}
    for part in ("ring_node_meta", "ring_edge_edge_map", "feature", "emb", "_csc_"):
        assert [name for name in names if part in name], (part, names)
    assert not foreign_segments()
    process = job.launcher if victim == "launcher" else job.process(*victim.split())
    process.kill()
    if victim != "launcher":
        output = job.finish()
        assert job.launcher.returncode == 137
        assert f"{victim} (pid {process.pid}) on 127.0.0.1 was killed by signal 9 (SIGKILL)" in output
    job.await_none_left()
    assert not [name for name in segment_names() if name.startswith(job_prefix(entry.job))]


def test_trainer_that_raises(start) -> None:
    """DGL makes a trainer that raised wait for all others at its exit; here the job ends and shows why."""
    job = start([], "--steps", ENDLESS, "--raise_on_rank", "1")
    output = job.finish()
    assert job.launcher.returncode == 1
    assert "[launcher] trainer 1 (pid " in output
    assert "[launcher]     RuntimeError: rank 1 was asked to fail" in output
    assert processes_in(job.folder) == []
