"""Commands that are copies of a process with everything imported behave as plain ``python`` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dglkge.launch import script_runner
from tests import warm
from tests.toy_kg import REPOSITORY

SHOW = """
import json, os, signal, sys
found = [sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), sys.stdin.read(), os.getsid(0) == os.getpid()]
print(json.dumps([*found, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, __name__]))
print("on stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_arguments_streams_folder_environment_and_status(tmp_path: Path, status: int) -> None:
    """Of a client, and of a process of a node program that becomes one: as without the server."""
    (tmp_path / "show.py").write_text(SHOW)
    plain, copied = [sys.executable], warm.python()
    runner = [*plain, script_runner.__file__]
    variables = {**os.environ, "GIVEN": "x", "PYTHONPATH": str(REPOSITORY)}
    told = []
    cases = (plain, variables), (copied, variables), (runner, variables), (runner, warm.runners(variables))
    for python, env in cases:
        done = subprocess.run(
            [*python, "show.py", str(status), "a b"],
            input="given",
            cwd=tmp_path,
            env=env,
            start_new_session=True,
            capture_output=True,
            text=True,
        )
        told.append((done.returncode, done.stdout, done.stderr))
    assert told[0] == told[1] and told[2] == told[3] and told[1][0] == told[3][0] == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_ends_the_copy(tmp_path: Path, number: int) -> None:
    (tmp_path / "wait.py").write_text(
        "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    )
    client = subprocess.Popen([*warm.python(), "wait.py"], cwd=tmp_path)
    try:
        limit = time.monotonic() + 30
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert client.poll() is None and time.monotonic() < limit
            time.sleep(0.02)
        copy = int((tmp_path / "pid").read_text())
        client.send_signal(number)
        assert client.wait(30) == -number
        while Path(f"/proc/{copy}").exists():
            assert time.monotonic() < limit
            time.sleep(0.02)
    finally:
        client.kill()
        client.wait()


IN_A_HOST = """
import os, sys, time
spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
print(*spaces, os.listdir("/dev/shm"), "torch" in sys.modules)
sys.stdout.flush()
open("pid", "w").write("ready")
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_copy_is_on_the_host_of_its_client(tmp_path: Path, number: int) -> None:
    words = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    (tmp_path / "wait.py").write_text(IN_A_HOST)
    shell = (
        "mount -t tmpfs tmpfs /dev/shm; touch /dev/shm/mine; readlink /proc/self/ns/pid /proc/self/ns/mnt; "
        f"setpriv --pdeathsig KILL {sys.executable} {script_runner.__file__} wait.py & client=$!; "
        "while [ ! -e pid ]; do sleep 0.02; done; "
        f"kill -{int(number)} $client; wait $client; echo status $?; "
        "for turn in $(seq 500); do ls /proc | grep -c '^[0-9]' > count; [ $(cat count) -le 3 ] && break; "
        "sleep 0.02; done; cat count"
    )
    env = warm.runners({**os.environ, "PYTHONPATH": str(REPOSITORY)})
    done = subprocess.run(
        [*words, "sh", "-c", shell], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[2] == f"{lines[0]} {lines[1]} ['mine'] True", done.stdout + done.stderr
    assert lines[3] == f"status {128 + number}" and int(lines[4]) <= 3, done.stdout + done.stderr
