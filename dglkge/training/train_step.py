"""What happens to one batch: pull, score, backward, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.table_set import TableSet
from dglkge.model.comparators import Dot
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss, Softmax
from dglkge.model.regularizers import Regularizer
from dglkge.model.softmax_of_products import SoftmaxOfProducts
from dglkge.sampling.edge_batches import EdgeBatch, EdgeGroup
from dglkge.sampling.negative_samplers import UniformNegatives, find_equal
from dglkge.training.phase_clock import PhaseClock
from dglkge.training.row_request import RowRequest
from dglkge.typing import RELATION, Side

NodeIds = npt.NDArray[np.int64]


class TrainStep:
    """Trains one batch at a time; a collective: every trainer must call it equally often.

    Parameters
    ----------
    model : KgeModel
    loss : Loss
    regularizer : Regularizer or None
        Of the rows of the positives, once for each side.
    tables : TableSet
    optimizer : SparseOptimizer
        Of ``dglkge.optim``, over the embeddings of all tables.
    negatives : UniformNegatives
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    own_entity : bool
        Whether the query's own entity is one negative more. For symmetric and near-symmetric
        relations (h, r, h) outscores the truth, and uniform sampling almost never shows it to the loss.
    products : torch.dtype
        Type in which softmax over inner products takes its matrix products; rows stay float32.
    clock : PhaseClock
    """

    def __init__(
        self,
        model: KgeModel,
        loss: Loss,
        regularizer: Regularizer | None,
        tables: TableSet,
        optimizer: Any,
        negatives: UniformNegatives,
        pairs: Sequence[tuple[str, str]],
        own_entity: bool,
        products: torch.dtype,
        clock: PhaseClock,
    ) -> None:
        self._clock = clock
        optimizer.when_phase(clock.enter)
        self._is_fused = isinstance(model.score_function, Dot) and isinstance(loss, Softmax)
        self._products = products
        self._model = model
        self._loss = loss
        self._regularizer = regularizer
        self._tables = tables
        self._optimizer = optimizer
        self._negatives = negatives
        self._pairs = pairs
        self._own_entity = own_entity

    def __call__(self, batch: EdgeBatch) -> float:
        """Train one batch.

        Returns
        -------
        float
            The sum of the losses of this trainer's triples, both sides, regularizer included. Shares
            are uneven, so losses are summed over trainers and divided by the global batch, never averaged.
        """
        clock = self._clock
        clock.enter("negatives")
        requests = {name: RowRequest(table) for name, table in self._tables.items()}
        scorers = [
            _GroupScorer(self, batch, group, requests) for group in self._with_negatives(batch, requests)
        ]
        clock.enter("gather")
        for request in requests.values():
            request.pull()
        clock.enter("score")
        losses = [scorer.loss(requests) for scorer in scorers]
        total = 0.0
        if losses:
            loss = torch.stack(losses).sum()
            clock.enter("backward")
            (loss / batch.global_size).backward()
            total = loss.item()
        clock.enter("merge")
        self._optimizer.step_rows(
            [(request.table.embedding, request.ids, request.gradients) for request in requests.values()]
        )
        return total

    def _compare(
        self,
        query: torch.Tensor,
        truths: torch.Tensor,
        negatives: torch.Tensor,
        own: torch.Tensor | None,
        places: tuple[torch.Tensor, torch.Tensor],
        own_ignored: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the loss (B,) of queries against their true answers and their negatives.

        ``places`` are rows and columns of the scores that do not count.
        """
        if self._is_fused:
            arguments = (query, truths, negatives, own, places, own_ignored, self._products)
            losses: torch.Tensor = SoftmaxOfProducts.apply(*arguments)
            return losses
        positive = self._model.compare_pairs(query, truths)
        scores = self._model.compare(query, negatives)
        ignored = torch.zeros(scores.shape, dtype=torch.bool)
        ignored[places] = True
        if own is not None and own_ignored is not None:
            scores = torch.cat([scores, self._model.compare_pairs(query, own)[:, None]], dim=1)
            ignored = torch.cat([ignored, own_ignored[:, None]], dim=1)
        return self._loss(positive, scores, ignored)

    def _with_negatives(self, batch: EdgeBatch, requests: dict[str, RowRequest]) -> list[_NegativeGroup]:
        """Attach to each group its chunk's negatives; groups of one chunk share them by entity type."""
        drawn: dict[tuple[int, str], _Negatives] = {}
        groups = []
        for group in batch.groups:
            found = []
            for entity_type in self._pairs[group.pair]:
                key = (group.chunk, entity_type)
                if key not in drawn:
                    ids = self._negatives.sample(entity_type, batch.epoch, batch.index, group.chunk)
                    drawn[key] = _Negatives(ids, requests[entity_type].add(ids))
                found.append(drawn[key])
            groups.append(_NegativeGroup(group, heads=found[0], tails=found[1]))
        return groups


class _Negatives:
    """Negatives of a chunk: node ids (N,) and the place of their rows."""

    def __init__(self, ids: NodeIds, place: slice) -> None:
        self.ids = ids
        self.place = place


class _NegativeGroup:
    """A group of edges with the negatives for each side."""

    def __init__(self, group: EdgeGroup, heads: _Negatives, tails: _Negatives) -> None:
        self.group = group
        self.of_side = {Side.HEAD: heads, Side.TAIL: tails}


class _GroupScorer:
    """The loss of one group of edges, in two strokes: ask for rows, then score them."""

    def __init__(
        self, step: TrainStep, batch: EdgeBatch, chosen: _NegativeGroup, requests: dict[str, RowRequest]
    ) -> None:
        group = chosen.group
        run = slice(group.start, group.end)
        self._step = step
        self._negatives = chosen.of_side
        self._lhs, self._rhs = step._pairs[group.pair]
        self._head_ids = batch.heads[run]
        self._tail_ids = batch.tails[run]
        self._weights = None if batch.weights is None else torch.from_numpy(batch.weights[run])
        self._heads = requests[self._lhs].add(batch.heads[run])
        self._tails = requests[self._rhs].add(batch.tails[run])
        self._relations = requests[RELATION].add(batch.relations[run])

    def loss(self, requests: dict[str, RowRequest]) -> torch.Tensor:
        """Return the summed loss of the group's triples, a scalar."""
        heads = requests[self._lhs].rows(self._heads)
        tails = requests[self._rhs].rows(self._tails)
        relations = requests[RELATION].rows(self._relations)
        rows = self._side_loss(Side.TAIL, heads, relations, tails, requests[self._rhs])
        rows = rows + self._side_loss(Side.HEAD, tails, relations, heads, requests[self._lhs])
        return rows.sum() if self._weights is None else (rows * self._weights).sum()

    def _side_loss(
        self,
        side: Side,
        anchors: torch.Tensor,
        relations: torch.Tensor,
        truths: torch.Tensor,
        request: RowRequest,
    ) -> torch.Tensor:
        """Return the loss (B,) of the queries for one side."""
        step, negatives = self._step, self._negatives[side]
        anchor_ids, true_ids = (
            (self._head_ids, self._tail_ids) if side is Side.TAIL else (self._tail_ids, self._head_ids)
        )
        query = step._model.query(anchors, relations, side)
        own = anchors if step._own_entity and self._lhs == self._rhs else None
        own_ignored = None if own is None else torch.from_numpy(anchor_ids == true_ids)
        rows, columns = find_equal(true_ids, negatives.ids)
        places = (torch.from_numpy(rows), torch.from_numpy(columns))
        losses = step._compare(query, truths, request.rows(negatives.place), own, places, own_ignored)
        if step._regularizer is None:
            return losses
        return losses + step._model.penalty(step._regularizer, anchors, relations, truths, side)
