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


@pytest.fixture
def copy(tmp_path):
    """A folder with the Makefile and pyproject.toml alone."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def steps(folder: Path, *arguments: str) -> list[str]:
    """The commands that make would run."""
    # A make above this test, `make test` for one, must not pass its flags on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFL"))}
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "target, venv, words",
    [
        ("test", ".venv", "'torch==2.13.0' -e '.[train,test,dev]'"),
        ("demo", ".venv", "'torch==2.13.0' -e '.[train,test,dev]'"),
        ("test-dgl", ".venv", "'torch==2.13.0' -e '.[train,test,dev]'"),
        ("test-cluster", ".venv", "'torch==2.13.0' -e '.[train,test,dev]'"),
        ("test-lowest", ".venv-lowest", "-c .venv-lowest/lowest.txt -e '.[train,test]'"),
        ("test-pbg", ".venv-pbg", "'torch==2.13.0' -e '.[train,test]' 'setuptools<81' wheel"),
    ],
)
def test_installs_once(copy, target, venv, words):
    first = "\n".join(steps(copy, target))
    assert f"-m venv {venv}\n" in first and f"{venv}/bin/python -m pip install -q  {words}" in first
    (copy / venv).mkdir()
    (copy / venv / "installed").touch()
    again = "\n".join(steps(copy, target))
    assert again and "pip" not in again and "-m venv" not in again


def python_of_version(folder: Path, version: str) -> Path:
    """An interpreter that says it is another version: the one that runs this test, told so."""
    path = folder / f"python{version}"
    major, minor = version.split(".")
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = ({major}, {minor}, 0)\n"
        "exec(sys.argv[sys.argv.index('-c') + 1])\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("version, is_allowed", [("3.9", False), ("3.10", True), ("3.15", True)])
def test_no_newer_interpreter_is_refused(copy, version, is_allowed):
    python = python_of_version(copy, version)
    done = subprocess.run(
        ["make", "test", f"PYTHON={python}"], cwd=copy, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "Traceback" not in done.stdout
    line = f"{python} is Python {version}: allowed: 3.10 and newer, e.g. make test PYTHON=python3.11"
    assert (done.stderr.splitlines()[0] == line) != is_allowed
    assert (f"{python} -m venv .venv" in done.stdout) == is_allowed
    assert not list(copy.glob(".venv*"))


def test_the_lowest_versions_are_those_of_the_core(copy):
    """The recipe's own line, run: each requirement of the core, and nothing else."""
    (line,) = [line for line in steps(copy, "test-lowest") if line.startswith("sed ")]
    (copy / ".venv-lowest").mkdir()
    subprocess.run(["sh", "-c", line], cwd=copy, check=True, timeout=60)
    core = re.findall(r"^dependencies = \[\n(.*?)^\]", (copy / "pyproject.toml").read_text(), re.M | re.S)[0]
    expected = [word.replace(">=", "==") for word in re.findall(r'"([^"]+)"', core)]
    assert (copy / ".venv-lowest" / "lowest.txt").read_text().split() == expected
    assert "torch==2.6" in expected and "numpy==2.0" in expected and len(expected) > 9


def test_the_documentation_is_built_strictly(copy):
    first = "\n".join(steps(copy, "docs"))
    assert "-m venv .venv-docs\n" in first and "mkdocs build --strict" in first


def test_tests_come_after_lint_and_last(copy):
    """So that the last line a reader sees is pytest's."""
    lines = steps(copy, "test")
    assert "pytest" in lines[-1]
    assert [line for line in lines if "ruff check" in line]
    # mypy is a test of tests/contract.
    assert [line.split()[0] for line in steps(copy, "lint")[-2:]] == [".venv/bin/ruff", ".venv/bin/mypy"]


def test_pip_and_pytest_take_flags(copy):
    lines = "\n".join(steps(copy, "test", "PIP_FLAGS=--no-index", "PYTEST_FLAGS=-x tests/data"))
    assert "pip install -q --no-index 'torch==2.13.0' -e" in lines and "-n 6 -x tests/data" in lines


def test_help_names_every_target(copy):
    """Its recipe is harmless: run it."""
    done = subprocess.run(["make"], cwd=copy, capture_output=True, text=True, timeout=60)
    targets = re.findall(r"^\.PHONY: (.*)$", (copy / "Makefile").read_text(), re.MULTILINE)[0].split()
    assert done.returncode == 0
    assert re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE) == targets


@pytest.mark.parametrize("script", [".ci/run", ".ci/as_user", "benchmarks/demo.sh"])
def test_scripts_parse_and_stop_at_the_first_error(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=60)
    assert "set -euo pipefail" in (ROOT / script).read_text()


def test_ci_runs_the_documentation_and_ends_with_pytest():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines.index("make docs") < lines.index("for target in test-user test-nohup; do")
    assert [line.strip() for line in lines if "exec " in line] == ["exec make test"]


MAKE = """#!/bin/sh
echo "$@" >> calls
case " $FAIL " in *" $1 "*) exit 1;; esac
echo "12 passed"
"""


@pytest.mark.parametrize(
    "fail, status, last",
    [
        ("", 0, "12 passed"),
        ("test", 1, ""),
        ("test-user", 1, "FAILED: make test-user"),
        ("test-nohup test", 1, "FAILED: make test-nohup test"),
    ],
)
def test_ci_runs_every_target_and_fails_if_one_does(tmp_path, fail, status, last):
    """With a make that writes down what it was asked for."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "make").write_text(MAKE)
    (tmp_path / "bin" / "make").chmod(0o755)
    for name in ("ip", "unshare", "chromium", "apt-get"):  # what is missing would be installed
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAIL": fail}
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "calls").read_text().split() == ["docs", "test-user", "test-nohup", "test"]
    if last:
        assert done.stdout.splitlines()[-1] == last


def test_the_launchers_tests_exist(copy):
    for target in ("test-user", "test-nohup"):
        (line,) = [line for line in steps(copy, target) if "pytest" in line]
        named = [word.partition("::")[0] for word in line.split() if word.startswith("tests/")]
        assert len(named) > 10 and not [name for name in named if not (ROOT / name).exists()]


def test_as_user_runs_a_command_as_nobody():
    """Also where the interpreter lies in a folder that nobody may not enter."""
    if os.geteuid() != 0:
        pytest.skip("root alone can become another user")
    code = (
        "import os, pathlib\n"
        "print(os.getuid(), os.getcwd(), os.access('.', os.W_OK), pathlib.Path.home().owner())\n"
        "raise SystemExit(3)"
    )
    before = set(Path("/tmp").glob("dglkge-user.*"))
    command = [str(ROOT / ".ci" / "as_user"), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout == f"65534 {ROOT} False nobody\n" and done.returncode == 3, done.stderr
    assert set(Path("/tmp").glob("dglkge-user.*")) == before


def test_the_tests_that_call_dgl_exist(copy):
    (line,) = [line for line in steps(copy, "test-dgl") if "pytest" in line]
    named = [word for word in line.split() if word.startswith("tests/")]
    assert len(named) > 10 and not [name for name in named if not (ROOT / name).exists()]


def test_the_workflow_runs_what_ci_runs():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "bash .ci/run" in text and "make test-lowest PYTHON=python" in text
    assert "make test-dgl PYTHON=python TORCH=torch" in text
