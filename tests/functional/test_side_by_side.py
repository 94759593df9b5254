"""Jobs side by side on one machine: the same tables, bit by bit, as one after another."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.functional.job import PLAIN, TIME_LIMIT_SECONDS, dglkge, launch_command, started
from tests.functional.results import assert_near, tables
from tests.toy_kg import toy_dataset

Job = contextlib.AbstractContextManager[subprocess.Popen[str]]


def start(folder: Path, *more: str, num_epochs: int = 2, python: Sequence[str] | None = None) -> Job:
    """Start a job of one trainer whose servers find a port of their own."""
    folder.mkdir(exist_ok=True)
    settings = (
        *(f"dataset={toy_dataset()}", f"output={folder / 'run'}", "model.dimension=16"),
        *("training.batch_size=50", "training.matmul_dtype=float32", f"training.num_epochs={num_epochs}"),
        *("evaluation.split=none", *more),
    )
    command = launch_command(folder, 1, settings, python=python)
    (folder / "ip_config.txt").write_text("127.0.0.1\n", encoding="utf-8")
    return started(command)


def finish(job: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for the end of a job, within the limit; return its output."""
    output, _ = job.communicate(timeout=TIME_LIMIT_SECONDS)
    assert job.returncode == status, output
    return output


def wait_until(is_true: Callable[[], object]) -> None:
    limit = time.monotonic() + TIME_LIMIT_SECONDS
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.1)


def segments() -> list[str]:
    """Return the names in shared memory that are of our jobs, their entries among them."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("dglkge-")]


def test_jobs_side_by_side(tmp_path: Path) -> None:
    with start(tmp_path / "alone", "seed=1") as job:
        finish(job)
    with start(tmp_path / "first", "seed=1") as first, start(tmp_path / "second", "seed=2") as second:
        finish(first)
        finish(second)
    expected = tables(tmp_path / "alone" / "run")
    assert_near(tables(tmp_path / "first" / "run"), expected, 0, 0)
    assert (tables(tmp_path / "second" / "run")["entity"] != expected["entity"]).any()
    assert segments() == []


def test_files_go_with_a_killed_launcher(tmp_path: Path) -> None:
    """While it trains its tables are in the folder and not in /dev/shm; after kill -9 all is gone."""
    folder = tmp_path / "tables"
    settings = ("tables.storage=disk", f"tables.folder={folder}")
    with start(tmp_path / "job", *settings, num_epochs=100000, python=PLAIN) as job:
        wait_until(lambda: (tmp_path / "job" / "run" / "checkpoint").exists() or job.poll() is not None)
        assert list(folder.glob("dglkge-*/*~node~entity~entity_rows*-kvdata-")), list(folder.rglob("*"))
        assert not [name for name in os.listdir("/dev/shm") if name.endswith("-kvdata-")]
        job.kill()
        wait_until(lambda: not list(folder.iterdir()) and not segments())


SMALL_MEMORY = 'mount -t tmpfs -o size=192k tmpfs /dev/shm && exec "$0" "$@"'


def test_small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: what does not fit is put into files elsewhere, and the job says so."""
    small = ("unshare", "--mount", "sh", "-c", SMALL_MEMORY)
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    wide = "model.dimension=256"
    with (
        start(tmp_path / "small", wide, python=(*small, *PLAIN)) as in_files,
        start(tmp_path / "large", wide, python=PLAIN) as in_memory,
    ):
        told = f"tables are files in {tmp_path} (0.00 GB): the tables need 0.00 GB of shared"
        assert told in finish(in_files)
        assert "tables are files" not in finish(in_memory)
    assert_near(tables(tmp_path / "small" / "run"), tables(tmp_path / "large" / "run"), 0, 0)
    assert not list(tmp_path.glob("dglkge-*"))


def test_list_refuse_and_stop(tmp_path: Path) -> None:
    """A job is listed while it runs; a second on its folder is refused; stop lets it commit, and go on."""
    run = tmp_path / "first" / "run"
    with start(tmp_path / "first", num_epochs=100000) as first:
        wait_until(lambda: (run / "checkpoint").exists() or first.poll() is not None)
        (entry,) = [job for job in json.loads(dglkge("jobs", "--json").stdout) if job["run"] == str(run)]
        assert psutil.Process(entry["pid"]).ppid() == entry["launcher_pid"]  # the node program is its child
        assert 0 < entry["allocated_shared_memory_bytes"] and 0 < entry["shared_memory_bytes"]
        assert str(run) in dglkge("jobs").stdout
        names = [name for name in os.listdir("/dev/shm") if name.endswith("-kvdata-") or "_node_" in name]
        assert names and not [name for name in names if not name.startswith("dglkge-")]
        with start(tmp_path / "first") as second:
            told = f"error: {run} is in use: another job writes there, job {entry['job']} of user "
            assert told in finish(second, 2)
        with start(tmp_path / "third") as third:
            assert "all processes ended well" in finish(third)
        stopped = dglkge("stop", str(run))
        assert stopped.stdout.startswith(f"stopped job {entry['job']} ")
        assert "all trainers have committed and left" in finish(first, 143)
        again = dglkge("stop", entry["job"], status=2)
        assert "no job of this machine matches" in again.stderr
