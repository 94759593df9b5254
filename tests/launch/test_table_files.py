"""Tables of a job on a machine: room, their place, and removal of what killed jobs leave."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from dglkge.distributed.jobs import SHARED_MEMORY_FOLDER, JobEntry, Registration
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.launch import table_storage
from dglkge.launch.machine import MachineJob
from dglkge.launch.table_storage import MachineNeeds, TableFolder, usual_folders


def test_stale_folders_go_and_held_ones_stay(tmp_path: Path) -> None:
    folders = [TableFolder(tmp_path, new_nonce()) for _ in range(5)]
    killed, removed, hidden, elsewhere, young = (folder.path for folder in folders)
    for folder in folders:
        (folder.path / "table").write_bytes(b"x")
        os.close(folder._lock)
    other = tmp_path / "dglkge-mine"
    other.mkdir()
    (removed / "lock").unlink()  # killed while it removed the folder
    hidden = hidden.rename(hidden.with_name(f".{hidden.name}"))  # killed while it made the folder
    elsewhere = elsewhere.rename(f"{elsewhere.parent}/dglkge-{new_nonce()}-{'0' * 8}-x")
    young = young.rename(young.with_name(f".{young.name}"))
    os.utime(hidden, (0, 0))
    first = TableFolder(tmp_path, new_nonce())
    assert not killed.exists() and not removed.exists() and not hidden.exists()
    # Another host's lock may not be seen here, and one that is still hidden may be in the making.
    assert other.exists() and elsewhere.exists() and young.exists()
    second = TableFolder(tmp_path, new_nonce())
    assert first.path.exists() and first.path != second.path
    assert (first.path.stat().st_mode & 0o777) == 0o700
    for folder in (first, second):
        folder.remove()
    assert sorted(tmp_path.iterdir()) == sorted([young, other, elsewhere])


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot make a folder for tables in .*/file/sub: Not a directory"):
        TableFolder(tmp_path / "file" / "sub", new_nonce())
    absent = tmp_path / "absent" / "deeper"
    assert table_storage.free_bytes(absent) > 0
    assert table_storage.free_bytes(Path("/proc/self/nothing")) == 0 or os.geteuid() == 0
    assert table_storage.roomy_folder([absent, tmp_path], 1) == absent
    with pytest.raises(InputError, match=rf"^files take \S+ GB, and none of {absent}, {tmp_path} has that"):
        table_storage.roomy_folder([absent, tmp_path], 2**62)
    monkeypatch.setattr(tempfile, "tempdir", SHARED_MEMORY_FOLDER)
    in_memory = Path(SHARED_MEMORY_FOLDER)
    assert in_memory in usual_folders() and in_memory not in usual_folders(on_disk=True)


def test_claims(tmp_path: Path) -> None:
    job = MachineJob()
    folders = (str(tmp_path),)
    assert job.claim(MachineNeeds(0)) == ("", "")
    needs = MachineNeeds(2**20, structure_bytes=2**10, storage="disk", table_folders=folders)
    assert job.claim(needs)[1] == f"tables are files in {tmp_path} (0.00 GB): tables.storage is disk"
    assert list(tmp_path.iterdir()) == []  # a dry run
    with pytest.raises(InputError, match=r"^the tables need \S+ GB of shared memory, /dev/shm has \S+ GB f"):
        job.claim(MachineNeeds(2**60))
    with pytest.raises(InputError, match=rf"files take \S+ GB, and none of {tmp_path} has that room: give"):
        job.claim(MachineNeeds(2**60, structure_bytes=1, table_folders=folders))


def test_room_beside_other_jobs(tmp_path: Path) -> None:
    """What another job has planned and not yet allocated is not free; the job's own plan is."""
    job, free = new_nonce(), shutil.disk_usage(tmp_path).free
    other = Registration(JobEntry(job, shared_memory_bytes=free // 2 + 2**30), str(tmp_path))
    try:
        with pytest.raises(InputError, match=r"GB free, of which other jobs will take \d+\.\d\d GB"):
            table_storage.check_shared_memory(free // 2, folder=str(tmp_path))
        table_storage.check_shared_memory(free // 2, job, str(tmp_path))
    finally:
        other.release()
    table_storage.check_shared_memory(free // 2, folder=str(tmp_path))
