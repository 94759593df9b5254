"""A dataset appears complete or not at all: overwritten, killed, on a full disk; the partitioning child."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import faults
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import PARTITION_LOG, PENDING_DESCRIPTION
from dglkge.errors import InputError, JobError
from dglkge.partition import run_build as run_build_module
from dglkge.partition.dataset_writer import staged
from dglkge.partition.run_build import GraphJob, run_build
from tests import warm
from tests.data.toy_folder import write_toy_folder
from tests.partition_tools.conftest import run_script
from tests.toy_kg import REPOSITORY, partition, ring_triples, write_splits

NUM_TRIPLES = 20_000
SPLIT_KIB = NUM_TRIPLES * 24 // 1024


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(folder, *files):
    """Write what a block writes: some files and, last, the description."""
    for name in (*files, PENDING_DESCRIPTION):
        (folder / name).write_text("{}")


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_overwrite_replaces_a_dataset_if_the_block_succeeds(tmp_path, error):
    """And nothing new stays after an exception; the folder appears at the end, also where an empty one is."""
    output = write_toy_folder(tmp_path / "out")
    before = names(output)
    (tmp_path / "empty").mkdir()
    for place in (output, tmp_path / "new", tmp_path / "empty"):
        with contextlib.suppress(error or ()), staged(place, overwrite=place == output) as folder:
            (folder / "part0").mkdir()
            fill(folder, "new")
            assert folder.parent == tmp_path
            assert (output / "train.npy").exists() if place == output else not (place / "new").exists()
            if error:
                raise error
    replaced = ["dataset.json", "new", "part0"]
    assert names(output) == (before if error else replaced)
    assert names(tmp_path / "empty") == ([] if error else replaced)
    assert names(tmp_path) == (["empty", "out"] if error else ["empty", "new", "out"])


def test_what_is_there_stays(tmp_path):
    for number, (content, place, overwrite, message) in enumerate((
        ("dataset", "out", False, "exists; choose another, or give --overwrite"),
        ({}, "out", True, "--overwrite replaces only a dataset"),
        ({"dataset.json": '{"a": 1}'}, "out", True, "--overwrite replaces only a dataset"),
        ({"dataset.json": '{"format_version": 99}'}, "out", True, "--overwrite replaces only"),
        ({}, "out/precious.txt", True, "exists and is no folder"),
        ({}, "out/precious.txt/in", True, "cannot be made: File exists"),
        ({}, "x" * 300, False, "cannot be used: File name too long"),
        ({".taken.partial": ""}, "out/taken", False, "cannot be used: another file is there; remove it"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        output = folder / "out"
        if content == "dataset":
            write_toy_folder(output)
        else:
            output.mkdir(parents=True)
            for name, text in {"precious.txt": "x", **content}.items():
                (output / name).write_text(text)
        before = contents(folder)
        with pytest.raises(InputError, match=message), staged(folder / place, overwrite):
            pytest.fail("the block must not run")
        assert contents(folder) == before


def test_two_runs_for_one_output(tmp_path):
    """And what appeared meanwhile stays."""
    output, other = tmp_path / "out", tmp_path / "other"
    with staged(output, overwrite=False) as folder, open(folder / ".lock") as lock:
        fill(folder, "a")
        with pytest.raises(BlockingIOError):  # held by the system, and so no longer than the process
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(InputError, match="another run is writing"), staged(output, overwrite=False):
            pytest.fail("the block must not run")
        assert (folder / "a").exists()
    assert names(output) == ["a", "dataset.json"]
    with pytest.raises(InputError, match="exists"), staged(other, overwrite=False):
        other.mkdir()
        (other / "a").touch()
    assert names(other) == ["a"] and names(tmp_path) == ["other", "out"]


def test_a_dataset_that_was_being_replaced_is_given_back(tmp_path) -> None:
    """The run before was killed when the old one had lost its name and the new one had none yet."""
    output = write_toy_folder(tmp_path / "data")
    expected = contents(output)
    for overwrite, error in ((False, InputError), (True, KeyboardInterrupt)):
        output.rename(tmp_path / ".data.replaced")
        with pytest.raises(error), staged(output, overwrite=overwrite):
            raise KeyboardInterrupt
        assert contents(output) == expected
    assert names(tmp_path) == ["data"]


RUN = """
import os, sys
sys.path.insert(0, {root!r})
from dglkge.partition import {module}
from partition_tools import partition

def stop(*arguments, **options):
    os.kill(os.getpid(), {signal})

{module}.{function} = stop
sys.exit(partition.main(sys.argv[1:]))
"""


def run_stopped(source: Path, output: Path, module: str, function: str, number: int):
    """Partition, and send a signal in place of a call of a function."""
    code = RUN.format(root=str(REPOSITORY), module=module, function=function, signal=int(number))
    words = ["--input", str(source), "--output", str(output), "--num-parts", "2", "--method", "random"]
    env = {**os.environ, warm.COPIED_BUILD: "1"}
    command = [*warm.python(), "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def loadable(folder: Path) -> list[Path]:
    datasets = []
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        with contextlib.suppress(InputError):
            Dataset.open(path)
            datasets.append(path)
    return datasets


def test_killed_runs_leave_nothing_that_loads_and_the_next_one_clears_up(tmp_path):
    source, output = write_splits(tmp_path / "source", ring_triples()), tmp_path / "out"
    calls = "make_dataset.write_triples dataset_writer.run_build dataset_writer._replace"
    for call in calls.split():
        done = run_stopped(source, output, *call.split("."), signal.SIGKILL)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not output.exists() and (tmp_path / ".out.partial").exists()
        assert loadable(tmp_path) == []
        (tmp_path / ".out.partial" / "remnant").touch()
    partition(source, output, "--num-parts", "2", "--method", "random")
    assert names(tmp_path) == ["out", "source"] and loadable(tmp_path) == [output]
    assert "remnant" not in names(output)


@pytest.mark.parametrize(
    "number, status, message",
    [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "partition.py: interrupted\n")],
)
@pytest.mark.usefixtures("in_foreground")
def test_signal_leaves_nothing_at_all(tmp_path, number, status, message):
    source = write_splits(tmp_path / "source", ring_triples())
    done = run_stopped(source, tmp_path / "out", "dataset_writer", "run_build", number)
    assert (done.returncode, done.stderr) == (status, message)
    assert names(tmp_path) == ["source"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Triples of 4,000 entities: 469 KiB as a split, 1.3 MiB as a partitioned graph."""
    rows = np.random.default_rng(0).integers((4000, 20, 4000), size=(NUM_TRIPLES, 3)).tolist()
    path = tmp_path_factory.mktemp("source") / "train.tsv"
    path.write_text("".join(f"e{h}\tr{r}\te{t}\n" for h, r, t in rows))
    return path


@pytest.fixture
def small_disk(tmp_path):
    with contextlib.ExitStack() as disks:

        def mount(kib: int) -> Path:
            disk = disks.enter_context(faults.small_disk(tmp_path / f"disk-{kib}", kib * 1024))
            if not disk.is_mount():
                pytest.skip("only root can mount a small tmpfs, and not in every container")
            return disk

        yield mount


def run(source: Path, output: Path, *more, **options):
    """Return exit status, stdout and stderr of a run as a user starts it."""
    words = ["--input", source, "--output", output, "--split", "1", "--method", "random", *more]
    done = run_script(*words, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("kib", [40, SPLIT_KIB * 3 // 4, 850, 1100])
def test_full_disk(kib, source, small_disk):
    """Temporary ids, vocabularies, splits, DGL's files and the edge tables: wherever it happens."""
    disk = small_disk(kib)
    target = f"a temporary file in {disk / '.out.partial'}" if kib == 40 else disk / "out"
    fault = f"partition.py: error: cannot write {target}: No space left on device\n"
    assert run(source, disk / "out", "--num-parts", "2") == (1, "", fault)
    assert list(disk.iterdir()) == []


def test_a_file_system_that_takes_no_files(source, small_disk):
    disk = small_disk(4096)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    fault = f"partition.py: error: the parent folder of {disk / 'out'} is not writable\n"
    assert run(source, disk / "out") == (2, "", fault)


def test_a_full_console_after_the_dataset_is_whole(source, tmp_path):
    with open("/dev/full", "w") as full:
        status, _, err = run(source, tmp_path / "out", "--json", stdout=full)
    assert (status, err) == (
        1,
        f"partition.py: error: the dataset lies in {tmp_path / 'out'}, but its figures are lost: "
        "cannot write the output: No space left on device\n",
    )
    assert len(Dataset.open(tmp_path / "out").split("train")) == NUM_TRIPLES


def test_the_old_dataset_comes_back_where_no_new_one_can_be(source, tmp_path, build_here, monkeypatch, call):
    output = tmp_path / "out"
    assert call(source)[0] == 0
    before = contents(output)
    rename = Path.rename

    def fail(path, target):
        if path.name == ".out.partial":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    status, _, err = call(source, "--overwrite", "--seed", "9")
    assert status == 1 and err.endswith(f": error: cannot write {output}: Input/output error\n")
    assert names(tmp_path) == ["out"] and contents(output) == before


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
