"""A run's store: the URL ``checkpoint.storage``, or the launcher's folder for machines without a common disk.

The objects have the names of the run's folder, so the objects copied to a disk are a run::

    config.json, stats.jsonl, metrics.json, ...     records of the run, and event files in tensorboard/
    features/{type}.npy, features/features.json     frozen vectors of entities, the same in all versions
    writer.json                                     the job that may write here
    checkpoint/v7/...                               a version, see dglkge.checkpoint.storage
    checkpoint/checkpoint_version.txt               the pointer to the newest version
    checkpoint/best, checkpoint/epoch_{E}           pointers to versions that are kept

Commit rule: frozen vectors, then the files of a version, its manifest and the pointer; then pointers to
versions that are kept; then older versions are removed. Nothing is renamed, and no object of a published
version is written again except pointers and records. The folders of a run that has a store are caches: each
is filled from the store when a job starts, and publishes a version after the store. A job takes the store
before it reads the version that it goes on from, reads both again before it replaces the pointer, and removes
only versions that it has read. A store that does not write atomically may leave a torn pointer, without its
last byte: the newest manifest with a right checksum and with all its files then takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dglkge.checkpoint import layout
from dglkge.checkpoint.features import parse_note
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest, TextEntry
from dglkge.checkpoint.storage import CheckpointStorage, VersionStore, check_crc32, check_files, file_crc32
from dglkge.checkpoint.stores import PatientStore, Store, is_url, open_store
from dglkge.distributed.lease import Lease, new_nonce, utc_now
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError, StorageError
from dglkge.file_lock import wait_for_lock

logger = logging.getLogger(__name__)

OPEN_ATTEMPTS = 3
"""Attempts to read a version while a job publishes newer ones and removes it."""
SLOWEST_UPLOAD_BYTES_PER_SECOND = 1e6
"""Rate that the limit of the wait for another machine's part allows for."""
LOCK_SECONDS = 600.0
"""Limit of the wait for another process that downloads the same run."""

_POINTER = f"{layout.CHECKPOINT_FOLDER}/{layout.VERSION_FILE}"
_FEATURES_NOTE = f"{layout.FEATURES_FOLDER}/{layout.FEATURES_NOTE_FILE}"


class Mirror(VersionStore):
    """A run's store, and its folder on this machine as a cache of it.

    A version that another job would replace is not published: CheckpointError.

    Parameters
    ----------
    store : Store
    output : path
        The run's folder on this machine.
    lease : Lease, optional
        The job's right to write to the folder. Its nonce names the job in the store too.
    commit_seconds : float, optional
        A commit waits for so long for a store that is out of reach; all else for
        :data:`dglkge.checkpoint.stores.RETRY_SECONDS`.
    keeps_files : bool
        Whether files with rows stay in the folder when the store has them.
    """

    poll_seconds = 1.0

    def __init__(
        self,
        store: Store,
        output: str | os.PathLike[str],
        lease: Lease | None = None,
        commit_seconds: float | None = None,
        keeps_files: bool = True,
    ) -> None:
        self.url = store.url
        self._keeps_files = keeps_files
        self._store = PatientStore(store, commit_seconds)
        self._run = Path(output)
        self._storage = CheckpointStorage(self._run / layout.CHECKPOINT_FOLDER, lease)
        self.nonce = self._storage.nonce or new_nonce()
        # The version that was published last, of which equal texts are copied inside the store.
        self._last: Manifest | None = None

    @property
    def progress(self) -> tuple[int, ...]:
        return self._store.progress

    def read(self, name: str) -> bytes | None:
        return self._store.read(f"{layout.CHECKPOINT_FOLDER}/{name}")

    def names(self, folder: str = "") -> list[str]:
        place = f"{layout.CHECKPOINT_FOLDER}/{folder}".rstrip("/")
        # A listing of a bucket may have the folder itself.
        inner = [name[len(place) + 1 :] for name in self._store.sizes(place)]
        return sorted({name.partition("/")[0] for name in inner if name})

    def write(self, name: str, content: bytes) -> None:
        self._store.write(f"{layout.CHECKPOINT_FOLDER}/{name}", content)

    def stored(self, version: int) -> Manifest:
        name = _object(version, layout.MANIFEST_FILE)
        content = self._store.read(name)
        if content is None:
            raise CheckpointError(f"{self._store.at(name)} is missing")
        return Manifest.parse(content, self._store.at(name))

    def keep_all(self, manifest: Manifest) -> None:
        self._last = manifest
        # The folder's are older, and one may have the name of a new one.
        self.push_pointers()
        super().keep_all(manifest)

    def remove(self, version: int, run_id: str = "") -> None:
        names = self.names(layout.version_folder(version))
        # A version of another run stays; one that was never completed goes.
        is_foreign = layout.MANIFEST_FILE in names and self.stored(version).run_id != run_id
        if not is_foreign and version != self._pointer():
            for name in sorted(names, key=lambda name: name != layout.MANIFEST_FILE):
                self._store.remove(_object(version, name))

    def newest(self) -> Manifest | None:
        """Return the published version at the URL; None if no version of it was ever completed."""
        if version := self._pointer():
            return self.stored(version)
        for version in reversed(self.versions()):
            is_complete = layout.MANIFEST_FILE in self.names(layout.version_folder(version))
            if is_complete and not self._lacking(stored := self.stored(version)):
                logger.warning("%s/%s: no whole pointer; version %d is whole", self.url, _POINTER, version)
                return stored
        return None

    def _lacking(self, manifest: Manifest) -> list[str]:
        """Describe the objects of rows and state that a version lacks, or has with another size."""
        sizes = self._store.sizes(_object(manifest.version))
        expected = {_object(manifest.version, file.name): file.size_bytes for file in manifest.binary_files}
        differing = [(name, size) for name, size in expected.items() if sizes.get(name) != size]
        return [f"{self._store.at(name)} has {sizes.get(name)} bytes, not {size}" for name, size in differing]

    def take(self, check: Callable[[CheckpointMeta], object]) -> Manifest | None:
        """Take the URL for this job, and return the version there; the job that had it writes no more.

        Nothing is changed if the version cannot be read, or ``check`` raises an error for its run.
        """
        stored = self.newest()
        if stored is not None:
            check(stored.meta)
        note = {"job": self.nonce, "host": socket.gethostname(), "since": utc_now()}
        self._store.write(layout.WRITER_FILE, (json.dumps(note) + "\n").encode())
        # Read again: until now the other job may have committed a version.
        self._last = self.newest()
        return self._last

    def fill(self, stored: Manifest | None, may_upload: bool = False) -> None:
        """Bring the store's version, and what it says of kept ones, to this machine's folder.

        Parameters
        ----------
        stored : Manifest or None
            What :meth:`newest` or :meth:`take` returned.
        may_upload : bool
            Whether a whole version of the folder goes to a store that has none.

        Raises
        ------
        CheckpointError
            If the store's version does not continue the folder's, or something is damaged.
        StorageError
            If the store cannot be reached, or the disk is full.
        """
        here = f"{self._run.resolve()} on {socket.gethostname()}"
        try:
            version = self._storage.named_version()
            local = self._storage.stored(version) if version else None
        except CheckpointError as error:
            raise CheckpointError(f"{error}; move {here} away") from None
        if stored is None:
            if local is not None:
                self._push_run(local, here, may_upload)
            return
        if local is not None and not stored.continues(local):
            raise CheckpointError(
                f"{here} has {local.describe()}, {self.url} has {stored.describe()}, which does not go on "
                "from it: move the one away that you do not want"
            )
        self._storage.prepare()
        kept = {name: note for name, note in self.pointers().items() if note}
        for name in set(self._storage.pointers()) - set(kept):
            (self._storage.path / name).unlink(missing_ok=True)
        for name, note in kept.items():
            self._storage.write_json(name, note)
        self._pull(stored)

    def _push_run(self, local: Manifest, here: str, may_upload: bool) -> None:
        """Upload the run of the folder, if it may be and is whole, to a store that has none."""
        lacks = f"{self.url} has no version of this run"
        if not may_upload:
            raise CheckpointError(
                f"{lacks}, and {here} has {local.describe()}: the run was removed there, or belongs to "
                "another launcher or URL. To go on, copy it there; to start anew, move the folder away"
            )
        try:
            # Damage of this disk must not become the store's version.
            check_files(self._storage.folder(local.version).path, local.binary_files)
        except CheckpointError as error:
            raise CheckpointError(f"{lacks}; {error}: move {here} away to start anew") from None
        kept = {note["version"] for note in self._storage.pointers().values() if note}
        for version in sorted(kept - {local.version}):
            self._push_version(self._storage.checked(version, texts=False))
        self._commit(local)

    def bring(self, kept: str) -> None:
        """Download the version of a folder (v7), or that a pointer at the store names, with the pointer."""
        note = self.read_pointer(kept) if layout.is_pointer(kept) else {}
        if version := note.get("version") or layout.parse_version_folder(kept):
            manifest = self.stored(version)
            self._pull_version(manifest)
            self._write_manifest(manifest)
        if note:
            self._storage.write_json(kept, note)

    def manifest(self, version: int) -> Manifest | None:
        """Return the version that the job has published last, the number of which is known."""
        if version and self.version != version:
            self._last = self.stored(version)
        return self._last if version else None

    def publish_in_cache(self, manifest: Manifest) -> None:
        """Publish a version of the store in the folder, which need not have all its files."""
        self._write_manifest(manifest)
        self._storage.publish(manifest.version)
        with contextlib.suppress(OSError):  # the next save removes the same files
            self._storage.drop_older(manifest.version)

    @property
    def version(self) -> int:
        """The version that this job has published last, or gone on from; 0 if there is none."""
        return 0 if self._last is None else self._last.version

    def _pull(self, stored: Manifest) -> None:
        """Download a version and publish it in the folder, where whole files stay; then the run's records."""
        self._storage.prepare()
        self._pull_features()
        self._pull_version(stored)
        self.publish_in_cache(stored)
        for name in filter(layout.is_record, self._store.sizes("")):
            self._pull_file(name)

    def refresh(self, kept: str = "") -> None:
        """Download the newest version and the records, if the folder does not have them whole; for reading.

        With a pointer, or the folder of a version, that version too.
        """
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            stored = self.newest()
            if stored is None:
                raise CheckpointError(f"{self.url} holds no checkpoint: no version of it was ever completed")
            if layout.is_pointer(kept) and not self.read_pointer(kept):
                raise CheckpointError(f"{self.url} has no kept version {kept!r}")
            try:
                self._pull(stored)
                if kept != layout.version_folder(stored.version):
                    self.bring(kept)
                # Of another run, whose place at the URL this one has taken.
                self._storage.drop_unpublished(stored.version)
                return
            except CheckpointError:
                # Training may have removed the version that was being read: the next attempt reads its
                # successor.
                newest = self.newest()
                if attempt == OPEN_ATTEMPTS or newest is None or newest.content == stored.content:
                    raise

    def add_part(self, version: int, entry: FileEntry) -> float:
        with self._store.committing():
            self._check_writer()
            self._push_file(version, entry.name, None)
            for text in entry.texts:
                self._push_file(version, text.name, text)
            super().add_part(version, entry)
        if not self._keeps_files:
            (self._run / _object(version, entry.name)).unlink()
        return (self._store.commit_seconds or 0.0) + entry.size_bytes / SLOWEST_UPLOAD_BYTES_PER_SECOND

    def read_receipts(self, version: int, names: Iterable[str]) -> dict[str, FileEntry]:
        with self._store.committing():
            return super().read_receipts(version, names)

    def publish_version(self, manifest: Manifest, parts: Sequence[FileEntry] = ()) -> None:
        self._commit(manifest, parts)
        self._storage.publish_version(manifest)

    def _commit(self, manifest: Manifest, parts: Sequence[FileEntry] = ()) -> None:
        """Upload a version but for its parts that are there, publish it, and remove older versions.

        CheckpointError if another job has taken the place of this one.
        """
        with self._store.committing():
            self._check_writer()
            self._push_features()
            self._push_version(manifest, parts)
            self.push_records()
            # Read again after the upload, which may take minutes.
            self._check_writer()
            super().publish_version(manifest)

    def push_records(self) -> None:
        """Upload configuration, statistics, metrics and event files."""
        records = [path for path in self._run.glob("*") if layout.is_record(path.name)]
        for path in sorted([*records, *self._run.glob(f"{layout.EVENTS_FOLDER}/*")]):
            if path.is_file():
                self._store.upload(path, path.relative_to(self._run).as_posix())

    def _push_version(self, manifest: Manifest, parts: Sequence[FileEntry] = ()) -> None:
        """Upload the files of a version but ``parts``, which are there with receipts; then its manifest."""
        version = manifest.version
        done = {layout.MANIFEST_FILE, *(part.name for part in parts)}
        done |= {text.name for part in parts for text in part.texts}
        for path in sorted((self._run / _object(version)).iterdir()):
            if path.name not in done:
                self._push_file(version, path.name, manifest.all_texts.get(path.name))
        if lacking := self._lacking(manifest):
            raise StorageError(f"{lacking[0]}, after its upload")
        for name in self.names(layout.version_folder(version)):
            if name.endswith(layout.RECEIPT_SUFFIX):
                self._store.remove(_object(version, name))
        self._store.write(_object(version, layout.MANIFEST_FILE), manifest.content)

    def _push_file(self, version: int, name: str, text: TextEntry | None) -> None:
        """Upload a file of a version; a text that the version before has is copied inside the store."""
        is_same = text is not None and self._last is not None and self._last.all_texts.get(name) == text
        target = _object(version, name)
        if not (is_same and self._store.copy(_object(self.version, name), target)):
            self._store.upload(self._run / target, target)

    def push_pointers(self) -> None:
        """Upload the folder's pointers that the store does not have; their versions were published before."""
        for name, note in self._storage.pointers().items():
            if note and note != self.read_pointer(name):
                self.write_json(name, note)

    def _push_features(self) -> None:
        """Upload the frozen vectors of the run, if it has some, and then their note."""
        note = self._run / _FEATURES_NOTE
        if note.is_file() and (content := note.read_bytes()) != self._store.read(_FEATURES_NOTE):
            for entity_type in parse_note(content, note):
                name = f"{layout.FEATURES_FOLDER}/{layout.features_array(entity_type)}"
                self._store.upload(self._run / name, name)
            self._store.write(_FEATURES_NOTE, content)

    def _pull_features(self) -> None:
        """Download the frozen vectors of the run, if it has some; files that are there and whole stay."""
        content = self._store.read(_FEATURES_NOTE)
        if content is None:
            return
        for entity_type, (_, _, crc32) in parse_note(content, self._store.at(_FEATURES_NOTE)).items():
            name = f"{layout.FEATURES_FOLDER}/{layout.features_array(entity_type)}"
            self._pull_file(name, crc32, layout.FEATURES_NOTE_FILE)
        # With the note the folder counts as whole.
        self._pull_file(_FEATURES_NOTE)

    def _pull_version(self, manifest: Manifest) -> None:
        """Download the files of a version that are not in the folder with their checksums."""
        version = manifest.version
        for entry in manifest.all_files:
            self._pull_file(_object(version, entry.name), entry.crc32)
        # The manifest does not list the statistics, which other programs write too.
        if layout.STATS_FILE in self.names(layout.version_folder(version)):
            self._pull_file(_object(version, layout.STATS_FILE))

    def _write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of a version to the folder, byte for byte."""
        folder = self._storage.folder(manifest.version)
        folder.make()
        folder.write(layout.MANIFEST_FILE, manifest.content)

    def _pull_file(self, name: str, crc32: int | None = None, source: str = "the manifest") -> None:
        """Download an object as the file of its name, unless that has the checksum that ``source`` gives."""
        target = self._run / name
        with contextlib.suppress(OSError):
            if crc32 is not None and file_crc32(target) == crc32:
                return
        folder = LeasedFolder(target.parent, self._storage.lease)
        folder.make()
        with folder.new_file(target.name) as path:
            self._store.download(name, path)
            if crc32 is not None:
                check_crc32(self._store.at(name), crc32, file_crc32(path), source)

    def _pointer(self) -> int | None:
        """Return the version that the pointer names; None where there is none, or it is torn."""
        text = (self._store.read(_POINTER) or b"").decode(errors="replace")
        # The last byte of the pointer is a line feed: without it "12" may be all that was written of "123".
        return layout.parse_version(text.strip()) if text.endswith("\n") else None

    def _check_writer(self) -> None:
        """Check that no other job was started with this store, and none has left a version there."""
        note = layout.parse_object(self._store.read(layout.WRITER_FILE))
        if note.get("job") != self.nonce:
            job, host, since = (note.get(key) for key in ("job", "host", "since"))
            who = f"job {str(job)[:8]} on {host}, started {since}" if note else "another job"
            raise CheckpointError(f"{self.url} was taken over by {who}: this job no longer writes")
        pointer = self._pointer()
        if pointer and pointer != self.version:
            versions = f"version {pointer} by now, this job has left version {self.version}"
            raise CheckpointError(f"{self.url} has {versions}: another job writes there")


def local_path(path: str | os.PathLike[str], version: int | None = None) -> str | os.PathLike[str]:
    """Return a path as it is; of a URL, the folder to which its newest version was downloaded.

    The folder is ``~/.cache/dglkge/runs/{name}-{digits}``; what is there already is not downloaded again.

    Parameters
    ----------
    path : path or URL
        Of a run, its ``checkpoint``, or a version there: ``s3://bucket/run/checkpoint/best``.
    version : int, optional
        Of a URL, one that is downloaded too.

    Raises
    ------
    InputError
        If the scheme is unknown, its package is not installed, there is no run, or the folder may not be
        written to.
    StorageError
        If the store cannot be reached, or the disk is full.
    """
    if not is_url(path):
        return path
    url = str(path).rstrip("/")
    run, inside, kept = f"{url}/".rpartition(f"/{layout.CHECKPOINT_FOLDER}/")
    kept = kept.rstrip("/")
    is_version = layout.is_pointer(kept) or layout.parse_version_folder(kept) is not None
    if not inside or (kept and not is_version):
        run, inside, kept = url, "", ""
    digits = hashlib.sha256(run.encode()).hexdigest()[:12]
    folder = Path.home() / ".cache" / "dglkge" / "runs" / f"{run.rpartition('/')[2]}-{digits}"
    mirror = Mirror(open_store(run), folder)
    LeasedFolder(folder).make()
    with open(folder / layout.LOCK_FILE, "w", encoding="utf-8") as lock:
        if not wait_for_lock(lock, LOCK_SECONDS):
            text = f"another process has been downloading {run} to {folder} for {LOCK_SECONDS:g} s"
            raise StorageError(text)
        mirror.refresh(kept if version is None else layout.version_folder(version))
    return folder / layout.CHECKPOINT_FOLDER / kept if inside else folder


def _object(version: int, *name: str) -> str:
    """Return the name of an object of a version, or of the folder of its objects."""
    return "/".join((layout.CHECKPOINT_FOLDER, layout.version_folder(version), *name))
