"""One training step, in the numbering of docs/architecture.md: negatives, lookup, score, update.

Steps 1 and 2, order and edges, are the batch itself (``sampling/edge_batches.py``); step 7 counts it
(``Trainer.batches``, ``EpochReport.count``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

import numpy as np
import torch

from dglkge.embeddings.found_rows import FoundRows
from dglkge.embeddings.row_lookup import DirectLookup, RowLookup
from dglkge.embeddings.table_set import TableSet
from dglkge.model.precision import is_finite
from dglkge.model.projections import ProjectedFeatures
from dglkge.sampling.known_answers import KnownAnswers
from dglkge.sampling.negatives import NegativeSampler
from dglkge.sampling.query_batches import QueryBatch, TrainingBatch
from dglkge.training.objectives.all_candidates import CandidateLoss
from dglkge.training.objectives.autograd_loss import AutogradLoss
from dglkge.training.objectives.dense_parameters import DenseParameters
from dglkge.training.objectives.dot_softmax import DotSoftmax
from dglkge.training.objectives.global_vectors import GlobalVectors
from dglkge.training.objectives.k_vs_all import request_queries
from dglkge.training.objectives.measures import BatchMeasures
from dglkge.training.objectives.relation_prediction import SampledWithRelations
from dglkge.training.objectives.row_dropout import RowDropout
from dglkge.training.objectives.rows import RangeOf, RowRequest, Scratch, Shift, request_rows
from dglkge.training.objectives.staged_rows import Staging
from dglkge.training.stats import PhaseClock
from dglkge.typing import Side

_Gradient = tuple[Any, torch.Tensor, torch.Tensor]
"""Embedding, node ids (n,) and gradient rows (n, D)."""


class TrainStep:
    """Trains one batch at a time; a collective: every trainer must call it equally often.

    Parameters
    ----------
    loss : AutogradLoss, DotSoftmax, SampledWithRelations or CandidateLoss
        Of groups of edges.
    tables : TableSet
    optimizer : SparseOptimizer or DeviceTables
        Over the embeddings of all tables.
    negatives : mapping of Side to NegativeSampler, or None
        Samplers of the sides that are trained. None where the loss takes all candidates.
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    clock : PhaseClock
    following : callable
        Returns this trainer's share of the batch that comes after one, None after the last.
    dropout : RowDropout, optional
    sums_batch : bool
        Train the sum over a global batch instead of its mean.
    known : KnownAnswers, optional
        Answers that are no negatives.
    global_vectors : GlobalVectors, optional
        Vectors that are added to rows; the loss must not read rows in place.
    dense : DenseParameters, optional
        Parameters of the score function's module, and of the projections of features.
    features : ProjectedFeatures, optional
        Added to rows; the loss must not read rows in place.
    frozen : collection of str
        Tables whose rows are not updated.
    touched : mapping of str to (n,) bool array, optional
        Whether a row is updated, by table and node id; without it all are.
    measures : BatchMeasures, optional
        Those that the loss adds to.
    staging : Staging, optional
        Copies rows to the device of the loss, and gradients back; without it the loss reads host memory.
    range_of : callable, optional
        Returns the ranges of nodes, where scores depend on them.

    Attributes
    ----------
    flag_sum : int
        Sum over all trainers of the flags that were given to the last step.
    is_skipped : bool
        Whether the last batch changed nothing, as a gradient in float16 was not finite; equal on all of them.
    """

    def __init__(
        self,
        loss: Union[AutogradLoss, DotSoftmax, SampledWithRelations, CandidateLoss],
        tables: TableSet,
        optimizer: Any,
        negatives: Mapping[Side, NegativeSampler] | None,
        pairs: Sequence[tuple[str, str]],
        clock: PhaseClock,
        following: Callable[[Any, Callable[[str], None]], TrainingBatch | None],
        dropout: RowDropout | None = None,
        sums_batch: bool = False,
        known: KnownAnswers | None = None,
        global_vectors: GlobalVectors | None = None,
        frozen: Collection[str] = (),
        touched: Mapping[str, np.ndarray] | None = None,
        measures: BatchMeasures | None = None,
        dense: DenseParameters | None = None,
        staging: Staging | None = None,
        features: ProjectedFeatures | None = None,
        range_of: RangeOf | None = None,
    ) -> None:
        self.measures = measures
        self._dense = dense
        self._features = features
        self._names = {id(table.embedding): name for name, table in tables.items()}
        self._touched = {id(tables[name].embedding): mask for name, mask in (touched or {}).items()}
        self._frozen = {id(tables[name].embedding) for name in frozen}
        self._dropout = dropout
        self._known = known
        self._range_of = range_of
        self._sums_batch = sums_batch
        self._global_vectors = global_vectors
        self.flag_sum, self.is_skipped = 0, False
        self._loss = loss
        self._tables = tables
        self._staging = staging
        # Only ids are collected ahead. Rows and gradients belong to the batch that trains, so both sets of
        # requests share one scratch memory.
        scratch = {name: Scratch() for name in tables}
        self._requests: Mapping[str, RowRequest]
        self._spare_requests: Mapping[str, RowRequest]
        self._requests, self._spare_requests = (
            ({name: RowRequest(table, scratch[name]) for name, table in tables.items()} for _ in range(2))
            if staging is None
            else staging.request_sets(tables)
        )
        shifts = shifts_of(tables, global_vectors, features)
        for request in (*self._requests.values(), *self._spare_requests.values()):
            request.shift = shifts.get(request.table.name)
        self._following = following
        self._next_plan: _Plan | None = None
        self._optimizer = optimizer
        self._negatives = negatives
        self._pairs = pairs
        self._clock = clock
        optimizer.when_phase(clock.enter)

    def __call__(self, batch: TrainingBatch, flags: int = 0) -> float:
        """Train one batch.

        Parameters
        ----------
        batch : TrainingBatch
        flags : int
            Summed over the trainers with the gradients: no round of messages of its own.

        Returns
        -------
        float
            The sum of the losses of this trainer's triples, both sides, regularizer included. Shares
            are uneven, so losses are summed over trainers and divided by the global batch, never averaged.
        """
        # 3 negatives: drawn already where the step before looked ahead.
        plan = self._take_plan(batch)
        # 4 lookup: rows of this machine are read where they lie, remote rows come by the exchange.
        self._clock.enter("gather")
        if self._dense is not None:
            # First: rows of features are projected by parameters that may be elsewhere until now.
            self._dense.start_batch()
        self._open(plan)
        if self._dropout is not None:
            self._dropout.start(plan.number)
            for name, request in plan.requests.items():
                self._dropout.apply(name, request.row_ids.numpy(), request.copied_rows)
        # 5 score: loss and backward; the gradients lie in the requests afterwards, and in the module.
        loss = self._compute(plan, batch)
        if self._dropout is not None:
            # A dropped number is the stored one times its mask, and so is its gradient.
            for name, request in plan.requests.items():
                self._dropout.apply(name, request.row_ids.numpy(), request.gradients)
        # 6 update: owners must not write rows that are still being read for the announced batch.
        self._lookup.before_update()
        self._clock.enter("merge")
        gradients = [
            (request.table.embedding, request.row_ids, request.gradients)
            for request in plan.requests.values()
        ]
        # Gradients of all owned candidates, beside those of the batch's rows; the optimizer adds equal ids.
        dense = (
            self._loss.dense_gradients()
            if isinstance(self._loss, (CandidateLoss, SampledWithRelations))
            else []
        )
        gradients += dense
        if self._features is not None:
            self._project_back(self._features, gradients)
        # Before the rows change: a clipped gradient's norm is that of rows, dense parameters and global
        # vectors together.
        other_squares = 0.0
        self.is_skipped = False
        if self._dense is not None:
            has_scale = self._dense.loss_scale is not None
            are_finite = not has_scale or all(is_finite(rows) for _, _, rows in gradients)
            self._clock.enter("exchange")
            self.is_skipped = not self._dense.sum_gradients(are_finite)
            other_squares += self._dense.squares
        if self.is_skipped:
            gradients = []
        elif self._global_vectors is not None:
            self._clock.enter("merge")
            other_squares += self._global_vectors.sum_gradients(
                (self._names[id(one)], rows) for one, _, rows in gradients
            )
        self._optimizer.step_rows(
            # Without a gradient neither a row nor its optimizer state changes, and nothing is sent.
            self._of_trained_rows(gradients),
            extra=flags,
            other_squares=other_squares,
            # Keys the rounding of rows of 16 bits: a resumed run rounds as one that was not interrupted.
            number=plan.number,
        )
        # Every trainer updates its own copy, or its slices: nothing is exchanged.
        self._clock.enter("update")
        if self._dense is not None and not self.is_skipped:
            self._dense.update(self._optimizer.clip_factor)
        if self._global_vectors is not None and not self.is_skipped:
            self._global_vectors.update(self._optimizer.clip_factor)
        self.flag_sum = self._optimizer.step_sum
        return loss

    def _compute(self, plan: _Plan, batch: TrainingBatch) -> float:
        """Return the summed loss of a batch whose rows are found; the gradients are in its requests."""
        size = 1 if self._sums_batch else batch.global_size
        if self._staging is None:
            # The next batch's ids travel in a thread while this one computes.
            self._announce_next(batch)
            return self._loss(plan.groups, size)
        for request in plan.requests.values():
            request.send()
        if isinstance(self._loss, AutogradLoss):
            # The device computes while the host prepares the next batch.
            pending = self._loss.start(plan.groups, size)
            self._announce_next(batch)
            self._clock.enter("backward")
            loss = pending.item()
        else:
            # Collectives of the host interrupt the device in any case.
            self._announce_next(batch)
            loss = self._loss(plan.groups, size)
        self._clock.enter("merge")
        for request in plan.requests.values():
            request.collect()
        self._staging.finish()
        return loss

    def _project_back(self, features: ProjectedFeatures, gradients: Sequence[_Gradient]) -> None:
        """Add the gradients of the projections: a row is e + f(x), so that of f(x) is that of the row."""
        for embedding, ids, rows in gradients:
            name = self._names[id(embedding)]
            if name in features.entity_types and len(ids):
                features.backward(name, self._tables[name].original_ids[ids], rows)

    def _of_trained_rows(self, gradients: Sequence[_Gradient]) -> list[_Gradient]:
        """Return the gradients of the rows that are trained."""
        kept = [one for one in gradients if id(one[0]) not in self._frozen]
        if not self._touched:
            return kept
        chosen = []
        for embedding, ids, rows in kept:
            here = torch.from_numpy(self._touched[id(embedding)][ids.numpy()])
            chosen.append((embedding, ids[here], rows[here]))
        return chosen

    @property
    def sent_bytes(self) -> int:
        """Bytes of queries and their gradients that this trainer sent to other machines."""
        return self._loss.sent_bytes if isinstance(self._loss, (CandidateLoss, SampledWithRelations)) else 0

    @property
    def _lookup(self) -> RowLookup:
        return self._tables.lookup

    def _open(self, plan: _Plan) -> None:
        """Find the rows of a batch: in place, or as the lookup fetches them."""
        rows: Mapping[str, FoundRows] = {}
        if not isinstance(self._lookup, DirectLookup):
            # No effect unless the optimizer overlaps steps: one in the background would still write to rows
            # that other trainers read here.
            self._optimizer.finish()
            wanted = {name: request.row_ids for name, request in plan.requests.items()}
            rows = self._lookup.rows(plan.number, wanted)
        is_copied = self._dropout is not None or not self._loss.reads_in_place
        for name, request in plan.requests.items():
            request.open(copy=is_copied, rows=rows.get(name))

    def _take_plan(self, batch: TrainingBatch) -> _Plan:
        """Return the plan of a batch; it exists already if the step before looked ahead."""
        plan, self._next_plan = self._next_plan, None
        if plan is None or plan.number != _number(batch):
            plan = self._plan(batch)
        return plan

    def _plan(self, batch: TrainingBatch) -> _Plan:
        """Draw the negatives of a batch and request its rows."""
        self._clock.enter("negatives")
        # Two sets: while a batch computes, the ids of the next one are collected in the other.
        requests, self._spare_requests = self._spare_requests, self._requests
        self._requests = requests
        for request in requests.values():
            request.clear()
        groups: list[Any]
        if isinstance(batch, QueryBatch):
            groups = request_queries(batch, requests, self._loss.shares_relations)
        else:
            groups = request_rows(
                batch, self._pairs, self._negatives, requests, self._known, self._loss.shares_relations,
                self._range_of,
            )  # fmt: skip
        if self._staging is not None:
            groups = self._staging.stage(requests, groups, _number(batch))
        return _Plan(_number(batch), requests, groups)

    def _announce_next(self, batch: TrainingBatch) -> None:
        """Plan the next batch while this one computes, where its ids go to other machines or to a device."""
        if not self._lookup.looks_ahead and self._staging is None:
            return
        following = self._following(batch, self._clock.enter)
        if following is None:
            return
        self._next_plan = plan = self._plan(following)
        if self._lookup.looks_ahead:
            wanted = {name: request.row_ids for name, request in plan.requests.items()}
            self._lookup.announce(plan.number, wanted)


def shifts_of(
    tables: Mapping[str, Any], global_vectors: GlobalVectors | None, features: ProjectedFeatures | None
) -> dict[str, Shift]:
    """Return the function from node ids to what is added to their rows, by table; only where there is any.

    Parameters
    ----------
    tables : mapping of str to EmbeddingTable
    global_vectors : GlobalVectors, optional
    features : ProjectedFeatures, optional
    """
    found: dict[str, Shift] = {}
    for name, table in tables.items():
        shift = None if global_vectors is None else global_vectors.shift_of(name)
        if features is not None and name in features.entity_types:
            shift = functools.partial(_projected, features, name, table.original_ids)
        if shift is not None:
            found[name] = shift
    return found


def _projected(
    features: ProjectedFeatures, name: str, original_ids: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    return features.rows(name, original_ids[ids])


def _number(batch: TrainingBatch) -> int:
    """Return a number that no other batch of any epoch has."""
    # Also the batch number that trainers compare in the exchange of ids.
    return (batch.epoch << 32) + batch.index


@dataclass(frozen=True)
class _Plan:
    """Groups and requests of a batch, before its rows are fetched.

    Attributes
    ----------
    number : int
    requests : mapping of str to RowRequest
        By table.
    groups : list of Group, or of QueryGroup
    """

    number: int
    requests: Mapping[str, RowRequest]
    groups: list[Any]
