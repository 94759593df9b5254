"""The folder of a checkpoint: its files, written whole and durably by the job that holds the run's lease."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dglkge.checkpoint import layout
from dglkge.checkpoint.manifest import (
    UNKNOWN_CRC32,
    FileEntry,
    Manifest,
    StoredVersion,
    TextEntry,
    parse,
)
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


def check_file(
    folder: Path, entry: FileEntry | TextEntry, checksum: bool = False, opened: BinaryIO | None = None
) -> None:
    """Check that a file exists and has its size and, if wanted, its checksum.

    Parameters
    ----------
    folder : Path
    entry : FileEntry or TextEntry
    checksum : bool
    opened : binary file, optional
        The file where it is open, and may have lost its name since.

    Raises
    ------
    CheckpointError
        If it is missing or damaged.
    """
    path = folder / entry.name
    try:
        size = path.stat().st_size if opened is None else os.fstat(opened.fileno()).st_size
        # The size is compared first: it needs no reading, and finds most interrupted copies.
        if size != entry.size_bytes:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, expected {entry.size_bytes}")
        if checksum and entry.crc32 != UNKNOWN_CRC32:
            check_crc32(folder, entry, file_crc32(opened or path))
    # An older version may be undamaged.
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def check_crc32(folder: Path, entry: FileEntry | TextEntry, crc32: int) -> None:
    """Compare the checksum of a file that was read with the one of its manifest.

    Raises
    ------
    CheckpointError
        If they differ.
    """
    if crc32 != entry.crc32 != UNKNOWN_CRC32:
        raise CheckpointError(
            f"{folder / entry.name} is damaged: its checksum is not the one in the manifest"
        )


def check_files(folder: Path, entries: Iterable[FileEntry | TextEntry], checksums: bool = True) -> None:
    """Check files of a version; see :func:`check_file`."""
    for entry in entries:
        check_file(folder, entry, checksums)


def read_version(folder: Path, version: int) -> StoredVersion:
    """Read the manifest in the folder of a version.

    Raises
    ------
    CheckpointError
        If it is missing, damaged or not ours.
    """
    path = folder / layout.MANIFEST_FILE
    with os_errors(CheckpointError, f"cannot read {path}"):
        if not path.exists():
            raise CheckpointError(f"{path} is missing: half-written, or not written by dglkge")
        stored = StoredVersion.parse(path.read_bytes(), str(path))
    if stored.version != version:
        raise CheckpointError(f"{path} is damaged: it describes version {stored.version}")
    return stored


def describe_text(path: Path, name: str) -> TextEntry:
    """Describe a text file that was just written."""
    return TextEntry(name, path.stat().st_size, file_crc32(path))


def receipt_of(entry: FileEntry, nonce: str) -> str:
    """Return the receipt of a file, for which rank 0 waits; the nonce is that of the job."""
    return json.dumps({"nonce": nonce, **dataclasses.asdict(entry)})


def parse_receipt(content: bytes, nonce: str) -> FileEntry | None:
    """Return the entry in a receipt; None for a torn one, and one of another job, e.g. a killed one."""
    try:
        note = json.loads(content)
    except ValueError:
        return None
    return parse(FileEntry, note) if note.pop("nonce", None) == nonce else None


def read_receipts(folder: LeasedFolder, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return the entries of those of some files for which a receipt of this job is there."""
    entries = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            receipt = (folder.path / layout.receipt_file(name)).read_bytes()
            if (entry := parse_receipt(receipt, folder.nonce)) is not None:
                entries[name] = entry
    return entries


def signs_of_life(folder: Path) -> list[tuple[str, int]]:
    """Return the files of a version that is written, also unfinished ones, and the times of their changes."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            found.append((path.name, path.stat().st_mtime_ns))
    return found


def parse_pointer(content: bytes) -> dict[str, Any]:
    """Return what a pointer's content names: version, checksum and note; empty if it is damaged."""
    try:
        note = json.loads(content)
        is_whole = type(note["version"]) is int and isinstance(note["checksum"], str)
    except (ValueError, KeyError, TypeError):
        return {}
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
    """Versions of a checkpoint, a folder each, in the checkpoint's folder.

    Files::

        checkpoint_version.txt              "7\\n": the version that counts; 0 before the first
        latest                              link to v7/
        epoch_{E}, best                     JSON: a version that is kept, and its manifest's checksum
        damaged_v{V}/                       files that checkpoint.fallback moved away
        v7/                                 a checkpoint of PyTorch-BigGraph; final once it is published:
            manifest.json                   the run, and each file's size and CRC-32; written last
            checkpoint_version.txt          "7\\n"
            embeddings_{type}_{part}.v7.h5  one part of the rows of an entity type
            model.v7.h5                     the relations
            training_state.pt               schedules, patience and objects of the user, if there are any
            config.json                     PyTorch-BigGraph's configuration of this model
            vocabulary_{type}.txt           all names of a type; line number = original id
            entity_names_{type}_{part}.json names of a part in the order of its rows
            entity_count_{type}_{part}.txt  number of rows of a part
            dynamic_rel_count.txt, dynamic_rel_names.json
            training_stats.json             JSON lines: loss and counts of each epoch

    The HDF5 files are PyTorch-BigGraph's version 1. Their root has the attributes ``format_version``
    (1), ``config/json`` (the text of config.json) and ``iteration/*``. In an embeddings file the rows
    stand in ascending order of original id, float32, contiguous and uncompressed; ``original_ids``
    (int64) is ours and PyTorch-BigGraph ignores it. ::

        with h5py.File("embeddings_person_0.v7.h5", "r") as file:
            row = file["embeddings"][12]            # (D,)
            original_id = file["original_ids"][12]  # its line in vocabulary_person.txt
            state = file["optimizer/sum"][12]       # whatever the optimizer keeps for that row

    Optimizer state lies in plain datasets ``optimizer/{name}`` with one row for each row. For
    row-wise Adagrad ``optimizer/state_dict`` holds the same as the ``torch.save`` bytes that
    PyTorch-BigGraph reads; it is only ever read with ``weights_only=True``.

    Relations joining one pair of entity types, with reciprocal rows, are PyTorch-BigGraph's *dynamic
    relations*: all stacked by relation id, an operator for each side. The operator ``lhs`` acts on the
    head to predict tails (the first half of our row), ``rhs`` on the tail to predict heads. ::

        with h5py.File("model.v7.h5", "r") as file:
            real = file["model/relations/0/operator/lhs/real"]  # (R, D/2); "imag" beside it

    DistMult has ``diagonals`` (R, D), TransE ``translations`` (R, D). All other relations are *static*:
    ``model/relations/{id}/operator/rhs/{real, imag | diagonal | translation}``, one group for each.
    PyTorch-BigGraph applies a static operator to the tail and uses it for both sides, so where rows
    are not reciprocal the adjoint of our row is stored (imaginary part or translation negated), which
    gives the same scores. Where they are reciprocal, ``rhs`` is the half that predicts heads and
    ``reciprocal/relations/{id}/operator/lhs/...`` is the half that predicts tails. It lies outside of
    ``model``: PyTorch-BigGraph ignores it and predicts tails with ``rhs`` as well, which is not our
    score.

    PyTorch-BigGraph has no RotatE, which keeps ``phases`` (radians), and no l1 comparator; config.json
    then names an operator or comparator that it refuses, rather than one that gives other scores.
    Optimizer state of relations is ``optimizer/{name}`` in model.v7.h5, one row for each relation; for
    row-wise Adagrad ``optimizer/state_dict`` holds it for torch's Adagrad over the operators' parameters, a
    relation's sum in every number of its row.

    A new version is written to a folder of its own, its manifest last; then ``checkpoint_version.txt`` is
    replaced in one step. Before that step version V counts, after it version V+1. Only then is V removed,
    unless a pointer names it. Lists of names that are the same in V and V+1 are hard links.

    Parameters
    ----------
    path : path
        The folder; it need not exist.
    lease : Lease, optional
        The job's right to write to the run. Its nonce is part of temporary names and receipts, and it is read
        again before a file takes its place, so a job that has lost it publishes nothing.
    """

    def folder(self, version: int) -> LeasedFolder:
        """Return the folder of a version, which need not exist."""
        return LeasedFolder(self.path / layout.version_folder(version), self.lease)

    def versions(self) -> list[int]:
        """Return the versions that have a folder, also unfinished ones, in ascending order."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted(version for name in names if (version := layout.parse_version_folder(name)) is not None)

    def published_version(self) -> int:
        """Return the published version; 0 if the folder holds no checkpoint.

        Raises
        ------
        CheckpointError
            If there are versions without a readable version file, or a whole version that cannot have been
            left by an interrupted save of the next one.
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

        Raises
        ------
        CheckpointError
            If it is damaged, or missing beside versions.
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
        path = self.path / layout.VERSION_FILE
        with os_errors(CheckpointError, f"cannot read {path}"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return path.read_text(encoding="utf-8", errors="replace").strip()
        return None

    def published(self, texts: bool = True) -> StoredVersion | None:
        """Return the published version; checks the sizes of its files.

        Parameters
        ----------
        texts : bool
            Whether to check text files too. Writing the next version does not need them.

        Raises
        ------
        CheckpointError
            If anything is missing or damaged; the message names the file and the newest good version.
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

    def kept(self, pointer: str) -> StoredVersion:
        """Return the version that a pointer names; checks the sizes of its files.

        Raises
        ------
        CheckpointError
            If there is no such pointer, its version is another one by now, or anything of it is damaged.
        """
        note, path = self.read_pointer(pointer), self.path / pointer
        if not note:
            raise CheckpointError(f"{path} is missing or damaged; expected the pointer to a version")
        stored = self.checked(note["version"], texts=True)
        if stored.checksum != note["checksum"]:
            raise CheckpointError(
                f"{path} names version {stored.version} with the checksum {note['checksum']}, and "
                f"{self.folder(stored.version).path} has another one"
            )
        return stored

    def stored(self, version: int) -> StoredVersion:
        """Read the manifest of a version; see :func:`read_version`."""
        return read_version(self.folder(version).path, version)

    def newest_good(self) -> int | None:
        """Return the newest version whose rows are complete and undamaged; None if there is none.

        Its texts may be damaged: the fallback writes them again.
        """
        for version in reversed(self.versions()):
            with contextlib.suppress(CheckpointError):
                check_files(self.folder(version).path, self.stored(version).manifest.binary_files)
                return version
        return None

    def prepare(self) -> None:
        """Make the folder and publish version 0 in it, before the first file is written.

        Raises
        ------
        CheckpointError
            If the folder is no folder, or may not be written to.
        StorageError
            If the disk is full or fails.
        """
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
        """Point to a version, which then outlives newer ones; replaces an older pointer of that name.

        Parameters
        ----------
        version : int
            It is published, or was.
        pointer : str
            ``"best"``, or one of :func:`dglkge.checkpoint.layout.epoch_pointer`.
        note : mapping
            The reason; :meth:`read_pointer` returns it.
        """
        self.write_json(pointer, {"version": version, "checksum": self.stored(version).checksum, **note})

    def keep_all(self, manifest: Manifest) -> None:
        """Write the pointers that a version was published with; those that are right stay as they are."""
        checksum = self.stored(manifest.version).checksum
        for pointer, note in manifest.kept_as.items():
            if self.read_pointer(pointer).get("checksum") != checksum:
                self.keep(manifest.version, pointer, note)

    def read_pointer(self, pointer: str) -> dict[str, Any]:
        """Return version, checksum and note of a pointer; empty if there is none, or it is damaged."""
        try:
            return parse_pointer((self.path / pointer).read_bytes())
        except OSError:
            return {}

    def pointers(self) -> dict[str, dict[str, Any]]:
        """Return what each pointer names, by its name; see :meth:`read_pointer`."""
        names = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        return {name: self.read_pointer(name) for name in names if layout.is_pointer(name)}

    def drop_older(self, version: int) -> None:
        """Remove older versions, apart from those that a pointer names."""
        for old in outdated(self.versions(), self.pointers().values(), version, self.path):
            self._remove(old)

    def drop_unpublished(self, version: int) -> None:
        """Remove what an interrupted save left: versions newer than ``version``, and unfinished files.

        Raises
        ------
        CheckpointError
            If the folder may not be written to, or belongs to another job now.
        StorageError
            If the disk fails.
        """
        self.check_lease()
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

    def checked(self, version: int, texts: bool = False) -> StoredVersion:
        """Read a version and check the sizes of its files, with or without its texts."""
        stored = self.stored(version)
        manifest = stored.manifest
        entries = manifest.all_files if texts else manifest.binary_files
        check_files(self.folder(version).path, entries, checksums=False)
        return stored

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
