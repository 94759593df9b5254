"""Commands that are copies of a process with everything imported behave as plain ``python`` does."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dglkge.kernels import jit
from dglkge.launch import script_runner
from tests import warm
from tests.toy_kg import REPOSITORY
from tests.warm.server import load_all

SHOW = """
import json, os, signal, sys
found = [sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), sys.stdin.read(), os.getsid(0) == os.getpid()]
print(json.dumps([*found, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, __name__]))
print("on stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def test_arguments_streams_folder_environment_and_status(tmp_path: Path) -> None:
    """Of a client, and of a process of a node program that becomes one: as without the server."""
    (tmp_path / "show.py").write_text(SHOW)
    plain, copied, runner = [sys.executable], warm.python(), [sys.executable, script_runner.__file__]
    env = {**os.environ, "GIVEN": "x", "PYTHONPATH": str(REPOSITORY)}
    options = {"input": "given", "cwd": tmp_path, "start_new_session": True}
    results = []
    for python, variables in ((plain, env), (copied, env), (runner, env), (runner, warm.runners(env))):
        command = [*python, "show.py", "3", "a b"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, **options)
        results.append((done.returncode, done.stdout, done.stderr))
    assert results[0] == results[1] and results[2] == results[3] and results[1][0] == results[3][0] == 3


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


LOADED = """
import numpy as np
from dglkge.kernels import hashing
rows, ids = np.ones((2, 4), np.float32), np.arange(2)
hashing.drop_numbers(rows, ids, np.uint64(1), np.uint16(9), np.float32(2))
print(sum(hashing.drop_numbers.stats.cache_hits.values()))
"""


def test_copies_have_the_loops_that_are_on_disk() -> None:
    runs = [[sys.executable], [sys.executable], warm.python()]
    printed = [subprocess.run([*run, "-c", LOADED], capture_output=True, text=True).stdout for run in runs]
    assert printed[1:] == ["1\n", "0\n"]


def test_the_server_compiles_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes none whose sources have changed, nor any from a damaged file."""
    path = tmp_path / "loops.py"
    path.write_text("import dglkge.kernels.jit as j\n@j.compiled\ndef add(a, b):\n    return a + b\n")

    def loop() -> Any:
        spec = importlib.util.spec_from_file_location("loops", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.add

    assert loop()(1, 2) == 3
    changed, same = loop(), loop()
    with monkeypatch.context() as context:
        context.setattr(jit, "_SOURCES_DIGEST", "other")
        load_all(changed)
    load_all(same)
    assert (len(changed.overloads), len(same.overloads)) == (0, 1)
    assert same(1, 2) == 3 and not same.stats.cache_hits and not same.stats.cache_misses
    for damaged in path.parent.rglob("*.nbc"):
        damaged.write_bytes(b"damaged")
    load_all(damaged_loop := loop())
    assert not damaged_loop.overloads and damaged_loop(1, 2) == 3
