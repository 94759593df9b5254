"""Processes that are forked are what started ones would be, and end as they do."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dglkge.launch import fork_server, script_runner
from tests.launch.conftest import GONE, ROOT, LaunchedJob, RunningProgram

TELL = """
import json, os, random, resource, signal, sys
imported = [name for name in ("torch", "dgl") if name in sys.modules]
threads = len(os.listdir("/proc/self/task"))
import numpy, torch
with open("/proc/self/environ") as file:
    shown = dict(text.split("=", 1) for text in file.read().split("\\0") if "=" in text)
path = f"{os.environ['DGL_ROLE']}-{os.environ.get('DGL_SERVER_ID', os.environ.get('RANK'))}.json"
facts = {
    "environment": dict(os.environ), "shown": shown, "imported": imported, "native threads": threads,
    "threads": torch.get_num_threads(), "draws": [numpy.random.rand(), random.random()],
    "arguments": sys.argv, "name": __name__, "path": sys.path[0], "folder": os.getcwd(),
    "input": sys.stdin.read(), "session": os.getsid(0) == os.getpid(),
    "signals": [signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP)],
    "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "cores": sorted(os.sched_getaffinity(0)), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "parent": open(f"/proc/{os.getppid()}/cmdline").read(),
}
with open(path, "w") as file:
    json.dump(facts, file)
print("told by", path)
print("and on stderr", file=sys.stderr)
"""


def test_a_forked_process_is_as_a_started_one(launch: Callable[..., LaunchedJob], tmp_path: Path) -> None:
    """Variables are those of the plan, here and for who reads them in /proc; libraries take them over."""
    options = ["--num_trainers=2", "--num_omp_threads=2", "--extra_envs=COLOUR=$x; 'y'", "--log_dir=logs"]
    options += [f"--ip_config={tmp_path / 'ip_config.txt'}"]
    hard = ["a b", "it's", '"quoted"', "$HOME", "`id`", "; touch injected", "", "--num_trainers", "-m", "*"]
    plan = json.loads(launch([*options, "--dry_run", "--json"], "", *hard).finish())
    job = launch(options, TELL, *hard, PYTHONPATH=str(ROOT))
    output = job.finish()
    assert job.launcher.returncode == 0, output
    draws = []
    for planned in plan:
        role, number = planned["name"].split()
        name = f"{'client' if role == 'trainer' else role}-{number}"
        facts = json.loads((tmp_path / f"{name}.json").read_text())
        draws += facts["draws"]
        environment = planned["environment"]
        drawn = environment.keys() & {"DGLKGE_JOB", "DGLKGE_SEGMENTS", "MASTER_PORT", "DGL_IP_CONFIG"}
        expected = {key: value for key, value in environment.items() if key not in drawn}
        for variables in (facts["environment"], facts["shown"]):
            assert expected.items() <= variables.items() and drawn <= variables.keys()
        assert fork_server.VARIABLE not in facts["environment"]
        log = (tmp_path / f"logs/{role}-{number}.log").read_text()
        assert f"told by {name}.json" in log and "and on stderr" in log
        assert facts["imported"] == ["torch", "dgl"]  # before the fork
        assert (facts["threads"], facts["native threads"]) == (2 if role == "trainer" else 1, 1)
        assert facts["arguments"] == [str(tmp_path / "script_1.py"), *hard]
        assert (facts["name"], facts["path"]) == ("__main__", str(tmp_path))
        assert (facts["folder"], facts["input"]) == (str(tmp_path), "")
        assert facts["session"] and facts["signals"] == [True, True] and facts["interrupts"]
        assert facts["descriptors"] == [0, 1, 2]
        assert facts["cores"] == sorted(os.sched_getaffinity(0))
        assert facts["files"] == list(resource.getrlimit(resource.RLIMIT_NOFILE))
        assert "dglkge.launch.node_program" in facts["parent"]
    assert len(set(draws)) == 6


def test_an_import_that_fails(launch: Callable[..., LaunchedJob], tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libc10.so is not here')")
    options = ["--num_trainers=1", f"--extra_envs=PYTHONPATH={tmp_path / 'broken'}"]
    job = launch(options, "print('not reached')", PYTHONPATH=str(ROOT))
    output = job.finish()
    assert job.launcher.returncode == 1
    assert "ImportError: libc10.so is not here" in output and "not reached" not in output
    assert "on 127.0.0.1 ended with status 1" in output


IMPORTS = """
import importlib, os, sys
from dglkge.launch.script_runner import DGL_MODULES, SERVER_MODULES, TRAINER_MODULES, prepare_dgl
prepare_dgl()
import torch
def refuse(*arguments, **options): raise AssertionError("CUDA is initialized by an import")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
for name in (*DGL_MODULES, *SERVER_MODULES, *TRAINER_MODULES):
    importlib.import_module(name)
import dglkge
from dglkge.training.building.checks import check_config
check_config(dglkge.load_config(None, ["dataset=x", "output=y"]))  # as each trainer does
slow = [name for name in ("pandas", "torch._dynamo") if name in sys.modules]
print(len(os.listdir("/proc/self/task")), slow)
"""


def test_what_is_imported_before_a_fork() -> None:
    """No CUDA, no thread, which a forked process would lack, and no slow pandas or torch compiler."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("1 []\n", 0), done.stderr


def test_the_launcher_starts_without_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; import dglkge.cli.launch, dglkge.launch.node_program"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


SLOW = "lambda environment: __import__('time').sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_during_imports(program: RunningProgram, number: int) -> None:
    program.start("pass", {}, {}, prepare=SLOW)
    program.processes(count=1)
    program.send("signal", process=1, number=number)
    changes = program.until(GONE, count=2)
    ended, _ = (change for change in changes if change.process == 1)
    assert ended.status == -number
    (gone,) = (change for change in changes if change.process == 2)
    assert "has ended" in gone.error  # it was not to be signalled, and cannot be started
    program.processes(count=0)


def test_the_fork_server_is_killed_during_imports(program: RunningProgram) -> None:
    code = "import os; print('Illegal instruction', flush=True); os._exit(9)"
    program.start("pass", prepare=f"lambda environment: exec({code!r})")
    (gone,) = program.until(GONE)
    assert gone.error == "the process that imports torch and DGL has ended"
    assert program.outputs[1] == b"Illegal instruction\n"


def test_what_imports_print_is_in_the_log_of_the_process_they_are_for(program: RunningProgram) -> None:
    prepare = "lambda environment: print('import', environment['NAME'], flush=True)"
    code = "import os; print('own', os.environ['NAME'], flush=True)"
    program.start(code, {"NAME": "a"}, {"NAME": "b"}, prepare=prepare, before="print('start')")
    program.until(GONE, count=2)
    assert program.outputs == {1: b"start\nimport a\nown a\n", 2: b"import b\nown b\n"}


def test_no_more_processes(program: RunningProgram) -> None:
    before = (
        "import os; real = os.fork\n"
        "def fork():\n"
        "    os.fork = real\n"
        "    raise BlockingIOError(11, 'no more processes')\n"
        "os.fork = fork\n"
    )
    program.start("print('ran')", {}, {}, before=before)
    errors = {change.process: change.error for change in program.until(GONE, 2) if hasattr(change, GONE)}
    assert errors == {1: "no more processes", 2: None} and program.outputs[2] == b"ran\n"


def run(arguments: list[str], folder: Path, runner: bool = True) -> subprocess.CompletedProcess:
    command = [sys.executable, *([script_runner.__file__] if runner else []), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    "body",
    [
        "print(sys.argv, __name__, __file__, sys.path[0], neighbour.VALUE)",
        "sys.exit(3)",
        "sys.exit('no luck')",
        "raise ValueError('broken')",
        "raise KeyboardInterrupt",
        "1 +",
        "atexit.register(print, 'farewell'); raise SystemExit(4)",
        "print('to a pipe', end=''); raise SystemExit(5)",
        "threading.Thread(target=print, args=('thread',)).start()",
        "atexit.register(lambda: print(__main__.thing is pickle.loads(pickle.dumps(thing))))",
    ],
)
def test_like_python(tmp_path: Path, body: str) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    modules = "__main__, atexit, neighbour, pickle, sys, threading"
    script.write_text(f"import {modules}\ndef thing(): ...\n{body}\n")
    arguments = ["script.py", "a b", "--c", "$d"]
    expected, got = (run(arguments, tmp_path, runner) for runner in (False, True))
    status = 130 if "KeyboardInterrupt" in body else expected.returncode  # python dies of the signal
    assert (got.returncode, got.stdout, got.stderr) == (status, expected.stdout, expected.stderr)


def test_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    text = "import sys\nfrom package import main\nprint(__name__, sys.argv[1:])\n"
    (tmp_path / "package" / "main.py").write_text(text)
    for runner in (False, True):
        done = run(["-m", "package.main", "x", "-m"], tmp_path, runner)
        assert (done.stdout, done.returncode) == ("package.main ['x', '-m']\n__main__ ['x', '-m']\n", 0)


def test_hanging_exit_handler_is_cut_short(tmp_path: Path) -> None:
    """A handler that waits for ever does not keep a failed process alive, nor its children's pipes."""
    text = "import atexit, threading\natexit.register(threading.Event().wait)\nraise SystemExit(7)\n"
    (tmp_path / "script.py").write_text(text)
    assert run(["script.py"], tmp_path).returncode == 7
