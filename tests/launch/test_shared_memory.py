"""Room in shared memory, and removal of what a job has left there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dglkge.distributed.jobs import JobEntry, Registration
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.launch.table_storage import (
    check_shared_memory,
    remove_job_segments,
    remove_segments,
    segment_names,
)


def test_names_and_removal(tmp_path: Path) -> None:
    """Files count, folders and links do not; a name that is gone already is no error."""
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert segment_names(str(tmp_path)) == {"a", "b"}
    assert remove_segments({"b", "gone"}, str(tmp_path)) == ["b"]
    assert segment_names(str(tmp_path)) == {"a"}


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


def test_segments_of_a_job(tmp_path: Path) -> None:
    """Those of its id go; other jobs' and other programs' stay."""
    job, other = new_nonce(), new_nonce()
    own, foreign, unknown = (f"dglkge-{job}-0~x-kvdata-", f"dglkge-{other}-0~x-kvdata-", "ring_node_meta")
    for name in (own, foreign, unknown):
        (tmp_path / name).touch()
    assert remove_job_segments("", str(tmp_path)) == []
    assert remove_job_segments(job, str(tmp_path)) == [own]
    assert segment_names(str(tmp_path)) == {foreign, unknown}
