"""The wheel, installed by pip into a clean environment: from triples to predictions in another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.functional.job import sets
from tests.test_packaging import wheel_file  # noqa: F401  a fixture
from tests.toy_kg import ring_triples, write_splits


def environment_with(wheel: Path, folder: Path) -> Path:
    """Create a virtual environment with the wheel; returns its folder of commands.

    The wheel's requirements are those of the running environment, for which no network is needed. A .pth file
    adds a folder, but not what .pth files in it add: a dglkge installed from sources stays invisible.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    install += ["--no-deps", "--no-compile", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    (packages / "requirements.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder / "bin"


def test_an_installed_wheel_needs_no_repository(wheel_file, tmp_path):  # noqa: F811
    commands, folder = environment_with(wheel_file, tmp_path / "venv"), tmp_path / "elsewhere"
    folder.mkdir()
    write_splits(folder / "triples", ring_triples())
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(command: str, *words: str) -> str:
        done = subprocess.run(
            [str(commands / command), *words],
            cwd=folder,
            env={**clean, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("python", "-c", "import dglkge; print(dglkge.__file__)")
    assert where.startswith(str(tmp_path / "venv"))
    assert "fb15k237/complex" in run("dglkge", "recipes")
    assert run("dglkge", "--version").startswith("dglkge ")
    assert run("dglkge-launch", "--help").startswith("usage: dglkge-launch")
    run("dglkge", "partition", "--input", "triples", "--output", "data/ring")
    more = "--dataset data/ring --input triples/test.tsv --name more --output data/more"
    run("dglkge", "extend", *more.split())
    # No compiled loops: they would be compiled anew in a new folder.
    settings = ["dataset=data/ring", "output=runs/ring", "training.kernels=reference"]
    settings += ["training.num_epochs=1", "model.dimension=16"]
    out = run("dglkge", "train", "--recipe", "stdlib/complex", *sets(settings), "--num_trainers", "1")
    assert "checkpoint, statistics and metrics are in runs/ring" in out
    report = json.loads(run("dglkge", "evaluate", "runs/ring", "--limit", "3", "--json"))
    assert report["num_triples"] == 3 and report["dataset"] == "ring"
    head, relation, _ = ring_triples().iloc[0]
    query = ["runs/ring", "--head", head, "--relation", relation, "--json"]
    assert len(json.loads(run("dglkge", "predict", *query))["answers"]) == 10
    assert sorted(path.name for path in folder.iterdir()) == ["data", "runs", "triples"]
