"""What a version of the checkpoint holds, as it is in a running job: rows and what is beside them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError
from dglkge.step.contracts import ModelStateful
from dglkge.training.control import TrainingControl
from dglkge.training.job import Job
from dglkge.typing import RELATION, TablePart


class ModelState:
    """What the model file holds beside the relations' rows, saved and restored by one loop.

    Parameters
    ----------
    items : mapping of str to ModelStateful
    cluster : Cluster
    """

    def __init__(self, items: Mapping[str, ModelStateful], cluster: Cluster) -> None:
        self._items = items
        self._cluster = cluster

    def saved(self) -> dict[str, Any]:
        """Return copies of all tensors by dataset, on rank 0; a collective.

        Raises
        ------
        CheckpointError, StorageError
            On all trainers, if one cannot put its part together.
        """
        is_first = self._cluster.world.rank == 0
        found: dict[str, Any] = {}
        for item in self._items.values():
            if item.is_collective:
                # Every trainer sends its slices; a full disk of rank 0 must end all of them.
                found.update(self._cluster.agree(item.state_dict))
            elif is_first:
                found.update(item.state_dict())
        return found

    def restore(self, storage: CheckpointStorage) -> None:
        """Take the state of the newest version of a folder, on every trainer.

        Raises
        ------
        CheckpointError
            If there is none, or it does not fit.
        """
        if not self._items:
            return
        manifest = storage.published()
        if manifest is None:
            raise CheckpointError(f"{storage.path} holds no checkpoint")
        with hdf5_format.open_file(storage.path / manifest.of_table(RELATION)[0].name) as file:
            for item in self._items.values():
                item.load_state_dict(file)


class LiveState:
    """Rows and optimizer state of a job's tables, with all that belongs to a version beside them.

    Parameters
    ----------
    job : Job
    checkpoints : CheckpointManager
    control : TrainingControl
    """

    def __init__(self, job: Job, checkpoints: CheckpointManager, control: TrainingControl) -> None:
        self._job = job
        self._checkpoints = checkpoints
        self._control = control
        beside = {"dense": job.dense, "global_vectors": job.global_vectors}
        items: dict[str, ModelStateful] = {name: one for name, one in beside.items() if one is not None}
        self._of_model = ModelState(items, job.cluster)

    def load_devices(self) -> None:
        """Copy the tables to the devices, where they train there; a collective."""
        if self._job.device_tables is not None:
            self._job.cluster.barrier()  # all trainers have written their initial rows
            self._job.device_tables.load()

    def settle(self) -> None:
        """Wait until the updates of all trainers are in the tables; a collective."""
        self._job.clock.stop()
        self.parts()  # waits for this trainer's optimizer
        # The trainer's rows come back from its device; all have done so after the barrier.
        if self._job.device_tables is not None:
            self._job.device_tables.store()
        self._job.cluster.barrier()

    def whole_dense(self, is_needed: bool = True) -> contextlib.AbstractContextManager[None]:
        """Let every trainer have all dense parameters in a block of code; a collective."""
        if self._job.dense is None or not is_needed:
            return contextlib.nullcontext()
        return self._job.dense.whole()

    def parts(self) -> list[TablePart]:
        """Return this machine's parts of the entity tables, with the optimizer's state."""
        tables = self._job.tables
        return [tables[name].own_part(self._state(name)) for name in tables.entity_types]

    def own_parts(self) -> list[TablePart]:
        """Return this machine's parts of all tables, the relations' last."""
        return [*self.parts(), self._job.tables[RELATION].own_part(self._state(RELATION))]

    def relation_part(self) -> TablePart | None:
        """Return the whole relation table on rank 0, which writes it, and what is beside it; a collective."""
        shared = self._of_model.saved()
        if self._job.world.rank != 0:
            return None
        return dataclasses.replace(self._job.tables[RELATION].whole(self._state(RELATION)), shared=shared)

    def restore(self, snapshot: str = "") -> None:
        """Fill this machine's tables, on one trainer of it; every trainer reads the state of training.

        Parameters
        ----------
        snapshot : str
            Name of a preserved version; empty: the newest one.
        """
        checkpoints = self._checkpoints
        self._of_model.restore(checkpoints.storage_of(snapshot))
        if self._job.world.is_machine_leader:
            *parts, relations = self.own_parts()
            checkpoints.restore(parts, relations, snapshot)
        meta = checkpoints.newest_meta(snapshot)
        if meta is not None:
            where = str(checkpoints.storage.path / snapshot)
            finished = meta.progress[Progress.FINISHED_EPOCHS]
            self._control.load(checkpoints.read_state(snapshot), where, finished)

    def _state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's tensors of a table."""
        state: dict[str, Any] = self._job.optimizer.state_tensors(self._job.tables[name].embedding)
        return state
