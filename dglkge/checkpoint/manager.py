"""Saves live tables as a new version, and fills them from the newest one."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dglkge.checkpoint import layout, part_files
from dglkge.checkpoint.manifest import CheckpointMeta, JobVersions, Manifest, check_same_run, extended
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.storage import CheckpointStorage, check_crc32, check_files
from dglkge.checkpoint.version_writer import NewVersion, write_anew
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.lease import Lease, new_nonce, utc_now
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.process_group import agree
from dglkge.distributed.world import DEFAULT_TIMEOUT_SECONDS
from dglkge.errors import CheckpointError, JobError, StorageError, os_errors
from dglkge.optim.workspace import Scratch
from dglkge.typing import TablePart

logger = logging.getLogger(__name__)

AGREEMENT_SECONDS = 30.0
"""Limit of the delay with which a host sees on a shared disk what another host has published."""
AGREEMENT_POLL_SECONDS = 0.5
PROGRESS_SECONDS = 2.0
"""Interval at which trainers that wait for a save compare its progress."""


def copied(part: TablePart, memory: Scratch) -> TablePart:
    """Return a copy of a part, in memory that the next version overwrites.

    It stays to the end of the run: 8·n·D bytes for n rows of D float32 with element-wise Adagrad.
    """

    def copy(name: str, values: torch.Tensor) -> torch.Tensor:
        width = math.prod(values.shape[1:])
        room = memory.take((part.table, part.part, name), len(values), width, values.dtype)
        return room.view(values.shape).copy_(values.detach())

    state = {name: copy(f"state {name}", values) for name, values in part.state.items()}
    return replace(part, rows=copy("rows", part.rows), state=state)


def fall_back(storage: CheckpointStorage, names: Mapping[str, Vocabulary] | None = None) -> int | None:
    """Publish the newest version with undamaged rows, if the published version is damaged.

    Reads every file. Newer versions are not deleted: they are moved to ``damaged_v{V}/``, with the pointers
    to them. Damaged text files of the good version are moved there too, and are written again from its rows
    and the names.

    Returns
    -------
    int or None
        The version that was published; None if nothing is damaged, or there is no checkpoint.

    Raises
    ------
    CheckpointError
        If no version is whole, the folder may not be written to, or a text does not come out as it was.
    """
    try:
        manifest = storage.published()
        if manifest is not None:
            check_files(storage.folder(manifest.version).path, manifest.all_files)
        return None
    except CheckpointError as error:
        good = storage.newest_good()
        if good is None:
            raise
        logger.warning("%s", error)
    with storage.writing():
        # Newer files go first. If the publication came first, the next save after a crash would remove them
        # as those of an interrupted save.
        if newer := [version for version in storage.versions() if version > good]:
            target = storage.damaged_folder(max(newer))
            pointers = [name for name, note in storage.pointers().items() if note.get("version", 0) > good]
            for name in [*pointers, *map(layout.version_folder, newer)]:
                os.replace(storage.path / name, target / name)
            logger.warning("newer files were moved to %s", target)
        storage.publish(good)
        if written := write_anew(storage, storage.stored(good), names or {}):
            logger.warning("written anew: %s", ", ".join(written))
    logger.warning("checkpoint.fallback: going on from version %d", good)
    return good


@dataclass(frozen=True)
class TrainerGroup:
    """The trainers of a job as one of them sees them; by default this one is alone.

    Attributes
    ----------
    rank : int
        This trainer's; rank 0 writes the relations and publishes versions.
    is_writer : bool
        Whether this trainer writes its machine's parts: one trainer of each machine does.
    barrier : callable
        Returns when all trainers have called it, or raises after a time limit.
    gather : callable
        Returns the texts of all trainers by rank, given this one's; a collective with a time limit.
    limit_seconds : float
        A save fails if no file of another machine has changed for so long.
    """

    rank: int = 0
    is_writer: bool = True
    barrier: Callable[[], None] = lambda: None
    gather: Callable[[str], Sequence[str]] = lambda text: [text]
    limit_seconds: float = DEFAULT_TIMEOUT_SECONDS


class CheckpointManager:
    """Saves and restores the tables of a run; each machine handles what it owns.

    All trainers call :meth:`save` or :meth:`start` together. The folder is one that all machines see, or each
    machine's own; of a run that has a store it is a cache.

    Parameters
    ----------
    path : path
        The checkpoint's folder.
    group : TrainerGroup
    names : mapping of str to Vocabulary
        The entities' names by type; a type that is not there has its ids for names.
    num_parts : int
        Parts of each table over all machines.
    lease : Lease or None
        The job's right to write to the run's folder.
    mirror : Mirror or None
        The run's store, on the writer of each machine: a URL, or the launcher's folder. The machines upload
        their parts side by side.

    Attributes
    ----------
    storage : CheckpointStorage
        The checkpoint's folder.
    records : LeasedFolder
        The run's folder around it, for metrics and other records.
    names : mapping of str to Vocabulary
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: TrainerGroup = TrainerGroup(),
        names: Mapping[str, Vocabulary] | None = None,
        num_parts: int = 1,
        lease: Lease | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.storage = CheckpointStorage(path, lease)
        self.records = LeasedFolder(self.storage.path.parent, lease)
        self.group = group
        self.num_parts = num_parts
        self.row_copy = Scratch()
        self.names = names or {}
        self._mirror = mirror
        # Another machine, or the launcher, may see the same folder in spite of --sync, and holds its lease.
        self._owns_folder = group.rank == 0 or (lease is not None and lease.is_holder)
        if lease is not None:
            # A thread may still write when the trainer ends: the lease is not released until then.
            lease.keep_while(lambda: self.is_writing)
        # A job without a lease still needs an identity in the lineage.
        self._job = JobVersions(self.storage.nonce or new_nonce(), 0, 0, socket.gethostname(), utc_now())
        self._progress: Callable[[], str] = lambda: "reserves memory"
        self._writing: Future[object] | None = None
        self._stats: list[Mapping[str, Any]] = []

    def latest(self) -> CheckpointMeta | None:
        """Return the newest version's description of its run; None if the folder holds no checkpoint.

        A collective: all trainers find the same undamaged version, or all raise the same CheckpointError.
        """
        manifest = self._agreed(texts=True)
        return None if manifest is None else manifest.meta

    def num_bytes(self) -> int:
        """Return the size of the newest version's files; 0 where there is none."""
        version = self.storage.named_version()
        return self.storage.stored(version).num_bytes if version else 0

    def fall_back(self, wait: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Publish the newest undamaged version, if the newest is damaged; a collective.

        The folder of a run that has a store has been compared with that when it was filled.

        Parameters
        ----------
        wait : callable
            A barrier whose limit grows with the bytes that one of the trainers may have to read.
        """
        if self.group.gather("" if self._mirror is None else "store")[0]:
            return
        # Every version that lies there is read, and then again the one that is gone back to.
        sizes = (path.stat().st_size for path in self.storage.path.glob("v*/*"))
        num_bytes = 2 * max(map(int, self.group.gather(str(sum(sizes)))))

        def mend() -> None:
            # Rank 0 alone works on a shared folder. All others wait in the barrier, then receive its error.
            if self.group.rank == 0:
                fall_back(self.storage, self.names)

        agree(self.group.gather, mend, lambda: wait(num_bytes))

    def save(self, *content: Any, **more: Any) -> int:
        """Write and publish a new version, then drop the older ones; takes no copy of the rows.

        Parameters and errors are those of :meth:`start`. When it returns, on any rank, the version counts.
        """
        version = self.start(*content, copy=False, **more)
        self.finish_together()
        return version

    def reserve(self, parts: Sequence[TablePart]) -> None:
        """Touch the memory of the copies in a thread; else training would wait for that at the first save."""
        if self.group.is_writer:
            self._in_thread(lambda: [copied(part, self.row_copy) for part in parts])

    def start(
        self,
        parts: Sequence[TablePart],
        relations: TablePart | None,
        meta: CheckpointMeta,
        kept_as: Mapping[str, Mapping[str, Any]] | None = None,
        state: bytes = b"",
        *,
        copy: bool = True,
    ) -> int:
        """Start to write a new version in a thread; a save that runs is finished first.

        Parameters
        ----------
        parts : sequence of TablePart
            The entity rows that this machine owns; ignored unless ``is_writer``.
        relations : TablePart or None
            All relations, in memory that does not change; ignored on other ranks than 0.
        meta : CheckpointMeta
            The run, its progress among it; the same on every rank.
        kept_as : mapping of str to mapping, optional
            Names of pointers by which the version is kept when newer ones come, and why.
        state : bytes
            What changes during training beside the tables, as :meth:`read_state` returns it; ignored on other
            ranks than 0.
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
        self.finish_together()
        previous = self._previous(meta)
        version = previous.version + 1
        self.group.barrier()  # no rank writes before all ranks have read the same version
        if self._owns_folder:
            self.storage.prepare()
            self.storage.drop_unpublished(previous.version)
            if self._mirror is not None and previous.version and self.group.rank > 0:
                self._mirror.publish_in_cache(previous)
        if self.group.rank == 0:
            self.records.drop_temporaries()
            self.storage.keep_all(previous)
        self.group.barrier()  # no rank writes before the files of an interrupted save are removed
        mine = parts if self.group.is_writer else []
        if copy:
            mine = [copied(part, self.row_copy) for part in mine]
            # All machines copy at the same batch boundary, so the copies belong to one state of training.
            self.group.barrier()  # from here on training may change the rows
        if self.group.rank == 0:
            if relations is None:
                raise CheckpointError("rank 0 was handed no relations to save")
            mine = [*mine, relations]
        lineage = extended(previous.lineage, replace(self._job, first=version, last=version))
        # Swapped and not cleared: the thread reads the old list while training adds to the new one.
        stats, self._stats = self._stats, []
        draft = Manifest(version, meta, (), (), previous.run_id, lineage, None, kept_as or {})
        store, limit = self._mirror or self.storage, self.group.limit_seconds
        new = NewVersion(
            self.storage, store, self.names, limit, draft, self.num_parts, mine, previous, stats, state
        )
        self._progress = new.progress

        def log_error(written: Future[object]) -> None:
            """Log an error of the thread at once, on every rank."""
            if error := written.exception():
                logger.error("checkpoint version %d was not written: %s", version, error)

        self._in_thread(new.write).add_done_callback(log_error)
        return version

    @property
    def is_writing(self) -> bool:
        """Whether the thread runs; on rank 0 until the version is published and older ones are removed."""
        return self._writing is not None and not self._writing.done()

    def check(self) -> None:
        """Raise an error of the thread, or that the lease is lost; does not wait."""
        if self.storage.lease is not None:
            self.storage.lease.check(afresh=False)
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until this process's share of the save is on the disk; on rank 0, until it is published.

        CheckpointError or JobError if a file could not be written, or another machine's are missing.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish_together(self) -> None:
        """Wait until the save is published, and uploaded where there is a URL; a collective.

        It takes as long as one of the trainers makes progress: a large version may take hours. All raise the
        error of one that could not write its share, or JobError if none makes progress any more.
        """
        before, last_news, limit = [""], time.monotonic(), self.group.limit_seconds
        while True:
            if self._writing is not None:
                wait([self._writing], PROGRESS_SECONDS)
            states = list(self.group.gather(self._progress() if self.is_writing else ""))
            if not any(states):
                break
            if states != before:
                before, last_news = states, time.monotonic()
            # Rank 0's clock decides for all, so that none waits in a collective that another has left.
            if self.group.gather("stalled" if time.monotonic() - last_news > limit else "")[0]:
                raise JobError(f"a version was not written: nothing has changed for {limit:g} s")
        agree(self.group.gather, self.finish)
        self.group.barrier()

    def push_records(self) -> None:
        """Upload metrics, other records and pointers to the run's store, if it has one; on rank 0."""
        if self._mirror is not None and self.group.rank == 0:
            self._mirror.push_records()
            self._mirror.push_pointers()

    def add_stats(self, record: Mapping[str, Any]) -> None:
        """Add a record of training; the next version writes it to training_stats.json."""
        self._stats.append(record)

    def keep_best(self, score: float, note: Mapping[str, Any]) -> bool:
        """Point ``best`` to the newest version if its score is above that of the one kept; rank 0 alone."""
        self.finish()
        best = self.storage.read_pointer(layout.BEST).get("score")
        # A NaN never becomes the best: no later score would be above it.
        if math.isnan(score) or (best is not None and not score > best):
            return False
        newest = self.storage.stored(self.storage.named_version())
        self.storage.keep(newest, layout.BEST, {"score": score, **note})
        if self._mirror is not None:
            with contextlib.suppress(StorageError):  # which is logged; the next commit uploads it
                self._mirror.push_pointers()
        return True

    def find(self, pointer: str = "") -> tuple[Path, Manifest]:
        """Return folder and manifest of the newest version on this trainer's disk, or of a pointer's.

        No collective, unlike :meth:`latest`. CheckpointError if it is absent, or a file of it damaged.
        """
        manifest = self.storage.kept(pointer) if pointer else self.storage.published()
        if manifest is None:
            raise CheckpointError(f"{self.storage.path} holds no checkpoint")
        return self.storage.folder(manifest.version).path, manifest

    def bring(self, pointer: str) -> None:
        """Bring the version that a pointer names to this machine's cache, on its owner."""
        if self._mirror is not None and self._owns_folder:
            self._mirror.bring(pointer)

    def read_state(self, pointer: str = "") -> bytes:
        """Return what a version of :meth:`find` has of training beside the tables; may be empty."""
        folder, manifest = self.find(pointer)
        if manifest.state is None:
            return b""
        path = folder / manifest.state.name
        with os_errors(CheckpointError, f"cannot read {path}"):
            state = path.read_bytes()
        check_crc32(path, manifest.state.crc32, zlib.crc32(state))
        return state

    def restore(self, parts: Sequence[TablePart], pointer: str = "") -> CheckpointMeta:
        """Fill live tables, rows and state, from the newest version, whatever parts it has.

        Parameters
        ----------
        parts : sequence of TablePart
            Filled in place; the relations that this machine owns may be one of them.
        pointer : str
            Pointer to the version to fill them from instead.

        Returns
        -------
        CheckpointMeta
            The run that was restored. Optimizer state that is missing or left over is logged.

        Raises
        ------
        CheckpointError
            If there is no checkpoint, a file of it is damaged, or it lacks a row.
        """
        folder, manifest = self.find(pointer)
        for part in parts:
            part_files.fill_part(folder, manifest, part)
        if self.group.rank == 0:
            check_files(folder, manifest.all_texts.values())
        return manifest.meta

    def _previous(self, meta: CheckpointMeta) -> Manifest:
        """Return the version before; without files on those that write none; a collective.

        Before the first one of a run it is version 0, which is empty.
        """
        mirror = self._mirror
        # Rank 0 has published in the store, if there is one.
        if number := self.group.gather("" if mirror is None else str(mirror.version))[0]:
            previous = agree(self.group.gather, lambda: mirror.manifest(int(number)) if mirror else None)
        elif previous := self._agreed(texts=False):
            check_same_run(previous.meta, meta)
        return previous or Manifest(int(number or 0), meta, (), (), new_nonce())

    def _agreed(self, texts: bool) -> Manifest | None:
        """Return the newest manifest once all trainers find the same one; a collective.

        A shared disk may show a new version to some hosts with a delay, so this polls up to a limit.
        """
        deadline = time.monotonic() + AGREEMENT_SECONDS
        where = f"{self.storage.path} on {socket.gethostname()}"
        while True:
            newest = agree(self.group.gather, lambda: self.storage.published(texts=texts))
            state = "none" if newest is None else f"version {newest.version} (manifest {newest.checksum})"
            states = self.group.gather(state)
            different = [rank for rank, name in enumerate(states) if name != states[0]]
            if not different:
                return newest
            places = [f"{name} in {place}" for name, place in zip(states, self.group.gather(where))]
            # Rank 0's clock decides for all: else one rank could raise while another polls on.
            if self.group.gather("late" if time.monotonic() >= deadline else "")[0]:
                raise CheckpointError(
                    f"the trainers do not find the same checkpoint: rank 0 has {places[0]}, rank "
                    f"{different[0]} has {places[different[0]]}; is the folder mounted on all machines? "
                    "Machines that share no disk need --sync"
                )
            time.sleep(AGREEMENT_POLL_SECONDS)

    def _in_thread(self, work: Callable[[], object]) -> Future[object]:
        """Run a function in a new thread."""
        # A new executor for each save: its thread ends with the save.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint")
        self._writing = thread.submit(work)
        # No wait: the thread ends with its work, and the interpreter joins it at exit.
        thread.shutdown(wait=False)
        return self._writing
