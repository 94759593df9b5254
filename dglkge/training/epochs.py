"""Elastic epochs: a loop over epochs that goes on where the last committed run of the job stood.

The semantics are AdaptDL's (``adaptdl.torch.epoch``; Qiao et al. 2021, "Pollux"): the state is one
integer, the number of finished epochs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Callable

logger = logging.getLogger(__name__)


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
        self._listeners: list[Callable[[], None]] = []
        self._generation = 0  # a loop of an earlier one, which is closed late, no longer counts

    def restore(self, finished: int) -> None:
        """Start from a number of finished epochs, with no loop open and no listeners."""
        self._finished = finished
        self.forget()

    def forget(self) -> None:
        """Forget an open loop and the listeners; the count stays."""
        self._generation += 1
        self._current = None
        self._listeners = []

    def when_finished(self, listener: Callable[[], None]) -> None:
        """Call a function after each epoch whose body ran to its end."""
        self._listeners.append(listener)

    def remaining_until(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left until ``num_epochs`` are finished.

        An epoch is finished when its body is left, in whatever way. While one is open,
        ``current() == finished()``.

        Raises
        ------
        RuntimeError
            At the first epoch, if another loop is open.
        """
        if self._current is not None:
            raise RuntimeError("overlapping epoch loops detected")
        if self._finished >= num_epochs:
            logger.info("epochs until %d are finished already: nothing to do", num_epochs)
        while self._finished < num_epochs:
            self._current = self._finished
            generation = self._generation
            try:
                yield self._current
            finally:
                if generation == self._generation:
                    self._finished += 1
                    self._current = None
            for listener in self._listeners:
                listener()

    def current(self) -> int | None:
        """Return the epoch whose body runs, None between and outside loops."""
        return self._current

    def finished(self) -> int:
        """Return the number of finished epochs."""
        return self._finished


JOB = ElasticEpochs()
"""This process's job; :func:`dglkge.training.build.build_trainer` sets it to what the checkpoint says."""


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Yield the epochs of this job that are left until ``num_epochs`` are finished.

    Code in the body before and between batch loops runs again after a restart and must be idempotent;
    code after the last batch loop of an epoch does not run again. Nothing of the script's own is saved: what
    depends on the epoch, a learning rate for instance, has to follow from its number.
    """
    return JOB.remaining_until(num_epochs)


def current_epoch() -> int | None:
    """Return the epoch whose body runs, None outside an epoch loop."""
    return JOB.current()


def finished_epochs() -> int:
    """Return the number of epochs that this job has finished."""
    return JOB.finished()
