"""A script under the runner behaves as under ``python``, except for DGL's farewell after a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dglkge.launch import script_runner

TIMEOUT_SECONDS = 30


def run(arguments: list[str], folder: Path, runner: bool = True) -> subprocess.CompletedProcess:
    command = [sys.executable, *([script_runner.__file__] if runner else []), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    "body",
    [
        "print(sys.argv, __name__, __file__, sys.path[0], neighbour.VALUE)",
        "sys.exit()",
        "sys.exit(3)",
        "sys.exit('no luck')",
        "raise ValueError('broken')",
        "raise KeyboardInterrupt",
        "1 +",
        "atexit.register(print, 'farewell'); raise SystemExit(4)",
        "print('to a pipe', end=''); raise SystemExit(5)",
        "threading.Thread(target=print, args=('thread',)).start()",
    ],
)
def test_like_python(tmp_path: Path, body: str) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(f"import atexit, sys, threading\nimport neighbour\ndef thing(): ...\n{body}\n")
    arguments = ["script.py", "a b", "--c", "$d"]
    expected, got = (run(arguments, tmp_path, runner) for runner in (False, True))
    status = 130 if "KeyboardInterrupt" in body else expected.returncode  # python dies of the signal
    assert got.returncode == status
    assert got.stdout == expected.stdout
    assert got.stderr == expected.stderr


def test_main_module(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, pickle, __main__\n"
        "def thing(): ...\n"
        "copy = lambda: pickle.loads(pickle.dumps(thing))\n"
        "atexit.register(lambda: print(__main__.thing is thing, copy() is thing))\n"
    )
    assert run(["script.py"], tmp_path).stdout == "True True\n"


def test_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("import sys\nfrom package import main\nprint(__name__, sys.argv[1:])\n")
    expected, got = (run(["-m", "package.main", "x", "-m"], tmp_path, runner) for runner in (False, True))
    assert got.stdout == expected.stdout == "package.main ['x', '-m']\n__main__ ['x', '-m']\n"
    assert got.returncode == 0


def test_children_that_are_spawned_find_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing as mp\n"
        "def work(queue): queue.put('worked')\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn'); queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,)); child.start()\n"
        "    print(queue.get(timeout=20)); child.join(); print(child.exitcode)\n"
    )
    assert run(["script.py"], tmp_path).stdout == "worked\n0\n"


FAKE_DGL = """
import atexit, sys, types
context = types.ModuleType("dgl.distributed.dist_context")
def exit_client(): print("farewell to all")
context.exit_client = exit_client
sys.modules["dgl.distributed.dist_context"] = context
atexit.register(print, "other handler")
atexit.register(exit_client)
"""


@pytest.mark.parametrize(
    ("end", "output", "status"),
    [
        ("", "farewell to all\nother handler\n", 0),
        ("sys.exit(3)", "other handler\n", 3),
        ("1 / 0", "other handler\n", 1),
    ],
)
def test_a_failed_process_skips_dgls_farewell(tmp_path: Path, end: str, output: str, status: int) -> None:
    """DGL's exit handler, which waits for every trainer, runs only after success; the others always."""
    (tmp_path / "script.py").write_text(FAKE_DGL + end)
    done = run(["script.py"], tmp_path)
    assert (done.stdout, done.returncode) == (output, status)


def test_hanging_exit_handler_is_cut_short(tmp_path: Path) -> None:
    """A handler that waits for ever does not keep a failed process alive, nor its children's pipes."""
    (tmp_path / "script.py").write_text(
        "import atexit, threading\natexit.register(threading.Event().wait)\nraise SystemExit(7)\n"
    )
    assert run(["script.py"], tmp_path).returncode == 7
