"""The node program as its launcher sees it: one stream, and nothing left when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dglkge.distributed.jobs import JobEntry, Registration, live_jobs
from dglkge.distributed.lease import new_nonce
from dglkge.errors import NotReadyError
from dglkge.launch.machine import clean_up, has_variable, wait_for_ending_jobs
from dglkge.launch.remote.protocol import HEARTBEAT, MARK, Call, Peer, ProtocolError, Reply, encode
from tests.launch.conftest import SERVE

TIMEOUT_SECONDS = 30
WAIT_FOR_EVER = "import signal, sys; print('ready', flush=True); signal.pause()"
STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)];" + WAIT_FOR_EVER
PROGRAM = """
import sys
from dglkge.launch import node_program
node_program.protocol.HEARTBEAT_SECONDS, node_program.GRACE_SECONDS = 0.1, float(sys.argv[2])
node_program.main(float(sys.argv[1]) or None)
"""


STARTED, ENDED, GONE = "pid", "status", "is_gone"
"""Changes of a process that name what has happened."""


class RunningProgram:
    """A node program, and a launcher that is this test."""

    def __init__(self, folder: Path, heartbeat_timeout: float = 0.0, grace: float = 3.0) -> None:
        self.folder = folder
        self.program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(heartbeat_timeout), str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._has_mark = False

    def send(self, task: str, **arguments: object) -> None:
        self.program.stdin.write(encode(Call(task, arguments)))

    def start(self, code: str, number: int = 1, **changes: object) -> None:
        self.start_all({number: {}}, **{"command": [sys.executable, "-c", SERVE + code], **changes})

    def start_all(self, processes: dict[int, dict[str, str]], **changes: object) -> None:
        fields = {"environment": {}, "folder": str(self.folder), "processes": list(processes.items())}
        self.send("start", **{**fields, **changes})

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            if not (more := os.read(self.program.stdout.fileno(), num_bytes - len(data))):
                raise EOFError
            data += more
        return data

    def next(self) -> Call | Reply:
        if not self._has_mark:
            assert self._read(len(MARK)) == MARK
            self._has_mark = True
        head, data = (self._read(size) for size in struct.unpack("!II", self._read(8)))
        kind, fields = json.loads(head)
        return {"Call": Call, "Reply": Reply}[kind](**fields, data=data)

    def until(self, change: str) -> tuple[list[SimpleNamespace], bytes]:
        """Read to a change of a process; return all changes but output, and the output."""
        messages, output = [], b""
        while not (messages and hasattr(messages[-1], change)):
            message = self.next()
            if message.data:
                output += message.data
            else:
                messages.append(SimpleNamespace(**{"task": message.task, "error": None, **message.arguments}))
        return messages, output

    def wait_ready(self) -> psutil.Process:
        """Wait for the word of WAIT_FOR_EVER; return its process."""
        pid = self.next().arguments[STARTED]
        output = b""
        while b"ready\n" not in output:
            output += self.next().data
        return psutil.Process(pid)

    def register(self, job: str) -> None:
        self.program.stdin.write(encode(Call("register", {"entry": JobEntry(job).to_dict()}, id=0)))
        assert self.next() == Reply(id=0)

    def lose(self) -> None:
        self.program.stdin.close()
        self.program.wait(TIMEOUT_SECONDS)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[RunningProgram]:
    """A node program that does not outlive the test."""
    running = RunningProgram(tmp_path)
    yield running
    with contextlib.suppress(OSError):
        running.program.stdin.close()
    running.program.wait(TIMEOUT_SECONDS)
    running.program.stdout.close()


def test_messages() -> None:
    """They survive any cut of the stream; a login shell's greeting before them does no harm."""
    messages = [
        Call(HEARTBEAT),
        Call("send", {"names": ["a\nb"]}, b"\0" * 100_000, 3),
        Reply(error="é", id=3),
        Call("process", {"process": 1, "status": -9, "ended_at": 1.5}),
        Call("process", {"process": 1}, b"\xff\n"),
    ]
    stream, received = b"Welcome\n" + MARK + b"".join(map(encode, messages)), []

    async def receive(sent: bytes, is_greeted: bool) -> None:
        reader = asyncio.StreamReader()
        peer = Peer(reader, None)

        async def send() -> None:
            for i in range(0, len(sent), 7):
                reader.feed_data(sent[i : i + 7])
                await asyncio.sleep(0)
            reader.feed_eof()

        sending = asyncio.ensure_future(send())
        if is_greeted:
            await peer._skip_to_mark()
        with contextlib.suppress(EOFError):
            while True:
                received.append(await peer.receive())
        await sending

    asyncio.run(receive(stream, True))
    assert received == messages
    for stream in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\2\0\0\0\0{}", b'\0\0\0\3\0\0\0\0"x"'):
        with pytest.raises(ProtocolError):
            asyncio.run(receive(stream, False))


def test_status(program: RunningProgram) -> None:
    """The status is that of the process, the signal's number negated; the program itself ends with 0."""
    ends = {"pass": 0, "raise SystemExit(255)": 255, "import os; os.kill(os.getpid(), 9)": -9}
    for number, (code, status) in enumerate(ends.items()):
        program.start(code, number)
        (started, ended, gone), _ = program.until(GONE)
        assert (ended.process, ended.status, gone.error) == (number, status, None)
        assert not psutil.pid_exists(started.pid)
    program.lose()
    assert program.program.returncode == 0


def test_process_gets_what_was_asked(program: RunningProgram, tmp_path: Path) -> None:
    """Arguments, environment and folder arrive as they are; both streams come out in one."""
    code = (
        "import os, sys\n"
        "print(sys.argv[1:], os.environ['ODD'], os.getcwd(), flush=True)\n"
        "print('err', file=sys.stderr)"
    )
    odd = ["it's", "$HOME `id`; exit", "", "a\nb", "\u00e9"]
    program.start("", command=[sys.executable, "-c", SERVE + code, *odd], environment={"ODD": "$x"})
    _, output = program.until(GONE)
    assert output.decode() == f"{odd} $x {tmp_path}\nerr\n"


def test_cannot_start(program: RunningProgram) -> None:
    """A program or folder that is missing is reported as an error, not as a status."""
    for request in ({"command": ["/no/such/program"]}, {"folder": "/no/such/folder"}):
        program.start("", **request)
        ((gone,), _) = program.until(GONE)
        assert "No such file or directory: '/no/such/" in gone.error


def test_signals_reach_the_process_alone(program: RunningProgram) -> None:
    """A polite signal is for the process, which decides about its children; SIGKILL is for all."""
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {WAIT_FOR_EVER!r}], start_new_session=True)\n"
        "while True: signal.pause()\n"
    )
    program.start(code)
    process = program.wait_ready()
    (child,) = process.children()
    program.send("signal", process=1, number=signal.SIGTERM)
    assert program.next().data.startswith(b"term")
    assert child.is_running()
    program.send("signal", process=1, number=signal.SIGKILL)
    messages, _ = program.until(GONE)
    assert messages[0].status == -9
    assert not child.is_running()


def test_orphans_are_ended(program: RunningProgram) -> None:
    """What a process leaves behind, even in a session of its own and deaf to SIGTERM, ends after it.

    What other processes have started is not touched.
    """
    code = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {STUBBORN!r}]\n"
        "child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True)\n"
    )
    program.start(code + "import signal; print('ready', flush=True); signal.pause()", 1)
    other = program.wait_ready()
    program.start(code, 2)
    messages, output = program.until(GONE)
    assert (messages[1].process, messages[1].status) == (2, 0)
    assert not psutil.pid_exists(int(output))
    assert len(other.children()) == 1


def test_launcher_gone(program: RunningProgram) -> None:
    """At the end of the stream the processes end, deaf to SIGTERM or not."""
    processes = []
    for number, code in enumerate((WAIT_FOR_EVER, STUBBORN)):
        program.start(code, number)
        processes.append(program.wait_ready())
    program.lose()
    assert not any(process.is_running() for process in processes)


def test_processes_die_with_their_program(program: RunningProgram) -> None:
    program.start(STUBBORN)
    process = program.wait_ready()
    program.program.kill()
    process.wait(TIMEOUT_SECONDS)


def test_stop_signals(program: RunningProgram) -> None:
    """The launcher is asked to stop the job; a second signal ends the processes."""
    program.start(WAIT_FOR_EVER)
    process = program.wait_ready()
    program.program.send_signal(signal.SIGINT)
    assert program.next() == Call("stop", {"number": signal.SIGINT})
    assert process.is_running()
    program.program.send_signal(signal.SIGTERM)
    assert program.next() == Call("stop", {"number": signal.SIGTERM})
    assert program.program.wait(TIMEOUT_SECONDS) == 1
    assert not process.is_running()


def test_what_a_lost_launcher_leaves(program: RunningProgram) -> None:
    """Shared memory of the job and its entry go; those of other jobs and programs stay."""
    job, other = new_nonce(), new_nonce()
    ended, foreign, unknown = (
        Path(f"/dev/shm/{name}") for name in (f"dglkge-{job}-0~x", f"dglkge-{other}-0~x", job)
    )
    neighbour = Registration(JobEntry(other))
    try:
        program.register(job)
        program.start(WAIT_FOR_EVER)
        program.wait_ready()
        for path in (ended, foreign, unknown):
            path.touch()
        program.lose()
        assert [path.exists() for path in (ended, foreign, unknown)] == [False, True, True]
        assert job not in {entry.job for entry in live_jobs()}
    finally:
        neighbour.release()
        for path in (ended, foreign, unknown):
            path.unlink(missing_ok=True)


def test_what_a_killed_program_leaves(program: RunningProgram) -> None:
    job = new_nonce()
    segment = Path(f"/dev/shm/dglkge-{job}-0~x")
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"
    try:
        program.register(job)
        program.start(code, environment={"DGLKGE_JOB": job})
        (orphan,) = program.wait_ready().children()
        segment.touch()
        assert segment.name not in clean_up("") and segment.exists()  # the job lives
        program.program.kill()
        program.program.wait(TIMEOUT_SECONDS)
        assert segment.name in clean_up(job)
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert not Path(f"/dev/shm/dglkge-job-{job}.json").exists()
    finally:
        segment.unlink(missing_ok=True)


def test_the_next_job_waits_for_one_that_ends(tmp_path: Path) -> None:
    program, job = RunningProgram(tmp_path, grace=3.0), new_nonce()
    program.register(job)
    program.start(STUBBORN)
    program.wait_ready()
    wait_for_ending_jobs(seconds=0.0)
    with pytest.raises(NotReadyError, match="have not ended on this machine after 0 s"):
        wait_for_ending_jobs(job, seconds=0.0)
    program.program.stdin.close()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any(entry.job == job and entry.is_ending for entry in live_jobs()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(
        NotReadyError, match=f"after 0.2 s .its node program: pid {program.program.pid}.; end"
    ):
        wait_for_ending_jobs(seconds=0.2)
    wait_for_ending_jobs()
    assert job not in {entry.job for entry in live_jobs()}
    program.program.wait(TIMEOUT_SECONDS)
    program.program.stdout.close()


def test_silent_launcher(tmp_path: Path) -> None:
    """Over a stream that may go silent, silence is the launcher's end; until then both send heartbeats."""
    program = RunningProgram(tmp_path, heartbeat_timeout=1.0, grace=0.2)
    try:
        program.start(STUBBORN)
        messages, _ = program.until(STARTED)
        process = psutil.Process(messages[-1].pid)
        for _ in range(15):  # longer than the silence that it would bear
            while program.next() != Call(HEARTBEAT):
                pass
            program.send(HEARTBEAT)
        assert process.is_running()
        program.program.wait(TIMEOUT_SECONDS)  # stdin stays open
        assert not process.is_running()
    finally:
        program.program.kill()
        program.program.communicate()


def test_variables_are_compared_by_their_whole_name_and_value() -> None:
    # A process just started often shows no environment yet, one started without any never does.
    child = psutil.Popen(["sleep", "60"], env={**os.environ, "X_Y": "ab"})
    matches = [has_variable(child, *pair) for pair in (("X_Y", "ab"), ("X_Y", "a"), ("Y", "ab"))]
    child.kill()
    child.wait()
    assert matches == [True, False, False] and not has_variable(child, "X_Y", "ab")
