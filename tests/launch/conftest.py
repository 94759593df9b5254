"""Jobs under the real launcher, as child processes, that are gone when a test ends however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest

from dglkge.distributed.jobs import JobEntry
from dglkge.launch.background import wait
from dglkge.launch.process_plan import PlannedProcess
from dglkge.launch.remote.connection import Events, NodeConnection, RunningProcess, open_node
from dglkge.launch.remote.protocol import MARK, Call, Reply, encode
from tests import warm
from tests.surroundings import free_ports

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 60
LAUNCHER = ["-m", "dglkge.cli.launch"]
SERVE = "from dglkge.launch.fork_server import serve; serve(id)\n"
"""Begin of a program from which processes are forked, which need no imports."""
SERVERS_LEAVE = "import os, sys\nif os.environ['DGL_ROLE'] == 'server': sys.exit()\n"


def planned_process(
    role: str, number: int, address: str, code: str, environment: Mapping[str, str] = {}
) -> PlannedProcess:
    command = (sys.executable, "-u", "-c", f"{SERVE}import os; exec(os.environ['CODE'])")
    variables = {"CODE": code, "OMP_NUM_THREADS": "1", **environment}
    return PlannedProcess(role, number, address, command, variables)


class LaunchedJob:
    """A running ``dglkge-launch``: its lines as they come, its processes, its end."""

    def __init__(
        self, arguments: list[str], folder: Path, environment: dict[str, str], starter: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.shown: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.launcher = subprocess.Popen(
            [*starter, sys.executable, *LAUNCHER, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # a test closed the pipe
            for line in self.launcher.stdout:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, *texts: str) -> None:
        missing = [text for text in texts if not any(text in line for line in self.shown)]
        while missing:
            line = self._lines.get(timeout=TIMEOUT_SECONDS)
            assert line is not None, f"the launcher ended before {missing}:\n" + "\n".join(self.shown)
            self.shown.append(line)
            missing = [text for text in missing if text not in line]

    def finish(self) -> str:
        while (line := self._lines.get(timeout=TIMEOUT_SECONDS)) is not None:
            self.shown.append(line)
        self.launcher.wait(TIMEOUT_SECONDS)
        return "\n".join(self.shown)

    def process(self, role: str, number: str) -> psutil.Process:
        """Find the process of a trainer or server, not its node program."""
        variable = {"trainer": "RANK", "server": "DGL_SERVER_ID"}[role]
        for child in psutil.Process(self.launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get(variable) == number:
                    return child
        raise AssertionError(f"{role} {number} does not run")

    def await_none_left(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (running := processes_in(self.folder)) and time.monotonic() < deadline:
            psutil.wait_procs(running, timeout=1)
        assert not running


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that have not ended and have their working folder there."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                processes.append(process)
    return processes


@pytest.fixture
def free_port() -> int:
    return free_ports(4)


@contextlib.contextmanager
def node_program() -> Iterator[NodeConnection]:
    with patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        opened = open_node("here", None, sys.executable)
    try:
        yield opened
    finally:
        wait(opened.close())


@pytest.fixture
def session() -> Iterator[NodeConnection]:
    with node_program() as opened:
        yield opened


def outcome(process: RunningProcess, events: Events) -> bytes:
    output, deadline = b"", time.monotonic() + TIMEOUT_SECONDS
    while not process.is_gone:
        assert time.monotonic() < deadline
        for _, changes in events.take(0.1):
            output += changes.pop("data", b"")
            process.apply(**changes)
    return output


STARTED, GONE = "pid", "is_gone"
"""Changes of a process that name what has happened."""

NODE_PROGRAM = """
import sys
from dglkge.launch import node_program
node_program.protocol.HEARTBEAT_SECONDS, node_program.GRACE_SECONDS = 0.1, float(sys.argv[2])
node_program.main(float(sys.argv[1]) or None)
"""


class RunningProgram:
    """A node program, and a launcher that is this test."""

    def __init__(self, folder: Path, heartbeat_timeout: float = 0.0, grace: float = 3.0) -> None:
        self.folder = folder
        self.pids: dict[int, int] = {}
        self.outputs: dict[int, bytes] = defaultdict(bytes)
        self.program = subprocess.Popen(
            [sys.executable, "-c", NODE_PROGRAM, str(heartbeat_timeout), str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._has_mark = False

    def send(self, task: str, **arguments: object) -> None:
        self.program.stdin.write(encode(Call(task, arguments)))

    def start(
        self, code: str, *environments: dict[str, str], number=1, before="", prepare="id", shared=()
    ) -> None:
        """Start a process for each environment, with the numbers from ``number`` on."""
        text = f"import sys; from dglkge.launch.fork_server import serve\n{before}\nserve({prepare})\n{code}"
        processes = list(enumerate(environments or ({},), start=number))
        for key, _ in processes:
            self.pids.pop(key, None)
            self.outputs.pop(key, None)
        command, environment = [sys.executable, "-c", text], dict(shared)
        self.send(
            "start", command=command, processes=processes, environment=environment, folder=str(self.folder)
        )

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            if not (more := os.read(self.program.stdout.fileno(), num_bytes - len(data))):
                raise EOFError
            data += more
        return data

    def next(self) -> Call | Reply:
        """Read a message; keep what it says about the number and the output of a process."""
        if not self._has_mark:
            assert self._read(len(MARK)) == MARK
            self._has_mark = True
        head, data = (self._read(size) for size in struct.unpack("!II", self._read(8)))
        kind, fields = json.loads(head)
        message = {"Call": Call, "Reply": Reply}[kind](**fields, data=data)
        if kind == "Call" and "process" in message.arguments:
            number = message.arguments["process"]
            self.outputs[number] += data
            if STARTED in message.arguments:
                self.pids[number] = message.arguments[STARTED]
        return message

    def until(self, change: str, count: int = 1) -> list[SimpleNamespace]:
        """Read until so many processes have changed; return all changes but output."""
        changes: list[SimpleNamespace] = []
        while sum(hasattr(item, change) for item in changes) < count:
            message = self.next()
            if not message.data:
                changes.append(SimpleNamespace(**{"task": message.task, "error": None, **message.arguments}))
        return changes

    def wait_ready(self, *numbers: int) -> list[psutil.Process]:
        """Wait until processes, the first if no number is given, have printed ``ready``; return them."""
        numbers = numbers or (1,)
        while any(number not in self.pids or b"ready\n" not in self.outputs[number] for number in numbers):
            self.next()
        return [psutil.Process(self.pids[number]) for number in numbers]

    def processes(self, count: int | None = None) -> list[psutil.Process]:
        """Return what the node program has started; wait until so many processes are left."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            processes = psutil.Process(self.program.pid).children(recursive=True)
            if count is None or len(processes) == count:
                return processes
            assert time.monotonic() < deadline, processes
            time.sleep(0.02)

    def register(self, job: str) -> None:
        self.program.stdin.write(encode(Call("register", {"entry": JobEntry(job).to_dict()}, id=0)))
        assert self.next() == Reply(id=0)

    def lose(self) -> None:
        with contextlib.suppress(OSError):
            self.program.stdin.close()
        self.program.wait(TIMEOUT_SECONDS)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[RunningProgram]:
    running = RunningProgram(tmp_path)
    yield running
    running.lose()
    running.program.stdout.close()


@pytest.fixture
def ip_config(tmp_path: Path, free_port: int) -> Path:
    path = tmp_path / "ip_config.txt"
    path.write_text(f"127.0.0.1 {free_port}\n")
    return path


STAND_INS = {
    "torch/__init__.py": "def set_num_threads(number): pass\n",
    "torch/distributed.py": "",
    "dgl/__init__.py": "",
    "dgl/distributed/__init__.py": "initialize = load_partition = partition_graph = lambda *_, **__: None\n",
}
for _name in ("kvstore", "dist_graph", "dist_tensor", "graph_partition_book", "rpc", "shared_mem_utils"):
    STAND_INS[f"dgl/distributed/{_name}.py"] = "def __getattr__(name): return lambda *_: None\n"


@pytest.fixture(scope="session")
def light_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with stand-ins for torch and DGL: real processes without the 3 CPU s of their imports."""
    folder = tmp_path_factory.mktemp("light")
    for name, text in STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return f"{folder}{os.pathsep}{ROOT}"


@pytest.fixture
def launch(tmp_path: Path, ip_config: Path) -> Iterator[Callable[..., LaunchedJob]]:
    """Start jobs: ``launch(options, script or its path, *arguments)``; PYTHONPATH decides about imports."""
    jobs: list[LaunchedJob] = []

    def start(options: list[str], script: str | Path, *arguments: str, starter=(), **environment: str):
        if isinstance(script, str):
            path = tmp_path / f"script_{len(jobs)}.py"
            path.write_text(script)
            script = path
        environment = {**warm.runners({"PYTHONPATH": str(ROOT)}), **environment}
        job = LaunchedJob([*options, str(script), *arguments], tmp_path, environment, starter)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.launcher.pid, signal.SIGKILL)
        job.launcher.wait(TIMEOUT_SECONDS)
    survivors = psutil.wait_procs(processes_in(tmp_path), timeout=10)[1]
    for process in survivors:
        process.kill()
    assert not survivors
