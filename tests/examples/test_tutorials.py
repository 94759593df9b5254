"""The notebooks of docs/tutorials run from the first cell to the last, and their saved outputs are whole."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.toy_kg import REPOSITORY

FOLDER = REPOSITORY / "docs" / "tutorials"
NEEDS = {"dataframe.ipynb": (), "turtle.ipynb": ("pyoxigraph",)}
"""Modules that not every installation has."""


@pytest.mark.parametrize("name", NEEDS)
def test_the_notebook_runs(name, tmp_path, monkeypatch):
    """Its kernel, and what that starts, are copies of a process that has imported torch and DGL."""
    for package in ("nbformat", "nbclient", "ipykernel", *NEEDS[name]):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv(warm.COPIED_BUILD, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Where the command dglkge is installed; the tests may run without an activated environment.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    shutil.copy(FOLDER / name, tmp_path)
    notebook = nbformat.read(tmp_path / name, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources)
    client.create_kernel_manager()
    client.km.kernel_spec.argv = [*warm.python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()  # raises at the first cell that fails
    assert (tmp_path / "runs").is_dir()
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    errors = [out for cell in codes for out in cell.outputs if out.get("name") == "stderr"]
    assert not errors, errors


@pytest.mark.parametrize("name", NEEDS)
def test_saved_outputs_are_shown_on_the_site(name):
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(NEEDS)
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    shown = json.dumps([cell["outputs"] for cell in codes])
    assert "Traceback" not in shown and "/tmp/" not in shown and str(Path.home()) not in shown
