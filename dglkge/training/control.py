"""What changes during training beside the tables: learning rates, patience, objects of the user.

Its state belongs to a version of the checkpoint. It is a ``torch.save`` of one dict::

    num_batches      batches that were trained since the run's first
    num_epochs       epochs after which the schedule was stepped
    param_groups     numbers and tuples of each parameter group of the optimizer, as lr and betas
    schedule         the scheduler's state and the learning rates that it keeps; absent without one
    dense_schedule   the same of the dense parameters, where they have one of their own
    early_stopping   best valid MRR and rankings since; absent without it
    objects          state_dict() of each registered object by name

All trainers compute the same state; rank 0's is written, and every trainer reads it back.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dglkge.config import Config
from dglkge.errors import CheckpointError, InputError
from dglkge.step.contracts import Stateful
from dglkge.training.early_stopping import EarlyStopping
from dglkge.training.schedule import EVERY_BATCH, Schedule, warm_up_factor

logger = logging.getLogger(__name__)


class TrainingControl:
    """Sets the learning rates of each batch, decides when to stop, and keeps all of this for a resume.

    Parameters
    ----------
    config : Config
    param_groups : sequence of dict
        The optimizer's, which are changed; empty where it has none.
    num_batches : int
        Batches of an epoch.
    dense_groups : sequence of dict
        Those of the dense parameters' optimizer. They follow the schedule of the rows, unless they have one
        of their own.

    Raises
    ------
    InputError
        If the schedule has fewer steps than the run, or its state cannot be saved.
    """

    def __init__(
        self,
        config: Config,
        param_groups: Sequence[dict[str, Any]],
        num_batches: int,
        dense_groups: Sequence[dict[str, Any]] = (),
    ) -> None:
        chosen = config.optimizer
        # The optimizers' own list where there is only one: groups may be added to it later.
        self._groups = [*param_groups, *dense_groups] if dense_groups else param_groups
        param_groups = self._groups
        self._at_start = [_plain(group) for group in param_groups]
        self._base = [float(group.get("lr", 0.0)) for group in param_groups]
        self._warmup_batches = chosen.warmup_batches
        # (name in the state, schedule, whether it goes on after each batch, its groups).
        self._schedules: list[tuple[str, Schedule, bool, slice]] = []
        num_rows = len(self._base) - (len(dense_groups) if config.dense.schedule else 0)
        for name, field, of, part in (
            ("schedule", "optimizer.schedule", chosen.schedule, slice(0, num_rows)),
            ("dense_schedule", "dense.schedule", config.dense.schedule, slice(num_rows, None)),
        ):
            if of is not None and self._base[part]:
                schedule = Schedule(field, of, self._base[part])
                self._schedules.append((name, schedule, of.every == EVERY_BATCH, part))
        self._early_stopping: EarlyStopping | None = None
        if config.training.early_stopping_patience:
            training = config.training
            self._early_stopping = EarlyStopping(
                training.early_stopping_patience, training.early_stopping_min_gain
            )
        # What belongs to the library, and objects of the user, each saved and restored by one loop.
        self._own: dict[str, Stateful] = {name: schedule for name, schedule, _, _ in self._schedules}
        if self._early_stopping is not None:
            self._own["early_stopping"] = self._early_stopping
        self._objects: dict[str, Stateful] = {}
        # States that were read for objects which are not registered yet.
        self._unclaimed: dict[str, Any] = {}
        self._num_batches = self._num_epochs = 0
        self._was_resumed = False
        for _, schedule, steps_batches, _ in self._schedules:
            schedule.check_length(config.training.num_epochs * (num_batches if steps_batches else 1))
        if self._schedules:
            self.to_bytes()

    @property
    def uses_mrr(self) -> bool:
        """Whether a ranking of the valid split changes the training that follows."""
        return self._early_stopping is not None or any(one.follows_mrr for _, one, _, _ in self._schedules)

    @property
    def must_stop(self) -> bool:
        """Whether early stopping ends the training."""
        return self._early_stopping is not None and self._early_stopping.is_over

    def register(self, name: str, item: Any) -> None:
        """Save the state of an object with each version, and load it if the resumed version has it.

        Raises
        ------
        InputError
            For a name that is taken or no text, an object without ``state_dict`` and ``load_state_dict``, or
            a state that cannot be saved without pickled code.
        """
        if not isinstance(name, str) or not name:
            raise InputError(f"trainer.register: the name is {name!r}; allowed: a non-empty text")
        if name in self._objects:
            raise InputError(f"trainer.register: {name!r} is registered already; allowed: each name once")
        lacking = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(item, m, None))]
        if lacking:
            raise InputError(
                f"trainer.register: {name!r} is a {type(item).__name__} without {' and '.join(lacking)}; "
                "allowed: an object with both methods"
            )
        _saved({name: item.state_dict()}, f"trainer.register: the state of {name!r}")
        self._objects[name] = item
        if name in self._unclaimed:
            item.load_state_dict(self._unclaimed.pop(name))
        elif self._was_resumed:
            logger.warning("the checkpoint has no state of %r, which was registered: it starts anew", name)

    def before_batch(self) -> None:
        """Set the learning rates of the next batch, where a schedule or a warm-up has them."""
        if not self._schedules and not self._warmup_batches:
            return
        factor = warm_up_factor(self._num_batches, self._warmup_batches)
        lrs = list(self._base)
        for _, schedule, _, part in self._schedules:
            lrs[part] = schedule.lrs
        for group, lr in zip(self._groups, lrs):
            group["lr"] = lr * factor

    def after_batch(self) -> None:
        """Count a batch."""
        self._num_batches += 1
        for _, schedule, steps_batches, _ in self._schedules:
            if steps_batches:
                schedule.step()

    def after_epochs(self, num_epochs: int) -> None:
        """Step a schedule of epochs; may be called several times after the same epoch."""
        while self._num_epochs < num_epochs:
            self._num_epochs += 1
            for _, schedule, steps_batches, _ in self._schedules:
                if not steps_batches and not schedule.follows_mrr:
                    schedule.step()

    def after_ranking(self, mrr: float) -> None:
        """Count a ranking of the valid split."""
        if self._early_stopping is not None:
            self._early_stopping.add(mrr)
        for _, schedule, _, _ in self._schedules:
            if schedule.follows_mrr:
                schedule.step(mrr)

    def to_bytes(self) -> bytes:
        """Return the state for a version; empty if training changes nothing but the tables.

        Raises
        ------
        InputError
            If an object's state cannot be saved without pickled code.
        """
        groups = [_plain(group) for group in self._groups]
        has_changed = groups != self._at_start
        if not (has_changed or self._own or self._warmup_batches or self._objects or self._unclaimed):
            return b""
        objects = {name: item.state_dict() for name, item in self._objects.items()}
        state = {
            "num_batches": self._num_batches,
            "num_epochs": self._num_epochs,
            "param_groups": groups,
            **{name: item.state_dict() for name, item in self._own.items()},
            "objects": {**self._unclaimed, **objects},
        }
        return _saved(state, f"the state of the training ({_names(objects, bool(self._schedules))})")

    def load(self, content: bytes, where: str, num_epochs: int) -> None:
        """Continue from the state of a version.

        Parameters
        ----------
        content : bytes
            As :meth:`to_bytes` returned it.
        where : str
            For error messages.
        num_epochs : int
            Epochs that the version has finished.

        Raises
        ------
        CheckpointError
            If it is not such a state, or that of an optimizer with other parameter groups.
        """
        self._was_resumed = True
        if not content:
            if self._own or self._warmup_batches:
                logger.warning("%s has no state of the training: schedule and patience start anew", where)
            self._num_epochs = num_epochs
            return
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            self._take(state, where)
        except CheckpointError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{where}: not the state of this training, or damaged ({reason})") from None

    def _take(self, state: Mapping[str, Any], where: str) -> None:
        """Take over a state that was read."""
        saved = state["param_groups"]
        if len(saved) != len(self._groups):
            raise CheckpointError(
                f"{where} has {len(saved)} parameter groups, the optimizer has {len(self._groups)}"
            )
        for group, values in zip(self._groups, saved):
            group.update(values)
        self._num_batches, self._num_epochs = int(state["num_batches"]), int(state["num_epochs"])
        for name, item in self._own.items():
            if name in state:
                item.load_state_dict(state[name])
        self._unclaimed = dict(state["objects"])
        for name, item in self._objects.items():
            if name in self._unclaimed:
                item.load_state_dict(self._unclaimed.pop(name))


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group that are numbers, texts, None or tuples of them."""
    kinds = (int, float, str, type(None))
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, kinds)
        or (isinstance(value, tuple) and all(isinstance(one, kinds) for one in value))
    }


def _names(objects: Mapping[str, Any], has_schedule: bool) -> str:
    """Return the parts of a state that may be of any form, for messages."""
    return ", ".join([*(["optimizer.schedule"] if has_schedule else []), *map(repr, objects)])


def _saved(state: Mapping[str, Any], what: str) -> bytes:
    """Return the bytes of a state that a reader without pickled code reads back.

    Raises
    ------
    InputError
        If there is none.
    """
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{what} cannot be saved: allowed are dicts, lists, tuples, numbers, texts and tensors, which "
            f"are read without running code ({reason})"
        ) from None
    return file.getvalue()
