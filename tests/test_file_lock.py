"""Locks on file systems that have none, and on those that fail."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dglkge.file_lock import try_lock, wait_for_lock


@pytest.mark.parametrize("lock", [try_lock, lambda file: wait_for_lock(file, 0.1)])
def test_a_file_system_without_locks(lock, tmp_path: Path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    """Commands go on with a warning; any other failure of the disk is an error."""

    def fail(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with open(tmp_path / "lock", "w") as file:
        number = errno.ENOLCK
        assert lock(file)
        assert f"the file system of {tmp_path}/lock has no locks (No locks available)" in caplog.text
        number = errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            lock(file)
        number = errno.EWOULDBLOCK
        assert not lock(file)
