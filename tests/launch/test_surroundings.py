"""The tests themselves, started as shells and CI systems start them, and beside another job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import surroundings

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = "tests/launch/test_launch_command.py::test_a_signal_leaves_nothing"
IN_PROCESS = "tests/partition_tools/test_run_build.py::test_interrupt_ends_the_child"


def run_tests(start: list[str], *tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*start, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    variables = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, errors="replace", timeout=240
    )


@pytest.fixture
def private_memory() -> None:
    """Skip where the kernel gives the tests no shared memory of their own."""
    code = "import sys; from tests import surroundings; sys.exit(surroundings.use_private_shared_memory())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(done.stderr.strip())


def test_tests_of_signals_pass_however_they_are_started() -> None:
    """All signals ignored and blocked, no standard input, a bare environment."""
    shell = (
        "umask 077; unset TERM HOME; export LANG=C LC_ALL=C; trap '' INT HUP TERM CHLD PIPE; "
        'exec setsid -w "$@" <&-'
    )
    code = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [1, 2, 15]);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = run_tests(["sh", "-c", shell, "sh", sys.executable, "-c", code], SIGNALS, IN_PROCESS)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


HOLDER = """
import subprocess, sys
from tests import surroundings
from dglkge.distributed.jobs import JobEntry, Registration
surroundings.use_private_shared_memory()
entry = Registration(JobEntry("0123456789abcdef", run="/runs/other"))
status = subprocess.run(sys.argv[1:]).returncode
entry.release()
sys.exit(status)
"""


def test_beside_another_job_in_the_same_shared_memory_they_pass(private_memory: None) -> None:
    done = run_tests([sys.executable, "-c", HOLDER], SIGNALS, **{surroundings.SWITCH: "shared"})
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


MEETING = """
import os, time
from pathlib import Path

def test_{name}():
    Path("/dev/shm/{name}").touch()
    Path("{folder}/{name}.there").touch()
    deadline = time.monotonic() + 60
    while not Path("{folder}/{other}.there").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.listdir("/dev/shm") == ["{name}"]
"""


def test_each_worker_of_root_has_shared_memory_of_its_own(private_memory: None, tmp_path: Path) -> None:
    """Two tests in two workers meet; what they leave in their /dev/shm fails the session all the same."""
    if os.geteuid() != 0:
        pytest.skip("the workers of an ordinary user share one /dev/shm")
    for name, other in (("one", "two"), ("two", "one")):
        text = MEETING.format(name=name, other=other, folder=tmp_path)
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-n", "2"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", os.devnull, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert "/dev/shm/one" in done.stdout and "/dev/shm/two" in done.stdout
    assert done.returncode == 1


def test_an_ordinary_user_has_shared_memory_of_his_own() -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone can become another user")
    code = (
        "import ctypes, os, sys; from tests import surroundings\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, as after an exec: /proc/self is the user's\n"
        "why_not = surroundings.use_private_shared_memory()\n"
        "if why_not: sys.exit(why_not)\n"
        "print(os.geteuid(), os.listdir('/dev/shm'))\n"
        "open('/dev/shm/mine', 'w').close()\n"
        "print(os.access('/etc/shadow', os.R_OK), os.access('/', os.W_OK))\n"
    )
    # The switch is for these tests; the child shows what happens without it.
    variables = {name: value for name, value in os.environ.items() if name != surroundings.SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60
    )
    if done.stderr.startswith("no shared memory"):
        pytest.skip(done.stderr.strip())
    assert done.stdout == "65534 []\nFalse False\n", done.stderr
    assert not Path("/dev/shm/mine").exists()


def test_free_ports_are_free_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choice is taken here in its midst, so the second one is made."""
    taken = surroundings.free_ports(3)
    choices = iter([taken, surroundings.free_ports(3)])
    monkeypatch.setattr(
        surroundings.random, "SystemRandom", lambda: SimpleNamespace(randrange=lambda *_: next(choices))
    )
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken + 1))
        first = surroundings.free_ports(3)
    assert first != taken and next(choices, None) is None
    assert surroundings.LOWEST_PORT <= first and first + 3 <= surroundings.HIGHEST_PORT < 29500


def test_ctrl_c_reaches_what_a_test_starts_and_afterwards_the_tests_ignore_it_again() -> None:
    with surroundings.background():
        with surroundings.foreground():
            code = (
                "import signal\n"
                "print(signal.getsignal(2) == signal.default_int_handler, signal.getsignal(1) == 0)"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
            assert done.stdout == "True True\n"
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
