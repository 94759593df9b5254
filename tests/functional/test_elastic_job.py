"""Jobs that are stopped, killed and resized: every triple counts once, every loss is the same."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from dglkge.data.dataset import Dataset
from tests import warm
from tests.functional import job as commands
from tests.functional.results import assert_near, json_lines, progress, stats, tables
from tests.surroundings import free_ports
from tests.toy_kg import toy_dataset

EVALUATED = {"evaluation.split": "test", "evaluation.batch_size": "8"}
SCRIPT = str(Path(__file__).with_name("elastic_train.py"))
NUM_EPOCHS, BATCHES_PER_EPOCH = 4, 6
SETTINGS = (
    *("model.dimension=16", "negatives.num_uniform=20", "negatives.chunk_size=16", "training.batch_size=32"),
    *(f"training.num_epochs={NUM_EPOCHS}", "checkpoint.every_epochs=0", "checkpoint.every_batches=4"),
    "evaluation.split=none",
)
Place = tuple[int, int]
"""An epoch and its batches that are done."""

Trained = tuple[int, int, list[int]]
"""Epoch, batch, and the ids of the triples that one trainer trained in it."""

LOSS_TOLERANCE = 1e-4
"""Relative. Sums in another order differ by about 1e-7; 24 steps of training make 1.3e-5 of that."""

TABLE_TOLERANCE = 5e-4
"""Absolute, for numbers of about 1: Adagrad's first steps are as long for tiny gradients as for large."""

LAUNCH = """
import sys
from dglkge.cli import launch
from dglkge.launch.remote import remote_site
planned = remote_site.planned_host
def host(address, machine, described):
    return planned(address, machine, {**described, "num_cores": int(open(sys.argv[1]).read())})
remote_site.planned_host = host
sys.exit(launch.main(sys.argv[2:]))
"""
"""The launcher on a machine whose number of cores stands in a file."""


@pytest.fixture(scope="module")
def ring() -> Path:
    return toy_dataset()


def script(ring: Path, folder: Path, *words: str, **changes: str) -> list[str]:
    fields = dict(setting.split("=") for setting in SETTINGS)
    fields |= {"dataset": str(ring), "output": str(folder / "run")} | changes
    sets = [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]
    return [SCRIPT, *words, *sets]


@pytest.fixture(scope="module")
def undisturbed(ring: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    commands.run([*warm.python(), *script(ring, folder)])
    return folder / "run"


class Job:
    """A launched job of the script, in a folder of its own."""

    def __init__(self, folder: Path, trainers: str, command: list[str], *options: str) -> None:
        self.folder = folder
        self.ip_config = commands.ip_config(folder)
        self.log = folder / f"launcher-{time.monotonic_ns()}.log"
        if not (folder / "cores").exists():
            (folder / "cores").write_text("2")
        words = [*commands.PLAIN, "-c", LAUNCH, str(folder / "cores"), "--ip_config", str(self.ip_config)]
        words += ["--num_trainers", trainers, "--num_omp_threads", "1", "--log_dir", str(folder / "logs")]
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                [*words, *options, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=warm.runners(commands.environment()),
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(20)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
        self.launcher.wait(20)

    def wait_until_held(self) -> None:
        commands.wait_for(self.folder / "held", self.launcher, self.log)

    def process(self, role: str, number: int) -> psutil.Process:
        return commands.processes_of(self.launcher, role, "elastic_train.py")[number]

    def finish(self) -> tuple[int, str]:
        """Wait for the end; return the status and what was said."""
        status = self.launcher.wait(commands.TIME_LIMIT_SECONDS)
        return status, self.log.read_text()


def hold(folder: Path, place: str, cores: int) -> None:
    """Order where the next attempt waits, and how many cores it finds."""
    (folder / "cores").write_text(str(cores))
    (folder / "hold").write_text(place)
    (folder / "held").unlink(missing_ok=True)


def starts_and_triples(attempts: list[Path]) -> tuple[list[Place], list[Trained]]:
    """Return where each attempt began, and what was trained that counts: up to where the next one began."""
    starts, lines = [], []
    for attempt in attempts:
        logs = [json_lines(path) for path in sorted(attempt.glob("trained-*.jsonl"))]
        (start,) = {tuple(log[0]) for log in logs}
        starts.append(start)
        lines.append([line for log in logs for line in log[1:]])
    ends = [*starts[1:], (NUM_EPOCHS, 0)]
    counted = [
        (epoch, index, ids)
        for trained, end in zip(lines, ends)
        for epoch, index, _, ids in trained
        if (epoch, index) < end
    ]
    return starts, counted


def assert_each_triple_once(ring: Path, counted: list[Trained]) -> None:
    """Hold that in each epoch each training triple was trained once, in batches of the right sizes."""
    num_triples = len(Dataset.open(ring).split("train"))
    assert num_triples == 32 * BATCHES_PER_EPOCH
    for epoch in range(NUM_EPOCHS):
        ids = [id_ for trained_epoch, _, ids in counted if trained_epoch == epoch for id_ in ids]
        assert np.bincount(ids, minlength=num_triples).tolist() == [1] * num_triples, epoch
        for index in range(BATCHES_PER_EPOCH):
            assert sum(len(ids) for *place, ids in counted if place == [epoch, index]) == 32


def loss_curve(run: Path) -> list[tuple[tuple[int, int], float]]:
    """Return every report of a run: (epoch, batches done) and loss; batches trained again have several."""
    return [((line["epoch"], line["batches_done"]), line["loss"]) for line in stats(run)]


def assert_same_training(run: Path, undisturbed: Path) -> None:
    expected = dict(loss_curve(undisturbed))
    assert len(expected) == NUM_EPOCHS * BATCHES_PER_EPOCH
    curve = loss_curve(run)
    assert dict(curve).keys() == expected.keys()
    for place, loss in curve:
        assert loss == pytest.approx(expected[place], rel=LOSS_TOLERANCE), place
    assert_near(tables(run), tables(undisturbed), 0, TABLE_TOLERANCE)


def train_resized(
    folder: Path, ends: Sequence[tuple[str, int, signal.Signals]], places: Sequence[str], **changes: str
) -> list[Place]:
    """Train with two, three and one trainers; returns where each attempt began.

    The first two attempts wait at a place each, where a process of a role and number gets a signal.
    """
    hold(folder, places[0], cores=2)
    with Job(folder, "1:3", script(toy_dataset(), folder, **changes), "--max_restarts", "2") as job:
        for (role, number, with_signal), place, cores in zip(ends, (*places[1:], "never 0 0 stop"), (3, 1)):
            job.wait_until_held()
            hold(folder, place, cores)
            if cores == 1:
                job.ip_config.write_text(f"127.0.0.1 {free_ports()} 2\n")
            job.process(role, number).send_signal(with_signal)
        status, output = job.finish()
    assert status == 0, output
    attempts = [folder / "logs" / f"attempt-{number}" for number in (1, 2, 3)]
    logs = [sorted(path.name for path in attempt.glob("*-?.log")) for attempt in attempts]
    assert [len([name for name in names if name.startswith("trainer")]) for names in logs] == [2, 3, 1]
    assert [len([name for name in names if name.startswith("server")]) for names in logs] == [1, 1, 2]
    assert "restart 1 of 2 in 1 s" in output and "restart 2 of 2 in " in output
    starts, counted = starts_and_triples(attempts)
    assert_each_triple_once(toy_dataset(), counted)
    return starts


def test_two_then_three_then_one_trainers_train_each_triple_once(undisturbed, tmp_path):
    """A trainer is told to stop, then a server is killed; test_order_jobs has it the other way round."""
    ends = (("client", 1, signal.SIGTERM), ("server", 0, signal.SIGKILL))
    starts = train_resized(tmp_path, ends, ("1 2 1 stop", "2 3 2 kill"))
    assert starts == [(0, 0), (1, 3), (1, 4)]
    assert_same_training(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    ("start", "name"),
    [
        pytest.param("in_foreground", "SIGINT", id="Ctrl-C"),
        pytest.param("in_background", "SIGTERM", id="SIGTERM, where Ctrl-C is ignored"),
    ],
)
def test_a_launcher_that_is_told_to_stop_commits_and_restarts_nothing(ring, tmp_path, request, start, name):
    request.getfixturevalue(start)
    hold(tmp_path, "0 2 1 stop", cores=2)
    with Job(tmp_path, "2", script(ring, tmp_path), "--max_restarts", "3") as job:
        job.wait_until_held()
        job.launcher.send_signal(signal.SIGINT)
        if name == "SIGTERM":
            job.launcher.send_signal(signal.SIGTERM)
        status, output = job.finish()
    assert status == 143, output
    assert f"stopped by {name}; all trainers have committed and left" in output
    assert name == "SIGINT" or "SIGINT" not in output
    log = (tmp_path / "logs" / "attempt-1" / "trainer-0.log").read_text()
    assert "stopped as asked: 0 epochs and 3 batches done, committed" in log
    assert not (tmp_path / "logs" / "attempt-2").exists()
    assert progress(tmp_path / "run") == (0, 3)


def test_a_signal_in_the_evaluation_stops_every_trainer(ring: Path, tmp_path: Path) -> None:
    command = script(ring, tmp_path, "--signal-in-evaluation", **EVALUATED, **{"training.num_epochs": "1"})
    with Job(tmp_path, "2", command) as job:
        status, output = job.finish()
    assert status == 143, output
    assert "ended with status 143, which says: stopped on request, start me again" in output
    # Training is committed, and nothing is said of a ranking that was not finished.
    assert not (tmp_path / "run" / "metrics.json").exists() and progress(tmp_path / "run") == (1, 0)


def stop_in_epoch_2(folder: Path, **changes: str) -> None:
    """Train in one process, and stop it in the third epoch."""
    hold(folder, "2 3 0 stop", cores=1)
    command = [*warm.python(), *script(toy_dataset(), folder, **changes)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=commands.environment()) as process:
        commands.wait_for(folder / "held", process)
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=60)
    assert process.returncode == 143 and "Preempted" not in output, output
    assert progress(folder / "run") == (2, 4)


@pytest.mark.usefixtures("in_foreground")
def test_plain_python_stops_and_goes_on_like_a_launched_job(ring, undisturbed, tmp_path):
    stop_in_epoch_2(tmp_path)
    for words, status in ((["--signal-in-evaluation"], 143), ([], 0)):
        commands.run([*warm.python(), *script(ring, tmp_path, *words, **EVALUATED)], status)
        assert (tmp_path / "run" / "metrics.json").exists() == (status == 0)
    assert_same_training(tmp_path / "run", undisturbed)
