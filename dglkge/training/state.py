"""Versions of a run: where they are, what they hold beside rows, and how a run goes on from one.

A run has its versions in a folder, with a lease, or in a store. The state of training is a ``torch.save`` of
one dict, ``state_dict()`` by name: learning rates, early stopping, sums of the open epoch, and the objects
that a script has registered, whose names begin with ``object:``. All trainers compute the same state; rank
0's is written, and every trainer reads it back. The model file holds parameters beside the relations' rows. A
run's place in its epochs is in the manifest.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge import __version__
from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, Progress
from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
from dglkge.checkpoint.manifest import CheckpointMeta, Manifest, check_same_run
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.stores import open_store
from dglkge.config import Config, refused_changes
from dglkge.config.schema import CheckpointConfig
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError, InputError, one_line
from dglkge.launch.remote.run_store import LauncherStore
from dglkge.planning.memory import saves_in_background
from dglkge.sampling.edge_batches import EpochBatches
from dglkge.step.contracts import ModelStateful, Stateful
from dglkge.training.job import Job
from dglkge.training.script import ElasticEpochs
from dglkge.typing import RELATION, TablePart

logger = logging.getLogger(__name__)

Fits = Callable[[CheckpointMeta, str], object]
Find = Callable[[Mirror], Manifest | None]
Names = Mapping[str, Vocabulary]

ATTEMPT_SECONDS = 5.0
"""Time that one trainer tries before all of them exchange their results: well below their timeout."""


def hold_run(output: Path, cluster: Cluster) -> Lease:
    """Take the lease on a run's folder, released when this trainer ends, however it ends; a collective.

    Rank 0 takes it, and where machines share no disk one trainer of each machine. The others get a lease of
    the same nonce, which they can check.
    """
    world = cluster.world
    # One nonce for the whole job: trainers that hold no lease check by it that the file is still this job's.
    nonce = cluster.gather_texts(new_nonce())[0]
    taker = LeaseTaker(output, nonce, world.job) if world.is_disk_leader else None
    lease: Lease | None = None

    def attempt() -> Lease | None:
        return lease if taker is None or lease is not None else taker.attempt(ATTEMPT_SECONDS)

    # Short attempts instead of one long wait: between them all trainers exchange results, within the timeout
    # of a collective.
    while True:
        taken = cluster.agree(attempt)
        if taken is not None and lease is None:
            cluster.on_exit(taken.release)
        lease = taken
        if not cluster.sum(np.array([taker is not None and lease is None], np.int64))[0]:
            break
    holder_nonce = cluster.gather_texts("" if lease is None else lease.holder_nonce)[0]
    return lease if lease is not None else Lease.shared(output, nonce, holder_nonce)


def open_checkpoints(
    output: Path, settings: CheckpointConfig, cluster: Cluster, fits: Fits, names: Names, num_parts: int
) -> CheckpointManager:
    """Take a run's folder, bring every disk of the job to the store's version, and open the checkpoint.

    A collective. Where a URL is configured, or machines share no disk, a store has the run: that of the URL
    or the launcher's; the folder on each machine is a cache of it. ``fits`` takes the description of a
    version in the store, and its place; it raises an error if this job may not go on from it.

    Raises
    ------
    CheckpointError, InputError
        On all trainers: another job holds a folder, it may not be written to or is a copy of another run, or
        the URL cannot be opened.
    StorageError
        On all trainers, if a disk is full or fails, or the store cannot be reached.
    """
    world, lease = cluster.world, hold_run(output, cluster)
    has_store = bool(settings.storage) or world.has_own_disk

    def open_mirror() -> Mirror | None:
        """Return the run's store, on the writer of each machine."""
        if not (has_store and world.is_machine_leader):
            return None
        store = open_store(settings.storage) if settings.storage else LauncherStore(output)
        return Mirror(store, output, lease, settings.store_seconds, settings.local)

    def take(mirror: Mirror) -> Manifest | None:
        return mirror.take(lambda saved: fits(saved, mirror.url))

    mirror = cluster.agree(open_mirror)
    if has_store:
        # Rank 0 first: it takes the store, to which a folder that has a run already may be uploaded.
        _fill(cluster, mirror if world.rank == 0 else None, take, bool(settings.storage))
        # Another machine may see the same folder in spite of --sync: then its lease is that machine's.
        _fill(cluster, mirror if lease.is_holder and world.rank > 0 else None, Mirror.newest, False)
    group = TrainerGroup(
        world.rank, world.is_machine_leader, cluster.barrier, cluster.gather_texts, world.timeout_seconds
    )
    return CheckpointManager(output / CHECKPOINT_FOLDER, group, names, num_parts, lease, mirror)


def _fill(cluster: Cluster, mirror: Mirror | None, find: Find, may_upload: bool) -> None:
    """Bring a disk to the store's version, on the trainers with a mirror; a collective."""
    manifest = cluster.agree(lambda: None if mirror is None else find(mirror))
    num_bytes = cluster.gather_texts(str(0 if manifest is None else manifest.num_bytes))
    most = max(map(int, num_bytes))
    cluster.agree(lambda: None if mirror is None else mirror.fill(manifest, may_upload), most)


OBJECT = "object:"
"""Prefix of the names of a script's objects."""


class TrainingState:
    """Everything of a version that is neither a row nor in the model file, saved and restored by one loop.

    Parameters
    ----------
    items : mapping of str to Stateful
        Those of the library; one with an empty state is not saved.
    door : str
        Where a script registers its objects, for error messages.
    """

    def __init__(self, items: Mapping[str, Stateful], door: str = "trainer.register") -> None:
        self._items, self._door = dict(items), door
        # States that were read for objects which are not registered yet; None before a version is read.
        self._unclaimed: dict[str, Any] | None = None

    def register(self, name: str, item: Any) -> None:
        """Save the state of an object with each version, and load it if the resumed version has it.

        Raises
        ------
        InputError
            For a name that is taken or no text, an object without ``state_dict`` and ``load_state_dict``, or
            a state that cannot be saved without pickled code.
        """
        if not isinstance(name, str) or not name:
            raise InputError(f"{self._door}: the name is {name!r}; allowed: a non-empty text")
        key = f"{OBJECT}{name}"
        if key in self._items:
            raise InputError(f"{self._door}: {name!r} is registered already; allowed: each name once")
        lacking = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(item, m, None))]
        if lacking:
            problem = f"{self._door}: {name!r} is a {type(item).__name__} without {' and '.join(lacking)}"
            raise InputError(f"{problem}; allowed: an object with both methods")
        _saved({key: item.state_dict()}, f"{self._door}: the state of {name!r}")
        self._items[key] = item
        if self._unclaimed and key in self._unclaimed:
            item.load_state_dict(self._unclaimed.pop(key))
        elif self._unclaimed is not None:
            logger.warning("the checkpoint has no state of %r, which was registered: it starts anew", name)

    def to_bytes(self) -> bytes:
        """Return the state for a version; empty if training changes nothing but the tables. A collective."""
        state = {**(self._unclaimed or {}), **{name: item.state_dict() for name, item in self._items.items()}}
        state = {name: value for name, value in state.items() if value or name.startswith(OBJECT)}
        names = ", ".join(name.removeprefix(OBJECT) for name in state)
        return _saved(state, f"the state of the training ({names})") if state else b""

    def load(self, content: bytes, where: str) -> None:
        """Continue from the bytes of a version; ``where`` is for error messages."""
        self._unclaimed = {}
        if not content:
            if self.to_bytes():
                logger.warning("%s has no state of the training: schedule and patience start anew", where)
            return
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            for name, item in self._items.items():
                if name in state:
                    item.load_state_dict(state.pop(name))
            self._unclaimed = {name: value for name, value in state.items() if name.startswith(OBJECT)}
        except CheckpointError as error:
            raise CheckpointError(f"{where} {error}") from None
        except Exception as error:
            text = f"{where}: not the state of this training, or damaged ({one_line(error)})"
            raise CheckpointError(text) from None


def _saved(state: Mapping[str, Any], label: str) -> bytes:
    """Return the bytes of a state that a reader without pickled code reads back."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        allowed = "dicts, lists, tuples, numbers, texts and tensors, which are read without running code"
        raise InputError(f"{label} cannot be saved: allowed are {allowed} ({one_line(error)})") from None
    return file.getvalue()


class Versions:
    """Writes and restores versions of a job: rows, parameters in the model file, state of training."""

    def __init__(self, job: Job, checkpoints: CheckpointManager, state: TrainingState) -> None:
        self._job, self._checkpoints, self._state = job, checkpoints, state
        beside = (job.features, job.dense, job.global_vectors)
        self._beside: list[ModelStateful] = [item for item in beside if item is not None]
        self._in_background = saves_in_background(job.config)

    def reserve(self) -> None:
        """Make room for the copies of rows that a save in the background takes."""
        if self._in_background:
            self._checkpoints.reserve(self._job.parts())

    def write(self, meta: CheckpointMeta, kept_as: Mapping[str, Mapping[str, Any]]) -> int:
        """Write a version, in the background unless the configuration says otherwise; a collective.

        Returns its number.
        """
        # After it all rows are final.
        self._job.settle()
        save = self._checkpoints.start if self._in_background else self._checkpoints.save
        return save(self._job.parts(), self._relations(), meta, kept_as, self._state.to_bytes())

    def _relations(self) -> TablePart | None:
        """Return the whole relation table on rank 0, which writes it, and what is beside it; a collective."""
        cluster, tables = self._job.cluster, self._job.tables
        shared: dict[str, Any] = {}
        for item in self._beside:
            if item.is_collective:
                # Every trainer sends its slices; a full disk of rank 0 must end all of them.
                shared.update(cluster.agree(item.state_dict))
            elif cluster.world.rank == 0:
                shared.update(item.state_dict())
        if cluster.world.rank != 0:
            return None
        whole = tables[RELATION].whole(self._job.optimizer_state(RELATION))
        return dataclasses.replace(whole, shared=shared)

    def restore(self, pointer: str = "") -> None:
        """Fill this machine's tables, on one trainer of it; every trainer reads what is beside them.

        ``pointer`` is the name of one to a preserved version; empty: the newest one.
        """
        folder, manifest = self._checkpoints.find(pointer)
        if self._job.averages is not None:
            self._job.averages.num_epochs = manifest.meta.progress[Progress.FINISHED_EPOCHS]
        if self._beside:
            with hdf5_format.open_file(folder / manifest.table_files(RELATION)[0].name) as file:
                for item in self._beside:
                    item.load_state_dict(file)
        if self._job.world.is_machine_leader:
            self._checkpoints.restore(self._job.own_parts(), pointer)
        self._state.load(self._checkpoints.read_state(pointer), str(self._checkpoints.storage.path))


def progress_at(finished: int, batches_done: int, batch_size: int) -> dict[str, Any]:
    """Return what every version says of its place in the epochs."""
    names = (Progress.FINISHED_EPOCHS, Progress.BATCHES_DONE, Progress.GLOBAL_BATCH_SIZE)
    return dict(zip(names, (finished, batches_done, batch_size)))


def new_run(batch_size: int) -> dict[str, Any]:
    """Return progress and versions of packages, which the description of every new run has."""
    versions = {"dglkge": __version__, "dgl": dgl.__version__, "torch": torch.__version__}
    return {"progress": progress_at(0, 0, batch_size), "versions": versions}


class Position:
    """Place of a run in its epochs.

    Attributes
    ----------
    batch : (int, int)
        An epoch, and the number of its batches that are done.
    ended : int
        Epochs with commit and validation done; at most those that are finished.
    ended_after : int or None
        Epochs after which training ended with its best version; None while it goes on.
    committed : (int, int) or None
        Epochs and batches of the newest version.
    """

    def __init__(self, config: Config, epochs: ElasticEpochs, batches: EpochBatches) -> None:
        self._config, self._epochs, self._batches = config, epochs, batches
        self.batch = (0, 0)
        self.ended = 0
        self.ended_after: int | None = None
        self.committed: tuple[int, int] | None = None

    @property
    def batches_done(self) -> int:
        """Batches done of the epoch that is open or comes next; an epoch may be left at any place."""
        epoch, done = self.batch
        return done if epoch == self._epochs.finished else 0

    @property
    def now(self) -> tuple[int, int]:
        """Finished epochs, and batches done of the next one."""
        return self._epochs.finished, self.batches_done

    @property
    def steps_done(self) -> int:
        """Global batches of all epochs that are done, in batches of the present size."""
        return self._epochs.finished * len(self._batches) + self.batches_done

    def end(self, finished: int, ended_after: int) -> None:
        """Leave no epoch to train: the best version, that of so many finished epochs, was restored."""
        self._epochs.end(finished)
        self.batch, self.ended, self.ended_after = (finished, 0), finished, ended_after

    def progress(self, passes_done: int, validates: bool) -> dict[str, Any]:
        """Describe the place for a version; ``validates``: the valid split is ranked after this epoch."""
        finished, batches_done = self.now
        described = progress_at(finished, batches_done, self._config.training.batch_size)
        further = {
            Progress.VALIDATION_PENDING: int(validates and self.ended < finished),
            Progress.ENDED_AFTER: self.ended_after,
            Progress.PASSES_DONE: passes_done,
            Progress.ORDER_MARK: self._batches.order_mark if batches_done else 0,
        }
        return {**described, **{name: value for name, value in further.items() if value}}

    def resume(self, saved: CheckpointMeta, now: Mapping[str, Any]) -> None:
        """Go on from a version that was restored; ``now`` is the present configuration."""
        finished = saved.progress[Progress.FINISHED_EPOCHS]
        self._epochs.restore(finished)
        self.batch = (finished, self._resumed_batches(saved.progress))
        self.ended, self.committed = finished, self.now
        if self._is_over(saved, now):
            self.end(finished, saved.progress[Progress.ENDED_AFTER])

    def _is_over(self, saved: CheckpointMeta, now: Mapping[str, Any]) -> bool:
        """Return whether a version is the end of training: its best version, restored, and nothing to add.

        More epochs, if the last ones were reached, or another patience continue from the best version.
        """
        ended_after = saved.progress.get(Progress.ENDED_AFTER)
        training = self._config.training
        if ended_after is None or training.early_stopping is None:
            return False
        before, now = saved.config.get("training", {}), now.get("training", {})
        is_same = before.get("early_stopping") == now.get("early_stopping")
        stopped_early = is_same and ended_after < before.get("num_epochs", 0)
        return bool(ended_after >= training.num_epochs or stopped_early)

    def _resumed_batches(self, progress: Mapping[str, Any]) -> int:
        """Return the batches done in the open epoch, in batches of this run's size."""
        size, expected = self._config.training.batch_size, self._batches.order_mark
        saved_size = progress[Progress.GLOBAL_BATCH_SIZE]
        # Progress is recorded in batches of the saved size. The order of triples does not depend on the batch
        # size, so another size may continue if it divides the position.
        done = progress[Progress.BATCHES_DONE] * saved_size
        if done % size:
            place = f"the checkpoint stands {done} triples into an epoch"
            allowed = f"{saved_size} and what else divides {done}"
            raise InputError(f"training.batch_size is {size}; {place}: allowed are {allowed}")
        # In an order of the machines an epoch depends on the partitions: other triples would be left.
        mark = progress.get(Progress.ORDER_MARK, 0)
        if done and mark != expected:
            problem = "the whole graph, and here each machine has an order of its own"
            allowed = "; allowed: sampling.order global, at least until the epoch's end"
            if mark:
                problem = "its machines, which other partitions and sampling.order global cannot continue"
                finish = "finish the epoch on the partitions that it began on, or resume from an epoch's end"
                allowed = f" (checksum {mark}, here {expected}): {finish} (checkpoint.keep_every_epochs)"
            where = f"the checkpoint stands {done} triples into an epoch in the order of"
            raise InputError(f"{where} {problem}{allowed}")
        return int(done // size)


def resumable(
    config: Config, meta: CheckpointMeta, saved: CheckpointMeta, where: Path | str
) -> CheckpointMeta:
    """Return what a version says of itself, if a run may go on from it; ``meta`` describes the run now.

    Raises
    ------
    CheckpointError
        If it is another run's, or the run has other settings now: each is named with both values.
    """
    check_same_run(saved, meta)
    settings = dict(meta.config)
    if settings.get("training", {}).get("matmul_dtype") == "auto":
        # Chosen later, as the run has recorded it.
        settings["training"] = {k: v for k, v in settings["training"].items() if k != "matmul_dtype"}
    is_finished = saved.progress[Progress.FINISHED_EPOCHS] >= config.training.num_epochs
    changes = refused_changes(saved.config, settings, is_finished)
    if changes:
        problem = f"{where} is of a run with other settings: {'; '.join(changes)}"
        allowed = "another output folder, or the settings that the run was started with"
        raise CheckpointError(f"{problem}; take {allowed}")
    return saved
