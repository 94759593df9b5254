"""DGL with any torch: in this process, in scripts that import nothing of ours, and in their children."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dglkge.distributed import dgl_import
from dglkge.distributed.dgl_memory import MOST_NAME_BYTES, named
from dglkge.errors import InputError
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "dglkge" / "launch" / "script_runner.py"


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(text)
    variables = {name: value for name, value in os.environ.items() if name != "DGLBACKEND"}
    variables |= {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(RUNNER), str(path)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


CHILDREN = """
import dgl, multiprocessing
def work(queue):
    queue.put(dgl.graph(([0, 1], [1, 2])).num_edges())
if __name__ == "__main__":
    print(dgl.backend.backend_name)
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print(queue.get(timeout=60))
        child.join(60)
        print(child.exitcode)
"""


def test_scripts_of_others_and_their_children(tmp_path: Path) -> None:
    done = run_script(tmp_path, CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["pytorch", *["2", "0"] * 2]
    assert not (tmp_path / ".dgl").exists()


def test_data_sets_of_dgl_are_loaded_at_their_first_use_and_graphbolt_is_refused(tmp_path: Path) -> None:
    """DGL imports without both and without pandas; GraphBolt is refused with one line."""
    calls = [
        "load_partition('part.json', 0, use_graphbolt=True)",
        "partition_graph(dgl.graph(([0], [1])), 'g', 1, 'out', use_graphbolt=True)",
        "dgl_partition_to_graphbolt.__globals__['gb'].load_from_shared_memory('g')",
        "initialize('ip_config.txt', use_graphbolt=True)",
    ]
    text = (
        "import dgl, dgl.distributed, sys\n"
        "print('pandas' in sys.modules, hasattr(dgl.data.utils, 'save_graphs'))\n"
        "from dgl.data import FB15k237Dataset\n"
        "print('pandas' in sys.modules, FB15k237Dataset.__name__, dgl.data.TUDataset.__name__)\n"
    )
    refused = ["from dgl.data import NoSuchDataset", "dgl.data.NoSuchDataset"]
    refused += [f"dgl.distributed.{call}" for call in calls[:-1]]
    for statement in refused:
        text += f"try:\n    {statement}\nexcept Exception as error:\n    print(error)\n"
    done = run_script(tmp_path, f"{text}dgl.distributed.{calls[-1]}\n")
    first, second, missing, absent, *refusals = done.stdout.splitlines()
    assert (first, second) == ("False True", "True FB15k237Dataset TUDataset")
    assert "cannot import name 'NoSuchDataset' from 'dgl.data'" in missing
    assert absent == "module 'dgl.data' has no attribute 'NoSuchDataset'"
    assert refusals == [dgl_import.REASON] * 3
    assert done.stderr.splitlines() == [f"dglkge: error: {dgl_import.REASON}"] and done.returncode == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "version, words, python",
    [("1.1.3", "dgl 1.1.3 is", (3, 12)), ("", "it is not", (3, 14)), ("2.1.0+cpu", "", (3, 14))],
)
def test_training_needs_dgl(monkeypatch, version, words, python):
    absent = importlib.metadata.PackageNotFoundError("dgl")
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=[version or absent]))
    monkeypatch.setattr(dgl_import.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "version_info", python)
    if not words:
        dgl_import.require_dgl("dglkge train")
        return
    then = " and dglkge-engine" if python == (3, 14) else ""
    words = rf"needs dgl 2.1.0, and {words} installed here: pip install 'dglkge\[train\]'{then}$"
    with pytest.raises(InputError, match=f"^dglkge train {words}"):
        dgl_import.require_dgl("dglkge train")


PREFIX = "dglkge-0123456789abcdef-0~"


def test_names_begin_with_the_jobs() -> None:
    """Once, behind a slash, and short enough for the kernel; different names stay different."""
    assert named(PREFIX, "node~x-kvdata-") == f"{PREFIX}node~x-kvdata-"
    assert named(PREFIX, "/ring_node_meta") == f"/{PREFIX}ring_node_meta"
    assert named(PREFIX, f"/{PREFIX}ring_node_meta") == f"/{PREFIX}ring_node_meta"
    long = [named(PREFIX, "ä" * 200 + end) for end in "ab"]
    assert len(set(long)) == 2
    assert all(name.startswith(PREFIX) and len(name.encode()) <= MOST_NAME_BYTES for name in long)


INSTALLED = """
import json, os, sys
import pytest, torch
import dglkge
from dgl.distributed import dist_tensor, kvstore, rpc, shared_mem_utils, graph_partition_book
from dglkge.distributed import dgl_memory

prefix, folder = sys.argv[1:3]
dgl_memory.install(prefix, folder)
dgl_memory.install(prefix, folder)
with pytest.raises(RuntimeError):
    dgl_memory.install(prefix + "x", folder)
zeros = dist_tensor._default_init_data((1000, 3), torch.float32)
assert zeros.shape == (1000, 3) and zeros.untyped_storage().nbytes() == 4
maps = []
for is_create in (True, False):
    shared = kvstore.empty_shared_mem("table-kvdata-", is_create, (1000, 3), "float32")
    maps.append(torch.utils.dlpack.from_dlpack(shared.to_dlpack()))
rpc.copy_data_to_shared_memory(maps[0], zeros)
assert not maps[0].any()
rpc.copy_data_to_shared_memory(maps[0], torch.full((), 2.0).expand(1000, 3))
assert bool((maps[1] == 2).all())
rpc.copy_data_to_shared_memory(maps[0], torch.arange(3000.0).view(1000, 3))
assert maps[1][7, 2] == 23
ids = shared_mem_utils._to_shared_mem(torch.arange(9), "/ring_node__ID")
assert graph_partition_book.exist_shared_mem_array("/ring_node__ID")
assert not graph_partition_book.exist_shared_mem_array("/ring_node_other")
empty = kvstore.empty_shared_mem("empty-kvdata-", True, (0, 3), "int64") if folder else None
places = [place for place in ("/dev/shm", folder) if place]
found = {place: sorted(name for name in os.listdir(place) if name.startswith(prefix)) for place in places}
print(json.dumps(found))
if not folder:
    for name in found["/dev/shm"]:
        os.unlink(f"/dev/shm/{name}")
"""


@pytest.mark.parametrize("in_files", [False, True])
def test_arrays_of_dgl(tmp_path: Path, in_files: bool) -> None:
    """Made by one call, found by another, in shared memory or as files; zeros take no memory before that."""
    pytest.importorskip("dgl")
    folder = str(tmp_path) if in_files else ""
    prefix = f"dglkge-{os.urandom(8).hex()}-0~"
    command = [*warm.python(), "-c", INSTALLED, prefix, folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DGLBACKEND": "pytorch"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    names = [f"{prefix}ring_node__ID", f"{prefix}table-kvdata-"]
    in_folder = {"/dev/shm": [], folder: [f"{prefix}empty-kvdata-", *names]}
    assert files == (in_folder if in_files else {"/dev/shm": names})
    assert not in_files or (tmp_path / names[1]).stat().st_size == 12000


def test_files_that_cannot_be_made(tmp_path: Path) -> None:
    pytest.importorskip("dgl")
    from dglkge.distributed.dgl_memory import file_array, has_file

    with pytest.raises(OSError, match="No space left"):
        file_array(str(tmp_path), "table", True, (2**45, 2**10), "float32")
    assert not has_file(str(tmp_path), "/table")
    file_array(str(tmp_path), "table", True, (3,))
    with pytest.raises(FileExistsError):
        file_array(str(tmp_path), "table", True, (3,))
