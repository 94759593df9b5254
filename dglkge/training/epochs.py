"""Elastic epochs, and the cadence of commits.

The loop over epochs resumes after the last committed state of the job.

The semantics are AdaptDL's (``adaptdl.torch.epoch``; Qiao et al. 2021, "Pollux"): the state is one
integer, the number of finished epochs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from dglkge.checkpoint.layout import Progress, epoch_snapshot
from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError

logger = logging.getLogger(__name__)

STOP, COMMIT = 1, 1 << 32
"""Flags of a trainer: it was asked to stop, it asks for a commit. Messages that all trainers exchange anyway
sum them: the lower 32 bits of the sum count the first, those above them the second."""


class ElasticEpochs:
    """Counts finished epochs.

    Parameters
    ----------
    finished : int
        Epochs that a former run of the job has finished.
    """

    def __init__(self, finished: int = 0) -> None:
        self._finished = finished
        self._current: int | None = None
        self._has_ended = False
        self._listeners: list[Callable[[], None]] = []
        # An abandoned generator runs its `finally` when it is collected, maybe after restore(): the number
        # of its generation is then an old one, and it counts no epoch.
        self._generation = 0

    def restore(self, finished: int) -> None:
        """Start from a number of finished epochs, with no loop open and no listeners."""
        self._finished = finished
        self._has_ended = False
        self.forget()

    def forget(self) -> None:
        """Drop an open loop and the listeners; the count stays."""
        self.stop()
        self._listeners = []

    def stop(self) -> None:
        """Close the open loop by a stop: its epoch is not finished, and the next loop goes on in it."""
        self._generation += 1
        self._current = None

    def end(self, finished: int) -> None:
        """Leave no epoch to train; the count is that of the version that was restored as the best.

        An open loop ends with its body, which is not counted.
        """
        self._generation += 1
        self._finished, self._current, self._has_ended = finished, None, True

    def when_finished(self, listener: Callable[[], None]) -> None:
        """Register a function that is called after each epoch with a body that ran to its end."""
        self._listeners.append(listener)

    def remaining_until(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left until ``num_epochs`` are finished.

        An epoch is finished when its body is left, also by ``break`` or an exception other than a stop. While
        one is open, ``current() == finished()``.

        Raises
        ------
        RuntimeError
            At the first epoch, if another loop is open.
        """
        if self._current is not None:
            raise RuntimeError("overlapping epoch loops detected")
        if self._finished >= num_epochs or self._has_ended:
            logger.info("epochs until %d are finished already: nothing to do", num_epochs)
        while self._finished < num_epochs and not self._has_ended:
            self._current = self._finished
            generation = self._generation
            try:
                yield self._current
            finally:
                if generation == self._generation:
                    self._finished += 1
                    self._current = None
            # Not in the `finally`: listeners are collectives, and after break or an exception trainers may be
            # at different places.
            for listener in self._listeners:
                listener()

    def current(self) -> int | None:
        """Return the running epoch, None between and outside loops."""
        return self._current

    def finished(self) -> int:
        """Return the number of finished epochs."""
        return self._finished


JOB = ElasticEpochs()
"""This process's job; :func:`dglkge.training.build.build_trainer` restores it from the checkpoint."""


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Yield the epochs of this job that are left until ``num_epochs`` are finished.

    Code in the body before and between batch loops runs again after a restart and must be idempotent;
    code after the last batch loop of an epoch does not run again. The script's variables are not saved: what
    depends on the epoch has to follow from its number, or be registered: ``trainer.register(name, object)``.
    """
    return JOB.remaining_until(num_epochs)


def current_epoch() -> int | None:
    """Return the running epoch, None outside an epoch loop."""
    return JOB.current()


def finished_epochs() -> int:
    """Return the number of epochs that this job has finished."""
    return JOB.finished()


class CommitPolicy:
    """Cadence of commits and of kept versions.

    Parameters
    ----------
    config : Config
    cluster : Cluster
    clock : callable
        Returns seconds.

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
        # Early stopping restores the best version at the end.
        self.keeps_best = config.checkpoint.keep_best or bool(config.training.early_stopping_patience)
        self._decides = cluster.world.rank == 0
        self._clock = clock
        self._last = clock()
        self._is_due = False

    def committed(self) -> None:
        """Restart the count of minutes after a commit."""
        self._last = self._clock()
        self._is_due = False

    def counts(self, batches_done: int) -> bool:
        """Return whether a commit is due after so many batches of an epoch, whatever the clock says."""
        every = self._config.checkpoint.every_batches
        return bool(every) and batches_done % every == 0

    def asks_after_batch(self, batches_done: int, num_batches: int, is_writing: bool = False) -> bool:
        """Return whether this trainer asks for a commit between two batches; only rank 0 does: clocks differ.

        Parameters
        ----------
        batches_done, num_batches : int
            Of the epoch; after its last batch :meth:`due_after_epoch` decides.
        is_writing : bool
            Whether a version is still being written. A due commit then waits for the first batch after it:
            training does not wait for the disk.
        """
        if not self._decides or batches_done >= num_batches:
            return False
        minutes = self._config.checkpoint.every_minutes
        passed = bool(minutes) and self._clock() - self._last >= 60 * minutes
        self._is_due = self._is_due or passed or self.counts(batches_done)
        return self._is_due and not is_writing

    def due_after_epoch(self, epochs_done: int) -> bool:
        """Return whether to commit after an epoch."""
        every = (self._config.checkpoint.every_epochs, self._config.checkpoint.keep_every_epochs)
        return (
            any(number and epochs_done % number == 0 for number in every)
            or epochs_done >= self._config.training.num_epochs
            or (self.keeps_best and self.validates_after_epoch(epochs_done))
        )

    def validates_after_epoch(self, epochs_done: int) -> bool:
        """Return whether the valid split is ranked after an epoch."""
        every = self._config.evaluation.valid_every_epochs
        return bool(every) and epochs_done % every == 0

    def snapshots_after_epoch(self, epochs_done: int) -> dict[str, dict[str, Any]]:
        """Return the names under which the version of an epoch is kept, and why."""
        every = self._config.checkpoint.keep_every_epochs
        if not every or epochs_done % every:
            return {}
        return {epoch_snapshot(epochs_done): {Progress.FINISHED_EPOCHS: epochs_done}}
