"""What all tests share: the data beside the repository, and the look at what the tests leave behind."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import gc
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

import dglkge
from tests import surroundings, warm

# No time limit for a case: machines are busy with other work.
hypothesis.settings.register_profile("dglkge", deadline=None)
hypothesis.settings.load_profile("dglkge")

SHARED_MEMORY = Path("/dev/shm")
MARK = "DGLKGE_TEST_SESSION"
"""Environment variable that marks what the tests started, whoever is its parent by now."""

LEAVE_SECONDS = 20
"""A DGL server leaves some seconds after its last client."""

JOB_FOLDERS = ("examples", "functional", "launch")
"""Folders whose tests start jobs with the launcher."""

LONG_FOLDERS = """functional training cluster optim examples launch checkpoint step report serving inference
kernels tuning""".split()
"""Folders whose files take longest; they are dealt out first."""

SESSION_MARK = pytest.StashKey[str]()
SEGMENTS_BEFORE = pytest.StashKey[set[str]]()
LEFT_BEHIND = pytest.StashKey[list[str]]()
WHY_SHARED = pytest.StashKey[str]()
"""Why the tests use the machine's shared memory; absent where they have their own."""
FOLDER = pytest.StashKey[contextlib.ExitStack]()
"""Removes the folder of what all workers use; absent in workers."""
TEMPLATE = pytest.StashKey[warm.Server]()
"""Of the processes that are copies of one that has imported torch and DGL; absent in workers."""
OWN_EACH = pytest.StashKey[bool]()
"""Whether each worker has shared memory of its own, so that several launch jobs at the same time."""


@pytest.fixture(scope="session")
def shared_datasets() -> Path:
    """Folder of the public data sets, which lie beside the repository and are no part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "datasets"
    if not folder.is_dir():
        pytest.skip(f"the data sets of ../shared are not here: no folder {folder}")
    return folder


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes, this one apart, with a mark of this session: its own or a worker's."""
    marked = []
    for process in psutil.process_iter():
        try:
            is_marked = process.pid != os.getpid() and process.environ().get(MARK, "").startswith(mark)
            # Python's own helper of multiprocessing stays until this process ends.
            helper = is_marked and "multiprocessing.resource_tracker" in " ".join(process.cmdline())
            if is_marked and not helper and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return marked


def locked_files(names: set[str]) -> set[str]:
    """Select the files that a living process holds a lock on."""
    locked = set()
    for name in names:
        with contextlib.suppress(OSError), open(SHARED_MEMORY / name, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.add(name)
    return locked


def unused_segments() -> set[str]:
    """Return the names in /dev/shm that no living process has mapped; the others are some live job's."""
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    names -= locked_files(names)  # entries of jobs
    for process in psutil.process_iter() if names else ():
        try:
            # Not psutil's list: it has the size of each region, for which the kernel walks all pages.
            regions = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            names -= {
                line.partition(f"{SHARED_MEMORY}/")[2].split(" (deleted)")[0] for line in regions.splitlines()
            }
        except (psutil.Error, OSError):
            continue
    return names


def end_processes(mark: str) -> list[str]:
    """Wait for the processes that the tests started, end those that stay, and describe these."""
    _, alive = psutil.wait_procs(marked_processes(mark), timeout=LEAVE_SECONDS)
    lines = []
    for process in alive:
        try:
            lines.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=LEAVE_SECONDS)
    return lines


def worker_group(nodeid: str, own_each: bool) -> str:
    """Return the group of a test, which one worker runs: the tests of its file, or all that launch jobs.

    In one /dev/shm those take turns: some look at all that lies there.
    """
    path = nodeid.split("::")[0]
    return "jobs" if Path(path).parent.name in JOB_FOLDERS and not own_each else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out groups of tests."""
    from xdist.scheduler import LoadScopeScheduling

    own_each = config.stash[OWN_EACH]

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_group(nodeid, own_each)

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the session's mark to a worker of pytest-xdist, and whether it makes a /dev/shm of its own."""
    node.workerinput["mark"] = f"{node.config.stash[SESSION_MARK]}-{node.workerinput['workerid']}"
    node.workerinput["why_shared"] = node.config.stash.get(WHY_SHARED, None)
    node.workerinput["own_each"] = node.config.stash[OWN_EACH]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Collect what the tests of a worker left behind."""
    lines = getattr(node, "workeroutput", {}).get("left_behind", [])
    node.config.stash.setdefault(LEFT_BEHIND, []).extend(lines)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker ends with one alone."""
    places = {name: place for place, name in enumerate(LONG_FOLDERS)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


def pytest_collection_finish() -> None:
    """Leave what exists out of later collections of garbage, each of which took half a second for it."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Put the surroundings right and note what lies in shared memory, in the process that the user started.

    The workers of pytest-xdist inherit all that. Those of root make one more /dev/shm each; others cannot: a
    process with threads, as they are, enters no user namespace.
    """
    # While tests are collected: half of that time was the search for garbage among ever more objects.
    gc.disable()
    workerinput = getattr(config, "workerinput", None)
    if workerinput is None:
        config.stash[FOLDER] = contextlib.ExitStack()
        config.stash[FOLDER].enter_context(surroundings.shared_folder())
        # What torch has compiled for one test, and the headers that it prepares for that, serve the others.
        compiled = os.path.join(os.environ[surroundings.SHARED_FOLDER], "compiled-by-torch")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
        # It would compile ten small files to see which vector instructions it can use.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
        surroundings.reset_signals_and_input()
        # Once for all processes that the tests start, also where Python is told to write no such files. A
        # folder that is read-only stays as it is.
        compileall.compile_dir(dglkge.__path__[0], quiet=2)
        config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests
        if config.getoption("numprocesses", None):
            # Workers share the cores: more threads than that wait for one another, and do so by spinning.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        why_shared = surroundings.use_private_shared_memory()
        config.stash[SEGMENTS_BEFORE] = unused_segments()
        config.stash[OWN_EACH] = why_shared is None and os.geteuid() == 0
        config.stash[SESSION_MARK] = uuid.uuid4().hex
        if config.getoption("numprocesses", None):
            template = config.stash[TEMPLATE] = warm.start_template({MARK: config.stash[SESSION_MARK]})
            # The workers of pytest-xdist need not import torch and DGL either.
            python = shlex.join(template.plain_python())
            config.option.tx = [f"popen//python={python}" for _ in config.option.tx]
    else:
        why_shared = workerinput["why_shared"]
        if workerinput["own_each"]:
            why_shared = surroundings.use_private_shared_memory()
            config.stash[SEGMENTS_BEFORE] = unused_segments()
        config.stash[SESSION_MARK] = workerinput["mark"]
    if why_shared is not None:
        config.stash[WHY_SHARED] = why_shared


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder of what the workers have shared."""
    if FOLDER in config.stash:
        config.stash[FOLDER].close()


def pytest_report_header(config: pytest.Config) -> str:
    """Say whose shared memory the tests use."""
    why_shared = config.stash.get(WHY_SHARED, None)
    return "shared memory: " + ("the tests' own" if why_shared is None else f"the machine's ({why_shared})")


@pytest.fixture(autouse=True)
def leave_little_to_collect(request: pytest.FixtureRequest) -> None:
    """Leave what exists, such as imported modules, out of later collections of garbage.

    Not after a failure: its traceback may hold tables, which a later collection must remove.
    """
    gc.collect()
    if not request.session.testsfailed:
        gc.freeze()


@pytest.fixture(autouse=True)
def restore_number_of_threads() -> Iterator[None]:
    """Give the next test as many threads of torch as this one: commands set their own, for their process."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``dglkge`` in this process and return its status, stdout and stderr."""
    from dglkge.cli.main import main

    def run_main(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_main


@pytest.fixture
def warm_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts with ``sys.executable`` begins as a copy of what has imported torch and DGL."""
    monkeypatch.setattr(sys, "executable", warm.executable())
    monkeypatch.setenv(warm.COPIED_BUILD, "1")


@pytest.fixture
def in_foreground() -> Iterator[None]:
    """Ctrl-C and hangups reach what the test starts, also where the tests run in a shell's background."""
    with surroundings.foreground():
        yield


@pytest.fixture
def in_background() -> Iterator[None]:
    """What the test starts ignores SIGINT and SIGHUP, as after ``nohup``."""
    with surroundings.background():
        yield


@pytest.fixture(scope="session", autouse=True)
def mark_what_tests_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let all that the tests start inherit the mark, and not this process, which may be a worker."""
    os.environ[MARK] = request.config.stash[SESSION_MARK]
    yield
    warm.stop()
    forkserver._forkserver._stop()  # what multiprocessing keeps for tests that fork; else it ends with us


@pytest.hookimpl(trylast=True)  # the workers are gone then
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hold that the tests leave no process and no shared memory: the session fails if they do."""
    if TEMPLATE in session.config.stash:
        session.config.stash[TEMPLATE].stop()
        del os.environ[warm.TEMPLATE]
    before = session.config.stash.get(SEGMENTS_BEFORE, None)
    if before is None:
        return
    lines = end_processes(session.config.stash[SESSION_MARK])
    from dglkge.distributed.jobs import remove_stale_entries  # only now: files of tests set up what it reads

    # A launcher that a test has killed cannot remove its entry in the register of jobs; the next job does so.
    remove_stale_entries(str(SHARED_MEMORY))
    lines += [f"/dev/shm/{name}" for name in sorted(unused_segments() - before)]
    if hasattr(session.config, "workeroutput"):  # this process is a worker, and its /dev/shm goes with it
        session.config.workeroutput["left_behind"] = lines
        return
    lines = session.config.stash.setdefault(LEFT_BEHIND, []) + lines
    session.config.stash[LEFT_BEHIND] = lines
    if lines:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name what the tests left behind."""
    lines = config.stash.get(LEFT_BEHIND, [])
    if lines:
        terminalreporter.section("FAILED: the tests left behind", red=True, bold=True)
        for line in lines:
            terminalreporter.line(line)
