"""The node program as its launcher sees it: one stream, and nothing left when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from dglkge.distributed.jobs import JobEntry, Registration, live_jobs
from dglkge.distributed.lease import new_nonce
from dglkge.errors import NotReadyError
from dglkge.launch.machine import clean_up, has_variable, wait_for_ending_jobs
from dglkge.launch.remote.protocol import HEARTBEAT, MARK, Call, Peer, ProtocolError, Reply, encode
from tests.launch.conftest import GONE, STARTED, TIMEOUT_SECONDS, RunningProgram

WAIT_FOR_EVER = "import signal, sys; print('ready', flush=True); signal.pause()"
STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)];" + WAIT_FOR_EVER


def test_messages() -> None:
    messages = [
        Call(HEARTBEAT),
        Call("send", {"names": ["a\nb"]}, b"\0" * 100_000, 3),
        Reply(error="é", id=3),
        Call("process", {"process": 1}, b"\xff\n"),
    ]
    stream, received = b"Welcome\n" + MARK + b"".join(map(encode, messages)), []

    async def receive(sent: bytes, is_greeted: bool) -> None:
        reader = asyncio.StreamReader()
        peer = Peer((reader, None))
        reader.feed_data(sent)
        reader.feed_eof()
        if is_greeted:
            await peer._skip_to_mark()
        with contextlib.suppress(EOFError):
            while True:
                received.append(await peer.receive())

    asyncio.run(receive(stream, True))
    assert received == messages
    for stream in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\2\0\0\0\0{}", b'\0\0\0\3\0\0\0\0"x"'):
        with pytest.raises(ProtocolError):
            asyncio.run(receive(stream, False))


def test_statuses(program: RunningProgram) -> None:
    ends = {"sys.exit(255)": 255, "os.kill(os.getpid(), 9)": -9, "pass": 0}
    code = "import os; print(os.environ['SHARED'], flush=True); exec(os.environ['END'])"
    program.start(code, *({"END": end} for end in ends), shared={"SHARED": "s"})
    changes = program.until(GONE, count=3)
    assert program.outputs == dict.fromkeys((1, 2, 3), b"s\n")
    for number, status in enumerate(ends.values(), start=1):
        started, ended, gone = (change for change in changes if change.process == number)
        assert not psutil.pid_exists(started.pid)
        assert (ended.status, gone.error) == (status, None)
    program.processes(count=0)
    program.start("print('next')")
    program.until(GONE)
    assert program.outputs[1] == b"next\n"
    program.lose()
    assert program.program.returncode == 0


def test_signals_reach_the_process_alone(program: RunningProgram) -> None:
    """A polite signal is for the process, which decides about its children; SIGKILL is for all of its own."""
    code = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {WAIT_FOR_EVER!r}], start_new_session=True)\n"
        "while True: signal.pause()\n"
    )
    program.start(code, {}, {})
    process, other = program.wait_ready(1, 2)
    (child,) = process.children()
    program.send("signal", process=1, number=signal.SIGTERM)
    assert program.next().data.startswith(b"term")
    assert child.is_running()
    program.send("signal", process=1, number=signal.SIGKILL)
    ended, _ = program.until(GONE)
    assert (ended.process, ended.status) == (1, -9)
    assert not child.is_running() and other.is_running() and len(other.children()) == 1


def test_orphans_are_ended(program: RunningProgram) -> None:
    """Even in a session of its own and deaf to SIGTERM; what other processes have started is not touched."""
    code = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {STUBBORN!r}]\n"
        "child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True)\n"
    )
    program.start(code + WAIT_FOR_EVER)
    (other,) = program.wait_ready()
    program.start(code, number=2)
    _, ended, _ = program.until(GONE)
    assert (ended.process, ended.status) == (2, 0)
    assert not psutil.pid_exists(int(program.outputs[2]))
    assert len(other.children()) == 1


@pytest.mark.parametrize("lost", ["launcher", "node program"])
def test_processes_end_with_their_launcher_and_node_program(program: RunningProgram, lost: str) -> None:
    slow = "lambda environment: 'SLOW' in environment and __import__('time').sleep(600)"
    program.start(STUBBORN, {}, {"SLOW": "1"}, prepare=slow)
    program.wait_ready()
    processes = program.processes(count=2)
    (program.lose if lost == "launcher" else program.program.kill)()
    assert psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)[1] == []


def test_stop_signals(program: RunningProgram) -> None:
    program.start(WAIT_FOR_EVER)
    (process,) = program.wait_ready()
    for number in (signal.SIGINT, signal.SIGTERM):
        assert process.is_running()
        program.program.send_signal(number)
        assert program.next() == Call("stop", {"number": number, "is_second": number == signal.SIGTERM})
    assert program.program.wait(TIMEOUT_SECONDS) == 1
    assert not process.is_running()


def test_what_a_lost_launcher_leaves(program: RunningProgram) -> None:
    job, other = new_nonce(), new_nonce()
    names = (f"dglkge-{job}-0~x", f"dglkge-{other}-0~x", job)
    paths = [Path(f"/dev/shm/{name}") for name in names]
    neighbour = Registration(JobEntry(other))
    try:
        program.register(job)
        program.start(WAIT_FOR_EVER)
        program.wait_ready()
        for path in paths:
            path.touch()
        program.lose()
        assert [path.exists() for path in paths] == [False, True, True]
        assert job not in {entry.job for entry in live_jobs()}
    finally:
        neighbour.release()
        for path in paths:
            path.unlink(missing_ok=True)


def test_what_a_killed_program_leaves(program: RunningProgram) -> None:
    job = new_nonce()
    segment = Path(f"/dev/shm/dglkge-{job}-0~x")
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"
    try:
        program.register(job)
        program.start(code, shared={"DGLKGE_JOB": job})
        (orphan,) = program.wait_ready()[0].children()
        segment.touch()
        assert segment.name not in clean_up("") and segment.exists()  # the job lives
        program.program.kill()
        program.program.wait(TIMEOUT_SECONDS)
        assert segment.name in clean_up(job)
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert not Path(f"/dev/shm/dglkge-job-{job}.json").exists()
    finally:
        segment.unlink(missing_ok=True)


def test_the_next_job_waits_for_one_that_ends(program: RunningProgram) -> None:
    job = new_nonce()
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
    words = f"after 0.2 s .its node program: pid {program.program.pid}.; end"
    with pytest.raises(NotReadyError, match=words):
        wait_for_ending_jobs(seconds=0.2)
    wait_for_ending_jobs()
    assert job not in {entry.job for entry in live_jobs()}


def test_silent_launcher(tmp_path: Path) -> None:
    """Over a stream that may go silent, silence is the launcher's end; until then both send heartbeats."""
    program = RunningProgram(tmp_path, heartbeat_timeout=1.0, grace=0.2)
    try:
        program.start(STUBBORN)
        process = psutil.Process(program.until(STARTED)[-1].pid)
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
    with psutil.Popen(["sleep", "60"], env={**os.environ, "X_Y": "ab"}) as child:
        matches = [has_variable(child, *pair) for pair in (("X_Y", "ab"), ("X_Y", "a"), ("Y", "ab"))]
        child.kill()
    assert matches == [True, False, False] and not has_variable(child, "X_Y", "ab")
