"""Side channel of a step: phases, votes, gradients that were not finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from dglkge.optim.step_exchange import ignore_phase

logger = logging.getLogger(__name__)


class StepSignals:
    """The part of an optimizer that talks.

    Attributes
    ----------
    num_skipped_rows : int
        Rows that were left alone, by any trainer, because their gradient was not finite.
    num_votes : int
        How many trainers gave their vote to the last finished step: the same number on each.
    """

    _tables: Sequence[Any]
    _raise_nonfinite: bool
    _enter: Callable[[str], None] = staticmethod(ignore_phase)
    num_votes = 0
    num_skipped_rows = 0

    def when_phase(self, enter: Callable[[str], None]) -> None:
        """Tell a function when merge, exchange, update and waiting begin."""
        self._enter = enter

    def _report(self, num_bad: np.ndarray) -> None:
        """Count or raise rows whose gradient was not finite, from the numbers of all trainers."""
        if not num_bad.any():
            return
        self.num_skipped_rows += int(num_bad.sum())
        text = ", ".join(
            f"{count} rows of {table.label!r}" for table, count in zip(self._tables, num_bad) if count
        )
        if self._raise_nonfinite:
            raise FloatingPointError(f"the gradient is not finite for {text}; these rows were not updated")
        logger.warning("the gradient is not finite for %s; these rows were not updated", text)
