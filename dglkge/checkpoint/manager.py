"""Saving live tables as a new version, and filling them from the newest one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dglkge.checkpoint import restore, snapshots
from dglkge.checkpoint.courier import Courier
from dglkge.checkpoint.fallback import fall_back
from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
from dglkge.checkpoint.row_copy import RowCopy
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.checkpoint.version_writer import NewVersion, VersionWriter, refuse_missing_relations
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError
from dglkge.typing import TablePart

logger = logging.getLogger(__name__)

WRITER_LIMIT_SECONDS = 600.0
"""A save fails when another machine's files have not changed for so long."""


class CheckpointManager:
    """Saves and restores the tables of a run; each machine handles what it owns.

    All trainers call :meth:`save` or :meth:`start` together. The folder is one that all machines see, unless
    there is a courier: then rank 0's is the checkpoint, and the others hold what was there at the start.

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
    limit_seconds : float
        How long rank 0 waits for another machine of which nothing new is seen.
    courier : Courier or None
        Brings files to rank 0 where machines share no disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        is_writer: bool,
        barrier: Callable[[], None],
        names: Mapping[str, Vocabulary] | None = None,
        num_parts: int | None = None,
        limit_seconds: float = WRITER_LIMIT_SECONDS,
        courier: Courier | None = None,
    ) -> None:
        self.storage = CheckpointStorage(path)
        self.rank = rank
        self.is_writer = is_writer
        self.barrier = barrier
        self.num_parts = num_parts
        self.row_copy = RowCopy()
        self._writer = VersionWriter(self.storage, names or {}, limit_seconds, courier)
        self._courier = courier
        self._writing: Future[object] | None = None
        self._stats: list[Mapping[str, Any]] = []

    def latest(self) -> CheckpointMeta | None:
        """Return what the newest version says about its run; None where the folder holds no checkpoint.

        Raises
        ------
        CheckpointError
            If there is a checkpoint and anything of it is missing or damaged.
        """
        manifest = self.storage.published()
        return None if manifest is None else manifest.meta

    def num_bytes(self) -> int:
        """Return the size of the newest version's files; 0 where there is none."""
        manifest = self.storage.published()
        return 0 if manifest is None else sum(entry.size_bytes for entry in manifest.files)

    def fall_back(self) -> None:
        """Go back to the newest good version if the newest is damaged; a collective.

        Raises
        ------
        CheckpointError
            If no version is whole.
        """
        if self.rank == 0:
            fall_back(self.storage, self._writer.names)
        self.barrier()

    def save(
        self,
        parts: Sequence[TablePart],
        relations: TablePart | None,
        meta: CheckpointMeta,
        snapshots: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """Write and publish a new version, then drop the older ones; takes no copy of the rows.

        Parameters and errors are those of :meth:`start`. When it returns, on any rank, the version counts.
        """
        version = self.start(parts, relations, meta, snapshots, copy=False)
        self.finish()
        self.barrier()
        return version

    def reserve(self, parts: Sequence[TablePart]) -> None:
        """Touch the memory of the copies in a thread; else training would wait for that at the first save."""
        if self.is_writer:
            self._in_thread(lambda: [self.row_copy.of(part) for part in parts])

    def start(
        self,
        parts: Sequence[TablePart],
        relations: TablePart | None,
        meta: CheckpointMeta,
        snapshots: Mapping[str, Mapping[str, Any]] | None = None,
        copy: bool = True,
    ) -> int:
        """Start to write a new version in a thread; a save that runs is finished first.

        Parameters
        ----------
        parts : sequence of TablePart
            The entity rows that this machine owns; looked at where ``is_writer``.
        relations : TablePart or None
            All relations, in memory that nobody changes; looked at on rank 0.
        meta : CheckpointMeta
            The run, its progress among it; the same on every rank.
        snapshots : mapping of str to mapping, optional
            Names under which the version is kept when newer ones come, and why.
        copy : bool
            Take a copy, after which the rows may change. Else they must not before :meth:`finish`.

        Returns
        -------
        int
            The new version.

        Raises
        ------
        CheckpointError
            If the save before failed, or the folder holds a damaged checkpoint or one of another model or
            dataset. What goes wrong in the thread, :meth:`check` and :meth:`finish` raise.
        """
        self.finish()
        self.barrier()  # the save before is published
        previous = self.storage.published(texts=False)
        if previous is not None:
            check_same_run(previous.meta, meta)
        version = 1 if previous is None else previous.version + 1
        if self._courier is not None:
            version = self._courier.agree(version)
        self.barrier()  # nobody writes before all have seen the same version
        if self.rank == 0:
            self.storage.prepare()
            self.storage.drop_unpublished(version - 1)
            if previous is not None:
                self.storage.place_texts(previous)
        self.barrier()  # nobody writes before the leavings of an interrupted save are gone
        mine = parts if self.is_writer else []
        if copy:
            mine = [self.row_copy.of(part) for part in mine]
            self.barrier()  # from here on training may change the rows
        num_parts = self.num_parts or 1 + max((part.part for part in parts), default=0)
        shared = refuse_missing_relations(relations) if self.rank == 0 else None
        stats, self._stats = self._stats, []
        new = NewVersion(version, meta, num_parts, mine, shared, previous, snapshots or {}, stats)
        self._in_thread(lambda: self._write(new))
        return version

    @property
    def is_writing(self) -> bool:
        """Whether the thread is at work; on rank 0, until the version counts and older ones are gone."""
        return self._writing is not None and not self._writing.done()

    def check(self) -> None:
        """Raise what went wrong in the thread, if anything did; does not wait."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until this process's share of the save is on the disk; on rank 0, until the version counts.

        Raises
        ------
        CheckpointError
            If a file could not be written, or another machine's are missing. The version before stays.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def add_stats(self, record: Mapping[str, Any]) -> None:
        """Take note of what training measured; the next version brings it to training_stats.json."""
        self._stats.append(record)

    def keep_best(self, score: float, note: Mapping[str, Any]) -> bool:
        """Keep the newest version as ``best/`` if its score is above that of the one kept; rank 0 alone."""
        self.finish()
        best = snapshots.read_note(self.storage.path, snapshots.BEST).get("score")
        if best is not None and not score > best:
            return False
        self.storage.keep(self.storage.published_version(), snapshots.BEST, {"score": score, **note})
        return True

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
        for part in [*parts, *([relations] if relations is not None else [])]:
            restore.fill_part(self.storage, manifest, part)
        if self.rank == 0:
            self.storage.check_texts(manifest)
            self.storage.place_texts(manifest)  # which an interrupted save may have left undone
        return manifest.meta

    def _in_thread(self, work: Callable[[], object]) -> None:
        """Start some work in a thread of its own, which ends with it."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint")
        self._writing = thread.submit(work)
        thread.shutdown(wait=False)

    def _write(self, new: NewVersion) -> None:
        """Write in the thread; what goes wrong is told at once, on every rank."""
        try:
            self._writer.write(new)
        except BaseException as error:
            logger.error("checkpoint version %d was not written: %s", new.version, error)
            raise
