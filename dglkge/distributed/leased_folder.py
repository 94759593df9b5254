"""Atomic and durable writing of files to a folder, while the job holds the run's lease."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dglkge.checkpoint import layout
from dglkge.distributed.lease import Lease
from dglkge.errors import write_errors


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    # A read-only descriptor is enough for fsync on Linux, and the only kind that a folder has.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, target: Path, lease: Lease | None = None) -> None:
    """Give a written file its name, durably, if this job still holds the lease of the folder."""
    # The content must be on the disk before the name: else a power cut could leave an empty file.
    sync(temporary)
    # Checked after the flush, which may take minutes: the time between this check and the rename is what a
    # job that lost its lease could still misuse.
    if lease is not None:
        lease.check()
    os.replace(temporary, target)
    # The rename itself is durable only when the folder is flushed.
    sync(target.parent)


class LeasedFolder:
    """A folder, which need not exist, in which a job writes while it holds the run's lease.

    The lease's nonce is part of temporary names, and it is read again before a file gets its name: a job that
    has lost its lease publishes nothing. Methods raise CheckpointError if the folder may not be written to or
    the lease was lost, StorageError if the disk is full or fails.

    Attributes
    ----------
    path : Path
    lease : Lease or None
    nonce : str
        Name of the job among others; empty where no lease was taken.
    """

    def __init__(self, path: str | os.PathLike[str], lease: Lease | None = None) -> None:
        self.path = Path(path)
        self.lease = lease
        self.nonce = "" if lease is None else lease.nonce

    def make(self) -> None:
        """Make the folder."""
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Check the lease; raise failures of the disk in the block as CheckpointError or StorageError."""
        if self.lease is not None:
            self.lease.check()
        with write_errors(f"cannot write to {self.path}"):
            yield

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Yield a temporary path to write to; at the end of the block the file is durable and has its name.

        If the block fails, an older file of that name stays.
        """
        # The temporary file is in the same folder, because os.replace is atomic within one file system only.
        target = self.path / name
        temporary = target.with_name(layout.temporary_file(target.name, self.nonce))
        try:
            with write_errors(f"cannot write {target}"):
                yield temporary
                put_in_place(temporary, target, self.lease)
        finally:
            # Gone after the rename. On a read-only disk this fails too; the first error is the one to report.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is absent."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self.path / name).read_bytes()
        return None

    def link_or_copy(self, source: Path, name: str) -> None:
        """Give a file that never changes one more name here; copy it where the disk has no hard links."""
        with self.new_file(name) as path:
            try:
                os.link(source, path)
            except OSError:
                shutil.copyfile(source, path)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, atomically and durably."""
        with self.new_file(name) as path:
            path.write_bytes(content)

    def write_text(self, name: str, text: str) -> None:
        """Write a small text, atomically and durably."""
        self.write(name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Write a value as indented JSON, atomically and durably."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def drop_temporaries(self) -> None:
        """Remove unfinished files that killed jobs left; the caller holds the lease."""
        with self.writing():
            for path in self.path.iterdir():
                # Names with a nonce only: another program's temporary files in this folder are not ours to
                # remove.
                if layout.is_temporary_of_a_job(path.name) and path.is_file():
                    path.unlink(missing_ok=True)
