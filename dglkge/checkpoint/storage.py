"""Places of versions: their contract, and the checkpoint's folder, written while a job holds its lease."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dglkge.checkpoint import layout
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, FileEntry, Manifest, TextEntry, parse
from dglkge.distributed.lease import Lease
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError, DglkgeError, os_errors

logger = logging.getLogger(__name__)


def file_crc32(file: Path | BinaryIO, start: int = 0, stop: int = 1 << 62, checksum: int = 0) -> int:
    """Return the CRC-32 of a file, or of its bytes [start, stop) behind those of a checksum.

    Of an open file it does not matter where it was read before.
    """
    if isinstance(file, Path):
        with open(file, "rb", buffering=0) as opened:
            return file_crc32(opened, start, stop, checksum)
    # Large blocks: a thread that copies rows meanwhile holds Python's lock most of the time.
    buffer = memoryview(bytearray(min(8 << 20, stop - start)))
    # preadv leaves the position of the descriptor alone: h5py or another thread may read from the same one.
    while count := os.preadv(file.fileno(), [buffer[: stop - start]], start):
        checksum = zlib.crc32(buffer[:count], checksum)
        start += count
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


def is_whole(folder: Path, entry: FileEntry | TextEntry, checksums: bool = True) -> bool:
    """Return whether a file of a version passes :func:`check_files`."""
    try:
        check_files(folder, [entry], checksums)
    except CheckpointError:
        return False
    return True


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


class VersionStore(Protocol):
    """A place that has the versions of a run, and where a job publishes its own.

    Names are relative to the checkpoint's folder. That folder is one (:class:`CheckpointStorage`); a URL and
    the launcher's folder are others (:class:`dglkge.checkpoint.mirror.Mirror`), of which it is a cache.

    Attributes
    ----------
    url : str
        For messages.
    nonce : str
        Name of the job, in its receipts.
    poll_seconds : float
        Pause between two looks for receipts.
    """

    url: str
    nonce: str
    poll_seconds: float = 0.02

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes while something is brought there."""
        return ()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is absent."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names of what is in the checkpoint's folder, or in that of a version; may be absent."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""

    def write_json(self, name: str, value: Any) -> None:
        """Write a value to a small file."""
        self.write(name, (json.dumps(value, indent=2) + "\n").encode())

    def add_part(self, version: int, entry: FileEntry) -> float:
        """Bring a file of a version that is not complete yet, with its names, and then its receipt.

        Returns the seconds that another machine's file of this size may take without progress.
        """
        receipt = json.dumps({"nonce": self.nonce, **dataclasses.asdict(entry)})
        self.write(f"{layout.version_folder(version)}/{layout.receipt_file(entry.name)}", receipt.encode())
        return 0.0

    def stored(self, version: int) -> Manifest:
        """Return the manifest of a version; CheckpointError if it is missing, damaged or not ours."""

    def publish(self, version: int) -> None:
        """Publish a version: all readers use it from now on."""
        self.write(layout.VERSION_FILE, f"{version}\n".encode())

    def remove(self, version: int, run_id: str = "") -> None:
        """Remove a version, its manifest first: without that it is incomplete from the start."""

    def publish_version(self, manifest: Manifest, parts: Sequence[FileEntry] = ()) -> None:
        """Publish a version that is complete in the folder; then write its pointers, and remove older ones.

        The place has ``parts`` already, with receipts.
        """
        version = manifest.version
        # Pointers follow the publication: at no time does one name a version that does not count. The next
        # start writes those that are missing.
        self.publish(version)
        self.keep_all(manifest)
        try:
            self.drop_older(version, manifest.run_id)
        except (OSError, DglkgeError) as error:
            # The version is published, so the save has succeeded. The next one removes the same files.
            logger.warning(
                "checkpoint version %d is published, but older files in %s could not be removed: %s",
                version, self.url, getattr(error, "strerror", None) or error,
            )  # fmt: skip
        logger.info("checkpoint version %d in %s", version, self.url)

    def keep(self, manifest: Manifest, pointer: str, note: Mapping[str, Any]) -> None:
        """Point to a version and note why: it outlives newer ones. Replaces an older pointer of that name."""
        self.write_json(pointer, {"version": manifest.version, "checksum": manifest.checksum, **note})

    def keep_all(self, manifest: Manifest) -> None:
        """Write the pointers that a version was published with; those that are right stay as they are."""
        for pointer, note in manifest.kept_as.items():
            if self.read_pointer(pointer).get("checksum") != manifest.checksum:
                self.keep(manifest, pointer, note)

    def drop_older(self, newest: int, run_id: str = "") -> None:
        """Remove versions before the newest that no pointer names; none if a pointer is damaged."""
        # One listing for both: with a second one a pointer that the first has missed would lose its version.
        names = self.names()
        notes = self.pointers(names).values()
        if not all(notes):
            logger.warning("no older version in %s is removed: a pointer to one is damaged", self.url)
            return
        kept = {note["version"] for note in notes}
        for version in self.versions(names):
            if version < newest and version not in kept:
                self.remove(version, run_id)

    def read_receipts(self, version: int, names: Iterable[str]) -> dict[str, FileEntry]:
        """Return the entries of those of some files of which there is a receipt of this job."""
        folder, entries = layout.version_folder(version), {}
        present = set(self.names(folder))
        for name in names:
            receipt = layout.receipt_file(name)
            note = layout.parse_object(self.read(f"{folder}/{receipt}") if receipt in present else None)
            # One of an earlier job, e.g. a killed one, is of another file; its writer replaces it.
            if note.pop("nonce", None) == self.nonce:
                entries[name] = parse(FileEntry, note)
        return entries

    def read_pointer(self, pointer: str) -> dict[str, Any]:
        """Return version, checksum and note of a pointer; empty if there is none, or it is damaged."""
        note: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            note = layout.parse_object(self.read(pointer))
        is_whole = type(note.get("version")) is int and isinstance(note.get("checksum"), str)
        return note if is_whole else {}

    def pointers(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return what each pointer names, by its name; ``names`` are those of a listing."""
        listed = self.names() if names is None else names
        return {name: self.read_pointer(name) for name in listed if layout.is_pointer(name)}

    def versions(self, names: Iterable[str] | None = None) -> list[int]:
        """Return the versions that have a folder, also unfinished ones, in ascending order."""
        numbers = map(layout.parse_version_folder, self.names() if names is None else names)
        return sorted(version for version in numbers if version is not None)


class CheckpointStorage(LeasedFolder, VersionStore):
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

    def __init__(self, path: str | os.PathLike[str], lease: Lease | None = None) -> None:
        super().__init__(path, lease)
        self.url = str(self.path)

    def folder(self, version: int) -> LeasedFolder:
        """Return the folder of a version, which need not exist."""
        return LeasedFolder(self.path / layout.version_folder(version), self.lease)

    def names(self, folder: str = "") -> list[str]:
        place = self.path / folder
        return sorted(os.listdir(place)) if place.is_dir() else []

    def named_version(self) -> int:
        """Return the version that the version file names, without a look at its files; 0 if there is none.

        CheckpointError if it is damaged, or missing beside versions.
        """
        path, text = self.path / layout.VERSION_FILE, self.version_text()
        if text is not None:
            version = layout.parse_version(text)
            if version is None:
                got = f"reads {text[:40]!r}" if text else "is empty"
                raise CheckpointError(f"{path} {got}; expected one number")
            return version
        if self.versions():
            raise CheckpointError(f"{path} is missing, but files of a checkpoint lie beside it")
        if self.path.is_file():
            raise CheckpointError(f"{self.path} is not a folder")
        return 0

    def version_text(self) -> str | None:
        """Return the content of the version file; None if there is none."""
        with os_errors(CheckpointError, f"cannot read {self.path / layout.VERSION_FILE}"):
            content = self.read(layout.VERSION_FILE)
        return None if content is None else content.decode(errors="replace").strip()

    def published(self, texts: bool = True) -> Manifest | None:
        """Return the published version, once the sizes of its files are checked; of texts, if wanted.

        CheckpointError if anything is missing or damaged; it names the file and the newest good version. Also
        if there is a whole version that cannot have been left by an interrupted save of the next one.
        """
        version = 0
        try:
            version = self.named_version()
            # Version + 1 is allowed: an interrupted save may have completed its files without publishing it.
            if max(self.versions(), default=0) > version + 1 and (self.newest_good() or 0) > version + 1:
                text = f"reads '{version}', but a newer version lies beside it"
                raise CheckpointError(f"{self.path / layout.VERSION_FILE} {text}")
            return self.checked(version, texts) if version else None
        except CheckpointError as error:
            if version and self.version_text() != str(version):
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
        super().publish(version)
        # Not every disk has links, and the copy of a run may have a folder there.
        link = self.path / layout.LATEST_LINK
        new = link.with_suffix(layout.TEMPORARY_SUFFIX)
        if version and (link.is_symlink() or not link.exists()):
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
                new.symlink_to(layout.version_folder(version))
                os.replace(new, link)

    def drop_unpublished(self, version: int) -> None:
        """Remove what an interrupted save left: versions newer than ``version``, and unfinished files."""
        self.drop_temporaries()
        with self.writing():
            for newer in self.versions():
                if newer > version:
                    self.remove(newer)

    def damaged_folder(self, version: int) -> Path:
        """Make a new folder for damaged files of a version: ``damaged_v{V}``, then ``damaged_v{V}_2``."""
        name = f"{layout.DAMAGED_PREFIX}{version}"
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        folder = next(self.path / candidate for candidate in names if not (self.path / candidate).exists())
        with self.writing():
            folder.mkdir()
        return folder

    def checked(self, version: int, texts: bool = True) -> Manifest:
        """Read a version and check the sizes of its files, with or without its texts."""
        manifest = self.stored(version)
        entries = manifest.all_files if texts else manifest.binary_files
        check_files(self.folder(version).path, entries, checksums=False)
        return manifest

    def remove(self, version: int, run_id: str = "") -> None:
        folder = self.folder(version).path
        (folder / layout.MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)

    def _advice(self) -> str:
        """Return the advice for a damaged checkpoint: the newest good version and the user's options."""
        good, anew = self.newest_good(), "move the folder away to start anew"
        if good is None:
            return f"no version in the folder is whole; {anew}"
        way = "set checkpoint.fallback=true to go on from it (what is newer is moved aside)"
        return f"the newest good version is {good}: {way}, or {anew}"
