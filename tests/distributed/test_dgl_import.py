"""DGL with any torch: in this process, in scripts that import nothing of ours, and in their children."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dglkge.distributed import dgl_import
from dglkge.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "dglkge" / "launch" / "script_runner.py"


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(text)
    variables = {name: value for name, value in os.environ.items() if name != "DGLBACKEND"}
    variables |= {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(RUNNER), str(path)], env=variables, capture_output=True, text=True, timeout=120
    )


def test_scripts_of_others_and_their_children(tmp_path: Path) -> None:
    """The script imports DGL first and nothing of ours; its children import the script again."""
    done = run_script(
        tmp_path,
        "import dgl, multiprocessing\n"
        "def work(queue):\n"
        "    queue.put(dgl.graph(([0, 1], [1, 2])).num_edges())\n"
        "if __name__ == '__main__':\n"
        "    print(dgl.backend.backend_name)\n"
        "    for method in ('spawn', 'forkserver'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        queue = context.Queue()\n"
        "        child = context.Process(target=work, args=(queue,))\n"
        "        child.start()\n"
        "        print(queue.get(timeout=60))\n"
        "        child.join(60)\n"
        "        print(child.exitcode)\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["pytorch", *["2", "0"] * 2]
    assert not (tmp_path / ".dgl").exists()


def test_data_sets_of_dgl_are_loaded_at_their_first_use_and_graphbolt_is_refused(tmp_path: Path) -> None:
    """DGL imports without both and without pandas; names of data sets are there all the same, wrong ones not.

    GraphBolt is refused with one line.
    """
    calls = [
        "initialize('ip_config.txt', 1000, None, 1, True)",
        "load_partition('part.json', 0, use_graphbolt=True)",
        "partition_graph(dgl.graph(([0], [1])), 'g', 1, 'out', use_graphbolt=True)",
        "dgl_partition_to_graphbolt.__globals__['gb'].load_from_shared_memory('g')",
        "initialize('ip_config.txt', use_graphbolt=True)",
    ]
    text = (
        "import dgl, dgl.distributed, sys\n"
        "print('pandas' in sys.modules, hasattr(dgl.data.utils, 'save_graphs'))\n"
        "import dgl.data\n"
        "print('pandas' in sys.modules)\n"
        "from dgl.data import FB15k237Dataset\n"
        "print('pandas' in sys.modules, FB15k237Dataset.__name__, dgl.data.TUDataset.__name__)\n"
        "try:\n    from dgl.data import NoSuchDataset\nexcept ImportError as error:\n    print(error)\n"
        "try:\n    dgl.data.NoSuchDataset\nexcept AttributeError as error:\n    print(error)\n"
    )
    for call in calls[:-1]:
        text += f"try:\n    dgl.distributed.{call}\nexcept Exception as error:\n    print(error)\n"
    done = run_script(tmp_path, f"{text}dgl.distributed.{calls[-1]}\n")
    first, second, third, missing, absent, *refusals = done.stdout.splitlines()
    assert (first, second, third) == ("False True", "False", "True FB15k237Dataset TUDataset")
    assert "cannot import name 'NoSuchDataset' from 'dgl.data'" in missing
    assert absent == "module 'dgl.data' has no attribute 'NoSuchDataset'"
    assert refusals == [dgl_import.REASON] * 4
    assert done.stderr.splitlines() == [f"dglkge: error: {dgl_import.REASON}"] and done.returncode == 2
    assert dgl_import.REASON.startswith("use_graphbolt=True needs dgl.graphbolt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "version, words, python",
    [
        ("1.1.3", "dgl 1.1.3 is", (3, 12)),
        ("", "it is not", (3, 12)),
        ("", "it is not", (3, 14)),
        ("2.1.0+cpu", "", (3, 14)),
        ("2.4.0", "", (3, 12)),
    ],
)
def test_training_needs_dgl(monkeypatch, version, words, python):
    def version_of(name: str) -> str:
        if not version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(dgl_import.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "version_info", python)
    if not words:
        dgl_import.require_dgl("dglkge train")
        return
    with pytest.raises(InputError) as caught:
        dgl_import.require_dgl("dglkge train")
    then = " and dglkge-engine" if python == (3, 14) else ""
    assert str(caught.value) == (
        f"dglkge train needs dgl 2.1.0, and {words} installed here: pip install 'dglkge[train]'{then}"
    )
