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


def replace_child(monkeypatch, tmp_path, code: str) -> None:
    """Put another script in the place of build_graph.py."""
    script = tmp_path / "build_graph.py"
    script.write_text(code)
    monkeypatch.setattr(run_build_module, "__file__", str(tmp_path / "run_build.py"))


def test_output_of_dgl_goes_to_the_log(dataset, capfd):
    run_build(dataset, JOB)
    assert "Converting to homogeneous graph" in (dataset / "partitions" / PARTITION_LOG).read_text()
    assert capfd.readouterr() == ("", "")
    assert (dataset / "partitions" / "g.json").exists()


def test_failure_shows_status_and_the_end_of_the_log(dataset, monkeypatch):
    code = "for i in range(50): print('line', i)\nraise SystemExit(3)"
    replace_child(monkeypatch, dataset, code)
    with pytest.raises(JobError, match="exit status 3") as caught:
        run_build(dataset, JOB)
    assert "| line 49" in str(caught.value) and "line 29\n" not in str(caught.value)


def test_child_ended_by_a_signal(dataset, monkeypatch):
    replace_child(monkeypatch, dataset, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(JobError, match=r"ended by SIGKILL \(out of memory\?\)"):
        run_build(dataset, JOB)


@pytest.mark.usefixtures("in_foreground")
def test_interrupt_ends_the_child(dataset, monkeypatch):
    replace_child(monkeypatch, dataset, f"import os, time; os.kill({os.getpid()}, 2); time.sleep(99)")
    with pytest.raises(KeyboardInterrupt):
        run_build(dataset, JOB)
    assert not [c for c in psutil.Process().children() if "build_graph.py" in " ".join(c.cmdline())]


@pytest.mark.usefixtures("in_foreground")
def test_interrupt_while_the_child_is_started(dataset, monkeypatch):
    """A signal that comes after the fork and before Popen returns."""
    replace_child(monkeypatch, dataset, "import time; time.sleep(99)")

    class InterruptedPopen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("dglkge.partition.run_build.subprocess.Popen", InterruptedPopen)
    with pytest.raises(KeyboardInterrupt):
        run_build(dataset, JOB)
    assert not [c for c in psutil.Process().children() if "build_graph.py" in " ".join(c.cmdline())]


def test_interrupt_that_another_thread_receives(dataset, monkeypatch):
    """Python runs the handler in the main thread, which the signal did not wake."""
    replace_child(monkeypatch, dataset, "import time; time.sleep(30)")
    has_run, seen = threading.Event(), []

    def handler(_number, _frame):
        has_run.set()
        raise KeyboardInterrupt

    def receive():
        while not [c for c in psutil.Process().children() if "build_graph.py" in " ".join(c.cmdline())]:
            time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        seen.append(has_run.wait(10))

    before = signal.signal(signal.SIGINT, handler)
    thread = threading.Thread(target=receive)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_build(dataset, JOB)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert seen == [True]


PARENT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from dglkge.partition import run_build
from dglkge.partition.run_build import GraphJob
run_build.__file__ = {module!r}
run_build.run_build(Path({dataset!r}), GraphJob("g", 1, "metis", 0, {{}}, [], 1, False))
"""

CHILD = """
import sys, time
sys.path.insert(0, {root!r})
from dglkge.partition.run_build import end_with_parent
end_with_parent(int(sys.argv[2]))
print("ready", flush=True)
time.sleep(99)
"""


def test_child_ends_with_its_parent(dataset):
    """Even where the parent is ended by ``kill -9``."""
    root = str(REPOSITORY)
    (dataset / "build_graph.py").write_text(CHILD.format(root=root))
    code = PARENT.format(root=root, module=str(dataset / "run_build.py"), dataset=str(dataset))
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        log = dataset / "partitions" / PARTITION_LOG
        child = None
        for _ in range(1200):
            if parent.poll() is not None or (log.exists() and "ready" in log.read_text()):
                break
            try:
                parent.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
        child = children[0]
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(10) == -signal.SIGKILL
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert gone and not alive


SLOW_IMPORT = """
import signal
print("ready", flush=True)
while True: signal.pause()
"""


def test_child_that_still_imports_ends_with_its_parent(dataset):
    """``kill -9`` in the seconds that the import of DGL takes."""
    root = str(REPOSITORY)
    (dataset / "slow" / "dgl").mkdir(parents=True)
    (dataset / "slow" / "dgl" / "__init__.py").write_text(SLOW_IMPORT)
    code = PARENT.format(root=root, module=run_build_module.__file__, dataset=str(dataset))
    environment = {**os.environ, "PYTHONPATH": str(dataset / "slow")}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        log = dataset / "partitions" / PARTITION_LOG
        for _ in range(1200):
            if parent.poll() is not None or (log.exists() and "ready" in log.read_text()):
                break
            threading.Event().wait(0.05)
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(10) == -signal.SIGKILL
    gone, alive = psutil.wait_procs([child], timeout=10)
    for process in alive:
        process.kill()
    assert gone and not alive
