"""What ``make lint`` does not hold of imports: circles, requirements, and that few modules are imported."""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys

import pytest

from tests.contract.source_tree import ROOT

DISTRIBUTIONS = {"faiss": "faiss-cpu", "mlflow": "mlflow-skinny", "sklearn": "scikit-learn", "yaml": "pyyaml"}
BRIDGES = {"pykeen", "torch_geometric"}
"""Programs that take a run as a model of theirs: who calls for that has them."""
DOOR = {"dglkge.distributed", "dglkge.distributed.dgl_import"}
"""What ``import dglkge`` imports of its own, so that DGL loads with any torch."""


@pytest.fixture(scope="module")
def graph():
    grimp = pytest.importorskip("grimp", reason="import-linter, of the extra dev, is not installed here")
    return grimp.build_graph("dglkge", include_external_packages=True)


def test_no_circles(graph):
    modules = {name for name in graph.modules if not graph.is_module_squashed(name)} - {"dglkge"}
    imported = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    graphlib.TopologicalSorter(imported).prepare()


def test_outside_packages_are_required_by_pyproject(graph):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.")[0]
    required = set(re.findall(r'"([A-Za-z0-9_-]+)[^"]*"', text)) | set(sys.stdlib_module_names)
    outside = {name.partition(".")[0] for name in graph.modules if graph.is_module_squashed(name)}
    assert "torch" in outside
    assert {DISTRIBUTIONS.get(name, name) for name in outside} - required <= {"pydantic_core", *BRIDGES}


def test_nothing_is_imported_through_the_front_door():
    """``from dglkge import x`` may import everything; the version is there without that."""
    through = re.compile(r"^\s*from dglkge import (?!__version__$)", re.MULTILINE)
    paths = [path for path in (ROOT / "dglkge").rglob("*.py") if path != ROOT / "dglkge" / "__init__.py"]
    assert len(paths) > 200 and not [path for path in paths if through.search(path.read_text())]


def test_files_are_read_without_torch_distributed():
    for name in ("layout", "hdf5_format", "storage", "reader"):
        assert "torch.distributed" not in (ROOT / "dglkge" / "checkpoint" / f"{name}.py").read_text(), name


WALL = """
import importlib, sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        ours = name.startswith(("dglkge.", "partition_tools"))
        if ours and not name.startswith(tuple(sys.argv[1].split(","))):
            raise ImportError("behind the wall: " + name)

sys.meta_path.insert(0, Wall())
for name in sys.argv[2:]:
    importlib.import_module(name)
print(*sys.modules)
"""


def modules_after(allowed: set[str], *modules: str) -> set[str]:
    """Import modules where nothing else of dglkge can be imported; returns what is loaded then."""
    command = [sys.executable, "-c", WALL, ",".join(allowed), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ImportError(done.stderr)
    return set(done.stdout.split())


def test_optim_is_imported_alone():
    files = (ROOT / "dglkge" / "optim").glob("*.py")
    modules = {f"dglkge.optim.{path.stem}" for path in files if path.stem != "__init__"}
    assert modules <= modules_after({*DOOR, "dglkge.optim", "dglkge.kernels"}, "dglkge.optim", *modules)
    with pytest.raises(ImportError, match=r"behind the wall: dglkge\.optim"):
        modules_after(DOOR, "dglkge.optim")


@pytest.mark.parametrize("name", ["dglkge", "dglkge.checkpoint.layout", "dglkge.data.dataset_files"])
def test_these_are_imported_without_large_packages(name):
    """Others import dglkge.optim alone; node programs, which import names, start at once."""
    loaded = {module.partition(".")[0] for module in modules_after({"dglkge."}, name)}
    assert "dglkge" in loaded
    assert not loaded & set("dgl h5py numba numpy pandas pyarrow pydantic rich torch yaml".split())
