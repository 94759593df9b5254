"""One training step: plan, rows, objective, update, in the numbering of docs/architecture.md.

Steps 1 and 2, order and edges, are the batch itself (``sampling/``).
"""

from __future__ import annotations

from collections.abc import Sequence

from dglkge.sampling.query_batches import TrainingBatch
from dglkge.step.clock import PhaseClock
from dglkge.step.contracts import Objective, Parameters, RowStore, StepResult
from dglkge.step.look_ahead import LookAhead
from dglkge.step.rows import Transforms
from dglkge.step.updates import RowUpdates


class TrainStep:
    """Trains one batch at a time; a collective: every trainer must call it equally often.

    Parameters
    ----------
    objective : Objective
    store : RowStore
        Where rows live.
    transforms : Transforms
        Of the rows of the store, and of the objective's candidates.
    parameters : sequence of Parameters
        Those beside the rows.
    updates : RowUpdates
    look_ahead : LookAhead
        Plans of the same objective and store.
    clock : PhaseClock
    """

    def __init__(
        self,
        objective: Objective,
        store: RowStore,
        transforms: Transforms,
        parameters: Sequence[Parameters],
        updates: RowUpdates,
        look_ahead: LookAhead,
        clock: PhaseClock,
    ) -> None:
        self._objective = objective
        self._store = store
        self._transforms = transforms
        self._parameters = parameters
        self._updates = updates
        self._look_ahead = look_ahead
        self._clock = clock

    def __call__(self, batch: TrainingBatch, flags: int = 0) -> StepResult:
        """Train one batch.

        Parameters
        ----------
        batch : TrainingBatch
        flags : int
            Summed over the trainers with the gradients: no round of messages of its own.
        """
        sent = self._sent_bytes()
        # 3 plan: negatives are drawn; made already where the step before looked ahead.
        plan = self._look_ahead.plan(batch)
        # 4 rows: after all transforms. First the parameters: a transform may project by them.
        self._clock.enter("gather")
        for parameters in self._parameters:
            parameters.start_batch(plan.number)
        self._transforms.start_batch(plan.number)
        rows = self._store.rows(plan)
        # 5 objective: while a device computes, or ids travel in a thread, the next batch is planned.
        finish = self._objective.gradients(plan, rows)
        self._look_ahead.look(batch)
        found = finish()
        self._clock.enter("merge")
        # Gradients of owned candidates come beside those of the batch's rows; the optimizer adds equal ids.
        gradients = [*rows.collect(), *found.candidates]
        self._transforms.backward(gradients)
        # 6 update: owners must not write rows that are still being read for the announced batch.
        self._store.before_update()
        self._clock.enter("exchange")
        squares = [parameters.sum_gradients(gradients) for parameters in self._parameters]
        is_skipped = None in squares
        self._clock.enter("merge")
        other_squares = sum(one for one in squares if one is not None)
        update = self._updates([] if is_skipped else gradients, plan.number, other_squares, flags)
        self._clock.enter("update")
        for parameters in () if is_skipped else self._parameters:
            # Every trainer updates its own copy, or its slices: nothing is exchanged.
            parameters.update(update.clip_factor)
        # 7 count
        sent = self._sent_bytes() - sent
        return StepResult(found.loss, found.measures, sent, is_skipped, update.extra_sum)

    def _sent_bytes(self) -> int:
        """Return the bytes of ids, rows, queries and gradients that this trainer sent to other machines."""
        return self._store.sent_bytes + self._objective.sent_bytes + self._updates.network_bytes
