"""The folder of a checkpoint: its files, written whole and durably by the job that holds the run's lease."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dglkge.checkpoint import layout
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, FileEntry, Manifest, TextEntry, parse
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError, os_errors

logger = logging.getLogger(__name__)


def file_crc32(file: Path | BinaryIO) -> int:
    """Return the CRC-32 of a file; of an open one from its first byte on, wherever it was read before."""
    if isinstance(file, Path):
        with open(file, "rb", buffering=0) as opened:
            return file_crc32(opened)
    checksum = place = 0
    # Large blocks: a thread that copies rows meanwhile holds Python's lock most of the time.
    buffer = memoryview(bytearray(8 << 20))
    # preadv leaves the position of the descriptor alone: h5py or another thread may read from the same one.
    while count := os.preadv(file.fileno(), [buffer], place):
        checksum = zlib.crc32(buffer[:count], checksum)
        place += count
    return checksum


def check_crc32(place: object, expected: int, crc32: int, source: str = "the manifest") -> None:
    """Compare the checksum of what was read with the one in ``source``, or raise CheckpointError."""
    if crc32 != expected != UNKNOWN_CRC32:
        raise CheckpointError(f"{place} is damaged: its checksum is not the one in {source}")


def check_files(
    folder: Path,
    entries: Iterable[FileEntry | TextEntry],
    checksums: bool = True,
    opened: Mapping[str, BinaryIO] = {},
) -> None:
    """Check that files of a version exist and have their sizes and, if wanted, their checksums.

    CheckpointError if one is missing or damaged. One that is open may have lost its name since.
    """
    for entry in entries:
        path, file = folder / entry.name, opened.get(entry.name)
        try:
            size = path.stat().st_size if file is None else os.fstat(file.fileno()).st_size
            # The size is compared first: it needs no reading, and finds most interrupted copies.
            if size != entry.size_bytes:
                raise CheckpointError(f"{path} is damaged: it has {size} bytes, expected {entry.size_bytes}")
            if checksums and entry.crc32 != UNKNOWN_CRC32:
                check_crc32(path, entry.crc32, file_crc32(file or path))
        # An older version may be undamaged.
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def read_version(folder: Path, version: int) -> Manifest:
    """Read the manifest in the folder of a version; CheckpointError if it is missing, damaged or not ours."""
    path = folder / layout.MANIFEST_FILE
    with os_errors(CheckpointError, f"cannot read {path}"):
        if not path.exists():
            raise CheckpointError(f"{path} is missing: half-written, or not written by dglkge")
        manifest = Manifest.parse(path.read_bytes(), str(path))
    if manifest.version != version:
        raise CheckpointError(f"{path} is damaged: it describes version {manifest.version}")
    return manifest


def describe_text(path: Path, name: str) -> TextEntry:
    """Describe a text file that was just written."""
    return TextEntry(name, path.stat().st_size, file_crc32(path))


def receipt_of(entry: FileEntry, nonce: str) -> str:
    """Return the receipt of a file, for which rank 0 waits; the nonce is that of the job."""
    return json.dumps({"nonce": nonce, **dataclasses.asdict(entry)})


def read_receipts(
    names: Iterable[str], nonce: str, read: Callable[[str], bytes | None]
) -> dict[str, FileEntry]:
    """Return the entries of those of some files of which a reader finds the receipt of this job."""
    entries = {}
    for name in names:
        note = layout.parse_object(read(layout.receipt_file(name)))  # empty if it is torn
        # One of an earlier job, e.g. a killed one, is of another file; its writer replaces it.
        if note.pop("nonce", None) == nonce:
            entries[name] = parse(FileEntry, note)
    return entries


def signs_of_life(folder: Path) -> list[tuple[str, int]]:
    """Return the files of a version that is written, also unfinished ones, and the times of their changes."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            found.append((path.name, path.stat().st_mtime_ns))
    return found


def parse_pointer(content: bytes | None) -> dict[str, Any]:
    """Return what a pointer's content names: version, checksum and note; empty if it is damaged."""
    note = layout.parse_object(content)
    is_whole = type(note.get("version")) is int and isinstance(note.get("checksum"), str)
    return note if is_whole else {}


def outdated(
    versions: Iterable[int], notes: Collection[Mapping[str, Any]], newest: int, place: object
) -> list[int]:
    """Return the versions before the newest that no pointer's note names; none if a pointer is damaged."""
    if not all(notes):
        logger.warning("no older version in %s is removed: a pointer to one is damaged", place)
        return []
    kept = {note["version"] for note in notes}
    return [version for version in versions if version < newest and version not in kept]


class CheckpointStorage(LeasedFolder):
    """A checkpoint's folder, with a folder for each version: docs/checkpoints.md has the format.

    A new version is written to a folder of its own, its manifest last; then ``checkpoint_version.txt`` is
    replaced in one step. Before that step version V counts, after it version V+1. Only then is V removed,
    unless a pointer names it.

    Parameters
    ----------
    path : path
        The folder; it need not exist.
    lease : Lease, optional
        The job's right to write to the run: a job that has lost it publishes nothing.
    """

    def folder(self, version: int) -> LeasedFolder:
        """Return the folder of a version, which need not exist."""
        return LeasedFolder(self.path / layout.version_folder(version), self.lease)

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def versions(self) -> list[int]:
        """Return the versions that have a folder, also unfinished ones, in ascending order."""
        found = map(layout.parse_version_folder, self._names())
        return sorted(version for version in found if version is not None)

    def published_version(self) -> int:
        """Return the published version; 0 if the folder holds no checkpoint.

        CheckpointError if there are versions without a readable version file, or a whole version that cannot
        have been left by an interrupted save of the next one.
        """
        try:
            version = self.named_version()
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._advice()}") from None
        # Version + 1 is allowed: an interrupted save may have completed its files without publishing them.
        newer = any(number > version + 1 for number in self.versions())
        if newer and (self.newest_good() or 0) > version + 1:
            raise CheckpointError(
                f"{self.path / layout.VERSION_FILE} reads '{version}', but a newer version lies beside it; "
                f"{self._advice()}"
            )
        return version

    def named_version(self) -> int:
        """Return the version that the version file names, without a look at its files; 0 if there is none.

        CheckpointError if it is damaged, or missing beside versions.
        """
        path = self.path / layout.VERSION_FILE
        text = self.version_text()
        if text is None:
            if self.versions():
                raise CheckpointError(f"{path} is missing, but files of a checkpoint lie beside it")
            if self.path.exists() and not self.path.is_dir():
                raise CheckpointError(f"{self.path} is not a folder")
            return 0
        version = layout.parse_version(text)
        if version is None:
            got = f"reads {text[:40]!r}" if text else "is empty"
            raise CheckpointError(f"{path} {got}; expected one number")
        return version

    def version_text(self) -> str | None:
        """Return the content of the version file; None if there is none."""
        with os_errors(CheckpointError, f"cannot read {self.path / layout.VERSION_FILE}"):
            content = self.read(layout.VERSION_FILE)
        return None if content is None else content.decode(errors="replace").strip()

    def published(self, texts: bool = True) -> Manifest | None:
        """Return the published version, once the sizes of its files are checked; of texts, if wanted.

        CheckpointError if anything is missing or damaged; it names the file and the newest good version.
        """
        version = self.published_version()
        if version == 0:
            return None
        try:
            return self.checked(version, texts)
        except CheckpointError as error:
            if self.version_text() != str(version):
                raise  # a newer version was published during the check
            raise CheckpointError(f"{error}; {self._advice()}") from None

    def kept(self, pointer: str) -> Manifest:
        """Return the version that a pointer names, once the sizes of its files are checked.

        CheckpointError if there is no such pointer, its version is another one by now, or damaged.
        """
        note, path = self.read_pointer(pointer), self.path / pointer
        if not note:
            raise CheckpointError(f"{path} is missing or damaged; expected the pointer to a version")
        manifest = self.checked(note["version"])
        if manifest.checksum != note["checksum"]:
            raise CheckpointError(
                f"{path} names version {manifest.version} with the checksum {note['checksum']}, and "
                f"{self.folder(manifest.version).path} has another one"
            )
        return manifest

    def stored(self, version: int) -> Manifest:
        """Read the manifest of a version; see :func:`read_version`."""
        return read_version(self.folder(version).path, version)

    def newest_good(self) -> int | None:
        """Return the newest version with undamaged rows, whatever its texts; None if there is none."""
        for version in reversed(self.versions()):
            with contextlib.suppress(CheckpointError):
                check_files(self.folder(version).path, self.stored(version).binary_files)
                return version
        return None

    def prepare(self) -> None:
        """Make the folder and publish version 0 in it, before the first file is written."""
        self.make()
        if not (self.path / layout.VERSION_FILE).exists():
            # Version 0 is published before any file exists: a folder with files and no version file counts as
            # damaged.
            self.publish(0)

    def publish(self, version: int) -> None:
        """Publish a version: all readers use it from now on."""
        self.write_text(layout.VERSION_FILE, f"{version}\n")
        # Not every disk has links, and the copy of a run may have a folder there.
        link = self.path / layout.LATEST_LINK
        new = link.with_suffix(layout.TEMPORARY_SUFFIX)
        if version and (link.is_symlink() or not link.exists()):
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
                new.symlink_to(layout.version_folder(version))
                os.replace(new, link)

    def keep(self, version: int, pointer: str, note: Mapping[str, Any]) -> None:
        """Point to a version and note why: it outlives newer ones. Replaces an older pointer of that name."""
        self.write_json(pointer, {"version": version, "checksum": self.stored(version).checksum, **note})

    def keep_all(self, manifest: Manifest) -> None:
        """Write the pointers that a version was published with; those that are right stay as they are."""
        checksum = self.stored(manifest.version).checksum
        for pointer, note in manifest.kept_as.items():
            if self.read_pointer(pointer).get("checksum") != checksum:
                self.keep(manifest.version, pointer, note)

    def read_pointer(self, pointer: str) -> dict[str, Any]:
        """Return version, checksum and note of a pointer; empty if there is none, or it is damaged."""
        with contextlib.suppress(OSError):
            return parse_pointer(self.read(pointer))
        return {}

    def pointers(self) -> dict[str, dict[str, Any]]:
        """Return what each pointer names, by its name; see :meth:`read_pointer`."""
        return {name: self.read_pointer(name) for name in self._names() if layout.is_pointer(name)}

    def drop_older(self, version: int) -> None:
        """Remove older versions, apart from those that a pointer names."""
        for old in outdated(self.versions(), self.pointers().values(), version, self.path):
            self._remove(old)

    def drop_unpublished(self, version: int) -> None:
        """Remove what an interrupted save left: versions newer than ``version``, and unfinished files."""
        self.drop_temporaries()
        with self.writing():
            for newer in self.versions():
                if newer > version:
                    self._remove(newer)

    def damaged_folder(self, version: int) -> Path:
        """Make a new folder for damaged files of a version: ``damaged_v{V}``, then ``damaged_v{V}_2``."""
        name = f"{layout.DAMAGED_PREFIX}{version}"
        folder, number = self.path / name, 1
        while folder.exists():
            number += 1
            folder = self.path / f"{name}_{number}"
        with self.writing():
            folder.mkdir()
        return folder

    def num_bytes(self) -> int:
        """Return the size of the files of all versions."""
        total = 0
        for version in self.versions():
            with contextlib.suppress(FileNotFoundError):
                total += sum(path.stat().st_size for path in self.folder(version).path.iterdir())
        return total

    def checked(self, version: int, texts: bool = True) -> Manifest:
        """Read a version and check the sizes of its files, with or without its texts."""
        manifest = self.stored(version)
        entries = manifest.all_files if texts else manifest.binary_files
        check_files(self.folder(version).path, entries, checksums=False)
        return manifest

    def _remove(self, version: int) -> None:
        """Remove the folder of a version; without its manifest the version is incomplete from the start."""
        folder = self.folder(version).path
        (folder / layout.MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)

    def _advice(self) -> str:
        """Return the advice for a damaged checkpoint: the newest good version and the user's options."""
        good = self.newest_good()
        if good is None:
            return "no version in the folder is whole; move the folder away to start anew"
        return (
            f"the newest good version is {good}: set checkpoint.fallback=true to go on from it "
            f"(what is newer is moved aside), or move the folder away to start anew"
        )
