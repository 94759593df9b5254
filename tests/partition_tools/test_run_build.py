"""The child that partitions: its output, its failures, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from dglkge.data.dataset_files import PARTITION_LOG
from dglkge.errors import JobError
from dglkge.partition import run_build as run_build_module
from dglkge.partition.run_build import GraphJob, run_build
from tests.toy_kg import REPOSITORY

JOB = GraphJob("g", 1, "metis", 0, {"entity": 3}, [["entity", "entity", 0, 2]], 1, False)


@pytest.fixture
def dataset(tmp_path):
    np.save(tmp_path / "train.npy", np.array([[0, 0, 1], [1, 0, 2]]))
    return tmp_path


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "build_graph.py" in " ".join(child.cmdline())]


def replace_child(monkeypatch, tmp_path, code: str) -> None:
    script = tmp_path / "build_graph.py"
    script.write_text(code)
    monkeypatch.setattr(run_build_module, "__file__", str(tmp_path / "run_build.py"))


def test_failure_shows_status_and_the_end_of_the_log(dataset, monkeypatch):
    code = "for i in range(50): print('line', i)\nraise SystemExit(3)"
    replace_child(monkeypatch, dataset, code)
    with pytest.raises(JobError, match="exit status 3") as caught:
        run_build(dataset, JOB)
    assert "| line 49" in str(caught.value) and "line 29\n" not in str(caught.value)
    (dataset / "partitions").rename(dataset / "of_the_first")
    replace_child(monkeypatch, dataset, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(JobError, match=r"ended by SIGKILL \(out of memory\?\)"):
        run_build(dataset, JOB)


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("is_starting", [False, True])
def test_interrupt_ends_the_child(dataset, monkeypatch, is_starting):
    """Also a signal that comes after the fork and before Popen returns."""

    class InterruptedPopen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            os.kill(os.getpid(), signal.SIGINT)

    if is_starting:
        monkeypatch.setattr("dglkge.partition.run_build.subprocess.Popen", InterruptedPopen)
    interrupt = "" if is_starting else f"import os; os.kill({os.getpid()}, 2); "
    replace_child(monkeypatch, dataset, f"{interrupt}import time; time.sleep(99)")
    with pytest.raises(KeyboardInterrupt):
        run_build(dataset, JOB)
    assert not children()


def test_interrupt_that_another_thread_receives(dataset, monkeypatch):
    """Python runs the handler in the main thread, which the signal did not wake."""
    replace_child(monkeypatch, dataset, "import time; time.sleep(30)")
    has_run, results = threading.Event(), []

    def handler(_number, _frame):
        has_run.set()
        raise KeyboardInterrupt

    def receive():
        while not children():
            time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        results.append(has_run.wait(10))

    before = signal.signal(signal.SIGINT, handler)
    thread = threading.Thread(target=receive)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_build(dataset, JOB)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert results == [True]


PARENT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from dglkge.partition.run_build import GraphJob, run_build
run_build(Path({dataset!r}), GraphJob("g", 1, "metis", 0, {{}}, [], 1, False))
"""

SLOW_IMPORT = """
import signal
print("ready", flush=True)
while True: signal.pause()
"""


def test_child_ends_with_its_parent(dataset):
    """Even where the parent is ended by ``kill -9``, in the seconds that the import of DGL takes."""
    (dataset / "slow" / "dgl").mkdir(parents=True)
    (dataset / "slow" / "dgl" / "__init__.py").write_text(SLOW_IMPORT)
    code = PARENT.format(root=str(REPOSITORY), dataset=str(dataset))
    environment = {**os.environ, "PYTHONPATH": str(dataset / "slow")}
    log = dataset / "partitions" / PARTITION_LOG
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        limit = time.monotonic() + 60
        while not (log.exists() and "ready" in log.read_text()):
            assert parent.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(10) == -signal.SIGKILL
    _, alive = psutil.wait_procs([child], timeout=10)
    for process in alive:
        process.kill()
    assert not alive
