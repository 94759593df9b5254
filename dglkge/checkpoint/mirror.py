"""Copy of a run at the URL ``checkpoint.storage``: versions are committed there too, and read from there.

The objects have the names of the run's folder, so the objects copied to a disk are a run::

    config.json, stats.jsonl, metrics.json, ...     records of the run
    features/{type}.npy, features/features.json     frozen vectors of entities, the same in all versions
    writer.json                                     the job that may write here
    checkpoint/embeddings_{type}_{part}.v7.h5, model.v7.h5, training_state.v7.pt, manifest.v7.json
    checkpoint/config.v7.json, entity_names_{type}_{part}.v7.json, entity_count_{type}_{part}.v7.txt
    checkpoint/vocabulary_{type}.txt, training_stats.json, ...
    checkpoint/best/snapshot.json                   the version that is the snapshot best/
    checkpoint/checkpoint_version.txt               the pointer

Commit rule: frozen vectors, then the parts of a version, its manifest and the pointer; then older versions
are removed.
Nothing is renamed, and no object of a published version is written again except the pointer and the records.
A store that does not write atomically may leave a torn pointer. The newest manifest with a right checksum
and with all its files then takes its place: a manifest is written after all of its files.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.checkpoint import hdf5_format, layout, snapshots
from dglkge.checkpoint.durable import LeasedFolder
from dglkge.checkpoint.features import parse_note
from dglkge.checkpoint.lineage import RunCopy, manifest_checksum, read_copy
from dglkge.checkpoint.manifest import FileEntry, Manifest, TextEntry
from dglkge.checkpoint.storage import CheckpointStorage, check_crc32, check_file, check_text
from dglkge.checkpoint.stores import is_url, open_store, retried
from dglkge.distributed.lease import Lease, new_nonce
from dglkge.errors import CheckpointError, InputError, StorageError, write_error
from dglkge.file_lock import wait_for_lock

logger = logging.getLogger(__name__)

OPEN_ATTEMPTS = 3
"""Attempts to read a version while a job publishes newer ones and removes it."""
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

    @property
    def num_bytes(self) -> int:
        """Size of its rows."""
        return sum(entry.size_bytes for entry in self.manifest.versioned_files)


class Mirror:
    """A run's folder and its copy at a URL.

    Parameters
    ----------
    url : str
    output : path
        The run's folder on this machine.
    lease : Lease, optional
        The job's right to write to the folder. Its nonce names the job at the URL too.

    Raises
    ------
    InputError
        If the URL's scheme is unknown or its package is not installed.
    """

    def __init__(self, url: str, output: str | os.PathLike[str], lease: Lease | None = None) -> None:
        self.url = url
        self._store = open_store(url)
        self._run = Path(output)
        self._storage = CheckpointStorage(self._run / layout.CHECKPOINT_FOLDER, lease)
        self._records = LeasedFolder(self._run, lease)
        self._features = LeasedFolder(self._run / layout.FEATURES_FOLDER, lease)
        self._job = self._storage.nonce or new_nonce()
        # The version that was published last, of which equal texts are copied inside the store.
        self._last: StoredVersion | None = None

    def newest(self) -> StoredVersion | None:
        """Return the published version at the URL; None if there is none.

        Raises
        ------
        CheckpointError
            Without the right to read it.
        StorageError
            If the store cannot be reached.
        """
        text = (self._read(_POINTER) or b"").decode(errors="replace").strip()
        version = layout.parse_version(text)
        if version is not None:
            with contextlib.suppress(CheckpointError):
                return self._stored(version)
        names = self._sizes(layout.CHECKPOINT_FOLDER)
        found = {layout.parse_versioned(name.rpartition("/")[2]) for name in names}
        for version in sorted({one.version for one in found if one is not None}, reverse=True):
            with contextlib.suppress(CheckpointError):
                stored = self._stored(version)
                sizes = [(_object(entry.name), entry.size_bytes) for entry in stored.manifest.versioned_files]
                if all(names.get(name) == size for name, size in sizes):
                    logger.warning("%s reads %r; version %d is whole", self._at(_POINTER), text[:40], version)
                    return stored
        return None

    def agree(self, stored: StoredVersion | None, writes: bool) -> None:
        """Bring the folder and the URL to the newer of their versions.

        Parameters
        ----------
        stored : StoredVersion or None
            What :meth:`newest` returned.
        writes : bool
            Whether this job may write to the URL from now on: it takes the place of another job there.

        Raises
        ------
        CheckpointError
            If neither of the two versions continues the other, or something is damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        local = read_copy(self._run)
        remote = RunCopy() if stored is None else stored.copy
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
            self.pull(stored, (layout.BEST_SNAPSHOT,))
            self._pull_records()
            logger.info("version %d of %s is in %s", remote.version, self.url, self._run)
        if not writes:
            return
        self._take()
        if stored is not None:
            self._last = stored
            self._drop(lambda version: version > remote.version)
        if (
            not local.problem
            and local.version
            and local.checksum != remote.checksum
            and local.continues(remote)
        ):
            self.push()

    def pull(self, stored: StoredVersion, kept: Sequence[str] = ()) -> None:
        """Download a version and publish it in the folder; files that are there and whole are not downloaded.

        Parameters
        ----------
        stored : StoredVersion
        kept : sequence of str
            Snapshots to download too, where the URL has them.

        Raises
        ------
        CheckpointError
            If an object is missing or damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        storage, manifest = self._storage, stored.manifest
        storage.prepare()
        before = storage.published(texts=False) if read_copy(self._run).version else None
        self._pull_features()
        self._pull_files(manifest)
        for name in kept:
            note = self._note(name)
            if note is not None and note["version"] != manifest.version:
                other = self._stored(int(note["version"]))
                self._pull_files(other.manifest)
                self._pull_manifest(other)
        stats = self._read(_object(layout.STATS_FILE))
        if stats is not None:
            storage.write_text(layout.STATS_FILE, stats.decode())
        self._pull_manifest(stored)
        for name in kept:
            note = self._note(name)
            if note is not None:
                storage.keep(int(note["version"]), name, note)
        if before is not None and before.version != manifest.version:
            old = before.all_texts
            same = {name for name, text in manifest.all_texts.items() if old.get(name) == text}
            storage.withdraw_texts(before.version, same)
        storage.publish(manifest.version)
        storage.place_texts(manifest)
        with contextlib.suppress(OSError):  # the next save removes the same files
            storage.drop_older(manifest.version)

    def refresh(self, kept: Sequence[str] = ()) -> None:
        """Download the newest version and the records, if the folder does not have them; for reading.

        Parameters
        ----------
        kept : sequence of str
            Snapshots that are wanted.

        Raises
        ------
        CheckpointError
            If the URL has no run or no such snapshot, or an object is damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            stored = self.newest()
            if stored is None:
                raise CheckpointError(f"{self.url} holds no checkpoint: no version of it was ever completed")
            for name in kept:
                if self._note(name) is None:
                    raise CheckpointError(f"{self.url} has no snapshot {name!r}")
            try:
                if read_copy(self._run) != stored.copy or kept:
                    self.pull(stored, kept)
                self._pull_records()
                return
            except CheckpointError:
                # Training may have removed the version that was being read: the next attempt reads its
                # successor.
                newest = self.newest()
                if attempt == OPEN_ATTEMPTS or newest is None or newest.content == stored.content:
                    raise

    def push(self) -> None:
        """Upload the folder's published version with its snapshots, publish it, and remove older versions.

        Raises
        ------
        CheckpointError
            If another job has taken the place of this one.
        StorageError
            If the store cannot be reached.
        """
        storage = self._storage
        version = storage.published_version()
        if not version:
            return
        self._check_writer()
        manifest = storage.manifest(version)
        content = (storage.path / layout.manifest_file(version)).read_bytes()
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
        texts = {name: check_text(storage.path, text, version) for name, text in manifest.all_texts.items()}
        self._push_features()
        self._push_version(manifest, texts)
        kept = self._push_snapshots()
        stats = storage.path / layout.STATS_FILE
        if stats.is_file():
            self._upload(stats, _object(layout.STATS_FILE))
        self.push_records()
        # Read again after the upload, which may take minutes.
        self._check_writer()
        self._write(_POINTER, f"{version}\n".encode())
        self._last = StoredVersion(manifest, content)
        self._drop(lambda one: one != version and one not in kept)
        logger.info("checkpoint version %d in %s", version, self.url)

    def push_records(self) -> None:
        """Upload the run's records: configuration, statistics and metrics."""
        for path in sorted(self._run.iterdir()) if self._run.is_dir() else []:
            if layout.is_record(path.name) and path.is_file():
                self._upload(path, path.name)

    def _push_version(self, manifest: Manifest, texts: Mapping[str, Path]) -> None:
        """Upload the files of a version, then its manifest, unless the store has exactly this version."""
        path = self._storage.path / layout.manifest_file(manifest.version)
        content = path.read_bytes()
        if self._read(_object(path.name)) == content:
            return
        for entry in manifest.versioned_files:
            self._upload(self._storage.path / entry.name, _object(entry.name))
        last = None if self._last is None else self._last.manifest
        old = {} if last is None else last.all_texts
        for name, text in manifest.all_texts.items():
            target = _text_object(name, manifest.version)
            if last is not None and old.get(name) == text:
                source = _text_object(name, last.version)
                if source == target or self._copy(source, target):
                    continue
            self._upload(texts[name], target)
        sizes = self._sizes(layout.CHECKPOINT_FOLDER)
        for entry in manifest.versioned_files:
            if sizes.get(_object(entry.name)) != entry.size_bytes:
                raise StorageError(
                    f"{self._at(_object(entry.name))} has {sizes.get(_object(entry.name))} bytes after its "
                    f"upload, expected {entry.size_bytes}"
                )
        self._write(_object(path.name), content)

    def _push_snapshots(self) -> set[int]:
        """Upload the folder's snapshots; return the versions of all that the URL has."""
        kept = {}
        for name in self._sizes(layout.CHECKPOINT_FOLDER):
            parts = name.split("/")
            if len(parts) == 3 and parts[2] == layout.SNAPSHOT_NOTE_FILE and layout.is_snapshot(parts[1]):
                kept[parts[1]] = self._note(parts[1])
        for path, versions in snapshots.snapshots(self._storage.path):
            note = snapshots.read_note(self._storage.path, path.name)
            if not versions or not note or note == kept.get(path.name):
                continue
            manifest = self._storage.manifest(max(versions))
            self._push_version(manifest, {name: path / name for name in manifest.all_texts})
            content = (path / layout.SNAPSHOT_NOTE_FILE).read_bytes()
            self._write(_object(f"{path.name}/{layout.SNAPSHOT_NOTE_FILE}"), content)
            kept[path.name] = note
        return {int(note["version"]) for note in kept.values() if note is not None}

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
                if path.is_file() and hdf5_format.file_crc32(path) == crc32:
                    continue
                source = _features_object(path.name)
                with self._new_file(folder, source, path.name) as received:
                    if hdf5_format.file_crc32(received) != crc32:
                        raise CheckpointError(
                            f"{self._at(source)} is damaged: its checksum is not the one in {name}"
                        )

    def _pull_files(self, manifest: Manifest) -> None:
        """Download the files of a version; replaced texts get the names with the version."""
        for entry in manifest.versioned_files:
            try:
                check_file(self._storage.path, entry, checksum=True)
            except CheckpointError:
                self._download(_object(entry.name), entry.name, entry)
        for name, text in manifest.all_texts.items():
            try:
                check_text(self._storage.path, text, manifest.version, checksum=True)
            except CheckpointError:
                source = _text_object(name, manifest.version)
                self._download(source, source.rpartition("/")[2], text)

    def _pull_manifest(self, stored: StoredVersion) -> None:
        with self._storage.new_file(layout.manifest_file(stored.manifest.version)) as path:
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
        name = _object(layout.manifest_file(version))
        content = self._read(name)
        if content is None:
            raise CheckpointError(f"{self._at(name)} is missing")
        return StoredVersion(Manifest.from_json(content.decode(errors="replace"), self._at(name)), content)

    def _note(self, snapshot: str) -> dict[str, Any] | None:
        """Return the note of a snapshot at the URL; None if there is no such snapshot."""
        content = self._read(_object(f"{snapshot}/{layout.SNAPSHOT_NOTE_FILE}"))
        try:
            note = json.loads(content or b"")
            return note if isinstance(note, dict) and int(note["version"]) > 0 else None
        except (ValueError, KeyError, TypeError):
            return None

    def _take(self) -> None:
        """Name this job as the one that writes to the URL."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        note = {"job": self._job, "host": socket.gethostname(), "since": since}
        self._write(layout.WRITER_FILE, (json.dumps(note) + "\n").encode())

    def _check_writer(self) -> None:
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

    def _drop(self, is_wanted: Callable[[int], bool]) -> None:
        """Remove the files of some versions; a failure is logged, the next version removes them."""
        try:
            for name in self._sizes(layout.CHECKPOINT_FOLDER):
                found = layout.parse_versioned(name.split("/", 1)[1])
                if found is not None and is_wanted(found.version):
                    with contextlib.suppress(FileNotFoundError):
                        self._store.remove(name)
        except (OSError, StorageError, CheckpointError) as error:
            logger.warning("older versions in %s could not be removed: %s", self.url, error)

    def _download(self, name: str, target: str, entry: FileEntry | TextEntry) -> None:
        """Download an object to the checkpoint's folder, and verify its checksum."""
        with self._new_file(self._storage, name, target) as path:
            check_crc32(Path(self._at(name)).parent, entry, hdf5_format.file_crc32(path))

    @contextlib.contextmanager
    def _new_file(self, folder: LeasedFolder, name: str, target: str) -> Iterator[Path]:
        """Download an object and yield its temporary file, which gets its name at the end of the block."""
        with folder.new_file(target) as path:
            try:
                retried(f"cannot read {self._at(name)}", lambda: self._store.download(name, path))
            except FileNotFoundError:
                raise CheckpointError(f"{self._at(name)} is missing") from None
            yield path

    def _upload(self, path: Path, name: str) -> None:
        try:
            retried(f"cannot write {self._at(name)}", lambda: self._store.upload(path, name))
        except FileNotFoundError as error:
            # A bucket that does not exist, or a local file that somebody removed.
            raise CheckpointError(f"cannot write {self._at(name)} from {path}: {error}") from None

    def _write(self, name: str, content: bytes) -> None:
        try:
            retried(f"cannot write {self._at(name)}", lambda: self._store.write(name, content))
        except FileNotFoundError as error:
            raise CheckpointError(f"cannot write {self._at(name)}: {error}") from None

    def _copy(self, name: str, target: str) -> bool:
        """Copy an object inside the store; returns False if it is absent."""
        try:
            retried(f"cannot write {self._at(target)}", lambda: self._store.copy(name, target))
        except FileNotFoundError:
            return False
        return True

    def _read(self, name: str) -> bytes | None:
        """Return a small object, None if it is absent."""
        try:
            return retried(f"cannot read {self._at(name)}", lambda: self._store.read(name))
        except FileNotFoundError:
            return None

    def _sizes(self, folder: str) -> dict[str, int]:
        return retried(f"cannot list {self.url}", lambda: self._store.sizes(folder))

    def _at(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url.rstrip('/')}/{name}"


def local_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path as it is; of a URL, the folder to which its newest version was downloaded.

    The folder is ``~/.cache/dglkge/runs/{name}-{digits}``; what is there already is not downloaded again.

    Parameters
    ----------
    path : path or URL
        Of a run, its ``checkpoint``, or a snapshot: ``s3://bucket/run/checkpoint/best``.

    Raises
    ------
    InputError
        If the scheme is unknown, its package is not installed, or there is no run.
    StorageError
        If the store cannot be reached, or the disk is full.
    """
    if not is_url(path):
        return path
    url, name, inner = str(path).rstrip("/").partition(f"/{layout.CHECKPOINT_FOLDER}")
    snapshot = inner.strip("/")
    digits = hashlib.sha256(url.encode()).hexdigest()[:12]
    folder = _cache_folder() / f"{url.rpartition('/')[2]}-{digits}"
    mirror = Mirror(url, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(f"cannot write to {folder}", error) from error
    with _only_this_process(folder, url):
        mirror.refresh((snapshot,) if snapshot else ())
    return folder / layout.CHECKPOINT_FOLDER / snapshot if name else folder


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


def _object(name: str) -> str:
    """Return the name of an object of the checkpoint's folder."""
    return f"{layout.CHECKPOINT_FOLDER}/{name}"


def _features_object(name: str) -> str:
    """Return the name of an object of the folder of features."""
    return f"{layout.FEATURES_FOLDER}/{name}"


def _text_object(name: str, version: int) -> str:
    """Return the name of the object of a text: with the version, where versions may have different ones."""
    return _object(layout.staged_file(name, version) if layout.is_replaced_text(name) else name)
