"""When the parameters are written; the same answer on every trainer."""

from __future__ import annotations

import time
from typing import Any, Callable

import numpy as np

from dglkge.checkpoint.snapshots import epoch_snapshot
from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError


class CommitPolicy:
    """The cadence of commits and of what is kept.

    Parameters
    ----------
    config : Config
    cluster : Cluster
    clock : callable
        Returns seconds; rank 0's decides.

    Raises
    ------
    InputError
        If the best version is to be kept and nothing measures it.
    """

    def __init__(self, config: Config, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        if config.checkpoint.keep_best and not config.evaluation.valid_every_epochs:
            raise InputError(
                "checkpoint.keep_best needs evaluation.valid_every_epochs of at least 1, got 0: "
                "the best version is the one with the best valid MRR"
            )
        self._config = config
        self._cluster = cluster
        self._clock = clock
        self._last = clock()
        self._is_due = False

    def committed(self) -> None:
        """Take note of a commit, from which minutes count."""
        self._last = self._clock()
        self._is_due = False

    def due_after_batch(self, batches_done: int, num_batches: int, is_writing: bool = False) -> bool:
        """Tell whether to commit between two batches; a collective where one may be due.

        Parameters
        ----------
        batches_done, num_batches : int
            Of the epoch; what comes after its last batch is :meth:`due_after_epoch`'s.
        is_writing : bool
            Whether a version is still being written. What is due then waits for the first batch that ends
            after it: training does not wait for the disk. Rank 0's counts.
        """
        if batches_done >= num_batches:
            return False
        chosen = self._config.checkpoint
        if chosen.every_batches and batches_done % chosen.every_batches == 0:
            self._is_due = True
        if not self._is_due and not chosen.every_minutes:
            return False
        passed = bool(chosen.every_minutes) and self._clock() - self._last >= 60 * chosen.every_minutes
        mine = self._cluster.world.rank == 0 and not is_writing and (self._is_due or passed)
        due = bool(self._cluster.sum(np.array([mine], dtype=np.int64))[0])
        self._is_due = self._is_due and not due
        return due

    def due_after_epoch(self, epochs_done: int) -> bool:
        """Tell whether to commit after an epoch."""
        every = (self._config.checkpoint.every_epochs, self._config.checkpoint.keep_every_epochs)
        return (
            any(number and epochs_done % number == 0 for number in every)
            or epochs_done >= self._config.training.num_epochs
            or (self._config.checkpoint.keep_best and self.validates_after_epoch(epochs_done))
        )

    def validates_after_epoch(self, epochs_done: int) -> bool:
        """Tell whether the valid split is ranked after an epoch."""
        every = self._config.evaluation.valid_every_epochs
        return bool(every) and epochs_done % every == 0

    def snapshots_after_epoch(self, epochs_done: int) -> dict[str, dict[str, Any]]:
        """Return the names under which the version of an epoch is kept, and why."""
        every = self._config.checkpoint.keep_every_epochs
        if not every or epochs_done % every:
            return {}
        return {epoch_snapshot(epochs_done): {"finished_epochs": epochs_done}}
