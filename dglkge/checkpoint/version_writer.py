"""Writes one version from its first file to publication. No collectives: runs in a thread beside training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dglkge.checkpoint import layout, part_files, shared_texts
from dglkge.checkpoint.bigraph import bigraph_attributes, bigraph_config
from dglkge.checkpoint.durable import LeasedFolder
from dglkge.checkpoint.lineage import extended
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest, TextEntry, check_complete
from dglkge.checkpoint.mirror import SLOWEST_UPLOAD_BYTES_PER_SECOND, Mirror
from dglkge.checkpoint.storage import (
    CheckpointStorage,
    describe_text,
    read_receipts,
    remove_receipts,
    signs_of_life,
    write_receipt,
)
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.lease import new_nonce
from dglkge.errors import CheckpointError, JobError
from dglkge.typing import TablePart

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02


@contextlib.contextmanager
def _failures_of_others() -> Iterator[None]:
    """Raise failures of other machines as JobError: a restart of the job may succeed."""
    try:
        yield
    except CheckpointError as error:
        raise JobError(str(error)) from error


@dataclass(frozen=True)
class NewVersion:
    """Share of one process in a version.

    Attributes
    ----------
    version : int
    meta : CheckpointMeta
    num_parts : int
        Parts of each entity type over all machines.
    parts : sequence of TablePart
        Entity rows to write; empty where another trainer writes them.
    relations : TablePart or None
        All relations, on rank 0, which also publishes.
    previous : Manifest or None
        The version before.
    kept_as : mapping of str to mapping
        Names of pointers to the version, and notes on their reason.
    stats : sequence of mapping
        Records of training since the version before.
    state : bytes
        What changes during training beside the tables; empty if nothing does. Rank 0's is written.
    """

    version: int
    meta: CheckpointMeta
    num_parts: int
    parts: Sequence[TablePart]
    relations: TablePart | None
    previous: Manifest | None
    kept_as: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stats: Sequence[Mapping[str, Any]] = ()
    state: bytes = b""


class VersionWriter:
    """Writes a process's files; on rank 0 waits for the files of the others, then publishes.

    The exchange protocol is files alone, so that training can use the network meanwhile: each writer leaves a
    receipt beside each file, and rank 0 polls the folder for all receipts, or the store where machines share
    no disk.

    Parameters
    ----------
    storage : CheckpointStorage
    names : mapping of str to Vocabulary
    limit_seconds : float
        Rank 0 fails if the files of the other writers have not changed for so long.
    mirror : Mirror or None
        The run's store beside the folder, on the writer of each machine.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        names: Mapping[str, Vocabulary],
        limit_seconds: float,
        mirror: Mirror | None = None,
    ) -> None:
        self.mirror = mirror
        self.storage = storage
        self.names = names
        self.limit_seconds = limit_seconds
        # A job without a lease still needs an identity in the lineage.
        self._job = storage.nonce or new_nonce()
        self._folder = storage.path
        self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())

    def progress(self) -> str:
        """Return a text that changes while this process's share of a version is written, sent or uploaded."""
        uploaded = () if self.mirror is None else self.mirror.progress
        return json.dumps([signs_of_life(self._folder), uploaded])

    def write(self, new: NewVersion) -> None:
        """Write this process's files of a version and, where it has the relations, publish it.

        Raises
        ------
        CheckpointError
            If a file may not be written.
        JobError
            If the disk is full or fails, another machine's files do not come, or the store cannot be reached.
            The version before stays as it is.
        """
        folder, mirror = self.storage.folder(new.version), self.mirror
        self._folder = folder.path
        config = bigraph_config(new.meta, new.num_parts, str(folder.path.resolve()))
        written = self._write_parts(folder, new, bigraph_attributes(new.meta, config))
        is_cache = mirror is not None and mirror.is_cache
        if new.relations is not None and not is_cache:
            with _failures_of_others():
                files = self._wait_for_all(new)
            self._publish(self._complete(new, files, config))
        if mirror is None:
            return
        for entry in written:
            mirror.push_part(new.version, entry, new.previous)
        if new.relations is None:
            return
        names = [
            layout.embeddings_file(name, part, new.version)
            for name in new.meta.entity_types
            for part in range(new.num_parts)
        ]
        slowest = max(entry.size_bytes for entry in written) / SLOWEST_UPLOAD_BYTES_PER_SECOND
        names.append(layout.model_file(new.version))
        files = mirror.wait_for_parts(new.version, names, self.limit_seconds + slowest)
        # A folder that all machines see has a version before the store; a cache after it.
        manifest = self._complete(new, files, config) if is_cache else None
        mirror.push(new.version, files)
        if manifest is not None:
            self._publish(manifest)

    def _write_parts(
        self, folder: LeasedFolder, new: NewVersion, attributes: Mapping[str, Any]
    ) -> list[FileEntry]:
        """Write this process's files, each with a receipt; returns their entries."""
        folder.make()
        entries = []
        for part in new.parts:
            entry = part_files.write_part(folder, new.version, part, new.meta, attributes)
            texts = self._same_names(folder, entry, new.previous)
            if not texts:
                ids = part.original_ids.sort().values.tolist()
                names = self.names.get(part.table)
                texts = part_files.write_names(folder, part.table, part.part, ids, names)
            # The receipt follows the durable file: its presence is the proof that rank 0 waits for.
            entries.append(dataclasses.replace(entry, texts=tuple(texts)))
            write_receipt(folder, entries[-1])
        if new.relations is not None:
            entry = part_files.write_relations(folder, new.version, new.relations, new.meta, attributes)
            entries.append(entry)
            write_receipt(folder, entry)
        return entries

    def _wait_for_all(self, new: NewVersion) -> list[FileEntry]:
        """Wait for the receipts of all writers, and return them."""
        # One file for each part of each entity type, and one for all relations.
        expected = new.num_parts * len(new.meta.entity_types) + 1
        folder = self.storage.folder(new.version)
        signs: list[tuple[str, int]] = []
        last_news = time.monotonic()
        while True:
            files = read_receipts(folder)
            now = time.monotonic()
            # On timeout, check_complete raises the error with the list of parts that are missing.
            if len(files) >= expected or now - last_news > self.limit_seconds:
                check_complete(new.meta, files)
                return files
            if (found := signs_of_life(folder.path)) != signs:
                signs, last_news = found, now
            time.sleep(POLL_SECONDS)

    def _same_names(
        self, folder: LeasedFolder, entry: FileEntry, previous: Manifest | None
    ) -> Sequence[TextEntry]:
        """Link a part's names and count if the version before has the same; return their entries."""
        if previous is None:
            return ()
        older = self.storage.folder(previous.version).path
        for old in previous.files:
            # Equal checksums of the ids mean the same rows in the same part, so the names are equal too.
            if (old.table, old.part, old.ids_crc32) == (entry.table, entry.part, entry.ids_crc32):
                return old.texts if shared_texts.link_texts(folder, older, old.texts) else ()
        return ()

    def _complete(self, new: NewVersion, files: Sequence[FileEntry], config: Mapping[str, Any]) -> Manifest:
        """Write the texts, the state and the manifest of a version whose parts are complete."""
        version, previous = new.version, new.previous
        folder = self.storage.folder(version)
        older = self.storage.folder(0 if previous is None else previous.version).path
        text = json.dumps(config, indent=4)
        texts = shared_texts.write(folder, new.meta, text, self.names, older, previous)
        shared_texts.write_stats(folder, older, new.stats)
        state = self._write_state(folder, new.state)
        before = previous.lineage if previous is not None else ()
        run_id = previous.run_id if previous is not None else new_nonce()
        lineage = extended(before, self._job, version, socket.gethostname(), self._since)
        manifest = Manifest(version, new.meta, files, texts, run_id, tuple(lineage), state, new.kept_as)
        # The order from here on is the commit protocol. The manifest lists files that are all durable, and
        # nothing in the folder changes any more.
        remove_receipts(folder.path)
        folder.write_text(layout.MANIFEST_FILE, manifest.to_json())
        return manifest

    def _publish(self, manifest: Manifest) -> None:
        """Publish a complete version in the folder, and remove older versions."""
        storage, version = self.storage, manifest.version
        # Pointers follow the publication: at no time does one name a version that does not count. The next
        # start writes those that are missing.
        storage.publish(version)
        storage.keep_all(manifest)
        try:
            storage.drop_older(version)
        except OSError as error:
            # The version is published, so the save has succeeded. The next one removes the same files.
            logger.warning(
                "checkpoint version %d is published, but older files in %s could not be removed: %s",
                version, storage.path, error.strerror or error,
            )  # fmt: skip
        logger.info("checkpoint version %d in %s", version, storage.path)

    def _write_state(self, folder: LeasedFolder, state: bytes) -> TextEntry | None:
        """Write the state of training; returns its entry, None if there is no state."""
        if not state:
            return None
        with folder.new_file(layout.STATE_FILE) as path:
            path.write_bytes(state)
            return describe_text(path, layout.STATE_FILE)


def refuse_missing_relations(relations: TablePart | None) -> TablePart:
    """Return rank 0's relations.

    Raises
    ------
    CheckpointError
        If there are none.
    """
    if relations is None:
        raise CheckpointError("rank 0 was handed no relations to save")
    return relations
