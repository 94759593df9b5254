"""What happens to one batch: find rows, score, differentiate, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

from dglkge.distributed.preemption import StopRequest
from dglkge.embeddings.table_set import TableSet
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.negative_samplers import UniformNegatives
from dglkge.training.autograd_loss import AutogradLoss
from dglkge.training.dot_softmax import DotSoftmax
from dglkge.training.groups import ask_for_rows
from dglkge.training.phase_clock import PhaseClock
from dglkge.training.row_request import RowRequest


class TrainStep:
    """Trains one batch at a time; a collective: every trainer must call it equally often.

    Parameters
    ----------
    loss : AutogradLoss or DotSoftmax
        Of groups of edges.
    tables : TableSet
    optimizer : SparseOptimizer
        Of ``dglkge.optim``, over the embeddings of all tables.
    negatives : UniformNegatives
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    clock : PhaseClock
    stop : StopRequest
        What this trainer was asked; a step tells all trainers.

    Attributes
    ----------
    someone_must_stop : bool
        Whether one of the trainers was asked to stop before the last step: the same on all of them.
    """

    def __init__(
        self,
        loss: Union[AutogradLoss, DotSoftmax],
        tables: TableSet,
        optimizer: Any,
        negatives: UniformNegatives,
        pairs: Sequence[tuple[str, str]],
        clock: PhaseClock,
        stop: StopRequest,
    ) -> None:
        self._stop = stop
        self.someone_must_stop = False
        self._loss = loss
        self._requests = {name: RowRequest(table) for name, table in tables.items()}
        self._optimizer = optimizer
        self._negatives = negatives
        self._pairs = pairs
        self._clock = clock
        optimizer.when_phase(clock.enter)

    def __call__(self, batch: EdgeBatch) -> float:
        """Train one batch.

        Returns
        -------
        float
            The sum of the losses of this trainer's triples, both sides, regularizer included. Shares
            are uneven, so losses are summed over trainers and divided by the global batch, never averaged.
        """
        requests = self._requests
        self._clock.enter("negatives")
        for request in requests.values():
            request.clear()
        groups = ask_for_rows(batch, self._pairs, self._negatives, requests)
        self._clock.enter("gather")
        for request in requests.values():
            request.open(copy=not self._loss.reads_in_place)
        loss = self._loss(groups, batch.global_size)
        self._clock.enter("merge")
        self._optimizer.step_rows(
            [(request.table.embedding, request.ids, request.gradients) for request in requests.values()],
            vote=self._stop.is_noted,
        )
        self.someone_must_stop = self._optimizer.num_votes > 0
        return loss
