"""The watchdog as its launcher sees it: three pipes, and nothing left when either of them ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dglkge.distributed.jobs import JobEntry, Registration
from dglkge.distributed.lease import new_nonce
from dglkge.errors import NotReadyError
from dglkge.launch import watchdog
from dglkge.launch.local_site import clear_machine
from dglkge.launch.shared_memory import remove_stale_segments, wait_for_watchdogs

TIMEOUT_SECONDS = 30
WAIT_FOR_EVER = "import signal, sys; print('ready', flush=True); signal.pause()"
STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)];" + WAIT_FOR_EVER


class RunningKeeper:
    """A watchdog started as the local executor starts it."""

    def __init__(self, code: str, default_folder: Path, **request: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        request = {
            "command": [sys.executable, "-c", code],
            "environment": {},
            "folder": str(default_folder),
            **request,
        }
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def report(self) -> dict:
        """Read the next report."""
        return json.loads(self.process.stderr.readline())

    def line(self) -> bytes:
        """Read the next line of output."""
        return self.process.stdout.readline()

    def send(self, number: int) -> None:
        """Ask for a signal."""
        self.process.stdin.write(b"%d\n" % number)

    def finish(self) -> tuple[bytes, list[dict]]:
        """Wait for the end with the launcher present; return the rest of both streams."""
        output = self.process.stdout.read()
        reports = [json.loads(line) for line in self.process.stderr]
        self.process.wait(TIMEOUT_SECONDS)
        return output, reports


@pytest.fixture
def keep(tmp_path: Path) -> Iterator:
    """Start watchdogs; none outlives the test."""
    watchdogs: list[RunningKeeper] = []

    def start(code: str, **request: object) -> RunningKeeper:
        watchdogs.append(RunningKeeper(code, tmp_path, **request))
        return watchdogs[-1]

    yield start
    for running in watchdogs:
        with contextlib.suppress(OSError):
            running.process.stdin.close()
        running.process.wait(TIMEOUT_SECONDS)
        running.process.stdout.close()
        running.process.stderr.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_status(keep, code: str, status: int) -> None:
    """The status is that of the process, the signal's number negated; the watchdog itself ends with 0."""
    running = keep(code)
    pid = running.report()["pid"]
    _, reports = running.finish()
    assert [report["status"] for report in reports] == [status]
    assert running.process.returncode == 0
    assert not psutil.pid_exists(pid)


def test_process_gets_what_was_asked(keep, tmp_path: Path) -> None:
    """Arguments, environment and folder arrive as they are; both streams come out in one."""
    code = (
        "import os, sys\n"
        "print(sys.argv[1:], os.environ['ODD'], os.getcwd(), flush=True)\n"
        "print('err', file=sys.stderr)"
    )
    odd = ["it's", "$HOME `id`; exit", "", "a\nb", "\u00e9"]
    running = keep("", command=[sys.executable, "-c", code, *odd], environment={"ODD": "$x"})
    output, _ = running.finish()
    assert output.decode() == f"{odd} $x {tmp_path}\nerr\n"


@pytest.mark.parametrize("request_", [{"command": ["/no/such/program"]}, {"folder": "/no/such/folder"}])
def test_cannot_start(keep, request_: dict) -> None:
    """A program or folder that is missing is reported as an error, not as a status."""
    running = keep("", **request_)
    _, (report,) = running.finish()
    assert "No such file or directory: '/no/such/" in report["error"]


def test_gone_before_the_request() -> None:
    """A watchdog whose launcher went at once goes too."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", watchdog.__file__], input=b"{", timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 1


def test_signals_reach_the_process_alone(keep) -> None:
    """A polite signal is for the process, which decides about its children; SIGKILL is for all."""
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {WAIT_FOR_EVER!r}], start_new_session=True)\n"
        "while True: signal.pause()\n"
    )
    running = keep(code)
    pid = running.report()["pid"]
    assert running.line() == b"ready\n"
    (child,) = psutil.Process(pid).children()
    running.send(signal.SIGTERM)
    assert running.line() == b"term\n"
    assert child.is_running()
    running.send(signal.SIGKILL)
    _, reports = running.finish()
    assert reports[-1]["status"] == -9
    assert not child.is_running()


def test_orphans_are_ended(keep) -> None:
    """What the process leaves behind, even in a session of its own and deaf to SIGTERM, ends after it."""
    code = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {STUBBORN!r}]\n"
        "child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True)\n"
    )
    running = keep(code)
    orphan = psutil.Process(int(running.line()))
    output, reports = running.finish()
    assert reports[-1]["status"] == 0
    assert not orphan.is_running()


@pytest.mark.parametrize("code", [WAIT_FOR_EVER, STUBBORN])
def test_launcher_gone(keep, code: str) -> None:
    """At the end of stdin the process ends, deaf to SIGTERM or not."""
    running = keep(code)
    process = psutil.Process(running.report()["pid"])
    assert running.line() == b"ready\n"
    running.process.stdin.close()
    running.process.wait(TIMEOUT_SECONDS)
    assert not process.is_running()


def test_process_dies_with_its_keeper(keep) -> None:
    """Even kill -9 of the watchdog ends the process."""
    running = keep(STUBBORN)
    process = psutil.Process(running.report()["pid"])
    assert running.line() == b"ready\n"
    running.process.kill()
    process.wait(TIMEOUT_SECONDS)
    running.process.wait(TIMEOUT_SECONDS)
    assert remove_stale_segments() == []  # its record goes
    assert not list(Path("/dev/shm").glob(f"{watchdog.RECORD_PREFIX}{running.process.pid}-*"))


def test_keeper_is_deaf_to_the_terminal(keep) -> None:
    """SIGINT, SIGTERM and SIGHUP end neither the watchdog nor, through it, the process."""
    running = keep(WAIT_FOR_EVER)
    process = psutil.Process(running.report()["pid"])
    assert running.line() == b"ready\n"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        running.process.send_signal(number)
    running.send(signal.SIGUSR1)
    _, reports = running.finish()
    assert reports[-1]["status"] == -signal.SIGUSR1
    assert not process.is_running()


def test_what_a_killed_watchdog_leaves_is_removed_by_the_next_job(keep) -> None:
    """Everything of a job is killed at once: the next job waits for nothing, and clears up."""
    job, other = new_nonce(), new_nonce()
    own, foreign, living = (f"dglkge-{job}-0~x", f"{job}-foreign", f"dglkge-{other}-0~x")
    paths = {name: Path("/dev/shm") / name for name in (own, foreign, living)}
    neighbour = Registration(JobEntry(other))
    try:
        running = keep(WAIT_FOR_EVER, job=job)
        process = psutil.Process(running.report()["pid"])
        assert running.line() == b"ready\n"
        for path in paths.values():
            path.touch()
        with pytest.raises(
            NotReadyError, match=f"after 0.2 s .their watchdogs: pid {running.process.pid}.; end"
        ):
            wait_for_watchdogs(seconds=0.2)
        assert own not in remove_stale_segments() and paths[own].exists()  # the watchdog lives
        running.process.kill()
        running.process.wait(TIMEOUT_SECONDS)
        process.wait(TIMEOUT_SECONDS)
        clear_machine()
        assert {name for name, path in paths.items() if path.exists()} == {foreign, living}
        assert not list(Path("/dev/shm").glob(f"{watchdog.RECORD_PREFIX}{running.process.pid}-*"))
    finally:
        neighbour.release()
        for path in paths.values():
            path.unlink(missing_ok=True)


def test_watchdogs_of_a_living_job_are_not_waited_for(keep) -> None:
    """Only those of ended jobs are, and those of the asking job itself: its attempt before."""
    job = new_nonce()
    entry = Registration(JobEntry(job))
    try:
        running = keep(WAIT_FOR_EVER, job=job)
        running.report()
        assert running.line() == b"ready\n"
        wait_for_watchdogs(new_nonce(), seconds=0.2)
        with pytest.raises(NotReadyError, match="after 0.2 s"):
            wait_for_watchdogs(job, seconds=0.2)
    finally:
        entry.release()


def test_a_jobs_own_memory_goes_unseen_when_the_launcher_is_gone(keep) -> None:
    """Made between two scans, or never mapped: the job's id in the name is enough; others' stay."""
    job, other = new_nonce(), new_nonce()
    own, foreign = (Path(f"/dev/shm/dglkge-{each}-0~x") for each in (job, other))
    entry = Path(f"/dev/shm/dglkge-job-{job}.json")
    try:
        running = keep(WAIT_FOR_EVER, job=job)
        running.report()
        assert running.line() == b"ready\n"
        for path in (own, foreign, entry):
            path.touch()
        running.process.stdin.close()
        running.process.wait(TIMEOUT_SECONDS)
        assert (own.exists(), foreign.exists(), entry.exists()) == (False, True, False)
    finally:
        for path in (own, foreign, entry):
            path.unlink(missing_ok=True)


def test_a_keeper_leaves_no_record(keep) -> None:
    """Neither when its process ends, nor when the launcher has gone."""
    for code in ("pass", WAIT_FOR_EVER):
        running = keep(code)
        running.report()
        if code == WAIT_FOR_EVER:
            assert running.line() == b"ready\n"
            assert len(list(Path("/dev/shm").glob(f"{watchdog.RECORD_PREFIX}{running.process.pid}-*"))) == 1
        running.process.stdin.close()
        running.process.wait(TIMEOUT_SECONDS)
        assert not list(Path("/dev/shm").glob(f"{watchdog.RECORD_PREFIX}{running.process.pid}-*"))


def test_a_record_is_never_seen_without_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks at that moment would take the watchdog for a killed one."""
    pattern = f"{watchdog.RECORD_PREFIX}{os.getpid()}-*"
    seen: list[list[Path]] = []
    lock = fcntl.flock

    def look_and_lock(descriptor: int, operation: int) -> None:
        seen.append(list(Path("/dev/shm").glob(pattern)))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", look_and_lock)
    record = watchdog.Record("a1b2")
    try:
        (path,) = Path("/dev/shm").glob(pattern)
        assert seen == [[]]
        assert json.loads(path.read_text()) == {"job": "a1b2"}
    finally:
        record.remove()
    assert not list(Path("/dev/shm").glob(f"*{pattern}"))


def test_descendants() -> None:
    """All generations are found, and nothing else."""
    code = "import subprocess,sys; c=subprocess.Popen(['cat'],stdin=0); print(c.pid,flush=True); c.wait()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        grandchild = int(child.stdout.readline())
        assert set(watchdog.descendants(os.getpid())) >= {child.pid, grandchild}
        assert watchdog.descendants(child.pid) == [grandchild]
        assert watchdog.descendants(grandchild) == []
    finally:
        child.communicate(timeout=TIMEOUT_SECONDS)


SILENT = """
import sys
import dglkge.launch.watchdog as watchdog
watchdog.HEARTBEAT_SECONDS, watchdog.GRACE_SECONDS = 0.1, 0.2
sys.exit(watchdog.main())
"""


@pytest.mark.parametrize("code", [WAIT_FOR_EVER, STUBBORN])
def test_silent_launcher(tmp_path: Path, code: str) -> None:
    """Over a channel that may go silent, silence is the launcher's end; until then both send heartbeats."""
    request = {
        "command": [sys.executable, "-c", code],
        "environment": {},
        "folder": str(tmp_path),
        "heartbeat_timeout": 1.0,
    }
    pipe = subprocess.PIPE
    running = subprocess.Popen(
        [sys.executable, "-c", SILENT], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0
    )
    try:
        running.stdin.write(json.dumps(request).encode() + b"\n")
        process = psutil.Process(json.loads(running.stderr.readline())["pid"])
        for _ in range(15):  # longer than the silence that it would bear
            assert json.loads(running.stderr.readline()) == {}
            running.stdin.write(b"\n")
        assert process.is_running()
        running.wait(TIMEOUT_SECONDS)  # stdin stays open
        assert not process.is_running()
    finally:
        running.kill()
        running.communicate()
