"""A port that another program takes between its choice and its use is chosen again, and the job trains."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dglkge.checkpoint.reader import open_checkpoint
from tests import warm
from tests.functional.job import ip_config, run
from tests.toy_kg import REPOSITORY, toy_dataset

SCRIPT = str(REPOSITORY / "tests" / "functional" / "robbed_train.py")


def train(folder: Path, what: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Launch the script with two trainers and no restarts."""
    command = [*warm.python(), "-m", "dglkge.cli.launch", "--ip_config", str(ip_config(folder))]
    command += ["--num_trainers", "2", "--num_omp_threads", "1", "--log_dir", str(folder / "logs")]
    command += [SCRIPT, what, str(folder), f"dataset={toy_dataset()}", f"output={folder / 'run'}"]
    return run([*command, "model.dimension=16", "training.num_epochs=1", "negatives.num_uniform=10"], status)


@pytest.mark.parametrize("what", ["server", "rendezvous", "trainer"])
def test_the_job_starts_again_with_other_ports(tmp_path: Path, what: str) -> None:
    done = train(tmp_path, what)
    stolen = (tmp_path / "stolen").read_text()
    told = f"{stolen} was taken by another program before the job could listen there: choosing ports again"
    assert done.stderr.count(told) == 1 and "restart" not in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert open_checkpoint(tmp_path / "run").meta.progress["finished_epochs"] == 1


def test_it_does_not_start_again_for_ever(tmp_path: Path) -> None:
    done = train(tmp_path, "always", status=75)
    assert done.stderr.count("choosing ports again") == 4
    stolen = (tmp_path / "stolen").read_text()
    assert f"dglkge: port taken: {stolen}" in (tmp_path / "logs" / "server-0.log").read_text()
    assert not (tmp_path / "run").exists()
