"""The package of the wheel alone: partition, train and predict in a folder without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.test_packaging import wheel  # noqa: F401  a fixture
from tests.toy_kg import ring_triples, write_splits


def test_an_installed_wheel_needs_no_repository(wheel, tmp_path):  # noqa: F811
    """From triples to predictions in another folder, with the package from the wheel alone."""
    site, folder = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(site)
    folder.mkdir()
    write_splits(folder / "triples", ring_triples())

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dglkge", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import dglkge; print(dglkge.__file__)"
    command = [sys.executable, "-c", where]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(site))
    run("partition", "--input", "triples", "--output", "data/ring")
    assert "fb15k237/complex" in run("recipes")
    # No compiled loops: they would be compiled anew in a new folder.
    settings = ["dataset=data/ring", "output=runs/ring", "training.kernels=reference"]
    settings += ["training.num_epochs=1", "model.dimension=16"]
    sets = [word for setting in settings for word in ("--set", setting)]
    out = run("train", "--recipe", "stdlib/complex", *sets, "--num_trainers", "1")
    assert "checkpoint, statistics and metrics are in runs/ring" in out
    head, relation, _ = ring_triples().iloc[0]
    answers = json.loads(run("predict", "runs/ring", "--head", head, "--relation", relation, "--json"))
    assert len(answers["answers"]) == 10
    assert sorted(path.name for path in folder.iterdir()) == ["data", "runs", "triples"]
