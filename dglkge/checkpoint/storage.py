"""The folder of a checkpoint: specification of its files, checks, publication and removal of versions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dglkge.checkpoint import hdf5_format, layout, snapshots
from dglkge.checkpoint.durable import LeasedFolder, sync
from dglkge.checkpoint.lineage import manifest_checksum
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, FileEntry, Manifest, TextEntry
from dglkge.errors import CheckpointError, write_error


def check_file(folder: Path, entry: FileEntry | TextEntry, checksum: bool = False) -> None:
    """Check that a file exists and has its size and, if wanted, its checksum.

    Raises
    ------
    CheckpointError
        If it is missing or damaged.
    """
    path = folder / entry.name
    with _failures_to_read(path):
        _check_size(path, entry, path.stat().st_size)
        if checksum and entry.crc32 != UNKNOWN_CRC32:
            check_crc32(folder, entry, hdf5_format.file_crc32(path))


def check_open_file(folder: Path, entry: FileEntry | TextEntry, file: BinaryIO) -> None:
    """Check the size and the checksum of a file that is open, and may have lost its name since.

    Raises
    ------
    CheckpointError
        If it is missing or damaged.
    """
    with _failures_to_read(folder / entry.name):
        _check_size(folder / entry.name, entry, os.fstat(file.fileno()).st_size)
        # The size is compared first: it needs no reading, and finds most interrupted copies.
        if entry.crc32 != UNKNOWN_CRC32:
            check_crc32(folder, entry, hdf5_format.open_crc32(file))


def check_text(folder: Path, entry: TextEntry, version: int, checksum: bool = False) -> Path:
    """Check a text file of a version; return where it lies now.

    Raises
    ------
    CheckpointError
        If it is missing or not as it was written.
    """
    own, staged = folder / entry.name, folder / layout.staged_file(entry.name, version)
    # A writer may rename the text between two attempts, in either direction: the third attempt finds it.
    for path in (staged, own, staged):
        try:
            # The size of the open file, because the name may belong to another version by now.
            with open(path, "rb") as file:
                _check_size(path, entry, os.fstat(file.fileno()).st_size)
                if checksum:
                    check_crc32(folder, entry, hdf5_format.open_crc32(file))
                return path
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    raise CheckpointError(f"{own} is missing")


def is_there(folder: Path, entry: TextEntry) -> bool:
    """Return whether a text has its own name and its size. Its content is not read: it does not change."""
    path = folder / entry.name
    return path.is_file() and path.stat().st_size == entry.size_bytes


def describe_text(path: Path, name: str) -> TextEntry:
    """Describe a text file that was just written."""
    return TextEntry(name, path.stat().st_size, hdf5_format.file_crc32(path))


@contextlib.contextmanager
def _failures_to_read(path: Path) -> Iterator[None]:
    """Raise read errors as CheckpointError: an older version may be undamaged."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def _check_size(path: Path, entry: FileEntry | TextEntry, size: int) -> None:
    if size != entry.size_bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, expected {entry.size_bytes}")


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


class CheckpointStorage(LeasedFolder):
    """Versions of a checkpoint in one folder.

    Files::

        checkpoint_version.txt            "7\\n": the version that counts; 0 before the first
        manifest.v7.json                  the run, and each file's size and CRC-32
        embeddings_{type}_{part}.v7.h5    one part of the rows of an entity type
        model.v7.h5                       the relations
        training_state.v7.pt              schedules, patience and objects of the user, if there are any
        config.json                       PyTorch-BigGraph's configuration of this model
        vocabulary_{type}.txt             all names of a type; line number = original id
        entity_names_{type}_{part}.json   names of a part in the order of its rows
        entity_count_{type}_{part}.txt    number of rows of a part
        dynamic_rel_count.txt, dynamic_rel_names.json
        training_stats.json               JSON lines: loss and counts of each epoch
        epoch_{E}/, best/                 links to a version that is kept; see snapshots.py
        damaged_v{V}/                     files that checkpoint.fallback moved away

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

    ``training_state.v7.pt`` is a ``torch.save`` of dicts, lists, numbers, texts and tensors, which
    ``torch.load(weights_only=True)`` reads; see :mod:`dglkge.training.control`. It is absent where training
    changes nothing but the tables.

    A version is written under other names (``*.tmp``), brought to the disk, renamed; when all writers
    have done so, the manifest is written and checkpoint_version.txt replaced in one step. Before that step
    version V is whole, after it version V+1. Only then is V dropped.

    PyTorch-BigGraph expects names, counts and config.json under names without a version. Those that are the
    same in V and V+1 stay as they are. Others are written as ``config.v{V+1}.json``; right before the step
    those of V are renamed to ``config.v{V}.json``, right after it those of V+1 take their own names. So at no
    time do names of one version lie beside rows of another; after a crash in between they may be missing,
    under their own names only, and the next start puts them back.

    Parameters
    ----------
    path : path
        The folder; it need not exist.
    lease : Lease, optional
        The job's right to write to the run. Its nonce is part of temporary names and receipts, and it is read
        again before a file takes its place, so a job that has lost it publishes nothing.
    """

    def published_version(self) -> int:
        """Return the published version; 0 if the folder holds no checkpoint.

        Raises
        ------
        CheckpointError
            If there are files of a checkpoint without a readable version file, or a whole version that
            cannot have been left by an interrupted save of the next one.
        """
        path = self.path / layout.VERSION_FILE
        text = self.version_text()
        if text is None:
            if any(True for _ in self.versioned()):
                raise CheckpointError(
                    f"{path} is missing, but files of a checkpoint lie beside it; {self._advice()}"
                )
            if self.path.exists() and not self.path.is_dir():
                raise CheckpointError(f"{self.path} is not a folder")
            return 0
        version = layout.parse_version(text)
        if version is None:
            got = f"reads {text[:40]!r}" if text else "is empty"
            raise CheckpointError(f"{path} {got}; expected one number; {self._advice()}")
        # Version + 1 is allowed: an interrupted save may have completed its files without publishing them.
        newer = any(not found.temporary and found.version > version + 1 for _, found in self.versioned())
        if newer and (self.newest_good() or 0) > version + 1:
            raise CheckpointError(
                f"{path} reads {text!r}, but a newer version lies beside it; {self._advice()}"
            )
        return version

    def version_text(self) -> str | None:
        """Return the content of the version file; None if there is none."""
        try:
            return (self.path / layout.VERSION_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.path / layout.VERSION_FILE}: {error.strerror}"
            ) from None

    def published(self, texts: bool = True) -> Manifest | None:
        """Return the manifest of the published version; checks the sizes of its files.

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
            manifest = self.manifest(version)
            self.check_files(manifest, texts=texts)
        except CheckpointError as error:
            if self.version_text() != str(version):
                raise  # a newer version was published during the check
            raise CheckpointError(f"{error}; {self._advice()}") from None
        return manifest

    def manifest(self, version: int) -> Manifest:
        """Read the manifest of a version.

        Raises
        ------
        CheckpointError
            If it is missing, damaged or not ours.
        """
        path = self.path / layout.manifest_file(version)
        try:
            manifest = Manifest.from_json(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: half-written, or not written by dglkge") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        if manifest.version != version:
            raise CheckpointError(f"{path} is damaged: it describes version {manifest.version}")
        return manifest

    def checksum_of(self, version: int) -> str:
        """Return the checksum of a version's manifest, which identifies its content; empty for version 0."""
        if version == 0:
            return ""
        try:
            return manifest_checksum((self.path / layout.manifest_file(version)).read_bytes())
        except OSError as error:
            raise CheckpointError(f"cannot read the manifest of version {version}: {error}") from None

    def check_files(self, manifest: Manifest, checksums: bool = False, texts: bool = True) -> None:
        """Check that the files of a version have their size and, if wanted, their checksum.

        Raises
        ------
        CheckpointError
            Naming the first missing or damaged file.
        """
        for entry in manifest.versioned_files:
            check_file(self.path, entry, checksums)
        if texts:
            self.check_texts(manifest, checksums)

    def check_texts(self, manifest: Manifest, checksums: bool = True) -> None:
        """Check the text files of a version, which takes little time compared with its rows.

        Raises
        ------
        CheckpointError
            Naming the first missing or damaged file.
        """
        for text in manifest.all_texts.values():
            check_text(self.path, text, manifest.version, checksums)

    def newest_good(self) -> int | None:
        """Return the newest version whose rows are complete and undamaged; None if there is none."""
        return next(self.whole_versions(), None)

    def whole_versions(self) -> Iterator[int]:
        """Yield the versions whose rows are complete and undamaged, the newest first.

        Their texts may be damaged: the fallback writes them again.
        """
        versions = {found.version for _, found in self.versioned() if not found.temporary}
        for version in sorted(versions, reverse=True):
            with contextlib.suppress(CheckpointError):
                self.check_files(self.manifest(version), checksums=True, texts=False)
                yield version

    def prepare(self) -> None:
        """Make the folder and publish version 0 in it, before the first file is written.

        Raises
        ------
        CheckpointError
            If the folder is no folder, or may not be written to.
        StorageError
            If the disk is full or fails.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(f"cannot write to {self.path}", error) from error
        if not (self.path / layout.VERSION_FILE).exists():
            # Version 0 is published before any file exists: a folder with files and no version file counts as
            # damaged.
            self.publish(0)

    def publish(self, version: int) -> None:
        """Publish a version: all readers use it from now on."""
        self.write_text(layout.VERSION_FILE, f"{version}\n")

    def write_receipt(self, entry: FileEntry) -> None:
        """Write the receipt of a file, for which rank 0 waits."""
        note = {"nonce": self.nonce, **dataclasses.asdict(entry)}
        self.write_text(layout.receipt_file(entry.name), json.dumps(note))

    def read_receipts(self, version: int) -> list[FileEntry]:
        """Return the entries in the receipts of this job for a version."""
        paths = sorted(self.path.glob(layout.receipts_pattern(version)))
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        # Files of a job that was killed may differ from those of this job. Its receipts have another nonce.
        return [FileEntry.from_dict(note) for note in notes if note.pop("nonce", None) == self.nonce]

    def remove_receipts(self, version: int) -> None:
        """Remove the receipts of a version."""
        for path in self.path.glob(layout.receipts_pattern(version)):
            path.unlink(missing_ok=True)

    def signs_of_life(self, version: int) -> list[tuple[str, int]]:
        """Return the files of a version, also unfinished ones, and the times of their last change."""
        found = []
        for path, one in self.versioned():
            if one.version == version:
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    found.append((path.name, path.stat().st_mtime_ns))
        return found

    def keep(self, version: int, name: str, note: Mapping[str, Any]) -> None:
        """Make a snapshot of a version, see :func:`dglkge.checkpoint.snapshots.take`."""
        self.check_lease()
        try:
            texts = self.manifest(version).all_texts.values()
            places = {text.name: check_text(self.path, text, version) for text in texts}
            snapshots.take(self.path, name, version, note, places)
        except OSError as error:
            raise write_error(f"cannot write {self.path / name}", error) from error

    def drop_older(self, version: int) -> None:
        """Remove all files of older versions, apart from those that a snapshot keeps."""
        kept = snapshots.kept_versions(self.path)
        for path, found in self.versioned():
            # Snapshots have the texts under their own names, so staged texts are not kept for them.
            leaving = path.name.endswith(layout.RECEIPT_SUFFIX) or found.staged
            if found.version < version and (leaving or found.version not in kept):
                path.unlink(missing_ok=True)

    def drop_unpublished(self, version: int) -> None:
        """Remove the files of an interrupted save: those newer than ``version``, and unfinished ones.

        Raises
        ------
        CheckpointError
            If the folder may not be written to, or belongs to another job now.
        StorageError
            If the disk fails.
        """
        self.check_lease()
        try:
            # Snapshots first: their links would dangle if the files of their versions were removed before
            # them.
            snapshots.recover(self.path, version)
            self.drop_temporaries()
            for path, found in self.versioned():
                if found.version > version or found.temporary:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(f"cannot write to {self.path}", error) from error

    def withdraw_texts(self, version: int, kept: Collection[str]) -> None:
        """Stage the texts of the published version, before the next one is published, except some.

        No reader then finds the names of one version beside the rows of another. It may find no names for a
        moment.

        Raises
        ------
        CheckpointError
            If the folder may not be written to, or belongs to another job now.
        StorageError
            If the disk is full or fails.
        """
        self.check_lease()
        try:
            for path in sorted(self.path.iterdir()):
                if layout.is_replaced_text(path.name) and path.name not in kept:
                    os.replace(path, self.path / layout.staged_file(path.name, version))
            sync(self.path)
        except OSError as error:
            raise write_error(f"cannot write to {self.path}", error) from error

    def place_texts(self, manifest: Manifest) -> None:
        """Rename the staged texts of the published version to their own names; remove those of no part.

        Does nothing if all texts have their names, and in folders with manifests of version 1 only.

        Raises
        ------
        CheckpointError
            If the folder may not be written to.
        StorageError
            If the disk is full or fails.
        """
        texts = manifest.all_texts
        if not texts:
            return
        try:
            # A missing staged file is normal: the text did not change, or was renamed before a crash.
            for name in filter(layout.is_replaced_text, texts):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self.path / layout.staged_file(name, manifest.version), self.path / name)
            # The version before may have had more parts, whose lists of names would describe no rows now.
            for path in self.path.iterdir():
                if layout.parse_names_part(path.name) is not None and path.name not in texts:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(f"cannot write to {self.path}", error) from error

    def damaged_folder(self, version: int) -> Path:
        """Make a new folder for damaged files of a version: ``damaged_v{V}``, then ``damaged_v{V}_2``."""
        name = f"{layout.DAMAGED_PREFIX}{version}"
        folder, number = self.path / name, 1
        while folder.exists():
            number += 1
            folder = self.path / f"{name}_{number}"
        try:
            folder.mkdir()
        except OSError as error:
            raise write_error(f"cannot write to {self.path}", error) from error
        return folder

    def versioned(self) -> Iterator[tuple[Path, layout.VersionedFile]]:
        """Yield the files that belong to a version."""
        paths: Sequence[Path] = sorted(self.path.iterdir()) if self.path.is_dir() else []
        for path in paths:
            found = layout.parse_versioned(path.name)
            if found is not None:
                yield path, found

    def num_bytes(self) -> int:
        """Return the size of all files of versions in the folder, those of damaged ones among them."""
        total = 0
        for path, _ in self.versioned():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def _advice(self) -> str:
        """Return the advice for a damaged checkpoint: the newest good version and the user's options."""
        good = self.newest_good()
        if good is None:
            return "no version in the folder is whole; move the folder away to start anew"
        return (
            f"the newest good version is {good}: set checkpoint.fallback=true to go on from it "
            f"(what is newer is moved aside), or move the folder away to start anew"
        )
