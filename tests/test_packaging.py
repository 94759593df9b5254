"""What a wheel holds, requires and installs, and that the commands it installs exist."""

from __future__ import annotations

import configparser
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dglkge

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.py",
        "py.typed",
        "schema.json",
        "datasets.yaml",
        "prefixes.yaml",
        "recipes/*/*.yaml",
        "model_card.md",
        "page/*",
        "report/page.[!p]*",
    )
    for path in (ROOT / "dglkge").rglob(pattern)
)


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory) -> Path:
    """The wheel's file, built from a copy of the sources, so that the repository keeps no build folder."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    for name in ("dglkge", "tests", "partition_tools", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.fail(f"no wheel: {done.stderr}")
    (path,) = (copy / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_file):
    """The wheel, opened."""
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


def metadata(archive: zipfile.ZipFile, name: str) -> str:
    """A file of the wheel's dist-info folder as text."""
    (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


def requirements(archive: zipfile.ZipFile, extra: str = "") -> list[str]:
    """What the wheel requires, for an extra or always, without the marker."""
    lines = re.findall(r"^Requires-Dist: (.*)$", metadata(archive, "METADATA"), re.MULTILINE)
    required = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        named = re.search(r"""extra == ['"](\w+)['"]""", marker)
        if (named.group(1) if named else "") == extra:
            required.append(requirement.replace(" ", "").replace("(", "").replace(")", ""))
    return required


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(PACKAGE_FILES)
    assert "dglkge/config/recipes/fb15k237/complex.yaml" in names


def test_every_folder_with_code_is_a_package():
    """find_packages passes over a folder without __init__.py, and the wheel then lacks it."""
    folders = {(ROOT / name).parent for name in PACKAGE_FILES if name.endswith(".py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_wheel_names_version_license_and_python(wheel):
    text = metadata(wheel, "METADATA")
    assert re.search(rf"^Version: {re.escape(dglkge.__version__)}$", text, re.MULTILINE)
    assert re.search(r"^Requires-Python: >=3\.10$", text, re.MULTILINE)
    assert re.search(r"^License-Expression: Apache-2\.0$", text, re.MULTILINE)
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_reading_requires_torch_and_training_dgl(wheel):
    """Each requirement of the core has a lower bound, none an upper one. torch 2.6 reads pickles safely."""
    always = requirements(wheel)
    assert not [line for line in always if not re.fullmatch(r"[a-z0-9]+>=[0-9.]+", line)]
    assert "torch>=2.6" in always and "numpy>=2.0" in always
    assert "dgl==2.1.0" in requirements(wheel, "train")
    assert not [line for line in always if line.startswith(("dgl", "scipy", "packaging"))]


def test_commands_resolve(wheel):
    parser = configparser.ConfigParser()
    parser.read_string(metadata(wheel, "entry_points.txt"))
    scripts = dict(parser["console_scripts"])
    assert set(scripts) == {"dglkge", "dglkge-engine", "dglkge-launch"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_packaged_script_is_the_one_to_copy():
    """``dglkge train`` runs what examples/train.py shows; only the names of imports differ."""
    packaged, shown = (
        (ROOT / name)
        .read_text(encoding="utf-8")
        .partition("def main(argv: Sequence[str] | None = None) -> int:")[2]
        .partition("\n\n\n")[0]
        for name in ("dglkge/cli/training_script.py", "examples/train.py")
    )
    assert len(packaged) > 500 and packaged == shown.replace("dglkge.", "")
