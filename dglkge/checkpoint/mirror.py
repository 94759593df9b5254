"""A run's store: the URL ``checkpoint.storage``, or the launcher's folder for machines without a common disk.

The objects have the names of the run's folder, so the objects copied to a disk are a run::

    config.json, stats.jsonl, metrics.json, ...     records of the run
    features/{type}.npy, features/features.json     frozen vectors of entities, the same in all versions
    writer.json                                     the job that may write here
    checkpoint/v7/...                               a version, see dglkge.checkpoint.storage
    checkpoint/checkpoint_version.txt               the pointer to the newest version
    checkpoint/best, checkpoint/epoch_{E}           pointers to versions that are kept

Commit rule: frozen vectors, then the files of a version, its manifest and the pointer; then pointers to
versions that are kept; then older versions are removed. Machines upload their parts side by side, each with
a receipt, for which rank 0 waits. Where machines share a disk, a version is published in the run's folder
first. Where they share none, their folders are caches: each holds the parts that its machine has written or
read, and is filled from the store when a job starts. A job takes the store (``writer.json``) before it reads
the version that it goes on from, reads both again before it replaces the pointer, and removes only versions
that it has read and that no pointer names.
Nothing is renamed, and no object of a published version is written again except pointers and records.
A store that does not write atomically may leave a torn pointer, without its last byte. The newest manifest
with a right checksum and with all its files then takes its place: a manifest is written after all its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dglkge.checkpoint import layout
from dglkge.checkpoint.features import parse_note
from dglkge.checkpoint.manifest import (
    CheckpointMeta,
    FileEntry,
    Manifest,
    RunCopy,
    TextEntry,
    manifest_checksum,
)
from dglkge.checkpoint.storage import (
    CheckpointStorage,
    LeasedFolder,
    check_crc32,
    check_file,
    check_rows,
    file_crc32,
    parse_pointer,
    parse_receipt,
    receipt_of,
)
from dglkge.checkpoint.stores import Store, is_url, open_store, retried
from dglkge.distributed.lease import Lease, new_nonce
from dglkge.errors import CheckpointError, InputError, JobError, StorageError, write_error
from dglkge.file_lock import wait_for_lock

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_ATTEMPTS = 3
"""Attempts to read a version while a job publishes newer ones and removes it."""
RECEIPT_POLL_SECONDS = 1.0
SLOWEST_UPLOAD_BYTES_PER_SECOND = 1e6
"""Rate that limits of waits for another machine's part allow for."""
LOCK_SECONDS = 600.0
"""Limit of the wait for another process that downloads the same run."""

_POINTER = f"{layout.CHECKPOINT_FOLDER}/{layout.VERSION_FILE}"


@dataclass(frozen=True)
class StoredVersion:
    """Published version at a URL.

    Attributes
    ----------
    manifest : Manifest
    content : bytes
        The manifest's object.
    """

    manifest: Manifest
    content: bytes

    @property
    def copy(self) -> RunCopy:
        """The version's place in its run's lineage."""
        one = self.manifest
        return RunCopy(one.version, one.run_id, manifest_checksum(self.content), tuple(one.lineage))


class Mirror:
    """A run's folder and its store.

    Parameters
    ----------
    store : Store
    output : path
        The run's folder on this machine.
    lease : Lease, optional
        The job's right to write to the folder. Its nonce names the job at the URL too.
    commit_seconds : float, optional
        A commit waits for so long for a store that is out of reach; all else for
        :data:`dglkge.checkpoint.stores.RETRY_SECONDS`.
    is_cache : bool
        Whether the store has a version before the folder, in which files may be missing.
    keeps_files : bool
        Whether files with rows stay in the folder when the store has them.
    """

    def __init__(
        self,
        store: Store,
        output: str | os.PathLike[str],
        lease: Lease | None = None,
        commit_seconds: float | None = None,
        is_cache: bool = False,
        keeps_files: bool = True,
    ) -> None:
        self.url = store.url
        self.is_cache = is_cache
        self._keeps_files = keeps_files
        self._store = store
        self._run = Path(output)
        self._storage = CheckpointStorage(self._run / layout.CHECKPOINT_FOLDER, lease)
        self._records = LeasedFolder(self._run, lease)
        self._features = LeasedFolder(self._run / layout.FEATURES_FOLDER, lease)
        self._job = self._storage.nonce or new_nonce()
        # The version that was published last, of which equal texts are copied inside the store.
        self._last: StoredVersion | None = None
        self._commit_seconds = commit_seconds
        self._is_committing = False
        self._num_done = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Changes while something is uploaded, or tried again; of users' own stores with each request."""
        return self._num_done, getattr(self._store, "num_bytes", 0)

    def newest(self) -> StoredVersion | None:
        """Return the published version at the URL; None if no version of it was ever completed.

        Raises
        ------
        CheckpointError
            If its manifest is damaged or of another format, or without the right to read it.
        StorageError
            If the store cannot be reached.
        """
        version = self._pointer()
        if version:
            return self._stored(version)
        sizes = self._sizes(layout.CHECKPOINT_FOLDER)
        versions = {number for name in sizes if (number := _version_of(name)) is not None}
        complete = [one for one in versions if _object(one, layout.MANIFEST_FILE) in sizes]
        for version in sorted(complete, reverse=True):
            stored = self._stored(version)
            files = stored.manifest.binary_files
            if all(sizes.get(_object(version, one.name)) == one.size_bytes for one in files):
                if self._read(_POINTER) is not None:
                    logger.warning("%s is torn; version %d is whole", self._at(_POINTER), version)
                return stored
        return None

    def take(self, check: Callable[[CheckpointMeta], object]) -> StoredVersion | None:
        """Take the URL for this job, and return the version there; the job that had it writes no more.

        Nothing is changed if the version cannot be read, or this job cannot go on from it.

        Parameters
        ----------
        check : callable
            Raises an error if this job cannot go on from a version of that run.

        Raises
        ------
        CheckpointError
            If the version cannot be read.
        StorageError
            If the store cannot be reached.
        """
        stored = self.newest()
        if stored is not None:
            check(stored.manifest.meta)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        note = {"job": self._job, "host": socket.gethostname(), "since": since}
        self._write(layout.WRITER_FILE, (json.dumps(note) + "\n").encode())
        # Read again: until now the other job may have committed a version.
        self._last = self.newest()
        return self._last

    def agree(self, stored: StoredVersion | None, writes: bool) -> None:
        """Bring the folder and the URL to the newer of their versions.

        Parameters
        ----------
        stored : StoredVersion or None
            What :meth:`newest` or :meth:`take` returned.
        writes : bool
            Whether this job has taken the URL.

        Raises
        ------
        CheckpointError
            If neither of the two versions continues the other, or something is damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        local = self._storage.copy(has_files=not self.is_cache)
        remote = RunCopy() if stored is None else stored.copy
        if self.is_cache:
            self._fill_cache(local, stored)
            return
        if local.problem and stored is not None:
            raise CheckpointError(
                f"{local.problem}; {self.url} has version {remote.version}: move {self._run} away to go on "
                "from there"
            )
        # Without a copy a damaged folder is the matter of resuming and of checkpoint.fallback.
        if not local.problem and not local.continues(remote):
            if stored is None or not remote.continues(local):
                raise CheckpointError(
                    f"{self._run} has {local.describe()}, {self.url} has {remote.describe()}; neither "
                    "continues the other: take another checkpoint.storage or output, or move one of them away"
                )
            self.pull(stored, (layout.BEST,))
            self._pull_records()
            logger.info("version %d of %s is in %s", remote.version, self.url, self._run)
        is_newer = local.version and local.checksum != remote.checksum and local.continues(remote)
        if writes and is_newer and not local.problem:
            # Damage of this disk must not take the place of the store's version.
            folder = self._storage.folder(local.version).path
            check_rows(folder, self._storage.manifest(local.version), checksums=True)
            self.push(local.version)

    def _fill_cache(self, local: RunCopy, stored: StoredVersion | None) -> None:
        """Bring the store's version, and what it says of kept ones, to this machine's folder."""
        here = f"{self._run.resolve()} on {socket.gethostname()}"
        if local.problem:
            raise CheckpointError(f"{local.problem}; move {here} away")
        if stored is None and local.version:
            raise CheckpointError(
                f"{self.url} has no version of this run, and {here} has {local.describe()}: the run was "
                "removed there, or belongs to another launcher or URL. To go on, copy it there; to start "
                "anew, move the folder away"
            )
        if stored is None:
            return
        if not stored.copy.continues(local):
            raise CheckpointError(
                f"{here} has {local.describe()}, {self.url} has {stored.copy.describe()}, which does not go "
                "on from it: move the one away that you do not want"
            )
        self._pull_pointers()
        self.pull(stored)
        self._pull_records()

    def _pull_pointers(self) -> None:
        """Make the cache's pointers to kept versions those of the store."""
        for name in self._storage.pointers():
            if not self._note(name):
                (self._storage.path / name).unlink(missing_ok=True)
        for name in self._sizes(layout.CHECKPOINT_FOLDER):
            pointer = name.partition("/")[2]
            if layout.is_pointer(pointer) and (note := self._note(pointer)):
                self._storage.make()
                self._storage.write_json(pointer, note)

    def bring(self, pointer: str) -> None:
        """Download the version that a pointer at the store names, and the pointer."""
        if note := self._note(pointer):
            self._pull_version(self._stored(note["version"]))
            self._storage.write_json(pointer, note)

    def manifest(self, version: int) -> Manifest | None:
        """Return the manifest of the version that the job has published last.

        Raises
        ------
        CheckpointError
            If it is missing or damaged at the store.
        StorageError
            If the store cannot be reached.
        """
        if version and self.version != version:
            self._last = self._stored(version)
        return self._last.manifest if version and self._last is not None else None

    def take_over(self) -> None:
        """Publish the version that rank 0 has published at the store in the cache of another machine."""
        if self._last is not None:
            version = self._last.manifest.version
            self._storage.folder(version).make()
            self._write_manifest(self._last)
            self._storage.publish(version)
            self._storage.drop_older(version)

    @property
    def version(self) -> int:
        """The version that this job has published last, or gone on from; 0 if there is none."""
        return 0 if self._last is None else self._last.manifest.version

    def pull(self, stored: StoredVersion, kept: Sequence[str] = ()) -> None:
        """Download a version and publish it in the folder; files that are there and whole are not downloaded.

        Parameters
        ----------
        stored : StoredVersion
        kept : sequence of str
            Pointers to download too, with their versions, where the URL has them.

        Raises
        ------
        CheckpointError
            If an object is missing or damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        storage, version = self._storage, stored.manifest.version
        storage.prepare()
        self._pull_features()
        self._pull_version(stored)
        pointers = {name: note for name in kept if (note := self._note(name))}
        for note in pointers.values():
            if note["version"] != version:
                self._pull_version(self._stored(note["version"]))
        storage.publish(version)
        for name, note in pointers.items():
            storage.write_json(name, note)
        with contextlib.suppress(OSError):  # the next save removes the same files
            storage.drop_older(version)

    def repair(self) -> None:
        """Download the damaged files of the folder's version again, if the URL has the same version.

        Raises
        ------
        CheckpointError
            If an object is missing or damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        if self._last is not None and self._storage.version_text() == str(self._last.manifest.version):
            self.pull(self._last)

    def refresh(self, kept: Sequence[str] = ()) -> None:
        """Download the newest version and the records, if the folder does not have them whole; for reading.

        Parameters
        ----------
        kept : sequence of str
            Pointers that are wanted.

        Raises
        ------
        CheckpointError
            If the URL has no run or no such pointer, or an object is damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            stored = self.newest()
            if stored is None:
                raise CheckpointError(f"{self.url} holds no checkpoint: no version of it was ever completed")
            for name in kept:
                if not self._note(name):
                    raise CheckpointError(f"{self.url} has no kept version {name!r}")
            try:
                self.pull(stored, kept)
                # Of another run, whose place at the URL this one has taken.
                self._storage.drop_unpublished(stored.manifest.version)
                self._pull_records()
                return
            except CheckpointError:
                # Training may have removed the version that was being read: the next attempt reads its
                # successor.
                newest = self.newest()
                if attempt == OPEN_ATTEMPTS or newest is None or newest.content == stored.content:
                    raise

    def push_part(self, version: int, entry: FileEntry, previous: Manifest | None) -> None:
        """Upload a file of a version that is not complete yet, with its names, and then its receipt.

        Parameters
        ----------
        version : int
        entry : FileEntry
            The file, in the folder.
        previous : Manifest or None
            Of the version before: names that it has too are copied inside the store.

        Raises
        ------
        CheckpointError
            If another job has taken the place of this one.
        StorageError
            If the store cannot be reached.
        """
        with self._committing():
            self._check_job()
            self._push_file(version, entry.name)
            for text in entry.texts:
                self._push_file(version, text.name, text, previous)
            receipt = receipt_of(entry, self._job).encode()
            self._write(_object(version, layout.receipt_file(entry.name)), receipt)
        if not self._keeps_files:
            (self._storage.folder(version).path / entry.name).unlink()

    def push(self, version: int, parts: Sequence[FileEntry] = ()) -> None:
        """Upload a version, publish it, and remove older versions.

        Parameters
        ----------
        version : int
            It is complete in the folder, apart from parts of other machines.
        parts : sequence of FileEntry
            The store has them already.

        Raises
        ------
        CheckpointError
            If another job has taken the place of this one.
        StorageError
            If the store cannot be reached.
        """
        with self._committing():
            self._push(version, parts)

    def _push(self, version: int, parts: Sequence[FileEntry] = ()) -> None:
        storage = self._storage
        self._check_writer()
        manifest = storage.manifest(version)
        content = (storage.folder(version).path / layout.MANIFEST_FILE).read_bytes()
        # After a fallback the folder has other versions of the same numbers.
        if self._last is not None and version <= self._last.manifest.version:
            if content == self._last.content:
                return
            newest = self._last.manifest.version
            raise CheckpointError(
                f"{self._run} has version {version}, and {self.url} has version {newest}, which does not "
                "come before it: to go on from the URL, move the folder away; to go on from the folder, take "
                "another checkpoint.storage"
            )
        self._push_features()
        self._push_version(manifest, parts)
        self._push_records()
        # Read again after the upload, which may take minutes.
        self._check_writer()
        self._write(_POINTER, f"{version}\n".encode())
        self._last = StoredVersion(manifest, content)
        self._push_pointers()
        self._drop_older(self._last)
        logger.info("checkpoint version %d in %s", version, self.url)

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        """Wait for a store that is out of reach as long as a commit may."""
        self._is_committing = True
        try:
            yield
        finally:
            self._is_committing = False

    def wait_for_parts(self, version: int, names: Sequence[str], limit_seconds: float) -> list[FileEntry]:
        """Wait for the receipts of all parts of a version, and return them.

        Parameters
        ----------
        version : int
        names : sequence of str
            Of the files.
        limit_seconds : float
            Limit of the wait for the next one.

        Raises
        ------
        JobError
            If another machine's part does not come.
        StorageError
            If the store cannot be reached.
        """
        pending = {_object(version, layout.receipt_file(name)): name for name in names}
        parts: dict[str, FileEntry] = {}
        last_news = time.monotonic()
        with self._committing():
            while True:
                sizes = self._sizes(f"{layout.CHECKPOINT_FOLDER}/{layout.version_folder(version)}")
                for receipt in pending.keys() & sizes.keys():
                    # One of an earlier job is of another file; its writer replaces it.
                    if (entry := parse_receipt(self._read(receipt) or b"{}", self._job)) is not None:
                        parts[pending.pop(receipt)] = entry
                        last_news = time.monotonic()
                if not pending:
                    return [parts[name] for name in names]
                waited = time.monotonic() - last_news
                if waited > limit_seconds + (self._commit_seconds or 0):
                    missing = f"{self._at(min(pending))} is missing"
                    raise JobError(f"{missing}: no part has come to the store for {waited:.0f} s")
                time.sleep(RECEIPT_POLL_SECONDS)

    def push_records(self) -> None:
        """Upload the run's records, and pointers to versions that are kept, where they have changed."""
        self._push_records()
        if self._last is not None:
            self._push_pointers()

    def _push_records(self) -> None:
        """Upload configuration, statistics and metrics."""
        for path in sorted(self._run.iterdir()) if self._run.is_dir() else []:
            if layout.is_record(path.name) and path.is_file():
                self._upload(path, path.name)

    def _push_version(self, manifest: Manifest, parts: Sequence[FileEntry] = ()) -> None:
        """Upload the files of a version, then its manifest, unless the store has exactly this version.

        ``parts`` are there already, with receipts.
        """
        folder, version = self._storage.folder(manifest.version).path, manifest.version
        content = (folder / layout.MANIFEST_FILE).read_bytes()
        if self._read(_object(version, layout.MANIFEST_FILE)) == content:
            return
        previous = None if self._last is None else self._last.manifest
        done = {layout.MANIFEST_FILE}.union(
            *({one.name, *(text.name for text in one.texts)} for one in parts)
        )
        for path in sorted(folder.iterdir()):
            if path.name not in done:
                self._push_file(version, path.name, manifest.all_texts.get(path.name), previous)
        sizes = self._sizes(f"{layout.CHECKPOINT_FOLDER}/{layout.version_folder(version)}")
        for entry in manifest.binary_files:
            name = _object(version, entry.name)
            if sizes.get(name) != entry.size_bytes:
                raise StorageError(
                    f"{self._at(name)} has {sizes.get(name)} bytes after its upload, expected "
                    f"{entry.size_bytes}"
                )
        for name in sizes:
            if name.endswith(layout.RECEIPT_SUFFIX):
                self._remove_object(name)
        self._write(_object(version, layout.MANIFEST_FILE), content)

    def _push_file(
        self, version: int, name: str, text: TextEntry | None = None, previous: Manifest | None = None
    ) -> None:
        """Upload a file of a version; a text that the version before has is copied inside the store."""
        if text is not None and previous is not None and previous.all_texts.get(name) == text:
            if self._copy(_object(previous.version, name), _object(version, name)):
                return
        self._upload(self._storage.folder(version).path / name, _object(version, name))

    def _push_pointers(self) -> None:
        """Upload the folder's pointers that the URL does not have, after their versions."""
        for name, note in self._storage.pointers().items():
            if note and note != self._note(name):
                # A cache has published the version at the store before it was kept.
                if not self.is_cache:
                    self._push_version(self._storage.kept(name))
                content = (self._storage.path / name).read_bytes()
                self._write(f"{layout.CHECKPOINT_FOLDER}/{name}", content)

    def _push_features(self) -> None:
        """Upload the frozen vectors of the run, if it has some, and then their note."""
        folder = self._features.path
        note = folder / layout.FEATURES_NOTE_FILE
        if not note.is_file():
            return
        content, target = note.read_bytes(), _features_object(note.name)
        if self._read(target) == content:
            return
        for entity_type in parse_note(content, note):
            name = layout.features_array(entity_type)
            self._upload(folder / name, _features_object(name))
        self._write(target, content)

    def _pull_features(self) -> None:
        """Download the frozen vectors of the run, if it has some; files that are there and whole stay."""
        name = layout.FEATURES_NOTE_FILE
        content = self._read(_features_object(name))
        if content is None:
            return
        records, folder = parse_note(content, self._at(_features_object(name))), self._features
        try:
            folder.path.mkdir(exist_ok=True)
        except OSError as error:
            raise write_error(f"cannot write to {folder.path}", error) from error
        with folder.new_file(name) as note:
            note.write_bytes(content)
            # Before the note has its name: with it the folder would count as whole.
            for entity_type, (_, _, crc32) in records.items():
                path = folder.path / layout.features_array(entity_type)
                if path.is_file() and file_crc32(path) == crc32:
                    continue
                source = _features_object(path.name)
                with self._new_file(folder, source, path.name) as received:
                    if file_crc32(received) != crc32:
                        raise CheckpointError(
                            f"{self._at(source)} is damaged: its checksum is not the one in {name}"
                        )

    def _pull_version(self, stored: StoredVersion) -> None:
        """Download the files of a version that are not in the folder with their checksums."""
        manifest, version = stored.manifest, stored.manifest.version
        folder = self._storage.folder(version)
        folder.make()
        entries = {one.name: one for one in [*manifest.binary_files, *manifest.all_texts.values()]}
        for name, entry in entries.items():
            try:
                check_file(folder.path, entry, checksum=True)
            except CheckpointError:
                with self._new_file(folder, _object(version, name), name) as path:
                    where = Path(self._at(_object(version, name))).parent
                    check_crc32(where, entry, file_crc32(path))
        # The manifest does not list the statistics, which other programs write too.
        stats = self._read(_object(version, layout.STATS_FILE))
        if stats is not None:
            folder.write_text(layout.STATS_FILE, stats.decode(errors="replace"))
        self._write_manifest(stored)

    def _write_manifest(self, stored: StoredVersion) -> None:
        """Write the manifest of a version to the folder, byte for byte."""
        with self._storage.folder(stored.manifest.version).new_file(layout.MANIFEST_FILE) as path:
            path.write_bytes(stored.content)

    def _pull_records(self) -> None:
        """Download the run's records."""
        for name in self._sizes(""):
            if layout.is_record(name):
                content = self._read(name)
                with self._records.new_file(name) as path:
                    path.write_bytes(content or b"")

    def _stored(self, version: int) -> StoredVersion:
        """Return a version of the store by its manifest.

        Raises
        ------
        CheckpointError
            If it is missing or damaged.
        """
        name = _object(version, layout.MANIFEST_FILE)
        content = self._read(name)
        if content is None:
            raise CheckpointError(f"{self._at(name)} is missing")
        return StoredVersion(Manifest.from_json(content.decode(errors="replace"), self._at(name)), content)

    def _pointer(self) -> int | None:
        """Return the version that the pointer names; None where there is none, or it is torn."""
        text = (self._read(_POINTER) or b"").decode(errors="replace")
        # The last byte of the pointer is a line feed: without it "12" may be all that was written of "123".
        return layout.parse_version(text.strip()) if text.endswith("\n") else None

    def _note(self, pointer: str) -> dict[str, Any]:
        """Return version, checksum and note of a pointer to a kept version; empty if there is none."""
        return parse_pointer(self._read(f"{layout.CHECKPOINT_FOLDER}/{pointer}") or b"")

    def _check_job(self) -> None:
        """Check that no other job was started with this URL.

        Raises
        ------
        CheckpointError
            If one was.
        """
        try:
            note = json.loads(self._read(layout.WRITER_FILE) or b"{}")
        except ValueError:
            note = {}
        if not isinstance(note, dict) or note.get("job") != self._job:
            who = f"job {str(note.get('job'))[:8]} on {note.get('host')}" if note else "another job"
            raise CheckpointError(
                f"{self.url} was taken over by {who}, started {note.get('since')}: this job no longer writes"
            )

    def _check_writer(self) -> None:
        """Check that no other job was started with this URL, and none has left a version there."""
        self._check_job()
        known = None if self._last is None else self._last.manifest.version
        pointer = self._pointer()
        if pointer and pointer != known:
            raise CheckpointError(
                f"{self.url} has version {pointer} by now, and this job has left version {known} there: "
                "another job writes to it"
            )

    def _drop_older(self, newest: StoredVersion) -> None:
        """Remove older versions of this run that no pointer names; a failure is logged."""
        try:
            names = list(self._sizes(layout.CHECKPOINT_FOLDER))
            inner = [name.partition("/")[2] for name in names]
            kept = [self._note(name) for name in inner if layout.is_pointer(name)]
            if not all(kept):
                logger.warning("no older version in %s is removed: a pointer to one is damaged", self.url)
                return
            keep = {note["version"] for note in kept} | {self._pointer()}
            for version in {number for name in names if (number := _version_of(name)) is not None}:
                if version < newest.manifest.version and version not in keep:
                    self._remove(version, newest.manifest.run_id, names)
        except (OSError, StorageError, CheckpointError) as error:
            logger.warning("older versions in %s could not be removed: %s", self.url, error)

    def _remove(self, version: int, run_id: str, names: Sequence[str]) -> None:
        """Remove a version of a run, or one that was never completed; its manifest first."""
        manifest = _object(version, layout.MANIFEST_FILE)
        if manifest in names and self._stored(version).manifest.run_id != run_id:
            return
        for name in sorted(names, key=lambda name: (name != manifest, name)):
            if _version_of(name) == version:
                self._remove_object(name)

    @contextlib.contextmanager
    def _new_file(self, folder: LeasedFolder, name: str, target: str) -> Iterator[Path]:
        """Download an object and yield its temporary file, which gets its name at the end of the block."""
        with folder.new_file(target) as path:
            try:
                self._request(f"cannot read {self._at(name)}", lambda: self._store.download(name, path))
            except FileNotFoundError:
                raise CheckpointError(f"{self._at(name)} is missing") from None
            yield path

    def _upload(self, path: Path, name: str) -> None:
        try:
            self._request(f"cannot write {self._at(name)}", lambda: self._store.upload(path, name))
        except FileNotFoundError as error:
            # A bucket that does not exist, or a local file that somebody removed.
            raise CheckpointError(f"cannot write {self._at(name)} from {path}: {error}") from None

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._request(f"cannot write {self._at(name)}", lambda: self._store.write(name, content))
        except FileNotFoundError as error:
            raise CheckpointError(f"cannot write {self._at(name)}: {error}") from None

    def _remove_object(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request(f"cannot remove {self._at(name)}", lambda: self._store.remove(name))

    def _copy(self, name: str, target: str) -> bool:
        """Copy an object inside the store; returns False if it is absent."""
        try:
            self._request(f"cannot write {self._at(target)}", lambda: self._store.copy(name, target))
        except FileNotFoundError:
            return False
        return True

    def _read(self, name: str) -> bytes | None:
        """Return a small object, None if it is absent."""
        try:
            return self._request(f"cannot read {self._at(name)}", lambda: self._store.read(name))
        except FileNotFoundError:
            return None

    def _request(self, what: str, work: Callable[[], T]) -> T:
        """Make a request, and again after a failure that may pass; see :func:`retried`."""

        def attempt() -> T:
            self._num_done += 1
            return work()

        return retried(what, attempt, self._commit_seconds if self._is_committing else None)

    def _sizes(self, folder: str) -> dict[str, int]:
        return self._request(f"cannot list {self.url}", lambda: self._store.sizes(folder))

    def _at(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url.rstrip('/')}/{name}"


def local_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path as it is; of a URL, the folder to which its newest version was downloaded.

    The folder is ``~/.cache/dglkge/runs/{name}-{digits}``; what is there already is not downloaded again.

    Parameters
    ----------
    path : path or URL
        Of a run, its ``checkpoint``, or a version there: ``s3://bucket/run/checkpoint/best``.

    Raises
    ------
    InputError
        If the scheme is unknown, its package is not installed, or there is no run.
    StorageError
        If the store cannot be reached, or the disk is full.
    """
    if not is_url(path):
        return path
    url, inside, pointer = _split(str(path))
    digits = hashlib.sha256(url.encode()).hexdigest()[:12]
    folder = _cache_folder() / f"{url.rpartition('/')[2]}-{digits}"
    mirror = Mirror(open_store(url), folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(f"cannot write to {folder}", error) from error
    with _only_this_process(folder, url):
        mirror.refresh((pointer,) if layout.is_pointer(pointer) else ())
    return folder / layout.CHECKPOINT_FOLDER / pointer if inside else folder


def _split(url: str) -> tuple[str, bool, str]:
    """Return the URL of a run, whether the given one is of its checkpoint, and the name inside of that."""
    head, _, last = url.rstrip("/").rpartition("/")
    if last == layout.CHECKPOINT_FOLDER:
        return head, True, ""
    run, _, folder = head.rpartition("/")
    is_inside = folder == layout.CHECKPOINT_FOLDER and (
        layout.is_pointer(last) or layout.parse_version_folder(last) is not None
    )
    return (run, True, last) if is_inside else (url.rstrip("/"), False, "")


def _cache_folder() -> Path:
    """Return the user's cache folder for runs; one of the system for temporary files if there is no home."""
    home = Path.home()
    if os.access(home, os.W_OK):
        return home / ".cache" / "dglkge" / "runs"
    folder = Path(tempfile.gettempdir()) / f"dglkge-{os.getuid()}"
    # Others can write to the parent: they may have prepared a link, or a folder whose files they change.
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise InputError(
            f"{folder} is not a folder that only this user can write, and {home} cannot be written; set HOME "
            "to a folder of yours"
        )
    return folder / "runs"


@contextlib.contextmanager
def _only_this_process(folder: Path, url: str) -> Iterator[None]:
    """Keep other processes of this machine from downloading to the same folder."""
    with open(folder / layout.LOCK_FILE, "w", encoding="utf-8") as lock:
        if not wait_for_lock(lock, LOCK_SECONDS):
            raise StorageError(
                f"another process has been downloading {url} to {folder} for {LOCK_SECONDS:g} s"
            )
        yield  # closing the file releases the lock


def _object(version: int, name: str) -> str:
    """Return the name of an object of a version."""
    return f"{layout.CHECKPOINT_FOLDER}/{layout.version_folder(version)}/{name}"


def _version_of(name: str) -> int | None:
    """Return the version that an object belongs to; None for any other."""
    # A listing of a bucket may have the folder itself, while its objects come and go.
    folder, _, rest = name.partition("/")[2].partition("/")
    return layout.parse_version_folder(folder) if rest else None


def _features_object(name: str) -> str:
    """Return the name of an object of the folder of features."""
    return f"{layout.FEATURES_FOLDER}/{name}"
