"""What a version holds beside rows: the state of training, and the parameters in its model file.

The state of training is a ``torch.save`` of one dict, ``state_dict()`` by name: learning rates, early
stopping, sums of the open epoch, and the objects that a script has registered, whose names begin with
``object:``. All trainers compute the same state; rank 0's is written, and every trainer reads it back.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Mapping
from typing import Any

import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.errors import CheckpointError, InputError, one_line
from dglkge.planning.memory import saves_in_background
from dglkge.step.contracts import ModelStateful, Stateful
from dglkge.training.job import Job
from dglkge.typing import RELATION, TablePart

logger = logging.getLogger(__name__)

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
        self._items = dict(items)
        self._door = door
        # States that were read for objects which are not registered yet.
        self._unclaimed: dict[str, Any] = {}
        self._was_resumed = False

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
            raise InputError(
                f"{self._door}: {name!r} is a {type(item).__name__} without {' and '.join(lacking)}; "
                "allowed: an object with both methods"
            )
        _saved({key: item.state_dict()}, f"{self._door}: the state of {name!r}")
        self._items[key] = item
        if key in self._unclaimed:
            item.load_state_dict(self._unclaimed.pop(key))
        elif self._was_resumed:
            logger.warning("the checkpoint has no state of %r, which was registered: it starts anew", name)

    def to_bytes(self) -> bytes:
        """Return the state for a version; empty if training changes nothing but the tables. A collective."""
        state = {**self._unclaimed, **{name: item.state_dict() for name, item in self._items.items()}}
        state = {name: value for name, value in state.items() if value or name.startswith(OBJECT)}
        names = ", ".join(name.removeprefix(OBJECT) for name in state)
        return _saved(state, f"the state of the training ({names})") if state else b""

    def load(self, content: bytes, where: str) -> None:
        """Continue from the bytes of a version; ``where`` is for error messages."""
        self._was_resumed = True
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
            reason = one_line(error)
            raise CheckpointError(f"{where}: not the state of this training, or damaged ({reason})") from None


def _saved(state: Mapping[str, Any], what: str) -> bytes:
    """Return the bytes of a state that a reader without pickled code reads back."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"{what} cannot be saved: allowed are dicts, lists, tuples, numbers, texts and tensors, which "
            f"are read without running code ({one_line(error)})"
        ) from None
    return file.getvalue()


class Versions:
    """Writes and restores versions of a job: rows, parameters in the model file, state of training."""

    def __init__(self, job: Job, checkpoints: CheckpointManager, state: TrainingState) -> None:
        self._job, self._checkpoints, self._state = job, checkpoints, state
        self._beside: list[ModelStateful] = [
            item for item in (job.features, job.dense, job.global_vectors) if item is not None
        ]
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
            with hdf5_format.open_file(folder / manifest.of_table(RELATION)[0].name) as file:
                for item in self._beside:
                    item.load_state_dict(file)
        if self._job.world.is_machine_leader:
            *parts, relations = self._job.own_parts()
            self._checkpoints.restore(parts, relations, pointer)
        self._state.load(self._checkpoints.read_state(pointer), str(self._checkpoints.storage.path))
