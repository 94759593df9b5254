"""Batches and their plans; those of the next batch are made while one computes, where its ids travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dglkge.sampling.query_batches import EpochBatches, TrainingBatch, TrainingBatches
from dglkge.step.clock import PhaseClock
from dglkge.step.contracts import Objective, RowStore
from dglkge.step.planning import Plan, number_of


class LookAhead(EpochBatches):
    """Returns batches and plans in the order of training, each made once; a collective.

    Parameters
    ----------
    batches : TrainingBatches
    objective : Objective
    store : RowStore
    clock : PhaseClock

    Attributes
    ----------
    order_mark : int
        Of the batches.
    """

    def __init__(
        self, batches: TrainingBatches, objective: Objective, store: RowStore, clock: PhaseClock
    ) -> None:
        self._batches = batches
        self._objective = objective
        self._store = store
        self._clock = clock
        self._next: tuple[TrainingBatch, Plan] | None = None
        self.order_mark = batches.order_mark

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return len(self._batches)

    def place(self, epoch: int, batches_done: int) -> dict[str, Any]:
        """Describe the place in the order after a number of batches, for ``stats.jsonl``."""
        return self._batches.place(epoch, batches_done)

    def batch(self, epoch: int, index: int, enter: Callable[[str], None]) -> TrainingBatch:
        """Return this trainer's share of a global batch; see :class:`EdgeBatches`."""
        self._batches.begin(epoch, index)
        if self._next is not None and (self._next[0].epoch, self._next[0].index) == (epoch, index):
            return self._next[0]
        return self._batches.batch(epoch, index, enter)

    def plan(self, batch: TrainingBatch) -> Plan:
        """Return the plan of a batch."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[1].number == number_of(batch):
            return ahead[1]
        return self._planned(batch)

    def look(self, batch: TrainingBatch) -> None:
        """Plan the batch that comes next in the epoch, where its ids go to other machines or to a device."""
        if not self._store.looks_ahead or batch.index + 1 >= len(self):
            return
        following = self._batches.batch(batch.epoch, batch.index + 1, self._clock.enter)
        plan = self._planned(following)
        self._next = (following, plan)
        self._store.announce(plan)

    def _planned(self, batch: TrainingBatch) -> Plan:
        """Draw the negatives of a batch, and start what its rows need."""
        self._clock.enter("negatives")
        return self._store.prepare(self._objective.plan(batch))
