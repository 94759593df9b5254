"""Cadence of commits, of rankings of the valid split and of kept versions, and early stopping."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.checkpoint.layout import Progress, epoch_pointer
from dglkge.config import Config
from dglkge.config.schema import EarlyStoppingConfig
from dglkge.distributed.runtime import Cluster

STOP, COMMIT = 1, 1 << 32
"""Flags of a trainer: it was asked to stop, it asks for a commit. Messages that all trainers exchange anyway
sum them: the lower 32 bits of the sum count the first, those above them the second."""

REPORTS_PER_EPOCH = 20
"""Most reports of the loss in an epoch; each costs a round of messages."""

TRIPLES_A_REPORT = 10_000
"""Fewest triples between two reports of an epoch: a report takes as long as some 200 triples."""


def falls_on(interval: int, done: int) -> bool:
    """Return whether something that is due every so many times is due after these; 0: never."""
    return interval > 0 and done % interval == 0


def reports_apart(num_batches: int, batch_size: int, is_lagged: bool = False) -> int:
    """Return the number of batches between two reports of an epoch; all where machines do not wait.

    Examples
    --------
    >>> reports_apart(57, 1000), reports_apart(57, 20_000), reports_apart(1000, 20_000)
    (10, 2, 50)
    """
    if is_lagged:
        return num_batches
    return max(num_batches // REPORTS_PER_EPOCH, -(-TRIPLES_A_REPORT // batch_size))


@dataclass
class Cadence:
    """Decides after each batch and epoch of a run what is due.

    Parameters
    ----------
    config : Config
    cluster : Cluster
    num_batches : int
        Of an epoch: after its last batch the cadence of epochs decides.
    clock : callable
        Returns seconds.

    Attributes
    ----------
    keeps_best : bool
        Whether the version with the best score is kept: early stopping restores it at the end.
    flag_sum : int or None
        Sum of all trainers' flags in the last step; None: no message since the last check had it.
    """

    config: Config
    cluster: Cluster
    num_batches: int = sys.maxsize
    clock: Callable[[], float] = time.monotonic
    flag_sum: int | None = None

    def __post_init__(self) -> None:
        self.settings = self.config.checkpoint
        self.keeps_best = self.settings.keep_best or self.config.training.early_stopping is not None
        self.committed()

    def committed(self) -> None:
        """Restart the count of minutes after a commit."""
        self._last, self._is_due = self.clock(), False

    def flags(self, batches_done: int, is_writing: bool = False) -> int:
        """Return this trainer's flags for the place after a batch of the epoch."""
        return STOP * self.cluster.stop.is_noted + COMMIT * self.asks_after_batch(batches_done, is_writing)

    def counts(self, batches_done: int) -> bool:
        """Return whether a commit is due after so many batches of an epoch, whatever the clock says."""
        return falls_on(self.settings.every_batches, batches_done)

    def asks_after_batch(self, batches_done: int, is_writing: bool = False) -> bool:
        """Return whether this trainer asks for a commit between two batches; only rank 0 does: clocks differ.

        While a version is being written a due commit waits for the first batch after it: training does not
        wait for the disk.
        """
        if self.cluster.world.rank or batches_done >= self.num_batches:
            return False
        minutes = self.settings.every_minutes or sys.maxsize
        self._is_due |= self.clock() - self._last >= 60 * minutes or self.counts(batches_done)
        return self._is_due and not is_writing

    def after_batch(self, batches_done: int, is_writing: bool = False) -> tuple[bool, bool]:
        """Return whether a trainer was asked to stop, and whether to commit, after a batch.

        Trained batches have exchanged the flags: a step, or a report where trainers of one machine are
        asynchronous. A message of their own would let those wait for one another, so it is sent only where a
        commit or a report is due.
        """
        flag_sum, self.flag_sum = self.flag_sum, None
        if flag_sum is None:
            apart = reports_apart(self.num_batches, self.config.training.batch_size)
            is_due = self.counts(batches_done) or batches_done % apart == 0
            if not (self.config.training.synchronous or is_due):
                return False, False
            flags = np.array([self.flags(batches_done, is_writing)], np.int64)
            flag_sum = int(self.cluster.sum(flags)[0])
        return flag_sum % COMMIT > 0, flag_sum >= COMMIT

    def due_after_epoch(self, epochs_done: int) -> bool:
        """Return whether to commit after an epoch."""
        is_last = epochs_done >= self.config.training.num_epochs
        is_due = is_last or falls_on(self.settings.every_epochs, epochs_done)
        is_kept = self.pointers_after_epoch(epochs_done)
        return bool(is_due or is_kept or (self.keeps_best and self.validates_after_epoch(epochs_done)))

    def validates_after_epoch(self, epochs_done: int) -> bool:
        """Return whether the valid split is ranked after an epoch."""
        return falls_on(self.config.evaluation.valid_every_epochs, epochs_done)

    def pointers_after_epoch(self, epochs_done: int) -> dict[str, dict[str, Any]]:
        """Return the names under which the version of an epoch is kept, and why."""
        if not falls_on(self.settings.keep_every_epochs, epochs_done):
            return {}
        return {epoch_pointer(epochs_done): {Progress.FINISHED_EPOCHS: epochs_done}}


@dataclass
class EarlyStopping:
    """Counts rankings without a gain since the best one; without settings training never ends early.

    A ranking's score is its ``evaluation.metric``. It gains if that is more than ``min_gain`` above the best
    of those that gained; the first one does, and NaN never does. Training ends after ``patience`` rankings in
    a row without a gain.

    Attributes
    ----------
    best : float or None
        Score of the last ranking that gained.
    num_without_gain : int
        Rankings since then.
    """

    settings: EarlyStoppingConfig | None
    best: float | None = None
    num_without_gain: int = 0

    def add(self, score: float) -> None:
        """Count one ranking."""
        min_gain = 0.0 if self.settings is None else self.settings.min_gain
        # A comparison with NaN is false, so NaN is no gain; as the first one it must not become the best.
        if score == score and (self.best is None or score > self.best + min_gain):
            self.best, self.num_without_gain = score, 0
        else:
            self.num_without_gain += 1

    @property
    def is_on(self) -> bool:
        """Whether training may end early, and ends with its best version."""
        return self.settings is not None

    @property
    def is_over(self) -> bool:
        """Whether training is to end."""
        return self.settings is not None and self.num_without_gain >= self.settings.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and the rankings since; empty where training never ends early."""
        return {"best": self.best, "num_without_gain": self.num_without_gain} if self.is_on else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`; patience and gain are those of now."""
        self.best, self.num_without_gain = state["best"], int(state["num_without_gain"])
