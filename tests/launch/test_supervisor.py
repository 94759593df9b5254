"""Jobs of small scripts under the supervisor: how each ends, what is said, what is left."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from dglkge.distributed.addresses import Machine
from dglkge.distributed.jobs import JobEntry
from dglkge.distributed.preemption import STOP_SIGNALS
from dglkge.distributed.world import JOB_VARIABLE
from dglkge.launch.console import Console
from dglkge.launch.process_plan import SERVER, TRAINER, Limits, PlannedProcess
from dglkge.launch.remote.connection import ssh_client
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.supervisor import JobResult, Supervisor
from tests.launch.conftest import planned_process

JOB = uuid.uuid4().hex[:16]
ADDRESS = "127.0.0.1"
SHORT = Limits(failure_seconds=0.5, stop_seconds=0.5, exit_seconds=0.5)
LONG = Limits(stop_seconds=20, exit_seconds=20)
FOREVER = "import signal; print('waits', flush=True)\nwhile True: signal.pause()"
STUBBORN = f"import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n{FOREVER}"
DONE = "print('done')"


def processes_left() -> list[psutil.Process]:
    """Return the children of this process, without the helpers that multiprocessing keeps once used."""
    helpers = ("resource_tracker", "forkserver", "tests.warm.server", "warm/client.py")
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if not any(helper in word for word in child.cmdline() for helper in helpers)
    ]


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that only waits to be reaped has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def supervise(folder: Path, console: Console, limits: Limits, plan: list[PlannedProcess]) -> JobResult:
    with contextlib.closing(RemoteSite(ssh_client({}), sys.executable, "/")) as site:
        site.connect([Machine(ADDRESS, 1)], JobEntry(JOB))
        return Supervisor(site, console, folder, limits).run(plan)


class Run:
    """A finished job: its result and what was shown; once a text is, signals are sent to this process."""

    def __init__(
        self,
        folder: Path,
        servers: list[str],
        trainers: list[str],
        limits: Limits = SHORT,
        signals: Sequence[int] = (),
        after: str = "waits",
        err: io.StringIO | None = None,
    ) -> None:
        self.out, self.err = io.StringIO(), err or io.StringIO()
        count = len(servers) + len(trainers) if after == "waits" else 1
        thread = threading.Thread(target=self._send, args=(signals, after, count), daemon=True)
        thread.start()
        plan = [
            planned_process(role, number, ADDRESS, code, {JOB_VARIABLE: JOB})
            for role, codes in ((SERVER, servers), (TRAINER, trainers))
            for number, code in enumerate(codes)
        ]
        self.result = supervise(folder, Console(self.out, self.err), limits, plan)
        self.statuses = {process.name: process.status for process in self.result.processes}
        assert processes_left() == []
        assert not any(is_running(process.pid) for process in self.result.processes if process.pid)

    def _send(self, numbers: Sequence[int], text: str, count: int) -> None:
        """Send the second signal at the launcher's words about the first."""
        for number in numbers:
            while (self.out.getvalue() + self.err.getvalue()).count(text) < count:
                threading.Event().wait(0.02)
            os.kill(os.getpid(), number)
            text, count = "a second signal ends them", 1


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    return functools.partial(Run, tmp_path)


def kill_self(number: int) -> str:
    return f"import os; print('dying', flush=True); os.kill(os.getpid(), {number})"


RAISES = "import traceback\ntry: raise ValueError('it')\nexcept ValueError: traceback.print_exc()"


@pytest.mark.parametrize(
    ("second", "status", "words"),
    [
        # The kernel still takes the killed one's memory down.
        ("import os; MARK; os.kill(os.getpid(), 9)", 137, ("trainer 1 ", "SIGKILL")),
        # One that aborts itself right after another has failed is not the cause.
        ("import os; MARK; os.kill(os.getpid(), 6)", 1, ("trainer 0 ", "ended with status 1")),
        # The one that raised first is, even if it ends later: it closes its connections before.
        (f"{RAISES}\nMARK; raise SystemExit(4)", 4, ("trainer 1 ", "ended with status 4")),
    ],
)
def test_the_cause_of_a_failure(run, tmp_path, second: str, status: int, words: tuple[str, str]) -> None:
    """A trainer may fail of a lost connection before the process ends that has closed it."""
    ready = str(tmp_path / "ready")
    failing = f"import os\nwhile not os.path.exists({ready!r}): pass\nraise OSError"
    mark = f"import time; open({ready!r}, 'w'); time.sleep(0.2)"
    job = run([FOREVER], [failing, second.replace("MARK", mark)])
    assert job.result.status == status, job.err.getvalue()
    assert all(word in job.result.reason for word in words)
    assert status != 4 or "ValueError: it" in job.err.getvalue()


@pytest.mark.parametrize(
    ("role", "code", "status", "words"),
    [
        ("trainer", "for i in range(100): print('line', i)\n1 / 0", 1, "ended with status 1"),
        ("server", "raise SystemExit(143)", 1, "ended with status 143"),  # not all have committed
        ("trainer", kill_self(15), 1, "was killed by signal 15 (SIGTERM)"),
        ("server", kill_self(9), 137, "was killed by signal 9 (SIGKILL) [kill -9, or the kernel was out of"),
    ],
)
def test_first_failure_ends_all(run, role: str, code: str, status: int, words: str) -> None:
    scripts = {"server": [FOREVER, STUBBORN], "trainer": [STUBBORN, FOREVER]}
    scripts[role].append(code)
    job = run(scripts["server"], scripts["trainer"])
    (culprit,) = [process for process in job.result.processes if process.name == f"{role} 2"]
    assert job.result.status == status
    assert job.result.reason.startswith(f"{role} 2 (pid {culprit.pid}) on 127.0.0.1 {words}")
    assert all(code in (-9, -15) for name, code in job.statuses.items() if name != culprit.name)
    text = job.err.getvalue()
    assert f"[launcher] the end of its log, {culprit.log}:" in text
    if "1 / 0" in code:
        assert "[launcher]     line 99\n" in text and "line 50" not in text
        assert "[launcher]     ZeroDivisionError: division by zero\n" in text


def test_program_that_does_not_exist(tmp_path: Path) -> None:
    plan = [PlannedProcess(TRAINER, 0, ADDRESS, ("/no/such/program",), {"OMP_NUM_THREADS": "1"})]
    result = supervise(tmp_path, Console(io.StringIO(), io.StringIO()), SHORT, plan)
    assert result.status == 127 and result.reason.startswith(
        "trainer 0 on 127.0.0.1 could not be started: [Errno 2] No such file"
    )


def test_a_killed_node_program(run, tmp_path: Path) -> None:
    note = tmp_path / "orphan"  # what it prints is lost with the node program
    code = "import os, pathlib, signal, subprocess, sys\n" + (
        f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE)\n"
        f"child.stdout.readline(); pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "os.kill(os.getppid(), 9); signal.pause()"
    )
    job = run([FOREVER], [code])
    assert job.result.status == 255
    assert job.result.reason.endswith("was lost: its node program was killed")
    assert not is_running(int(note.read_text()))


LATER = "import time; time.sleep(1)"
FAILS_LATER = f"{LATER}; raise SystemExit(4)"
EARLY = "ended with status 0, and trainer 0 still ran 0.5 s later"


@pytest.mark.parametrize(
    ("servers", "trainers", "limits", "status", "reason"),
    [
        pytest.param([STUBBORN, DONE], [DONE, DONE], SHORT, 0, None, id="a server stays, and is ended"),
        pytest.param([FAILS_LATER], [DONE], LONG, 4, "ended with status 4", id="a server fails last"),
        pytest.param([DONE], [FOREVER, DONE], SHORT, 1, EARLY, id="a server leaves early"),
        pytest.param([DONE], [LATER], LONG, 0, None, id="servers leave when the first trainer says so"),
        pytest.param([], [DONE, LATER], SHORT, 0, None, id="a trainer ends long before another"),
    ],
)
def test_who_may_end_when(run, servers, trainers, limits, status, reason) -> None:
    job = run(servers, trainers, limits)
    assert job.result.status == status
    assert (job.result.reason or "").endswith(reason or "") and (reason is None) == (status == 0)
    warning = "[launcher] warning: server 0 still ran 0.5 s after the last trainer; ended\n"
    assert status or job.err.getvalue() == (warning if STUBBORN in servers else "")


SAVES = """
import signal, sys
def save(number, frame):
    print("saved at", signal.Signals(number).name, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("waits", flush=True)
while True: signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "code", "status", "end"),
    [
        # No status says 143, since nothing was committed.
        (signal.SIGINT, FOREVER, 130, "trainer 0 was killed by signal 2 (SIGINT) without a commit"),
        (signal.SIGHUP, FOREVER, 129, "trainer 0 was killed by signal 15 (SIGTERM) without a commit"),
        (signal.SIGTERM, STUBBORN, 1, "trainer 0 had not committed by then and had to be killed"),
        (signal.SIGTERM, SAVES, 143, "all trainers have committed and left"),
        (signal.SIGHUP, SAVES, 143, "all trainers have committed and left"),  # they may know SIGTERM alone
        # The job is done, and 143 would have it started again.
        (signal.SIGTERM, SAVES.replace("143", "0"), 0, "all trainers had ended well"),
    ],
)
@pytest.mark.usefixtures("in_foreground")
def test_signals_end_the_job(run, number: int, code: str, status: int, end: str) -> None:
    """They go to the trainers; the servers, which save nothing, are killed after these have ended."""
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    saves = "saved" in code
    job = run([code], [code], LONG if saves else SHORT, [number])
    name, limit = signal.Signals(number).name, 20 if saves else 0.5
    assert (job.result.status, job.result.is_interrupted) == (status, True)
    assert job.result.reason == f"stopped by {name}; {end}"
    words = f"[launcher] stopped by {name}: trainers have {limit} s to commit; a second signal"
    assert words in job.err.getvalue()
    lines = [line for line in job.out.getvalue().splitlines() if "saved" in line]
    assert lines == ["[trainer 0] saved at SIGTERM"] * saves
    assert job.result.processes[0].status == -signal.SIGKILL
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (STUBBORN, "; trainer 0 had not committed by then and had to be killed"),
        (f"{LATER}; raise SystemExit(7)", "; trainer 0 ended with status 7 without a commit"),
    ],
)
def test_143_needs_the_commit_of_all(run, other: str, words: str) -> None:
    job = run([], [other, "raise SystemExit(143)"], Limits(stop_seconds=2, failure_seconds=0.2))
    assert job.result.status == 1
    assert job.result.reason.startswith("trainer 1 (pid ") and job.result.reason.endswith(words)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_trainer_that_leaves_with_143_lets_the_others_finish(run, is_told: bool) -> None:
    """Also when the launcher is told to stop at the same time: a first signal does not end the wait."""
    later = "import sys, time; time.sleep(1); print('written', flush=True); sys.exit(143)"
    limits, signals = Limits(failure_seconds=0.2, stop_seconds=20), [signal.SIGTERM] * is_told
    job = run([STUBBORN], [later, "raise SystemExit(143)"], limits, signals, "start me again")
    assert job.statuses == {"server 0": -9, "trainer 0": 143, "trainer 1": 143}
    assert "[trainer 0] written\n" in job.out.getvalue()
    assert (job.result.status, job.result.is_interrupted) == (143, is_told)
    assert job.result.reason.startswith("trainer 1 (pid ")
    assert "the end of its log" not in job.err.getvalue()


class Impatient(io.StringIO):
    def write(self, text: str) -> int:
        if "a second signal ends them" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize(("num_signals", "err"), [(2, io.StringIO), (1, Impatient)])
@pytest.mark.usefixtures("in_foreground")
def test_second_signal_cuts_the_wait_short(run, num_signals: int, err: type[io.StringIO]) -> None:
    """Who presses Ctrl-C twice does not wait for trainers that save; a limit of an hour is cut short."""
    limits = Limits(stop_seconds=3600, failure_seconds=0.2)
    job = run([], [STUBBORN], limits, [signal.SIGINT] * num_signals, err=err())
    assert (job.result.status, job.statuses, job.result.is_interrupted) == (130, {"trainer 0": -9}, True)
    words = "stopped by SIGINT; trainer 0 had not committed when a second signal came and had to be killed"
    assert job.result.reason == words


def test_logs_that_cannot_be_written_do_not_end_the_job(tmp_path: Path) -> None:
    log_dir = tmp_path / "removed"
    job = Run(log_dir, [DONE], ["for i in range(5000): print('line', i)", DONE])
    assert (job.result.status, job.result.reason) == (0, None), job.err.getvalue()
    lines = [line for line in job.out.getvalue().splitlines() if line.startswith("[trainer 0]")]
    assert lines == [f"[trainer 0] line {i}" for i in range(5000)]
    (warning,) = job.err.getvalue().splitlines()  # of the process that is the first by chance
    words = rf"warning: the log {log_dir}/(server-0|trainer-[01])\.log cannot be written: No such file"
    assert re.search(words, warning)


def test_clean_up_is_done_whatever_goes_wrong_before(tmp_path: Path, monkeypatch) -> None:
    name = f"dglkge-{JOB}-0~{uuid.uuid4().hex}"
    memory = (
        f"import mmap; file = open('/dev/shm/{name}', 'w+b'); file.truncate(4096)\n"
        f"memory = mmap.mmap(file.fileno(), 4096)\n{FOREVER}"
    )
    fails = "import time; time.sleep(2); raise SystemExit(3)"
    console = Console(io.StringIO(), io.StringIO())
    monkeypatch.setattr(console, "message", Mock(side_effect=MemoryError))
    plan = [planned_process(TRAINER, number, ADDRESS, code) for number, code in enumerate((memory, fails))]
    with pytest.raises(MemoryError):
        supervise(tmp_path, console, SHORT, plan)
    assert processes_left() == []
    assert not (Path("/dev/shm") / name).exists()


def test_progress_of_rank_0_only(tmp_path: Path) -> None:
    bar = "import time\nfor i in range(6): print(f'\\r{i}/5', end='', flush=True); time.sleep(0.05)\nprint()"
    out = io.StringIO()
    plan = [planned_process(TRAINER, i, ADDRESS, bar) for i in range(2)]
    assert supervise(tmp_path, Console(out, io.StringIO(), is_terminal=True), SHORT, plan).status == 0
    shown = out.getvalue()
    assert "[trainer 0] 3/5" in shown and "[trainer 1] 3/5" not in shown
    assert shown.count("[trainer 0] 5/5\n") == shown.count("[trainer 1] 5/5\n") == 1
    assert (tmp_path / "trainer-0.log").read_text() == (tmp_path / "trainer-1.log").read_text() == "5/5\n"
