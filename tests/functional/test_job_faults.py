"""Faults of a real job: full disks, closed terminals, signals, ports and folders of others, damaged data."""

from __future__ import annotations

import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from fault_sites import BATCH_SIZE, OneMachine
from faults import LIMIT_SECONDS, finish_and_compare, run_damages, run_trials, small_disk
from tests import warm
from tests.functional import job as commands
from tests.functional.results import progress
from tests.functional.test_training_job import settings
from tests.toy_kg import toy_dataset

ELASTIC = str(Path(__file__).with_name("elastic_train.py"))
NUM_DAMAGES = 20
ROBBED = str(Path(__file__).with_name("robbed_train.py"))


def launch(
    folder: Path, script: Sequence[str], *words: str, num_trainers: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a job, whose launcher is an ordinary process, to its end."""
    command = commands.launch_command(folder, num_trainers, words, python=commands.PLAIN, script=script)
    return commands.run(command, **warm.runners(commands.environment()), **variables)


def test_a_disk_that_is_full_for_a_while_costs_one_attempt(tmp_path: Path) -> None:
    """The first attempt cannot write its checkpoint: status 1, not that of bad input, and the second can."""
    words = settings(toy_dataset(), tmp_path / "run", "evaluation.split=none")
    script = ("--max_restarts", "1", ELASTIC, "--ending", "full")
    done = launch(tmp_path, script, *words, num_trainers=1)
    output = done.stdout + done.stderr
    assert "ended with status 1; logs in " in output and "restart 1 of 1 in 1 s" in output
    assert "dglkge: error: cannot write " in output and "_0.v1.h5: No space left on device" in output
    assert open_checkpoint(tmp_path / "run", verify=True).progress["finished_epochs"] == 4


def test_a_signal_in_the_shutdown_of_dgl_does_not_hang_the_job(tmp_path: Path) -> None:
    """SIGINT reaches a trainer that waits in DGL's exit for another, which comes later."""
    words = settings(toy_dataset(), tmp_path / "run", "evaluation.split=none")
    done = launch(tmp_path, (ELASTIC, "--ending", "late"), *words, DGLKGE_TIMEOUT_SECONDS="20")
    assert "all processes ended well" in done.stderr


@pytest.mark.parametrize("is_ignored", [False, True])
def test_plain_python_whose_terminal_is_closed(tmp_path: Path, is_ignored: bool) -> None:
    """It commits and ends with 143; under nohup it trains on, to the end, though its bar has no terminal."""
    (tmp_path / "hold").write_text("0 1 0 go")
    words = settings(toy_dataset(), tmp_path / "run", "evaluation.split=none", "training.progress=always")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(commands.environment())
        os.environ.pop("PYTHONUNBUFFERED", None)  # what could not be written must not stay in a buffer
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, ELASTIC, *commands.sets(words)])
    limit = time.monotonic() + 60
    while not (tmp_path / "held").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.close(terminal)
    (tmp_path / "go").touch()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if is_ignored else 143)
    assert progress(tmp_path / "run") == ((4, 0) if is_ignored else (0, 2))


@pytest.mark.parametrize("target", ["server", "rendezvous", "trainer"])
def test_the_job_starts_again_with_other_ports(tmp_path: Path, target: str) -> None:
    """Without a restart."""
    words = (f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", "model.dimension=16")
    words += ("training.num_epochs=1", "negatives.num_uniform=10")
    done = launch(tmp_path, (ROBBED, target, str(tmp_path), *words))
    stolen = (tmp_path / "stolen").read_text()
    told = f"{stolen} was taken by another program before the job could listen there: choosing ports again"
    assert done.stderr.count(told) == 1 and "restart" not in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert progress(tmp_path / "run") == (1, 0)


def test_a_second_job_is_refused_and_the_next_goes_on_after_kill(tmp_path: Path) -> None:
    output = tmp_path / "run"
    small = (f"dataset={toy_dataset()}", f"output={output}", "model.dimension=16", "evaluation.split=none")
    words = commands.sets((*small, "training.batch_size=48", "training.num_epochs=100000"))
    with commands.started([sys.executable, commands.TRAIN, *words]) as first:
        commands.wait_for(output / "stats.jsonl", first, 2)
        config = (output / "config.json").read_bytes()
        second = commands.train_alone(*small, "training.num_epochs=7", "training.batch_size=24", status=2)
        (line,) = [line for line in second.stderr.splitlines() if "error:" in line]
        told = f"{output} is in use: another job writes there, trainer (pid {first.pid}) on "
        assert line.startswith(f"train.py: error: {told}")
        assert "Traceback" not in second.stderr
        assert (output / "config.json").read_bytes() == config and first.poll() is None
        first.kill()
        assert first.wait() == -signal.SIGKILL
    until = f"training.num_epochs={progress(output)[0] + 1}"
    third = commands.train_alone(*small, "training.batch_size=48", until)
    assert "resumed: " in third.stderr and "is held by" not in third.stderr
    assert not (output / "lease.json").exists()


def test_a_flipped_bit_is_one_line(tmp_path: Path) -> None:
    """Who is in a hurry may train on it."""
    dataset = Path(shutil.copytree(toy_dataset(), tmp_path / "dataset"))
    path = dataset / "partitions" / "part0" / "edges.npy"
    content = bytearray(path.read_bytes())
    content[-12] ^= 1  # a head, which stays a valid id
    path.write_bytes(content)
    words = (f"dataset={dataset}", f"output={tmp_path / 'run'}", "training.num_epochs=1")
    command = commands.launch_command(tmp_path, 1, words)
    done = commands.run(command, status=2)
    assert f"{path} is damaged: its CRC-32 is" in done.stdout + done.stderr
    commands.run(command, DGLKGE_NO_VERIFY="1")


@pytest.mark.timeout(600)
def test_a_run_survives_random_faults(tmp_path, monkeypatch):
    """Nothing that was published is lost, and the tables are those of an undisturbed run, bit by bit."""
    random.seed(7)
    monkeypatch.setenv("PYTHONPATH", warm.runners(os.environ)["PYTHONPATH"])
    dataset = toy_dataset()
    num_batches = -(-len(Dataset.open(dataset).split("train")) // BATCH_SIZE)
    with small_disk(tmp_path / "disk", 32 << 20) as folder, small_disk(tmp_path / "logs", 1 << 20) as logs:
        site = OneMachine(folder, logs, dataset, num_batches, LIMIT_SECONDS)
        names = ["all", *(["disk"] if site.can_be_filled() else [])]
        trials = run_trials(site, names)
        trials.append(finish_and_compare(site, tmp_path))
        trials += run_damages(folder / "run" / "checkpoint", NUM_DAMAGES)
    assert len(trials) == len(names) + 1 + NUM_DAMAGES
    assert [(trial.fault, trial.wrong) for trial in trials if trial.wrong] == []
    assert [trial.lost_commits for trial in trials if trial.lost_commits] == []
