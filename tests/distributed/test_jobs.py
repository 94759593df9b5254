"""The register of a machine's jobs: entries of living jobs, what they still claim, who is meant by a name."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dglkge.cli.jobs import _send
from dglkge.distributed import jobs
from dglkge.distributed.jobs import JobEntry, Registration, claims_of_others, job_prefix, live_jobs
from dglkge.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
ONE, TWO = "00000000000000a1", "00000000000000b2"


@contextlib.contextmanager
def holder(code: str, *arguments: str) -> Iterator[int]:
    """Run some code in another process, which is killed at the end of the block; yields its pid."""
    text = f"import sys\n{code}\nprint('held', flush=True); sys.stdin.read()"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", text, *arguments], env=environment, **streams) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process.pid
        finally:
            process.kill()


HOLDS_ENTRY = """
from dglkge.distributed.jobs import JobEntry, Registration
job = JobEntry(sys.argv[2], run="/runs/one", user="eve", host="here", launcher_pid=5)
entry = Registration(job, sys.argv[1])
"""


def test_an_entry_lives_as_long_as_its_process(tmp_path: Path) -> None:
    with holder(HOLDS_ENTRY, str(tmp_path), ONE) as pid:
        (entry,) = live_jobs(str(tmp_path))
        assert (entry.job, entry.user, entry.pid) == (ONE, "eve", pid)
        assert 0 < jobs.process_start(os.getpid()) <= jobs.process_start(pid)
        words = rf"{ONE} of user eve, launcher pid 5 on here; wait for it, end it \(dglkge job stop {ONE}\)"
        with pytest.raises(InputError, match=f"^/runs/one is in use: another job writes there, job {words}"):
            Registration(JobEntry(TWO, run="/runs/one"), str(tmp_path))
    assert live_jobs(str(tmp_path)) == []
    assert jobs.job_of_segment(f"{job_prefix(ONE)}0~x-kvdata-") == ONE
    for other in (f"dglkge-job-{ONE}.json", "node~_N~emb_0-kvdata-", f"dglkge-{ONE}"):
        assert jobs.job_of_segment(other) == ""
    second = Registration(JobEntry(TWO, run="/runs/one"), str(tmp_path))
    jobs.remove_stale_entries(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"dglkge-job-{TWO}.json"]
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_entries_that_cannot_be_read(tmp_path: Path) -> None:
    """Half-written, of a later version with more fields, or with another job's id: never an error."""
    (tmp_path / f"dglkge-job-{ONE}.json").write_text('{"job": "')
    (tmp_path / "dglkge-job-x.json").write_text(json.dumps({"job": TWO, "colour": "red"}))
    assert live_jobs(str(tmp_path)) == []
    assert JobEntry.from_dict({"job": TWO, "colour": "red", "ports": [1]}) == JobEntry(TWO, ports=(1,))
    held = Registration(JobEntry(TWO), str(tmp_path))
    (tmp_path / f"dglkge-job-{TWO}.json").write_text("[1")
    assert live_jobs(str(tmp_path)) == [JobEntry(TWO)]
    held.release()


def test_a_lock_that_is_kept_holds_no_job_up(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(jobs, "REGISTER_LOCK_SECONDS", 0.1)
    lock = "import fcntl, os; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    with holder(lock, str(tmp_path)):
        Registration(JobEntry(TWO, run="/runs/one"), str(tmp_path)).release()
    assert f"another process keeps {tmp_path} locked" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="root only: acts as two users")
def test_other_users_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"launcher_pid": os.getpid(), "launcher_started": jobs.process_start(os.getpid())}
    held = Registration(JobEntry(ONE, run="/runs/one", **launcher), str(tmp_path))
    os.chown(tmp_path / f"dglkge-job-{ONE}.json", 65534, 65534)
    Registration(JobEntry(TWO, run="/runs/one"), str(tmp_path)).release()
    (entry,) = live_jobs(str(tmp_path))
    assert entry.owner == 65534
    monkeypatch.setattr("dglkge.cli.jobs.os.kill", lambda *_arguments: pytest.fail("a signal was sent"))
    with pytest.raises(InputError, match=f"process {os.getpid()} is not of the entry's owner"):
        _send(entry)
    held.release()


def test_claims_are_what_is_planned_and_not_allocated(tmp_path: Path) -> None:
    """Segments that exist count as taken, not the asking job's own plan, nor that of ended jobs."""
    folder = str(tmp_path)
    entry = Registration(JobEntry(ONE, shared_memory_bytes=10 * 2**20, memory_bytes=2**50), folder)
    assert claims_of_others(ONE, folder) == jobs.Claims()
    assert claims_of_others("", folder).shared_memory_bytes == 10 * 2**20
    (tmp_path / f"{job_prefix(ONE)}0~table").write_bytes(b"x" * 2**22)
    (tmp_path / f"{job_prefix(TWO)}0~table").write_bytes(b"x" * 2**22)
    claims = claims_of_others(TWO, folder)
    assert claims.shared_memory_bytes == pytest.approx(6 * 2**20, abs=2**16)
    # This process has taken some megabytes of what its entry plans.
    assert 2**50 - 2**40 < claims.memory_bytes < 2**50 - 2**22 - 2**20
    entry.update(memory_bytes=1)
    assert claims_of_others(TWO, folder).memory_bytes == 0
    entry.release()
    assert claims_of_others(TWO, folder) == jobs.Claims()


def test_jobs_that_a_name_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder, relative or with a link; an id or its beginning; a pid of a launcher."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    first, second = JobEntry(ONE, run=str(tmp_path / "run"), launcher_pid=12), JobEntry(TWO, launcher_pid=13)
    for text, expected in {
        "run": [first], "link/": [first], ONE: [first], "00000000000000b": [second], "0": [first, second],
        "13": [second], "other": [], "": [],
    }.items():  # fmt: skip
        assert jobs.matching_jobs(text, [first, second]) == expected, text


def test_sizes() -> None:
    sizes = {"4G": 4 << 30, "512MiB": 512 << 20, "1.5 kib": 1536, "77": 77, "2T": 2 << 40}
    sizes |= {"64MB": 64_000_000, "1.5 GiB": 3 << 29, "2gb": 2 * 10**9, ".5 kB ": 500, "9b": 9}
    assert {text: jobs.parse_bytes(text) for text in sizes} == sizes
    for text in ("", "G", "0", "-1G", "4X", "1e3", "GB", "2XB", "two", "2,5GB", "2GB RAM"):
        with pytest.raises(InputError, match="is no size; allowed: a number above 0 with K, M, G or T"):
            jobs.parse_bytes(text)
