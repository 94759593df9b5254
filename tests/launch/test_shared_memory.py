"""Which segments are DGL's, who uses them, and removing them."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from dglkge.distributed.jobs import JobEntry, Registration
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.launch.shared_memory import (
    check_shared_memory,
    dgl_segments,
    remove_job_segments,
    remove_segments,
    segment_names,
    segment_users,
)
from dglkge.launch.watchdog import SHARED_MEMORY_FOLDER, mapped_segments

RING = {
    "node~_N~emb_0-kvdata-",
    "ring",
    "ring_edge__ID",
    "ring_node_meta",
    "ring_node_node_map",
    "ringring_0_csc_data",
}


def test_dgl_names() -> None:
    """DGL's names are known by its marks; names that merely begin alike are not taken for its."""
    others = {"ringo", "ring_tone", "sem.ring", "torch_12_34", "psm_1", "_node_meta_x", "x_node_node_map"}
    assert dgl_segments(RING | others) == RING
    assert dgl_segments(others) == set()
    assert dgl_segments(set()) == set()


def test_names_and_removal(tmp_path: Path) -> None:
    """Files count, folders and links do not; a name that is gone already is no error."""
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert segment_names(str(tmp_path)) == {"a", "b"}
    assert remove_segments({"b", "gone"}, str(tmp_path)) == ["b"]
    assert segment_names(str(tmp_path)) == {"a"}


MAPPER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 4096):
    print("mapped", flush=True)
    sys.stdin.read()
"""


def test_users() -> None:
    """A segment's user is found while it has it mapped, even under an odd name, and not afterwards."""
    name = f"dglkge test {uuid.uuid4().hex}"
    path = os.path.join(SHARED_MEMORY_FOLDER, name)
    with open(path, "wb") as file:
        file.truncate(4096)
    try:
        user = subprocess.Popen(
            [sys.executable, "-c", MAPPER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert user.stdout.readline() == b"mapped\n"
            assert mapped_segments(user.pid) == {name}
            assert segment_users({name, "absent"}) == {name: user.pid}
            os.unlink(path)
            assert mapped_segments(user.pid) == set()
        finally:
            user.kill()
            user.communicate()
        assert segment_users({name}) == {}
        assert mapped_segments(user.pid) == set()
    finally:
        remove_segments([name])


def test_own_mapping() -> None:
    """A file elsewhere and anonymous memory are no segments."""
    before = mapped_segments(os.getpid())
    with mmap.mmap(-1, 4096):
        assert mapped_segments(os.getpid()) == before


@pytest.mark.parametrize("names", [set(), []])
def test_no_names_no_search(names: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without names nothing is searched."""
    monkeypatch.setattr(os, "listdir", lambda _path: pytest.fail("searched"))
    assert segment_users(names) == {}


def test_room_for_the_tables(tmp_path: Path) -> None:
    """What does not fit is refused with both figures."""
    check_shared_memory(0, folder=str(tmp_path))
    with pytest.raises(InputError, match=r"the tables need 1000000000\.00 GB of shared memory, .* GB free$"):
        check_shared_memory(10**18, folder=str(tmp_path))


def test_room_beside_other_jobs(tmp_path: Path) -> None:
    """What another job has planned and not yet allocated is not free; the job's own plan is."""
    job, free = new_nonce(), shutil.disk_usage(tmp_path).free
    other = Registration(JobEntry(job, shared_memory_bytes=free // 2 + 2**30), str(tmp_path))
    try:
        with pytest.raises(InputError, match=r"GB free, of which other jobs will take \d+\.\d\d GB"):
            check_shared_memory(free // 2, folder=str(tmp_path))
        check_shared_memory(free // 2, job, str(tmp_path))
    finally:
        other.release()
    check_shared_memory(free // 2, folder=str(tmp_path))


def test_segments_of_a_job() -> None:
    """Those of its id go, and those that its watchdogs saw; what was there before and other jobs' stay."""
    mark, job, other = uuid.uuid4().hex, new_nonce(), new_nonce()
    own, seen, old, foreign = (
        f"dglkge-{job}-0~x-kvdata-", f"{mark}-seen", f"{mark}-old", f"dglkge-{other}-0~x-kvdata-"
    )  # fmt: skip
    paths = [Path(SHARED_MEMORY_FOLDER, name) for name in (own, seen, old, foreign)]
    for path in paths:
        path.touch()
    try:
        before = segment_names() - {seen, own, foreign}
        assert remove_job_segments(job, {seen, old, foreign}, before) == sorted([own, seen])
        assert [path.exists() for path in paths] == [False, False, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
