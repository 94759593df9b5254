"""Saving live tables as a new version, and filling them from the newest one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from dglkge.checkpoint import layout, part_files, restore
from dglkge.checkpoint.bigraph_config import bigraph_attributes, bigraph_config
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest, check_complete, check_same_run
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.data.relation_vocabulary import RelationVocabulary
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError
from dglkge.typing import TablePart

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and restores the tables of a run; each machine handles what it owns.

    All trainers call :meth:`save` together. The folder is one that all machines see.

    Parameters
    ----------
    path : path
        The checkpoint's folder.
    rank : int
        This trainer's rank; rank 0 writes the relations and publishes the version.
    is_writer : bool
        Whether this trainer writes its machine's parts: one trainer of each machine does.
    barrier : callable
        Returns when all trainers have called it, or raises after a time limit.
    names : mapping of str to Vocabulary
        The entities' names by type; a type that is not there has its ids for names.
    num_parts : int or None
        Parts of each table over all machines; None where this process owns them all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        is_writer: bool,
        barrier: Callable[[], None],
        names: Mapping[str, Vocabulary] | None = None,
        num_parts: int | None = None,
    ) -> None:
        self.storage = CheckpointStorage(path)
        self.rank = rank
        self.is_writer = is_writer
        self.barrier = barrier
        self.names = names or {}
        self.num_parts = num_parts

    def latest(self) -> CheckpointMeta | None:
        """Return what the newest version says about its run; None where the folder holds no checkpoint.

        Raises
        ------
        CheckpointError
            If there is a checkpoint and anything of it is missing or damaged.
        """
        manifest = self.storage.published()
        return None if manifest is None else manifest.meta

    def save(self, parts: Sequence[TablePart], relations: TablePart | None, meta: CheckpointMeta) -> int:
        """Write and publish a new version, then drop the older ones.

        Parameters
        ----------
        parts : sequence of TablePart
            The entity rows that this machine owns; looked at where ``is_writer``.
        relations : TablePart or None
            All relations; looked at on rank 0.
        meta : CheckpointMeta
            The run, its progress among it; the same on every rank.

        Returns
        -------
        int
            The new version.

        Raises
        ------
        CheckpointError
            If the folder holds a damaged checkpoint or one of another model or dataset, or the parts do
            not make up whole tables. The version before stays as it is.
        """
        previous = self.storage.published()
        if previous is not None:
            check_same_run(previous.meta, meta)
        version = 1 if previous is None else previous.version + 1
        self.barrier()  # nobody writes before all have seen the same version
        if self.rank == 0:
            self.storage.prepare()
            self.storage.drop_unpublished(version - 1)
        self.barrier()  # nobody writes before the leavings of an interrupted save are gone
        self._write(version, parts, relations, meta, previous)
        self.barrier()  # everything is on the disk
        if self.rank == 0:
            self._publish(version, meta)
        self.barrier()  # the version counts
        if self.rank == 0 or self.is_writer:
            self.storage.drop_older(version)
        return version

    def restore(self, parts: Sequence[TablePart], relations: TablePart | None = None) -> CheckpointMeta:
        """Fill live tables, rows and state, from the newest version, whatever parts it has.

        Parameters
        ----------
        parts : sequence of TablePart
            Filled in place.
        relations : TablePart or None
            The relations among the rows that this machine owns; filled in place.

        Returns
        -------
        CheckpointMeta
            The run that was restored. Optimizer state that is missing or left over is logged.

        Raises
        ------
        CheckpointError
            If there is no checkpoint, a file of it is damaged, or it lacks a row.
        """
        manifest = self.storage.published()
        if manifest is None:
            raise CheckpointError(f"{self.storage.path} holds no checkpoint")
        live = [*parts, *([relations] if relations is not None else [])]
        for entry in manifest.files:
            if any(part.table == entry.table for part in live):
                self.storage.check_file(entry, checksum=True)
        for part in live:
            restore.fill_part(self.storage.path, manifest, part)
        return manifest.meta

    def _write(
        self,
        version: int,
        parts: Sequence[TablePart],
        relations: TablePart | None,
        meta: CheckpointMeta,
        previous: Manifest | None,
    ) -> None:
        """Write this process's files of a version, and a receipt for each."""
        num_parts = self.num_parts or 1 + max((part.part for part in parts), default=0)
        config = bigraph_config(meta, num_parts, str(self.storage.path.resolve()))
        attributes = bigraph_attributes(meta, config)
        if self.is_writer:
            for part in parts:
                entry = part_files.write_part(self.storage, version, part, meta, attributes)
                if not self._has_names(entry, previous):
                    names = self.names.get(part.table)
                    part_files.write_names(self.storage, part, names)
                self.storage.write_receipt(entry)
        if self.rank == 0:
            if relations is None:
                raise CheckpointError("rank 0 was handed no relations to save")
            self.storage.write_receipt(
                part_files.write_relations(self.storage, version, relations, meta, attributes)
            )

    def _has_names(self, entry: FileEntry, previous: Manifest | None) -> bool:
        """Tell whether the lists of names that a part would get lie in the folder already."""
        files = (
            layout.entity_names_file(entry.table, entry.part),
            layout.entity_count_file(entry.table, entry.part),
        )
        if previous is None or not all((self.storage.path / name).is_file() for name in files):
            return False
        known = {(old.table, old.part): old.ids_crc32 for old in previous.files}
        return known.get((entry.table, entry.part)) == entry.ids_crc32

    def _publish(self, version: int, meta: CheckpointMeta) -> None:
        """Check that all of a version is there, describe it and make it the one that counts."""
        files = self.storage.read_receipts(version)
        check_complete(meta, files)
        num_parts = max(entry.part for entry in files) + 1
        self._write_shared_files(meta, num_parts, anew=version == 1)
        self.storage.write_text(layout.manifest_file(version), Manifest(version, meta, files).to_json())
        self.storage.publish(version)
        self.storage.remove_receipts(version)
        self.storage.drop_names_from(num_parts)
        logger.info("checkpoint version %d in %s", version, self.storage.path)

    def _write_shared_files(self, meta: CheckpointMeta, num_parts: int, anew: bool) -> None:
        """Write the files that do not belong to one version: PyTorch-BigGraph's config, and names."""
        config = bigraph_config(meta, num_parts, str(self.storage.path.resolve()))
        self.storage.write_text(layout.CONFIG_FILE, json.dumps(config, indent=4))
        for table, names in self.names.items():
            missing = not (self.storage.path / layout.vocabulary_file(table)).is_file()
            if table in meta.entity_types and (anew or missing):
                with self.storage.new_file(layout.vocabulary_file(table)) as path:
                    names.save(path)
        if anew or not (self.storage.path / layout.RELATION_NAMES_FILE).is_file():
            labels = RelationVocabulary(meta.relations).labels.names
            self.storage.write_text(layout.RELATION_COUNT_FILE, f"{len(labels)}\n")
            self.storage.write_text(layout.RELATION_NAMES_FILE, json.dumps(list(labels), indent=4))
