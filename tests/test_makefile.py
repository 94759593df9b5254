"""What make does, without doing it: the order of its steps, and when it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH = "'torch==2.13.0' -e '.[train,test"


@pytest.fixture
def copy(tmp_path):
    """A folder with the Makefile and pyproject.toml alone."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # A make above this test, `make test` for one, must not pass its flags on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFL"))}
    environment |= variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def steps(folder: Path, *arguments: str) -> list[str]:
    """The commands that make would run."""
    done = run(folder, "make", "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "target, venv, words",
    [
        ("test", ".venv", f"{TORCH},dev]'"),
        ("test-lowest", ".venv-lowest", "-c .venv-lowest/lowest.txt -e '.[train,test]'"),
        ("test-pbg", ".venv-pbg", f"{TORCH}]' 'setuptools<81' wheel"),
    ],
)
def test_installs_once(copy, target, venv, words):
    first = "\n".join(steps(copy, target))
    assert f"-m venv {venv}\n" in first and f"{venv}/bin/python -m pip install -q  {words}" in first
    (copy / venv).mkdir()
    (copy / venv / "installed").touch()
    again = "\n".join(steps(copy, target))
    assert again and "pip" not in again and "-m venv" not in again


@pytest.mark.parametrize("version, is_allowed", [("3.9", False), ("3.10", True), ("3.15", True)])
def test_no_newer_interpreter_is_refused(copy, version, is_allowed):
    """With the interpreter that runs this test, told that it is another version."""
    python = copy / f"python{version}"
    told = f"import sys\nsys.version_info = {tuple(map(int, version.split('.')))}\n"
    python.write_text(f"#!{sys.executable}\n{told}exec(sys.argv[sys.argv.index('-c') + 1])\n")
    python.chmod(0o755)
    done = run(copy, "make", "test", f"PYTHON={python}")
    assert done.returncode == 2 and "Traceback" not in done.stdout
    line = f"{python} is Python {version}: allowed: 3.10 and newer, e.g. make test PYTHON=python3.11"
    assert (done.stderr.splitlines()[0] == line) != is_allowed
    assert (f"{python} -m venv .venv" in done.stdout) == is_allowed


def test_the_lowest_versions_are_those_of_the_core(copy):
    """The recipe's own line, run: each requirement of the core, and nothing else."""
    (line,) = [line for line in steps(copy, "test-lowest") if line.startswith("sed ")]
    (copy / ".venv-lowest").mkdir()
    subprocess.run(["sh", "-c", line], cwd=copy, check=True, timeout=60)
    core = re.findall(r"^dependencies = \[\n(.*?)^\]", (copy / "pyproject.toml").read_text(), re.M | re.S)[0]
    expected = [word.replace(">=", "==") for word in re.findall(r'"([^"]+)"', core)]
    assert (copy / ".venv-lowest" / "lowest.txt").read_text().split() == expected
    assert "torch==2.6" in expected and "numpy==2.0" in expected and len(expected) > 9


def test_tests_come_after_lint_and_last(copy):
    """So that the last line a reader sees is pytest's."""
    lint = [f".venv/bin/{name}" for name in ("ruff", "ruff", "lint-imports", "mypy")]
    assert [line.split()[0] for line in steps(copy, "test")[-5:]] == [*lint, ".venv/bin/python"]
    lines = "\n".join(steps(copy, "test", "PIP_FLAGS=--no-index", "PYTEST_FLAGS=-x tests/data"))
    assert f"pip install -q --no-index {TORCH}" in lines and lines.endswith("-m pytest -n 4 -x tests/data")


def test_help_names_every_target(copy):
    """Its recipe is harmless: run it."""
    done = run(copy, "make")
    targets = re.findall(r"^\.PHONY: (.*)$", (copy / "Makefile").read_text(), re.MULTILINE)[0].split()
    assert re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE) == targets


@pytest.mark.parametrize("target", ["test-fast", "test-user", "test-nohup", "test-dgl"])
def test_files_of_a_part_of_the_tests_exist(copy, target):
    (line,) = [line for line in steps(copy, target) if "pytest" in line]
    named = [word.partition("::")[0] for word in line.split() if word.startswith("tests/")]
    assert len(named) > 10 and not [name for name in named if not (ROOT / name).exists()]


MAKE = """#!/bin/sh
echo "$@" >> calls
echo "summary of $1"
case " $FAIL " in *" $1 "*) exit 2;; esac
"""


SUMMARY, FAILED = "summary of test-nohup", "FAILED: make test-user docs"


@pytest.mark.parametrize(
    "fail, status, before", [("", 0, SUMMARY), ("test", 2, SUMMARY), ("docs test-user", 1, FAILED)]
)
def test_ci_runs_every_target_and_ends_with_the_summary_of_all_tests(tmp_path, fail, status, before):
    """With a make that writes down what it was asked for."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for name in ("make", "ip", "unshare", "chromium", "apt-get"):  # what is missing would be installed
        (tmp_path / "bin" / name).write_text(MAKE if name == "make" else "#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAIL": fail}
    done = run(tmp_path, ".ci/run", **variables)
    assert done.returncode == status, done.stderr
    first, *beside, last = (tmp_path / "calls").read_text().split()
    assert (first, last) == (".venv/installed", "test")
    assert sorted(beside) == ["docs", "lint", "test-nohup", "test-user"]
    lines = done.stdout.splitlines()
    assert lines[-1] == "summary of test" and before in lines


def test_as_user_runs_a_command_as_nobody():
    """Also where the interpreter lies in a folder that nobody may not enter."""
    if os.geteuid() != 0:
        pytest.skip("root alone can become another user")
    code = "import os, pathlib; home = pathlib.Path.home()\n"
    code += "print(os.getuid(), os.getcwd(), os.access('.', os.W_OK), home.owner()); exit(3)"
    before = set(Path("/tmp").glob("dglkge-user.*"))
    done = run(ROOT, str(ROOT / ".ci" / "as_user"), sys.executable, "-c", code)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout == f"65534 {ROOT} False nobody\n" and done.returncode == 3, done.stderr
    assert set(Path("/tmp").glob("dglkge-user.*")) == before


def test_scripts_stop_at_the_first_error_and_the_workflow_runs_what_ci_runs():
    for script in (".ci/run", ".ci/as_user", "benchmarks/demo.sh"):
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=60)
        assert "set -euo pipefail" in (ROOT / script).read_text()
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "bash .ci/run" in text and "make test-lowest PYTHON=python" in text
    assert "make test-dgl PYTHON=python TORCH=torch" in text
