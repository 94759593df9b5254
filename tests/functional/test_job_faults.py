"""Faults of a real job: full disks, closed terminals, signals, ports and folders of others, damaged data."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dglkge.checkpoint import open_checkpoint
from tests import warm
from tests.functional import job as commands
from tests.functional.results import progress
from tests.functional.test_training_job import settings
from tests.toy_kg import toy_dataset

LOOP = """
import atexit, os, subprocess, sys, time
from pathlib import Path
import dglkge

config = dglkge.load_config(None, sys.argv[1:])
folder = Path(config.output).parent
rank = os.environ.get("RANK", "0")

def await_file(name):
    for _ in range(2000):
        if (folder / name).exists():
            return
        time.sleep(0.05)

def main():
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        before_training()
        for _ in dglkge.remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():
                trainer.step(batch)
                after_batch()
    return 0

before_training = after_batch = lambda: None
"""

FULL_DISK = (
    LOOP
    + """
def full(*arguments):
    raise OSError(28, "No space left on device")

def before_training():
    if os.environ["DGLKGE_LOG_DIR"].endswith("attempt-1"):
        from dglkge.checkpoint import part_files
        part_files.fill_rows = full
sys.exit(dglkge.run_command("full_disk.py", main))
"""
)


def launch(folder: Path, code: str = "", *options: str, num_trainers: int = 2) -> list[str]:
    """Return the command that launches a script of this file, or the one that is there."""
    if code:
        (folder / "script.py").write_text(code)
    return [
        *(sys.executable, "-m", "dglkge.cli.launch", "--ip_config", str(commands.ip_config(folder))),
        *("--num_trainers", str(num_trainers), "--num_omp_threads", "1", "--log_dir", str(folder / "logs")),
        *(*options, str(folder / "script.py")),
    ]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a job, whose launcher is an ordinary process, to its end."""
    return commands.run(command, **warm.runners(commands.environment()), **environment)


def test_a_disk_that_is_full_for_a_while_costs_one_attempt(tmp_path: Path) -> None:
    """The first attempt cannot write its checkpoint: status 1, not that of bad input, and the second can."""
    command = launch(tmp_path, FULL_DISK, "--max_restarts", "1", num_trainers=1)
    done = run([*command, *settings(toy_dataset(), tmp_path / "run")])
    output = done.stdout + done.stderr
    assert "ended with status 1; logs in " in output and "restart 1 of 1 in 1 s" in output
    assert "dglkge: error: cannot write " in output and "_0.v1.h5: No space left on device" in output
    checkpoint = open_checkpoint(tmp_path / "run")
    checkpoint.verify()
    assert checkpoint.progress["finished_epochs"] == 4


SHUTDOWN = (
    LOOP
    + """
def interrupt_me():  # once this process waits for the others in DGL's shutdown
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -INT {os.getpid()}; sleep 1; touch {folder}/go"])

status = dglkge.run_command("shutdown.py", main)
if rank == "1":
    atexit.register(interrupt_me)
else:
    await_file("go")
sys.exit(status)
"""
)


def test_a_signal_in_the_shutdown_of_dgl_does_not_hang_the_job(tmp_path: Path) -> None:
    """SIGINT reaches a trainer that waits in DGL's exit for another, which comes later."""
    command = [*launch(tmp_path, SHUTDOWN), *settings(toy_dataset(), tmp_path / "run")]
    done = run(command, DGLKGE_TIMEOUT_SECONDS="20")
    assert "all processes ended well" in done.stderr


HANGUP = (
    LOOP
    + """
def after_batch():
    if not (folder / "waits").exists() and rank == "0":
        (folder / "waits").touch()
        await_file("go")
sys.exit(dglkge.run_command("hangup.py", main))
"""
)


def await_path(path: Path) -> None:
    """Wait, within a limit, until there is such a file."""
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_plain_python_whose_terminal_is_closed(tmp_path: Path, is_ignored: bool) -> None:
    """It commits and ends with 143; under nohup it trains on, to the end, though its bar has no terminal."""
    (tmp_path / "script.py").write_text(HANGUP)
    command = [sys.executable, str(tmp_path / "script.py"), *settings(toy_dataset(), tmp_path / "run")]
    command.append("training.progress=always")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(commands.environment())
        os.environ.pop("PYTHONUNBUFFERED", None)  # what could not be written must not stay in a buffer
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        os.execv(sys.executable, command)
    await_path(tmp_path / "waits")
    os.close(terminal)
    (tmp_path / "go").touch()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if is_ignored else 143)
    assert (
        progress(tmp_path / "run") == (4, 0) if is_ignored else (0, 0) < progress(tmp_path / "run") < (1, 0)
    )


def test_sighup_to_one_trainer_stops_all(tmp_path: Path) -> None:
    """As SIGTERM does: all commit and leave with 143."""
    command = [*launch(tmp_path, HANGUP), *settings(toy_dataset(), tmp_path / "run")]
    env = warm.runners(commands.environment())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as job:
        await_path(tmp_path / "waits")
        commands.processes_of(job, "client", "script.py")[1].send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        output, _ = job.communicate(timeout=commands.TIME_LIMIT_SECONDS)
    assert job.returncode == 143, output
    assert "ended with status 143, which says: stopped on request, start me again" in output
    assert progress(tmp_path / "run") < (4, 0)


def train_robbed(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    """Launch the script with two trainers and no restarts."""
    (folder / "script.py").symlink_to(Path(__file__).with_name("robbed_train.py"))
    command = [*launch(folder), target, str(folder), f"dataset={toy_dataset()}", f"output={folder / 'run'}"]
    words = ("model.dimension=16", "training.num_epochs=1", "negatives.num_uniform=10")
    return commands.run([*command, *words], 0, **warm.runners(commands.environment()))


@pytest.mark.parametrize("target", ["server", "rendezvous", "trainer"])
def test_the_job_starts_again_with_other_ports(tmp_path: Path, target: str) -> None:
    done = train_robbed(tmp_path, target)
    stolen = (tmp_path / "stolen").read_text()
    told = f"{stolen} was taken by another program before the job could listen there: choosing ports again"
    assert done.stderr.count(told) == 1 and "restart" not in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert progress(tmp_path / "run") == (1, 0)


def small_settings(output: Path, num_epochs: int) -> list[str]:
    return [
        *(f"dataset={toy_dataset()}", f"output={output}", "model.dimension=16", "training.batch_size=48"),
        *("evaluation.split=none", f"training.num_epochs={num_epochs}"),
    ]


def test_a_second_job_is_refused_and_the_next_goes_on_after_kill(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [sys.executable, commands.TRAIN, *commands.sets(small_settings(output, 100000))]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=commands.environment())
    try:
        commands.wait_for_line(output / "stats.jsonl", first, 2)
        config = (output / "config.json").read_bytes()
        second = commands.train_alone(*small_settings(output, 7), "training.batch_size=24", status=2)
        (line,) = [line for line in second.stderr.splitlines() if "error:" in line]
        assert line.startswith(
            f"train.py: error: {output} is in use: another job writes there, trainer (pid {first.pid}) on "
        )
        assert "Traceback" not in second.stderr
        assert (output / "config.json").read_bytes() == config
        assert first.poll() is None
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    finally:
        first.kill()
        first.wait()
    third = commands.train_alone(*small_settings(output, progress(output)[0] + 1))
    assert "resumed: " in third.stderr and "is held by" not in third.stderr
    assert not (output / "lease.json").exists()


def test_a_process_of_another_launcher_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Every process of ``srun -n4 train.py`` would train alone, in the same folder."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    done = commands.train_alone(*small_settings(tmp_path / "run", 1), status=2)
    assert "train.py: error: SLURM_STEP_NUM_TASKS is 4: srun (or another launcher) started 4" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_a_flipped_bit_is_one_line(tmp_path: Path) -> None:
    """In one process and under the launcher; who is in a hurry may train on it."""
    dataset = Path(shutil.copytree(toy_dataset(), tmp_path / "dataset"))
    path = dataset / "partitions" / "part0" / "edges.npy"
    content = bytearray(path.read_bytes())
    content[-12] ^= 1  # a head, which stays a valid id
    path.write_bytes(content)
    settings = (f"dataset={dataset}", f"output={tmp_path / 'run'}", "training.num_epochs=1")
    message = f"{path} is damaged: its CRC-32 is"
    assert message in commands.train_alone(*settings, status=2).stderr
    command = commands.launch_command(tmp_path, 1, settings)
    done = commands.run(command, status=2)
    assert message in done.stdout + done.stderr
    commands.run(command, DGLKGE_NO_VERIFY="1")
