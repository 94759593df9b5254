"""Jobs side by side on one machine: the same tables, bit by bit, as one after another."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.functional.job import PLAIN, TIME_LIMIT_SECONDS, dglkge, environment, launch_command
from tests.functional.results import assert_near, tables
from tests.toy_kg import toy_dataset

NUM_JOBS = 2


def start(
    folder: Path,
    seed: int,
    *more: str,
    num_epochs: int = 2,
    python: Sequence[str] | None = None,
) -> subprocess.Popen[str]:
    """Start a job of one trainer whose servers find a port of their own."""
    folder.mkdir(exist_ok=True)
    settings = (
        *(f"dataset={toy_dataset()}", f"output={folder / 'run'}", f"seed={seed}", "model.dimension=16"),
        *("training.batch_size=50", "training.matmul_dtype=float32", f"training.num_epochs={num_epochs}"),
        *("evaluation.split=none", *more),
    )
    command = launch_command(folder, 1, settings, python=python)
    # Its servers find a port of their own.
    (folder / "ip_config.txt").write_text("127.0.0.1\n", encoding="utf-8")
    # With a launcher that is an ordinary process, servers and trainers are copies all the same.
    env = warm.runners(environment()) if python else environment()
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def finish(job: subprocess.Popen[str]) -> str:
    """Wait for the end of a job, within the limit; return its output."""
    try:
        return job.communicate(timeout=TIME_LIMIT_SECONDS)[0]
    finally:
        job.kill()


def our_segments() -> list[str]:
    """Return the names in shared memory that are of our jobs, their entries among them."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("dglkge-")]


def running_jobs() -> list[dict]:
    return json.loads(dglkge("jobs", "--json").stdout)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("alone")
    for seed in range(NUM_JOBS):
        job = start(base / str(seed), seed)
        output = finish(job)
        assert job.returncode == 0, output
    return base


def assert_same(one_run: Path, other_run: Path) -> None:
    """Compare the tables of two runs bit by bit."""
    assert_near(tables(other_run), tables(one_run), 0, 0)


def test_jobs_side_by_side(alone: Path, tmp_path: Path) -> None:
    jobs = [start(tmp_path / str(seed), seed) for seed in range(NUM_JOBS)]
    outputs = [finish(job) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * NUM_JOBS, "\n".join(outputs)
    for seed in range(NUM_JOBS):
        assert_same(alone / str(seed) / "run", tmp_path / str(seed) / "run")
    assert our_segments() == []


def test_tables_in_files(alone: Path, tmp_path: Path) -> None:
    """The same tables, bit by bit; nothing is left in the folder."""
    job = start(tmp_path / "job", 0, "tables.storage=disk", f"tables.folder={tmp_path / 'tables'}")
    output = finish(job)
    assert job.returncode == 0, output
    assert f"tables are files in {tmp_path / 'tables'} (0.00 GB): tables.storage is disk" in output
    assert_same(alone / "0" / "run", tmp_path / "job" / "run")
    assert list((tmp_path / "tables").iterdir()) == []


def test_files_go_with_a_killed_launcher(tmp_path: Path) -> None:
    """While it trains its tables are in the folder and not in /dev/shm; after kill -9 all is gone."""
    folder = tmp_path / "tables"
    settings = ("tables.storage=disk", f"tables.folder={folder}")
    job = start(tmp_path / "job", 0, *settings, num_epochs=100000, python=PLAIN)
    try:
        limit = time.monotonic() + TIME_LIMIT_SECONDS
        while not (tmp_path / "job" / "run" / "checkpoint").exists() and time.monotonic() < limit:
            assert job.poll() is None, finish(job)
            time.sleep(0.1)
        assert list(folder.glob("dglkge-*/*~node~entity~entity_rows*-kvdata-")), list(folder.rglob("*"))
        assert not [name for name in os.listdir("/dev/shm") if name.endswith("-kvdata-")]
        job.kill()
        job.wait(TIME_LIMIT_SECONDS)
        while (list(folder.iterdir()) or our_segments()) and time.monotonic() < limit:
            time.sleep(0.1)
        assert list(folder.iterdir()) == []
        assert our_segments() == []
    finally:
        job.kill()
        job.communicate()


SMALL_MEMORY = 'mount -t tmpfs -o size=192k tmpfs /dev/shm && exec "$0" "$@"'


def test_small_shared_memory(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: what does not fit is put into files elsewhere, and the job says so."""
    small = ("unshare", "--mount", "sh", "-c", SMALL_MEMORY)
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    wide = "model.dimension=256"
    jobs = [
        start(tmp_path / "small", 0, wide, python=(*small, *PLAIN)),
        start(tmp_path / "large", 0, wide, python=PLAIN),
    ]
    outputs = [finish(job) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(outputs)
    assert f"tables are files in {tmp_path} (0.00 GB): the tables need 0.00 GB of shared" in outputs[0]
    assert "tables are files" not in outputs[1]
    assert_same(tmp_path / "large" / "run", tmp_path / "small" / "run")
    assert not list(tmp_path.glob("dglkge-*"))


def test_list_refuse_and_stop(tmp_path: Path) -> None:
    """A job is listed while it runs; a second on its folder is refused; stop lets it commit, and go on."""
    first = start(tmp_path / "first", 0, num_epochs=100000)
    second = third = None
    try:
        run = tmp_path / "first" / "run"
        limit = time.monotonic() + TIME_LIMIT_SECONDS
        while not (run / "checkpoint").exists() and first.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        (entry,) = [entry for entry in running_jobs() if entry["run"] == str(run)]
        assert psutil.Process(entry["pid"]).ppid() == entry["launcher_pid"]  # the node program is its child
        assert 0 < entry["allocated_shared_memory_bytes"] and 0 < entry["shared_memory_bytes"]
        assert str(run) in dglkge("jobs").stdout
        names = [name for name in os.listdir("/dev/shm") if name.endswith("-kvdata-") or "_node_" in name]
        assert names and not [name for name in names if not name.startswith("dglkge-")]

        second = start(tmp_path / "first", 0)
        output = finish(second)
        assert second.returncode == 2
        assert f"error: {run} is in use: another job writes there, job {entry['job']} of user " in output

        third = start(tmp_path / "third", 0)
        assert "all processes ended well" in finish(third)
        stopped = dglkge("stop", str(run))
        assert stopped.stdout.startswith(f"stopped job {entry['job']} ")
        assert first.wait(TIME_LIMIT_SECONDS) == 143
        assert "all trainers have committed and left" in first.communicate()[0]
        again = dglkge("stop", entry["job"], status=2)
        assert "no job of this machine matches" in again.stderr
    finally:
        for job in (first, second, third):
            if job is not None:
                job.terminate()
                job.communicate(timeout=TIME_LIMIT_SECONDS)
