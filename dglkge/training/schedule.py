"""Learning rates that change during training: torch's own schedulers by name, and a linear warm-up.

A scheduler of ``torch.optim.lr_scheduler`` drives a small optimizer of torch with as many parameter groups as
the run's, whose learning rates are then copied. So any optimizer with ``param_groups`` can be driven, and
torch's checks of the order of calls hold.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from dglkge.config import Config
from dglkge.errors import InputError, unknown_name
from dglkge.model.choices import ScheduleSettings

PLATEAU = "ReduceLROnPlateau"
"""The scheduler that is told the valid MRR after each ranking, and is not stepped otherwise."""

EVERY_BATCH = "batch"

_OF_FUNCTIONS = ("LRScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")
"""Classes that need functions or other schedulers, which a configuration cannot have."""

_REPLACING = {"base_lr", "max_lr"}
"""Options with rates that replace those of the groups. One number is the first group's rate: the others keep
their ratio to it, where torch would give all groups the same rate."""

_NOT_OPTIONS = ("self", "optimizer", "last_epoch", "verbose")
_TRIED_STEPS = 3


def known_schedules() -> dict[str, type]:
    """Return the schedulers of this version of torch that a configuration can name."""
    base = lr_scheduler.LRScheduler
    found = {
        name: kind
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, base) and not name.startswith("_")
    }
    found[PLATEAU] = lr_scheduler.ReduceLROnPlateau  # of no common base in early versions of torch
    return {name: kind for name, kind in sorted(found.items()) if name not in _OF_FUNCTIONS}


def check_schedule(config: Config) -> None:
    """Refuse schedules that torch does not have, and settings that have no effect together.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    rows, dense = config.optimizer, config.dense
    for field, schedule, lrs in (
        ("optimizer.schedule", rows.schedule, [rows.lr, rows.relations.lr or rows.lr]),
        ("dense.schedule", dense.schedule, [dense.lr]),
    ):
        if schedule is not None:
            _check(config, field, schedule, lrs)


def _check(config: Config, field: str, chosen: ScheduleSettings, lrs: Sequence[float]) -> None:
    """Refuse one schedule."""
    known = known_schedules()
    if chosen.name not in known:
        raise unknown_name(field, chosen.name, list(known))
    tried = Schedule(field, chosen, lrs)
    num_epochs = config.training.num_epochs
    try:
        for _ in range(_TRIED_STEPS if chosen.every == EVERY_BATCH else min(num_epochs, 10_000)):
            tried.step(0.0)
    except Exception as error:
        raise _refused(field, chosen, error) from None


def _refused(field: str, chosen: ScheduleSettings, error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(f"{field} {chosen}: torch refuses it: {reason}")


class Schedule:
    """Learning rates of some parameter groups under one of torch's schedulers.

    Parameters
    ----------
    field : str
        Of the configuration, for messages.
    chosen : ScheduleSettings
    lrs : sequence of float
        Learning rate of each group at the start.

    Raises
    ------
    InputError
        For an option that the scheduler does not have, or a value that torch refuses.
    """

    def __init__(self, field: str, chosen: ScheduleSettings, lrs: Sequence[float]) -> None:
        self._field = field
        kind = known_schedules()[chosen.name]
        self.follows_mrr = chosen.name == PLATEAU
        allowed = [name for name in inspect.signature(kind).parameters if name not in _NOT_OPTIONS]
        options = chosen.options
        for name in options:
            if name not in allowed:
                raise unknown_name(f"option of {self._field} {chosen.name}", name, allowed)
        if options.get("cycle_momentum"):
            raise InputError(
                f"{self._field}.cycle_momentum is true: only learning rates are scheduled; allowed: false"
            )
        if "cycle_momentum" in allowed:
            options["cycle_momentum"] = False
        if self.follows_mrr:
            options.setdefault("mode", "max")  # a higher MRR is a better one
        for name in _REPLACING & set(options):
            if isinstance(options[name], (int, float)) and lrs[0]:
                options[name] = [options[name] * (lr / lrs[0]) for lr in lrs]
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lrs]
        self._driver = torch.optim.SGD(groups, lr=lrs[0])
        try:
            self._scheduler = kind(self._driver, **options)
        except Exception as error:
            raise _refused(field, chosen, error) from None
        # Some schedulers keep what has no plain form, such as a Counter of milestones.
        self._counters = [key for key, value in vars(self._scheduler).items() if isinstance(value, Counter)]

    @property
    def lrs(self) -> list[float]:
        """Learning rate of each group now."""
        return [float(group["lr"]) for group in self._driver.param_groups]

    def step(self, mrr: float | None = None) -> None:
        """Go one step further; with the valid MRR where the scheduler follows it."""
        self._driver.step()  # has no gradients: torch warns of schedulers that come before it
        if self.follows_mrr:
            self._scheduler.step(mrr)
        else:
            self._scheduler.step()

    def check_length(self, num_steps: int) -> None:
        """Refuse a run that is longer than the scheduler, if that has an end.

        Raises
        ------
        InputError
            With both numbers of steps.
        """
        total = getattr(self._scheduler, "total_steps", None)
        if isinstance(total, int) and num_steps > total:
            raise InputError(
                f"{self._field} {type(self._scheduler).__name__} has {total} steps and the run "
                f"{num_steps}; allowed: total_steps of at least that"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the learning rates, from which most compute the next ones."""
        # Functions follow from the options; OneCycleLR of early versions of torch keeps one.
        state = {key: value for key, value in self._scheduler.state_dict().items() if not callable(value)}
        for key in self._counters:
            state[key] = dict(state[key])
        # initial_lr, max_lr and the like: schedulers keep them in the groups.
        groups = [
            {key: value for key, value in group.items() if isinstance(value, (int, float))}
            for group in self._driver.param_groups
        ]
        return {"scheduler": state, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        scheduler = dict(state["scheduler"])
        for key in self._counters:
            scheduler[key] = Counter(scheduler[key])
        self._scheduler.load_state_dict(scheduler)
        for group, saved in zip(self._driver.param_groups, state["groups"]):
            group.update(saved)


def warm_up_factor(num_batches_done: int, warmup_batches: int) -> float:
    """Return the factor on the learning rate of the next batch: (n + 1) / W after n of W batches, then 1.

    Source: gradual warm-up of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2, from 0.
    """
    return min(1.0, (num_batches_done + 1) / warmup_batches) if warmup_batches else 1.0
