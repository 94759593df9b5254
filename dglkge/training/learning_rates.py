"""Learning rates that change during training: torch's own schedulers by name, and a linear warm-up.

A scheduler of ``torch.optim.lr_scheduler`` drives a small optimizer of torch with as many parameter groups as
the run's, whose learning rates are then copied. So any optimizer with ``param_groups`` can be driven, and
torch's checks of the order of calls hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from dglkge.config import Config
from dglkge.errors import CheckpointError, InputError
from dglkge.model.choices import ScheduleSettings
from dglkge.training.building.components import named_class, torch_classes, tried_on_torch

PLATEAU = "ReduceLROnPlateau"
"""The scheduler that is told the score of each ranking of the valid split, and is not stepped otherwise."""

EVERY_BATCH = "batch"

_REPLACING = {"base_lr", "max_lr"}
"""Options with rates that replace those of the groups. One number is the first group's rate: the others keep
their ratio to it, where torch would give all groups the same rate."""

_TRIED_STEPS = 3

Groups = Sequence[dict[str, Any]]


def known_schedules() -> dict[str, Any]:
    """Return the schedulers of this version of torch that a configuration can name."""
    # Some need functions or other schedulers, which a configuration cannot have.
    unfit = ("LRScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")
    return torch_classes(lr_scheduler, lr_scheduler.LRScheduler, unfit)


def try_schedule(
    field: str, settings: ScheduleSettings | None, lrs: Sequence[float], num_epochs: int
) -> None:
    """Make some steps of a schedule; raises InputError for one that torch does not have, or refuses."""
    if settings is not None:
        num_steps = _TRIED_STEPS if settings.every == EVERY_BATCH else min(num_epochs, 10_000)
        with tried_on_torch(field, settings):
            tried = Schedule(field, settings, lrs)
            for _ in range(num_steps):
                tried.step(0.0)


class Schedule:
    """Learning rates of some parameter groups under one of torch's schedulers.

    Parameters
    ----------
    field : str
        Of the configuration, for messages.
    lrs : sequence of float
        Learning rate of each group at the start.

    Attributes
    ----------
    total_steps : int or None
        Steps after which the scheduler ends; None where it has no end.
    """

    def __init__(self, field: str, settings: ScheduleSettings, lrs: Sequence[float]) -> None:
        reserved = ("self", "optimizer", "last_epoch", "verbose")
        kind, allowed = named_class(field, settings, known_schedules(), reserved)
        self.follows_ranking, self.steps_batches = settings.name == PLATEAU, settings.every == EVERY_BATCH
        options = settings.options
        if options.get("cycle_momentum"):
            problem = f"{field}.cycle_momentum is true: only learning rates are scheduled"
            raise InputError(f"{problem}; allowed: false")
        if "cycle_momentum" in allowed:
            options["cycle_momentum"] = False
        if self.follows_ranking:
            options.setdefault("mode", "max")  # a higher score is a better one
        for name in _REPLACING & set(options):
            if isinstance(options[name], (int, float)) and lrs[0]:
                options[name] = [options[name] * (lr / lrs[0]) for lr in lrs]
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lrs]
        self._driver = torch.optim.SGD(groups, lr=lrs[0])
        with tried_on_torch(field, settings):
            self._scheduler = kind(self._driver, **options)
        self.total_steps: int | None = getattr(self._scheduler, "total_steps", None)

    @property
    def lrs(self) -> list[float]:
        """Learning rate of each group now."""
        return [float(group["lr"]) for group in self._driver.param_groups]

    def step(self, score: float | None = None) -> None:
        """Go one step further; with the score of the valid split where the scheduler follows it."""
        self._driver.step()  # has no gradients: torch warns of schedulers that come before it
        self._scheduler.step(*([score] if self.follows_ranking else []))

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the learning rates, from which most compute the next ones."""
        # initial_lr, max_lr and the like: schedulers keep them in the groups.
        groups = [plain_group(group) for group in self._driver.param_groups]
        return {"scheduler": self._scheduler.state_dict(), "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        self._scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(self._driver.param_groups, state["groups"]):
            group.update(saved)


class LearningRates:
    """Sets the learning rates of each batch: those of the optimizers, schedules, and the warm-up.

    Parameters
    ----------
    row_groups : sequence of dict
        Parameter groups of the optimizer of rows, which are changed; empty where it has none.
    num_batches : int
        Batches of an epoch.
    dense_groups : sequence of dict
        Those of the dense parameters. Without a schedule of their own they follow that of the rows.

    Attributes
    ----------
    num_epochs : int
        Epochs after which the schedules were stepped.
    """

    def __init__(
        self, config: Config, row_groups: Groups, num_batches: int, dense_groups: Groups = ()
    ) -> None:
        self._groups = [*row_groups, *dense_groups]
        self._at_start = list(map(plain_group, self._groups))
        self._base = [float(group.get("lr", 0.0)) for group in self._groups]
        self._warmup_batches = config.optimizer.warmup_batches
        self._num_batches = self.num_epochs = 0
        # (name in the state, schedule, its groups).
        self._schedules: list[tuple[str, Schedule, slice]] = []
        num_rows = len(self._base) - (len(dense_groups) if config.dense.schedule else 0)
        for name, field, settings, part in (
            ("schedule", "optimizer.schedule", config.optimizer.schedule, slice(0, num_rows)),
            ("dense_schedule", "dense.schedule", config.dense.schedule, slice(num_rows, None)),
        ):
            if settings is not None and self._base[part]:
                schedule = Schedule(field, settings, self._base[part])
                steps_an_epoch = num_batches if schedule.steps_batches else 1
                num_steps = config.training.num_epochs * steps_an_epoch
                if schedule.total_steps is not None and num_steps > schedule.total_steps:
                    problem = f"{field} {settings.name} has {schedule.total_steps} steps"
                    allowed = "total_steps of at least that"
                    raise InputError(f"{problem} and the run {num_steps}; allowed: {allowed}")
                self._schedules.append((name, schedule, part))

    @property
    def follows_ranking(self) -> bool:
        """Whether a ranking of the valid split changes the rates that follow."""
        return any(schedule.follows_ranking for _, schedule, _ in self._schedules)

    def before_batch(self) -> None:
        """Set the learning rates of the next batch, where a schedule or a warm-up has them.

        After n of W batches of the warm-up they are multiplied by (n + 1) / W. Source: gradual warm-up of
        Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2, from 0.
        """
        if not self._schedules and not self._warmup_batches:
            return
        factor = min(1.0, (self._num_batches + 1) / max(1, self._warmup_batches))
        lrs = list(self._base)
        for _, schedule, part in self._schedules:
            lrs[part] = schedule.lrs
        for group, lr in zip(self._groups, lrs):
            group["lr"] = lr * factor

    def after_batch(self) -> None:
        """Count a batch."""
        self._num_batches += 1
        for _, schedule, _ in self._schedules:
            if schedule.steps_batches:
                schedule.step()

    def after_epochs(self, num_epochs: int) -> None:
        """Step schedules of epochs; may be called several times after the same epoch."""
        while self.num_epochs < num_epochs:
            self.num_epochs += 1
            for _, schedule, _ in self._schedules:
                if not schedule.steps_batches and not schedule.follows_ranking:
                    schedule.step()

    def after_ranking(self, score: float) -> None:
        """Count a ranking of the valid split."""
        for _, schedule, _ in self._schedules:
            if schedule.follows_ranking:
                schedule.step(score)

    def state_dict(self) -> dict[str, Any]:
        """Return counts, parameter groups and schedules; empty where the rates are those of the start."""
        groups = [plain_group(group) for group in self._groups]
        if groups == self._at_start and not self._schedules and not self._warmup_batches:
            return {}
        return {
            "num_batches": self._num_batches,
            "num_epochs": self.num_epochs,
            "param_groups": groups,
            **{name: schedule.state_dict() for name, schedule, _ in self._schedules},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        saved = state["param_groups"]
        if len(saved) != len(self._groups):
            raise CheckpointError(f"has {len(saved)} parameter groups, the optimizer has {len(self._groups)}")
        for group, values in zip(self._groups, saved):
            group.update(values)
        self._num_batches, self.num_epochs = int(state["num_batches"]), int(state["num_epochs"])
        for name, schedule, _ in self._schedules:
            if name in state:
                schedule.load_state_dict(state[name])


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group: numbers, texts, None and tuples of them."""
    return {key: value for key, value in group.items() if key != "params"}
