"""Relation prediction: (h, ?, t) against all relations, beside the loss of the entities.

Chen et al. 2021, "Relation prediction as an auxiliary training objective for improving multi-relational
graph representations": its loss is added, times a weight. Relations are few, so that all of them
are candidates with every objective; their table is sharded over the trainers as entities are in
``one_vs_all``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import torch

from dglkge.model.kge_model import KgeModel
from dglkge.training.objectives.all_candidates import CandidateLoss, Piece
from dglkge.training.objectives.autograd_loss import AutogradLoss
from dglkge.training.objectives.dot_softmax import DotSoftmax
from dglkge.training.objectives.rows import Group, RowPlaces
from dglkge.typing import Side

RELATION_BLOCKS = {Side.TAIL: "relation~tail", Side.HEAD: "relation~head"}
"""Names of the blocks of relation prediction; '~' cannot be confused with an entity type of that name."""


def relation_pieces(
    model: KgeModel,
    keys: npt.NDArray[np.int64],
    heads: torch.Tensor,
    tails: torch.Tensor,
    factors: npt.NDArray[np.float32],
) -> list[Piece]:
    """Return the queries (h, ?, t): one for each direction that has relation rows of its own.

    Parameters
    ----------
    model : KgeModel
    keys : (B,) int64
        Determines the answers of each query: the node id of the relation itself, where there is one answer.
    heads, tails : (B, D) tensor
    factors : (B,) float32
    """
    forwards = model.score_function.relation_query(heads, tails)
    # Without reciprocal rows both directions have the same scores: one query with twice the factor.
    if not model.reciprocal:
        return [Piece(RELATION_BLOCKS[Side.TAIL], forwards, keys, 2 * factors)]
    backwards = model.score_function.relation_query(tails, heads)
    return [
        Piece(RELATION_BLOCKS[Side.TAIL], forwards, keys, factors),
        Piece(RELATION_BLOCKS[Side.HEAD], backwards, keys, factors),
    ]


class RelationQueries:
    """Queries (h, ?, t) of groups of edges, and their gradients; a :class:`QueryMaker`.

    Gradients are added to those that the rows have already. Rows are copied in any case.

    Parameters
    ----------
    model : KgeModel
    weight : float
        Weight of relation prediction; 0: no queries.
    is_staged : bool
        Whether rows and gradients are on a device.
    """

    reads_in_place = True
    shares_relations = False

    def __init__(self, model: KgeModel, weight: float, is_staged: bool = False) -> None:
        self._model = model
        self._weight = np.float32(weight)
        self._is_staged = is_staged

    def make(self, groups: Sequence[Group], global_size: int) -> list[Piece]:
        """Return the queries of a batch's groups."""
        self._leaves: list[tuple[Group, list[torch.Tensor]]] = []
        pieces: list[Piece] = []
        for group in groups if self._weight else ():
            heads, tails = leaves = [self._leaf(place) for place in (group.heads, group.tails)]
            factors = self._weight * group.factors(global_size)
            pieces += relation_pieces(self._model, group.relation_ids, heads, tails, factors)
            self._leaves.append((group, leaves))
        self._queries = [piece.queries for piece in pieces]
        return pieces

    def take_back(self, gradients: Sequence[torch.Tensor]) -> float:
        """Add the gradients of the rows, given those of the queries; returns the penalty, which is 0."""
        if self._queries:
            given = [of_query.to(query.device) for query, of_query in zip(self._queries, gradients)]
            torch.autograd.backward(self._queries, given)
        for group, (heads, tails) in self._leaves if not self._is_staged else ():
            for place, leaf in ((group.heads, heads), (group.tails, tails)):
                if leaf.grad is not None:
                    place.gradients.add_(leaf.grad)
        return 0.0

    def _leaf(self, place: RowPlaces) -> torch.Tensor:
        """Return rows as a leaf; on a device its gradient is added to those of the rows."""
        return place.leaf() if self._is_staged else place.found().copied().requires_grad_()


class SampledWithRelations:
    """Loss against sampled negatives, and relation prediction beside it; a collective.

    Parameters
    ----------
    sampled : AutogradLoss or DotSoftmax
    of_relations : CandidateLoss
        Of the queries of :class:`RelationQueries`.
    """

    def __init__(self, sampled: Union[AutogradLoss, DotSoftmax], of_relations: CandidateLoss) -> None:
        self.reads_in_place = sampled.reads_in_place
        self.shares_relations = sampled.shares_relations
        self._sampled = sampled
        self._of_relations = of_relations

    def __call__(self, groups: Sequence[Group], global_size: int) -> float:
        """Return the summed loss; leaves the gradients, divided by ``global_size``, with the rows."""
        # In this order: compiled loops write the gradients of the rows, to which the relations' are added.
        # Without triples of its own a trainer still scores its relations for the others.
        loss = self._sampled(groups, global_size)
        return loss + self._of_relations(groups, global_size)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this trainer sent to other machines."""
        return self._of_relations.sent_bytes

    def dense_gradients(self) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Return (embedding, node ids, gradients) of the relations that this trainer owns."""
        return self._of_relations.dense_gradients()
