"""One training step: plan, rows, objective, update, in the numbering of docs/architecture.md.

Steps 1 and 2, order and edges, are the batch itself (``sampling/``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dglkge.embeddings.table_set import TableSet
from dglkge.optim.links import UpdateResult
from dglkge.sampling.edge_batches import EpochBatches
from dglkge.sampling.query_batches import TrainingBatch, TrainingBatches
from dglkge.step.contracts import Objective, Parameters, PhaseClock, RowGradients, StepResult
from dglkge.step.planning import Plan, number_of
from dglkge.step.rows import RowStore, Transforms


@dataclass
class RowUpdates:
    """Merges the gradients of all trainers and updates rows where they are stored; a collective.

    Attributes
    ----------
    tables : TableSet
    optimizer : SparseOptimizer or DeviceTables
        Over the embeddings of all tables.
    frozen : collection of str
        Tables whose rows are not updated.
    touched : mapping of str to (n,) bool array, optional
        Whether a row is updated, by table and node id; without it all are.
    """

    tables: TableSet
    optimizer: Any
    frozen: Collection[str] = ()
    touched: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __call__(
        self, gradients: Sequence[RowGradients], number: int, other_squares: float, flags: int
    ) -> UpdateResult:
        """Update all rows of a batch.

        ``number`` is that of the batch. It keys the rounding of rows of 16 bits: a resumed run rounds as one
        that was not interrupted. ``other_squares`` is the sum of the squares of gradients of other
        parameters: a clipped gradient's norm is that of all. ``flags`` are summed over the trainers with the
        gradients.
        """
        # Without a gradient neither a row nor its optimizer state changes, and nothing is sent.
        trained = [self._trained(part) for part in gradients if part.table not in self.frozen]
        return self.optimizer.step_rows(trained, extra=flags, other_squares=other_squares, number=number)

    def _trained(self, gradients: RowGradients) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Return embedding, ids and gradients of the rows that are trained."""
        table, ids, rows = gradients
        ids = self.tables.row_ids(table, ids)
        if table in self.touched:
            here = torch.from_numpy(self.touched[table][ids.numpy()])
            ids, rows = ids[here], rows[here]
        return self.tables[table].embedding, ids, rows


@dataclass
class LookAhead(EpochBatches):
    """Returns batches and plans in the order of training, each made once; a collective."""

    batches: TrainingBatches
    objective: Objective
    store: RowStore
    clock: PhaseClock

    def __post_init__(self) -> None:
        self._next: deque[tuple[TrainingBatch, Plan]] = deque()
        self.order_mark = self.batches.order_mark

    def __len__(self) -> int:
        return len(self.batches)

    def place(self, epoch: int, batches_done: int) -> dict[str, Any]:
        return self.batches.place(epoch, batches_done)

    def batch(self, epoch: int, index: int, enter: Callable[[str], None]) -> TrainingBatch:
        self.batches.begin(epoch, index)
        if self._next and (self._next[0][0].epoch, self._next[0][0].index) == (epoch, index):
            return self._next[0][0]
        with self.store.planning():
            return self.batches.batch(epoch, index, enter)

    def plan(self, batch: TrainingBatch) -> Plan:
        """Return the plan of a batch."""
        if self._next and self._next[0][1].number == number_of(batch):
            return self._next.popleft()[1]
        self._next.clear()
        return self._planned(batch)

    def look(self, batch: TrainingBatch) -> None:
        """Plan the batches that come next in the epoch, as many as the store fetches rows for."""
        stop = min(batch.index + 1 + self.store.num_ahead, len(self))
        for index in range(batch.index + 1 + len(self._next), stop):
            with self.store.planning():
                following = self.batches.batch(batch.epoch, index, self.clock.enter)
            plan = self._planned(following)
            self._next.append((following, plan))
            self.store.announce(plan)

    def _planned(self, batch: TrainingBatch) -> Plan:
        """Draw the negatives of a batch, and start what its rows need."""
        self.clock.enter("negatives")
        with self.store.planning():
            return self.store.prepare(self.objective.plan(batch))


@dataclass
class TrainStep:
    """Trains one batch at a time; a collective: every trainer must call it equally often.

    The transforms are those of the rows of the store, and of the objective's candidates; ``parameters`` are
    beside the rows; ``look_ahead`` has plans of the same objective and store.
    """

    objective: Objective
    store: RowStore
    transforms: Transforms
    parameters: Sequence[Parameters]
    updates: RowUpdates
    look_ahead: LookAhead
    clock: PhaseClock

    def __call__(self, batch: TrainingBatch, flags: int = 0) -> StepResult:
        """Train one batch; ``flags`` are summed over the trainers with the gradients: no round of messages
        of its own.
        """
        sent = self._sent_bytes()
        # 3 plan: negatives are drawn; made already where the step before looked ahead.
        plan = self.look_ahead.plan(batch)
        # 4 rows: after all transforms. First the parameters: a transform may project by them.
        self.clock.enter("gather")
        for parameters in self.parameters:
            parameters.start_batch(plan.number)
        self.transforms.start_batch(plan.number)
        rows = self.store.rows(plan)
        # 5 objective: while a device computes, or ids travel in a thread, the next batch is planned.
        finish = self.objective.gradients(plan, rows)
        self.look_ahead.look(batch)
        outcome = finish()
        self.clock.enter("merge")
        # Gradients of owned candidates come beside those of the batch's rows; the optimizer adds equal ids.
        gradients = [*rows.collect(), *outcome.candidates]
        self.transforms.backward(gradients)
        # 6 update: owners must not write rows that are still being read for the announced batch.
        self.store.before_update()
        self.clock.enter("exchange")
        squares = [parameters.sum_gradients(gradients) for parameters in self.parameters]
        is_skipped = None in squares
        self.clock.enter("merge")
        other_squares = sum(square for square in squares if square is not None)
        update = self.updates([] if is_skipped else gradients, plan.number, other_squares, flags)
        self.clock.enter("update")
        for parameters in () if is_skipped else self.parameters:
            # Every trainer updates its own copy, or its slices: nothing is exchanged.
            parameters.update(update.clip_factor)
        # 7 count
        sent = self._sent_bytes() - sent
        return StepResult(float(outcome.loss), outcome.measures, sent, is_skipped, update.extra_sum)

    def _sent_bytes(self) -> int:
        """Return the bytes of ids, rows, queries and gradients that this trainer sent to other machines."""
        return self.store.sent_bytes + self.objective.sent_bytes + int(self.updates.optimizer.network_bytes)
