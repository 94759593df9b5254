"""Names of shared memory, and DGL's arrays as files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dglkge.distributed.dgl_memory import MOST_NAME_BYTES, named
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
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
import torch
import dglkge
from dgl.distributed import dist_tensor, kvstore, rpc, shared_mem_utils, graph_partition_book
from dglkge.distributed import dgl_memory

prefix, folder = sys.argv[1:3]
dgl_memory.install(prefix, folder)
dgl_memory.install(prefix, folder)
try:
    dgl_memory.install(prefix + "x", folder)
    raise AssertionError("installed twice")
except RuntimeError:
    pass
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
    done = subprocess.run(
        [*warm.python(), "-c", INSTALLED, prefix, folder],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DGLBACKEND": "pytorch"},
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    names = [f"{prefix}ring_node__ID", f"{prefix}table-kvdata-"]
    if in_files:
        assert files == {"/dev/shm": [], folder: sorted([*names, f"{prefix}empty-kvdata-"])}
        assert (tmp_path / names[1]).stat().st_size == 12000
    else:
        assert files == {"/dev/shm": names}


def test_files_that_cannot_be_made(tmp_path: Path) -> None:
    """A full disk is an error at the start, not a SIGBUS later."""
    pytest.importorskip("dgl")
    from dglkge.distributed.dgl_memory import file_array, has_file

    with pytest.raises(OSError, match="No space left|File too large"):
        file_array(str(tmp_path), "table", True, (2**45, 2**10), "float32")
    assert has_file(str(tmp_path), "/table")
    with pytest.raises(FileExistsError):
        file_array(str(tmp_path), "table", True, (3,))
