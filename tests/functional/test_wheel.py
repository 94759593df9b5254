"""The wheel: what it holds, requires and installs; installed by pip, it goes from triples to predictions."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import dglkge
from tests.functional.job import sets
from tests.toy_kg import REPOSITORY, ring_triples, write_splits

DATA = "py.typed schema.json datasets.yaml prefixes.yaml recipes/*/*.yaml model_card.md page/*".split()
PACKAGE_FILES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for pattern in ("*.py", "report/page.[!p]*", *DATA)
    for path in (REPOSITORY / "dglkge").rglob(pattern)
)


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, so that the repository keeps no build folder."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("dglkge", "tests", "partition_tools", "examples"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"no wheel: {done.stderr}"
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture
def wheel(wheel_file: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


def info(archive: zipfile.ZipFile, name: str) -> str:
    """Return a file of the wheel's dist-info folder as text."""
    (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    """find_packages passes over a folder without __init__.py."""
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(PACKAGE_FILES)
    assert "dglkge/config/recipes/fb15k237/complex.yaml" in names


def test_reading_requires_torch_and_training_dgl(wheel):
    """Each requirement of the core has a lower bound, none an upper one. torch 2.6 reads pickles safely."""
    metadata = Parser().parsestr(info(wheel, "METADATA"))
    assert metadata["Version"] == dglkge.__version__ and metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text()
    lines = [re.sub(r"[ ()\"']", "", line) for line in metadata.get_all("Requires-Dist")]
    always = [line for line in lines if "extra==" not in line]
    assert not [line for line in always if not re.fullmatch(r"[a-z0-9]+>=[0-9.]+", line)]
    assert "torch>=2.6" in always and "numpy>=2.0" in always
    assert not [line for line in always if line.startswith(("dgl", "scipy", "packaging"))]
    assert [line for line in lines if line.startswith("dgl==2.1.0;") and line.endswith("extra==train")]


def test_commands_resolve(wheel):
    parser = configparser.ConfigParser()
    parser.read_string(info(wheel, "entry_points.txt"))
    scripts = dict(parser["console_scripts"])
    assert set(scripts) == {"dglkge", "dglkge-engine", "dglkge-launch"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_packaged_script_is_the_one_to_copy():
    """``dglkge train`` runs what examples/train.py shows; only the names of imports differ."""
    packaged, shown = (
        (REPOSITORY / name).read_text(encoding="utf-8").partition("def main(")[2].partition("\n\n\n")[0]
        for name in ("dglkge/cli/training_script.py", "examples/train.py")
    )
    assert len(packaged) > 500 and packaged == shown.replace("dglkge.", "")


def environment_with(wheel: Path, folder: Path) -> Path:
    """Create a virtual environment with the wheel; returns its folder of commands.

    The wheel's requirements are those of the running environment, for which no network is needed. A .pth file
    adds a folder, but not what .pth files in it add: a dglkge installed from sources stays invisible.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    install += ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    (packages / "requirements.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder / "bin"


def test_an_installed_wheel_needs_no_repository(wheel_file, tmp_path):
    commands, folder = environment_with(wheel_file, tmp_path / "venv"), tmp_path / "elsewhere"
    write_splits(folder / "triples", ring_triples())
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["OMP_NUM_THREADS"] = "1"

    def run(command: str, *words: str) -> str:
        options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 240}
        done = subprocess.run([str(commands / command), *words], **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("python", "-c", "import dglkge; print(dglkge.__file__)")
    assert where.startswith(str(tmp_path / "venv"))
    assert "fb15k237/complex" in run("dglkge", "recipes")
    assert run("dglkge-launch", "--help").startswith("usage: dglkge-launch")
    run("dglkge", "partition", "--input", "triples", "--output", "data/ring")
    # No compiled loops: they would be compiled anew in a new folder.
    settings = ["dataset=data/ring", "output=runs/ring", "training.kernels=reference"]
    settings += ["training.num_epochs=1", "model.dimension=16"]
    out = run("dglkge", "train", "--recipe", "stdlib/complex", *sets(settings))
    assert "checkpoint, statistics and metrics are in runs/ring" in out
    head, relation, _ = ring_triples().iloc[0]
    query = ["runs/ring", "--head", head, "--relation", relation, "--json"]
    assert len(json.loads(run("dglkge", "predict", *query))["answers"]) == 10
    assert sorted(path.name for path in folder.iterdir()) == ["data", "runs", "triples"]
