"""A run that is killed, terminated or interrupted leaves nothing that loads, and the next run succeeds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from tests import warm
from tests.data.toy_folder import write_toy_folder
from tests.toy_kg import REPOSITORY, partition, ring_triples, write_splits

RUN = """
import os, sys
sys.path.insert(0, {root!r})
from dglkge.partition import {module}
from partition_tools import partition

def stop(*arguments, **options):
    os.kill(os.getpid(), {signal})

{module}.{function} = stop
sys.exit(partition.main(sys.argv[1:]))
"""

POINTS = [("make_dataset", "write_triples"), ("dataset_writer", "run_build"), ("dataset_writer", "_replace")]
"""Where the run is stopped: instead of calling this function."""


@pytest.fixture
def source(tmp_path) -> Path:
    return write_splits(tmp_path / "source", ring_triples())


def run(source: Path, output: Path, module: str, function: str, number: int, *options: str):
    code = RUN.format(root=str(REPOSITORY), module=module, function=function, signal=int(number))
    words = ["--input", str(source), "--output", str(output), "--num-parts", "2", "--method", "random"]
    command = [*warm.python(), "-c", code, *words, *options]
    env = {**os.environ, warm.COPIED_BUILD: "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def loadable(folder: Path) -> list[Path]:
    datasets = []
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        with contextlib.suppress(InputError):
            Dataset.open(path)
            datasets.append(path)
    return datasets


def test_killed_runs_leave_nothing_that_loads_and_the_next_one_clears_up(tmp_path, source):
    output = tmp_path / "out"
    for module, function in POINTS:
        done = run(source, output, module, function, signal.SIGKILL)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not output.exists() and (tmp_path / ".out.partial").exists()
        assert loadable(tmp_path) == []
    partition(source, output, "--num-parts", "2", "--method", "random")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert loadable(tmp_path) == [output]


@pytest.mark.parametrize(
    "number, status, message",
    [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "partition.py: interrupted\n")],
)
@pytest.mark.usefixtures("in_foreground")
def test_signal_leaves_nothing_at_all(tmp_path, source, number, status, message):
    done = run(source, tmp_path / "out", "dataset_writer", "run_build", number)
    assert (done.returncode, done.stderr) == (status, message)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_killed_overwrite_keeps_the_old_dataset(tmp_path, source):
    output = write_toy_folder(tmp_path / "out")
    done = run(source, output, "dataset_writer", "run_build", signal.SIGKILL, "--overwrite")
    assert done.returncode == -signal.SIGKILL
    assert loadable(tmp_path) == [output] and Dataset.open(output).name == "toy"
