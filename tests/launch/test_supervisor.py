"""Jobs of small scripts under the supervisor: how each ends, what is said, what is left."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import psutil
import pytest

from dglkge.distributed.ip_config import Machine
from dglkge.distributed.jobs import JobEntry
from dglkge.distributed.world import JOB_VARIABLE
from dglkge.launch.console import Console
from dglkge.launch.job_result import JobResult
from dglkge.launch.process_plan import SERVER, TRAINER, Limits, PlannedProcess
from dglkge.launch.remote.remote_site import RemoteSite
from dglkge.launch.ssh import SshSettings
from dglkge.launch.supervisor import Supervisor

JOB = uuid.uuid4().hex[:16]
SHORT = Limits(failure_seconds=0.5, stop_seconds=0.5, exit_seconds=0.5)
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
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def supervise(folder: Path, console: Console, limits: Limits, plan: list[PlannedProcess]) -> JobResult:
    """Run a job on this machine to its end."""
    with contextlib.closing(RemoteSite(SshSettings(), sys.executable, str(folder))) as site:
        site.connect([Machine("127.0.0.1", 1)], JobEntry(JOB))
        return Supervisor(site, console, folder, limits).run(plan)


class Run:
    """A finished job: its result and what was shown."""

    def __init__(self, folder: Path, servers: list[str], trainers: list[str], limits: Limits) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        scripts = [(SERVER, code) for code in servers] + [(TRAINER, code) for code in trainers]
        plan = [
            PlannedProcess(
                role,
                number - (len(servers) if role == TRAINER else 0),
                "127.0.0.1",
                (sys.executable, "-u", "-c", code),
                {"DGLKGE_TEST": str(number), JOB_VARIABLE: JOB},
            )  # fmt: skip
            for number, (role, code) in enumerate(scripts)
        ]
        self.result = supervise(folder, Console.of(self.out, self.err), limits, plan)
        self.statuses = {process.name: process.status for process in self.result.processes}


@pytest.fixture
def run(tmp_path: Path):
    """Run a job to its end; hold that no process of it is left."""

    def go(servers: list[str], trainers: list[str], limits: Limits = SHORT) -> Run:
        finished = Run(tmp_path, servers, trainers, limits)
        assert processes_left() == []
        assert not any(is_running(process.pid) for process in finished.result.processes if process.pid)
        return finished

    return go


def test_success(run, tmp_path: Path) -> None:
    """All end with 0: status 0, nothing said, every line in its log and, prefixed, in the stream."""
    job = run([DONE], ["print('one')\nprint('two')", "import sys; print('three', file=sys.stderr)"])
    assert (job.result.status, job.result.reason) == (0, None)
    assert job.statuses == {"server 0": 0, "trainer 0": 0, "trainer 1": 0}
    assert sorted(job.out.getvalue().splitlines()) == [
        "[server 0] done",
        "[trainer 0] one",
        "[trainer 0] two",
        "[trainer 1] three",
    ]
    assert job.err.getvalue() == ""
    assert (tmp_path / "trainer-0.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "trainer-1.log").read_text() == "three\n"
    assert job.result.processes[1].log == str(tmp_path / "trainer-0.log")


def kill_self(number: int) -> str:
    """A script that a signal ends."""
    return f"import os; print('dying', flush=True); os.kill(os.getpid(), {number})"


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(9, 137, ("trainer 1 ", "SIGKILL")), (6, 1, ("trainer 0 ", "ended with status 1"))],
)
def test_a_killed_process_is_the_cause_of_a_failure_that_was_seen_before(
    run, tmp_path: Path, number: int, status: int, words: tuple[str, str]
) -> None:
    """A trainer may fail of its lost connection while the kernel still takes the killed one's memory down.

    One that aborts itself right after another has failed is not the cause.
    """
    ready = tmp_path / "ready"
    failing = f"import os\nwhile not os.path.exists({str(ready)!r}): pass\nraise SystemExit(1)"
    killed = f"import os, time; open({str(ready)!r}, 'w').close(); time.sleep(0.2)"
    job = run([FOREVER], [failing, f"{killed}; os.kill(os.getpid(), {number})"])
    assert job.result.status == status
    assert job.result.reason is not None and all(word in job.result.reason for word in words)


@pytest.mark.parametrize(("silent", "named"), [(False, "trainer 1 "), (True, "trainer 0 ")])
def test_who_raised_first_is_the_cause_even_if_it_ends_later(
    run, tmp_path: Path, silent: bool, named: str
) -> None:
    """Closing its connections, a trainer that raised may end after those that failed of that.

    One that ended without a traceback cannot be told from them: the first one that ended is named.
    """
    ready = tmp_path / "ready"
    shown = "pass" if silent else "traceback.print_exc()"
    later = (
        f"import traceback, time\ntry: raise ValueError('it')\nexcept ValueError: {shown}\n"
        f"open({str(ready)!r}, 'w'); time.sleep(0.2); raise SystemExit(4)"
    )
    lost = f"import os\nwhile not os.path.exists({str(ready)!r}): pass\nraise OSError"
    job = run([FOREVER], [lost, later])
    assert job.result.reason is not None and job.result.reason.startswith(named), job.err.getvalue()
    assert job.result.status == (1 if silent else 4)
    assert silent or "ValueError: it" in job.err.getvalue()


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise SystemExit(3)", 3, "ended with status 3"),
        ("raise SystemExit(143)", 1, "ended with status 143"),  # not all have committed
        (kill_self(15), 1, "was killed by signal 15 (SIGTERM)"),
        (kill_self(9), 137, "was killed by signal 9 (SIGKILL) [kill -9, or the kernel was out of memory"),
        (kill_self(11), 139, "was killed by signal 11 (SIGSEGV)"),
    ],
)
@pytest.mark.parametrize("role", ["server", "trainer"])
def test_first_failure_ends_all(run, code: str, status: int, words: str, role: str) -> None:
    """Whoever fails first is named with its status, and all others, deaf to SIGTERM or not, are ended."""
    servers, trainers = [FOREVER, STUBBORN], [STUBBORN, FOREVER]
    (servers if role == "server" else trainers).append(code)
    number = len(servers if role == "server" else trainers) - 1
    job = run(servers, trainers)
    culprit = next(process for process in job.result.processes if process.name == f"{role} {number}")
    assert job.result.status == status
    assert job.result.reason.startswith(f"{role} {number} (pid {culprit.pid}) on 127.0.0.1 {words}")
    assert all(code in (-9, -15) for name, code in job.statuses.items() if name != culprit.name)


def test_failure_shows_the_end_of_the_log(run, tmp_path: Path) -> None:
    """The last lines, the traceback among them, and where the log lies."""
    job = run([FOREVER], ["for i in range(100): print('line', i)\n1 / 0"])
    said = job.err.getvalue()
    assert f"[launcher] the end of its log, {tmp_path / 'trainer-0.log'}:" in said
    assert "[launcher]     line 99\n" in said
    assert "line 50" not in said
    assert "[launcher]     ZeroDivisionError: division by zero\n" in said


def test_program_that_does_not_exist(tmp_path: Path) -> None:
    """What cannot be started is a failure with the reason."""
    out, err = io.StringIO(), io.StringIO()
    plan = [PlannedProcess(TRAINER, 0, "127.0.0.1", ("/no/such/program",), {})]
    result = supervise(tmp_path, Console.of(out, err), SHORT, plan)
    assert result.status == 127
    assert result.reason.startswith("trainer 0 on 127.0.0.1 could not be started: [Errno 2] No such file")


def test_a_killed_node_program(run, tmp_path: Path) -> None:
    """Its processes have failed, and what they had started is ended too."""
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


def test_lingering_server_is_ended_with_a_warning(run) -> None:
    """Trainers done, a server stays: it is ended, and the job has not failed."""
    job = run([STUBBORN, DONE], [DONE, DONE])
    assert (job.result.status, job.result.reason) == (0, None)
    assert job.statuses == {"server 0": -9, "server 1": 0, "trainer 0": 0, "trainer 1": 0}
    assert (
        "[launcher] warning: server 0 still ran 0.5 s after the last trainer; ended\n" == job.err.getvalue()
    )


def test_server_that_fails_last(run) -> None:
    """A server that fails after the trainers still fails the job."""
    job = run(["import time; time.sleep(1); raise SystemExit(4)"], [DONE], Limits(exit_seconds=20))
    assert job.result.status == 4


def test_server_that_leaves_early(run) -> None:
    """A server that ends with 0 while a trainer goes on for longer than it may is a failure."""
    job = run([DONE], [FOREVER, DONE])
    assert job.result.status == 1
    assert "server 0 (pid" in job.result.reason
    assert job.result.reason.endswith("ended with status 0, and trainer 0 still ran 0.5 s later")


def test_trainers_may_end_after_the_servers(run) -> None:
    """Servers leave when the first trainer says so; the trainers end a little later."""
    assert run([DONE], ["import time; time.sleep(1)"], Limits(exit_seconds=20)).result.status == 0


def test_trainer_may_finish_long_before_another(run) -> None:
    """Ending with 0 early is no failure and sets no limit for the others."""
    job = run([], [DONE, "import time; time.sleep(1.5)"])
    assert job.result.status == 0


def send_when(text: str, stream: io.StringIO, count: int, *numbers: int) -> threading.Thread:
    """Send signals to this process once a text has been seen often enough."""

    def watch() -> None:
        seen = threading.Event()
        while stream.getvalue().count(text) < count and not seen.wait(0.02):
            pass
        for number in numbers:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("code", [FOREVER, STUBBORN])
@pytest.mark.usefixtures("in_foreground")
def test_signals_end_the_job(tmp_path: Path, number: int, code: str) -> None:
    """Ctrl-C, SIGTERM and SIGHUP end everything; no status says 143, since nothing was committed."""
    out = io.StringIO()
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    command = (sys.executable, "-u", "-c", code)
    plan = [PlannedProcess(role, 0, "127.0.0.1", command, {}) for role in (SERVER, TRAINER)]
    err = io.StringIO()
    thread = send_when("waits", out, 2, number)
    result = supervise(tmp_path, Console.of(out, err), SHORT, plan)
    thread.join()
    name = signal.Signals(number).name
    if code is STUBBORN:
        end = "trainer 0 had not committed by then and had to be killed"
    else:  # a script without a handler for it
        death = "2 (SIGINT)" if number == signal.SIGINT else "15 (SIGTERM)"
        end = f"trainer 0 was killed by signal {death} without a commit"
    status = 1 if number == signal.SIGTERM else 128 + number
    assert (result.status, result.reason) == (status, f"stopped by {name}; {end}")
    assert f"[launcher] stopped by {name}: trainers have 0.5 s to commit; a second signal" in err.getvalue()
    assert processes_left() == []
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


SAVES = """
import signal, sys
def save(number, frame):
    print("saved at", signal.Signals(number).name, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("waits", flush=True)
while True: signal.pause()
"""


def test_trainers_may_save_while_servers_still_serve(tmp_path: Path) -> None:
    """SIGTERM goes to the trainers; the servers get theirs only after these have ended."""
    out, err = io.StringIO(), io.StringIO()
    command = (sys.executable, "-u", "-c", SAVES)
    plan = [PlannedProcess(role, 0, "127.0.0.1", command, {}) for role in (SERVER, TRAINER)]
    thread = send_when("waits", out, 2, signal.SIGTERM)
    limits = Limits(stop_seconds=20)
    result = supervise(tmp_path, Console.of(out, err), limits, plan)
    thread.join()
    assert (result.is_interrupted, result.reason) == (
        True,
        "stopped by SIGTERM; all trainers have committed and left",
    )
    lines = [line for line in out.getvalue().splitlines() if "saved" in line]
    assert lines == ["[trainer 0] saved at SIGTERM", "[server 0] saved at SIGTERM"]
    assert [process.status for process in result.processes] == [143, 143]
    assert result.status == 143


@pytest.mark.usefixtures("in_foreground")
def test_a_closed_terminal_asks_for_a_commit(tmp_path: Path) -> None:
    """SIGHUP to the launcher is SIGTERM to the trainers, which may know that one alone."""
    out, err = io.StringIO(), io.StringIO()
    plan = [PlannedProcess(TRAINER, 0, "127.0.0.1", (sys.executable, "-u", "-c", SAVES), {})]
    thread = send_when("waits", out, 1, signal.SIGHUP)
    limits = Limits(stop_seconds=20)
    result = supervise(tmp_path, Console.of(out, err), limits, plan)
    thread.join()
    words = "stopped by SIGHUP; all trainers have committed and left"
    assert (result.status, result.reason, result.is_interrupted) == (143, words, True)
    assert "[trainer 0] saved at SIGTERM" in out.getvalue().splitlines()


def test_trainers_that_finish_when_they_are_asked_to_stop(tmp_path: Path) -> None:
    """All had ended with 0: the job is done, and 143 would have it started again."""
    ends = SAVES.replace("sys.exit(143)", "sys.exit(0)")
    out, err = io.StringIO(), io.StringIO()
    plan = [PlannedProcess(TRAINER, 0, "127.0.0.1", (sys.executable, "-u", "-c", ends), {})]
    thread = send_when("waits", out, 1, signal.SIGTERM)
    result = supervise(tmp_path, Console.of(out, err), SHORT, plan)
    thread.join()
    assert (result.status, result.reason) == (0, "stopped by SIGTERM; all trainers had ended well")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (STUBBORN, "; trainer 0 had not committed by then and had to be killed"),
        (
            "import time; time.sleep(0.3); raise SystemExit(7)",
            "; trainer 0 ended with status 7 without a commit",
        ),
    ],
)
def test_143_needs_the_commit_of_all(run, other: str, words: str) -> None:
    """One has left with 143; another does not, or dies meanwhile."""
    job = run([], [other, "raise SystemExit(143)"], Limits(stop_seconds=2))
    assert job.result.status == 1
    assert job.result.reason.startswith("trainer 1 (pid ") and job.result.reason.endswith(words)


def test_a_trainer_that_leaves_with_143_lets_the_others_finish(run) -> None:
    """They have agreed to leave and each does it in its own time; the servers are ended after them."""
    later = "import sys, time; time.sleep(1); print('written', flush=True); sys.exit(143)"
    job = run([STUBBORN], [later, "raise SystemExit(143)"], Limits(failure_seconds=0.2, stop_seconds=20))
    assert job.statuses == {"server 0": -9, "trainer 0": 143, "trainer 1": 143}
    assert "[trainer 0] written\n" in job.out.getvalue()
    assert (job.result.status, job.result.is_interrupted) == (143, False)
    assert job.result.reason.startswith("trainer 1 (pid ")
    assert "the end of its log" not in job.err.getvalue()


def test_a_first_signal_does_not_cut_short_who_commits_already(tmp_path: Path) -> None:
    """Who evicts a job tells trainers and launcher at the same time; the second signal ends them."""
    later = "import sys, time; time.sleep(2); sys.exit(143)"
    out, err = io.StringIO(), io.StringIO()
    commands = [(sys.executable, "-u", "-c", code) for code in (later, "raise SystemExit(143)")]
    plan = [PlannedProcess(TRAINER, i, "127.0.0.1", command, {}) for i, command in enumerate(commands)]
    thread = send_when("start me again", err, 1, signal.SIGTERM)
    limits = Limits(failure_seconds=0.2, stop_seconds=20)
    result = supervise(tmp_path, Console.of(out, err), limits, plan)
    thread.join()
    assert [process.status for process in result.processes] == [143, 143]
    assert (result.status, result.is_interrupted) == (143, True)


@pytest.mark.usefixtures("in_foreground")
def test_a_second_signal_right_after_the_message_is_heard(tmp_path: Path) -> None:
    """The signal arrives while the message is written, before the wait for the trainers begins."""
    out = io.StringIO()

    class Impatient(io.StringIO):
        """Presses Ctrl-C again as soon as the message is there."""

        def write(self, text: str) -> int:
            if "a second signal ends them" in text:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    plan = [PlannedProcess(TRAINER, 0, "127.0.0.1", (sys.executable, "-u", "-c", STUBBORN), {})]
    first = send_when("waits", out, 1, signal.SIGINT)
    limits = Limits(stop_seconds=3600, failure_seconds=0.2)
    result = supervise(tmp_path, Console.of(out, Impatient()), limits, plan)
    first.join()
    assert result.status == 130 and result.is_interrupted


@pytest.mark.usefixtures("in_foreground")
def test_second_signal_cuts_the_wait_short(tmp_path: Path) -> None:
    """Who presses Ctrl-C twice does not wait for trainers that save; a limit of an hour is cut short."""
    out, err = io.StringIO(), io.StringIO()
    plan = [PlannedProcess(TRAINER, 0, "127.0.0.1", (sys.executable, "-u", "-c", STUBBORN), {})]
    first = send_when("waits", out, 1, signal.SIGINT)
    second = send_when("stopped by", err, 1, signal.SIGINT)
    limits = Limits(stop_seconds=3600, failure_seconds=0.2)
    result = supervise(tmp_path, Console.of(out, err), limits, plan)
    first.join()
    second.join()
    assert (result.status, result.processes[0].status) == (130, -9)


def segment_script(name: str, end: str) -> str:
    """A script that makes shared memory, keeps it mapped, and ends in some way."""
    return (
        "import mmap, os, signal\n"
        f"file = open('/dev/shm/{name}', 'w+b'); file.truncate(4096)\n"
        "memory = mmap.mmap(file.fileno(), 4096)\n"
        f"print('waits', flush=True)\n{end}"
    )


def test_shared_memory_of_a_failed_job_is_removed(run) -> None:
    """What the job made is removed after a failure; names of others stay, used by the job or not."""
    mark = uuid.uuid4().hex
    shared = Path("/dev/shm")
    mapped, unmapped, foreign = f"dglkge-{JOB}-0~{mark}-a", f"dglkge-{JOB}-0~{mark}-b", f"old~{mark}-kvdata-"
    (shared / foreign).touch()
    try:
        killed_at_once = segment_script(unmapped, "os.kill(os.getpid(), 9)")
        servers = [segment_script(name, "signal.pause()") for name in (mapped, foreign)]
        job = run(servers, [killed_at_once])
        assert job.result.status == 137
        assert {name for name in (mapped, unmapped, foreign) if (shared / name).exists()} == {foreign}
    finally:
        for name in (mapped, unmapped, foreign):
            (shared / name).unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")
def test_a_full_log_disk_does_not_end_the_job(run, tmp_path: Path) -> None:
    """Training goes on, every line is shown, one warning names file and reason, nothing is left behind."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this container may not mount a tmpfs: {mounted.stderr.strip()}")
    name = f"dglkge-{JOB}-0~{uuid.uuid4().hex}-kvdata-"
    try:
        code = segment_script(name, "for i in range(5000): print('a line of the log, number', i)")
        job = run([code.replace("5000", "1")], [code, DONE])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert (job.result.status, job.result.reason) == (0, None), job.err.getvalue()
    shown = [line for line in job.out.getvalue().splitlines() if line.startswith("[trainer 0] a line")]
    assert shown == [f"[trainer 0] a line of the log, number {i}" for i in range(5000)]
    assert job.err.getvalue().count("\n") == 1
    # Whose line meets the full disk first is chance: each of the three processes writes one.
    written = rf"warning: the log {tmp_path}/(server-0|trainer-[01])\.log cannot be written: "
    assert re.search(written + "No space left on device; the job goes on", job.err.getvalue())
    assert not (Path("/dev/shm") / name).exists()


def test_clean_up_is_done_whatever_goes_wrong_before(tmp_path: Path) -> None:
    """A console that raises at the end of a job keeps neither processes nor shared memory."""
    name = f"dglkge-{JOB}-0~{uuid.uuid4().hex}"
    code = segment_script(name, FOREVER)

    class Broken(Console):
        def message(self, text: str, level: str = "info") -> None:
            raise MemoryError

    console = Broken(io.StringIO(), io.StringIO(), is_terminal=False, is_coloured=False)
    plan = [
        PlannedProcess(TRAINER, number, "127.0.0.1", (sys.executable, "-u", "-c", text), {})
        for number, text in enumerate((code, "import time; time.sleep(2); raise SystemExit(3)"))
    ]
    with pytest.raises(MemoryError):
        supervise(tmp_path, console, SHORT, plan)
    assert processes_left() == []
    assert not (Path("/dev/shm") / name).exists()


def test_progress_of_rank_0_only(tmp_path: Path) -> None:
    """On a terminal the bar of rank 0 moves; the other trainers show whole lines."""
    bar = (
        "import sys, threading\n"
        "for i in range(5): sys.stderr.write(f'\\r{i}/5'); sys.stderr.flush(); threading.Event().wait(0.05)\n"
        "sys.stderr.write('\\r5/5\\n')"
    )
    out = io.StringIO()
    console = Console(out, io.StringIO(), is_terminal=True, is_coloured=False)
    plan = [PlannedProcess(TRAINER, i, "127.0.0.1", (sys.executable, "-c", bar), {}) for i in range(2)]
    assert supervise(tmp_path, console, SHORT, plan).status == 0
    shown = out.getvalue()
    assert "[trainer 0] 3/5" in shown
    assert "[trainer 1] 3/5" not in shown
    assert shown.count("[trainer 0] 5/5\n") == shown.count("[trainer 1] 5/5\n") == 1
    assert (tmp_path / "trainer-0.log").read_text() == (tmp_path / "trainer-1.log").read_text() == "5/5\n"
