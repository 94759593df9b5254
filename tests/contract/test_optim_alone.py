"""dglkge.optim works where nothing else of dglkge can be imported."""

from __future__ import annotations

import subprocess
import sys

from tests.contract.source_tree import ROOT, sources

LOOPS = (
    "dglkge.kernels",
    *(
        f"dglkge.kernels.{name}"
        for name in (
            "chains",
            "hashing",
            "jit",
            "narrow_rows",
            "rows",
            "rules",
            "updates",
        )
    ),
)
PROGRAM = """
import importlib, sys

ALONE = ("dglkge.optim.", "dglkge.kernels.")

# What dglkge itself imports, so that DGL loads with any torch.
DOOR = ("dglkge.distributed", "dglkge.distributed.dgl_import")

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name in DOOR:
            return None
        if name.startswith(("dglkge.", "partition_tools")) and not (name + ".").startswith(ALONE):
            raise ImportError("behind the wall: " + name)

sys.meta_path.insert(0, Wall())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(name for name in sys.modules if name.split(".")[0] == "dglkge"))
"""


def import_behind_wall(*modules: str) -> subprocess.CompletedProcess[str]:
    """Import modules in a process that can import nothing of dglkge but its optimizers and their loops."""
    command = [sys.executable, "-c", PROGRAM, *modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_optim_is_imported_alone():
    modules = [source.module for source in sources("dglkge/optim")]
    done = import_behind_wall("dglkge.optim", *modules)
    assert done.returncode == 0, done.stderr
    door = {"dglkge.distributed", "dglkge.distributed.dgl_import"}
    assert done.stdout.split() == sorted({"dglkge", "dglkge.optim", *door, *LOOPS, *modules})


def test_the_wall_stands():
    done = import_behind_wall("dglkge.errors")
    assert done.returncode != 0
    assert "behind the wall: dglkge.errors" in done.stderr
