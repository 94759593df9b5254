"""Jobs that are stopped, killed and resized: every triple counts once, every loss is the same."""

from __future__ import annotations

import signal
import subprocess
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

SCRIPT = str(Path(__file__).with_name("elastic_train.py"))
NUM_EPOCHS, BATCHES_PER_EPOCH, NUM_BUCKETS = 4, 6, 6
SETTINGS = (
    *("model.dimension=16", "negatives.num_uniform=20", "negatives.chunk_size=16", "training.batch_size=32"),
    *(f"training.num_epochs={NUM_EPOCHS}", "checkpoint.every_epochs=0", "checkpoint.every_batches=4"),
    *("evaluation.split=none", "sampling.num_ranges=4", "training.matmul_dtype=float32"),
)
EVALUATED = ("evaluation.split=test", "evaluation.batch_size=8")
LAUNCH = """
import sys
from dglkge.cli import launch
from dglkge.launch.remote import remote_site
planned = remote_site.planned_host
def host(address, port, described):
    return planned(address, port, {**described, "num_cores": int(open(sys.argv[1]).read())})
remote_site.planned_host = host
sys.exit(launch.main(sys.argv[2:]))
"""
"""The launcher on a machine whose number of cores stands in a file."""


def script(folder: Path, *words: str, settings: tuple[str, ...] = ()) -> list[str]:
    places = (f"dataset={toy_dataset()}", f"output={folder / 'run'}")
    return [SCRIPT, *words, *commands.sets((*places, *SETTINGS, *settings))]


def run_alone(folder: Path, *words: str, settings: tuple[str, ...] = (), status: int = 0) -> Path:
    """Run the script in one process; returns the run."""
    commands.run([*warm.python(), *script(folder, *words, settings=settings)], status)
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_alone(tmp_path_factory.mktemp("undisturbed"))


def test_statistics_name_the_bucket(undisturbed: Path) -> None:
    lines = stats(undisturbed)
    for epoch in range(NUM_EPOCHS):
        turns = [line["bucket_number"] for line in lines if line["epoch"] == epoch]
        assert turns == sorted(turns) and turns[-1] == NUM_BUCKETS - 1
    assert {line["num_buckets"] for line in lines} == {NUM_BUCKETS}
    assert all(0 <= line["bucket"][0] < line["bucket"][1] < 4 for line in lines)


def started(folder: Path, trainers: str, command: list[str], *options: str):
    """Launch the script on a machine with as many cores as stand in the file ``cores``."""
    if not (folder / "cores").exists():
        (folder / "cores").write_text("2")
    words = ["--ip_config", str(commands.ip_config(folder)), "--log_dir", str(folder / "logs")]
    words += ["--num_trainers", trainers, "--num_omp_threads", "1", *options]
    return commands.started([*commands.PLAIN, "-c", LAUNCH, str(folder / "cores"), *words, *command])


def process(job: subprocess.Popen[str], role: str, number: int) -> psutil.Process:
    return commands.processes_of(job, role, "elastic_train.py")[number]


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the status and what was said."""
    output, _ = job.communicate(timeout=commands.TIME_LIMIT_SECONDS)
    return job.returncode, output


def hold(folder: Path, place: str, cores: int) -> None:
    """Order where the next attempt waits, and how many cores it finds."""
    (folder / "cores").write_text(str(cores))
    (folder / "hold").write_text(place)
    (folder / "held").unlink(missing_ok=True)


def assert_each_triple_once(attempts: list[list[list]]) -> None:
    """Hold that what counts, up to where the next attempt began, is each triple once in each epoch.

    The lines of an attempt: where it began, and then epoch, batch, its size and triple ids of each trainer.
    """
    num_triples = len(Dataset.open(toy_dataset()).split("train"))
    assert num_triples == 32 * BATCHES_PER_EPOCH
    ends = [*(attempt[0] for attempt in attempts[1:]), [NUM_EPOCHS, 0]]
    counted = [line for attempt, end in zip(attempts, ends) for line in attempt[1:] if line[:2] < end]
    for epoch in range(NUM_EPOCHS):
        ids = [id_ for line in counted if line[0] == epoch for id_ in line[3]]
        assert np.bincount(ids, minlength=num_triples).tolist() == [1] * num_triples, epoch
        for index in range(BATCHES_PER_EPOCH):
            assert sum(len(line[3]) for line in counted if line[:2] == [epoch, index]) == 32


def lines_of(attempt: Path) -> list[list]:
    """Return where an attempt began, as all its trainers say, and the lines of all of them."""
    logs = [json_lines(path) for path in sorted(attempt.glob("trained-*.jsonl"))]
    assert all(log[0] == logs[0][0] for log in logs)
    return [logs[0][0], *(line for log in logs for line in log[1:])]


def loss_curve(run: Path) -> list[tuple[tuple[int, int], float]]:
    """Return every report of a run: (epoch, batches done) and loss; batches trained again have several."""
    return [((line["epoch"], line["batches_done"]), line["loss"]) for line in stats(run)]


def test_two_then_three_then_one_trainers_train_each_triple_once(undisturbed: Path, tmp_path: Path) -> None:
    """A server is killed while two trainers are inside a bucket, then one of three is told to stop."""
    hold(tmp_path, "1 2 1 kill", cores=2)
    with started(tmp_path, "1:3", script(tmp_path), "--max_restarts", "2") as job:
        commands.wait_for(tmp_path / "held", job)
        hold(tmp_path, "2 3 2 stop", cores=3)
        process(job, "server", 0).send_signal(signal.SIGKILL)
        commands.wait_for(tmp_path / "held", job)
        hold(tmp_path, "never 0 0 stop", cores=1)
        (tmp_path / "ip_config.txt").write_text(f"127.0.0.1 {free_ports()} 2\n")
        process(job, "client", 2).send_signal(signal.SIGTERM)
        status, output = finish(job)
    assert status == 0, output
    assert "restart 1 of 2 in 1 s" in output and "restart 2 of 2 in " in output
    folders = [tmp_path / "logs" / f"attempt-{number}" for number in (1, 2, 3)]
    assert [len(list(folder.glob("trainer-?.log"))) for folder in folders] == [2, 3, 1]
    assert [len(list(folder.glob("server-?.log"))) for folder in folders] == [1, 1, 2]
    attempts = [lines_of(folder) for folder in folders]
    assert [attempt[0] for attempt in attempts] == [[0, 0], [0, 4], [2, 4]]
    assert_each_triple_once(attempts)
    expected, curve = dict(loss_curve(undisturbed)), loss_curve(tmp_path / "run")
    assert dict(curve).keys() == expected.keys() and len(expected) == NUM_EPOCHS * BATCHES_PER_EPOCH
    for place, loss in curve:
        # Sums in another order differ by about 1e-7; 24 steps of training make 1.3e-5 of that.
        assert loss == pytest.approx(expected[place], rel=1e-4), place
    # Numbers of about 1: Adagrad's first steps are as long for tiny gradients as for large.
    assert_near(tables(tmp_path / "run"), tables(undisturbed), 0, 5e-4)


@pytest.mark.parametrize(
    ("start", "number"),
    [
        pytest.param("in_foreground", signal.SIGINT, id="Ctrl-C"),
        pytest.param("in_background", signal.SIGTERM, id="SIGTERM, where Ctrl-C is ignored"),
        pytest.param("in_foreground", signal.SIGHUP, id="SIGHUP to one trainer"),
    ],
)
def test_a_job_that_is_told_to_stop_commits_and_restarts_nothing(tmp_path, request, start, number):
    request.getfixturevalue(start)
    hold(tmp_path, "0 2 1 stop", cores=2)
    is_launcher = number != signal.SIGHUP
    options = ("--max_restarts", "3") if is_launcher else ()
    with started(tmp_path, "2", script(tmp_path), *options) as job:
        commands.wait_for(tmp_path / "held", job)
        if number == signal.SIGTERM:
            job.send_signal(signal.SIGINT)
        (job if is_launcher else process(job, "client", 1)).send_signal(number)
        status, output = finish(job)
    assert status == 143, output
    if is_launcher:
        assert f"stopped by {number.name}; all trainers have committed and left" in output
    else:
        assert "ended with status 143, which says: stopped on request, start me again" in output
    assert number == signal.SIGINT or "SIGINT" not in output
    log = next((tmp_path / "logs").rglob("trainer-0.log")).read_text()
    assert "stopped as asked: 0 epochs and 3 batches done, committed" in log
    assert not (tmp_path / "logs" / "attempt-2").exists()
    assert progress(tmp_path / "run") == (0, 3)


def test_a_signal_in_the_evaluation_stops_every_trainer(tmp_path: Path) -> None:
    settings = (*EVALUATED, "training.num_epochs=1")
    with started(tmp_path, "2", script(tmp_path, "--signal-in-evaluation", settings=settings)) as job:
        status, output = finish(job)
    assert status == 143, output
    assert "ended with status 143, which says: stopped on request, start me again" in output
    # Training is committed, and nothing is said of a ranking that was not finished.
    assert not (tmp_path / "run" / "metrics.json").exists() and progress(tmp_path / "run") == (1, 0)


@pytest.mark.usefixtures("in_foreground")
def test_plain_python_that_is_stopped_goes_on_bit_by_bit(undisturbed: Path, tmp_path: Path) -> None:
    """Inside a bucket; and once more in its evaluation."""
    hold(tmp_path, "2 3 0 stop", cores=1)
    command = [*warm.python(), *script(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=commands.environment()) as job:
        commands.wait_for(tmp_path / "held", job)
        job.send_signal(signal.SIGTERM)
        _, output = job.communicate(timeout=60)
    assert job.returncode == 143 and "Preempted" not in output, output
    assert progress(tmp_path / "run") == (2, 4)
    for words, status in ((["--signal-in-evaluation"], 143), ([], 0)):
        run_alone(tmp_path, *words, settings=EVALUATED, status=status)
        assert (tmp_path / "run" / "metrics.json").exists() == (status == 0)
    assert_near(tables(tmp_path / "run"), tables(undisturbed), 0, 0)
