"""Queries with all their answers at once (KvsAll, Dettmers et al. 2018): one query for all that share it.

In a softmax, each of k answers has label 1 / k; in binary cross entropy (loss.name logistic), label 1.
The regularizer takes the given entity, the relation and the mean over the answers of each query; the answers'
part is computed where their rows are stored. Relation prediction adds queries (h, ?, t) with all relations of
the pair, their losses times a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Union

import numpy as np
import numpy.typing as npt
import torch

from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.sampling.query_batches import AnswerIndex, QueryBatch, ShardAnswers
from dglkge.training.objectives.all_candidates import Piece
from dglkge.training.objectives.one_vs_all import make_queries, places_on
from dglkge.training.objectives.relation_prediction import relation_pieces
from dglkge.training.objectives.rows import RowPlaces, RowRequest
from dglkge.training.objectives.shard_objective import SOFTMAX, Answers
from dglkge.typing import RELATION, Side

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class QueryGroup:
    """Queries of a batch of one side and pair of entity types.

    Attributes
    ----------
    side : Side
        The side of the missing entity.
    answer_type : str
    query_ids : (B,) int64
    anchors, relations : RowPlaces
    relation_ids : (B,) int64
        Node id of each query's relation.
    relation_places : (B,) int64 or None
        Where ``relations`` holds each relation once (U,): the place there of each query's.
    """

    side: Side
    answer_type: str
    query_ids: Ids
    anchors: RowPlaces
    relations: RowPlaces
    relation_ids: Ids
    relation_places: Ids | None


@dataclass(frozen=True)
class PairGroup:
    """Queries (h, ?, t) of a batch with the same entity types.

    Attributes
    ----------
    pair_ids : (P,) int64
    heads, tails : RowPlaces
    """

    pair_ids: Ids
    heads: RowPlaces
    tails: RowPlaces


def request_queries(
    batch: QueryBatch, requests: Mapping[str, RowRequest], shares_relations: bool = False
) -> list[Union[QueryGroup, PairGroup]]:
    """Make the groups of a batch of queries, requesting all rows, by table.

    With ``shares_relations`` a group requests the row of each relation once.
    """
    groups: list[Union[QueryGroup, PairGroup]] = []
    for run in batch.runs:
        part = slice(run.start, run.end)
        relations = wanted = batch.relations[part]
        places = None
        if shares_relations:
            wanted, places = np.unique(relations, return_inverse=True)
        groups.append(
            QueryGroup(
                run.side,
                run.answer_type,
                batch.query_ids[part],
                requests[run.anchor_type].add(batch.anchors[part]),
                requests[RELATION].add(wanted),
                relations,
                places,
            )
        )
    for pairs in batch.pair_runs:
        part = slice(pairs.start, pairs.end)
        heads = requests[pairs.lhs].add(batch.pair_heads[part])
        tails = requests[pairs.rhs].add(batch.pair_tails[part])
        groups.append(PairGroup(batch.pair_ids[part], heads, tails))
    return groups


class AnsweredQueries:
    """Queries and penalties of any model, by autograd; a :class:`QueryMaker`.

    Parameters
    ----------
    model : KgeModel
    regularizer : Regularizer or None
    relation_weight : float
        Weight of the queries (h, ?, t).
    shares_relations : bool
        Groups hold the row of each relation once.
    """

    reads_in_place = False

    def __init__(
        self,
        model: KgeModel,
        regularizer: Regularizer | None,
        relation_weight: float = 0.0,
        shares_relations: bool = False,
    ) -> None:
        self.shares_relations = shares_relations
        self._model = model
        self._relation_weight = relation_weight
        self._regularizer = regularizer

    def make(self, groups: Sequence[Union[QueryGroup, PairGroup]], global_size: int) -> list[Piece]:
        """Return all queries of a batch's groups."""
        model = self._model
        pieces: list[Piece] = []
        self._penalty = torch.zeros(())
        for group in groups:
            if isinstance(group, PairGroup):
                share = np.full(len(group.pair_ids), self._relation_weight / global_size, np.float32)
                heads, tails = group.heads.leaf(), group.tails.leaf()
                pieces += relation_pieces(model, group.pair_ids, heads, tails, share)
                continue
            anchors, relations = group.anchors.leaf(), group.relations.leaf()
            # Divided by the global batch, as shares of trainers are uneven and gradients are summed.
            factors = np.full(len(group.query_ids), 1 / global_size, np.float32)
            places = places_on(group.relation_places, anchors.device)
            query = make_queries(model, anchors, relations, group.side, group.relation_ids, places)
            pieces.append(Piece(group.answer_type, query, group.query_ids, factors))
            if self._regularizer is not None:
                penalty = self._regularizer.of_query(query)
                if penalty is None:
                    own_rows = relations if places is None else relations[places]
                    penalty = model.query_penalty(self._regularizer, anchors, own_rows, group.side)
                self._penalty = self._penalty + penalty.sum() / global_size
        self._queries = [piece.queries for piece in pieces]
        return pieces

    def take_back(self, gradients: Sequence[torch.Tensor]) -> float:
        """Write the gradients of the rows; returns the penalty."""
        tensors = list(self._queries)
        given = [of_query.to(query.device) for query, of_query in zip(tensors, gradients)]
        if self._penalty.requires_grad:
            # One backward pass for queries and penalty, which have the same leaves.
            tensors, given = [*tensors, self._penalty], [*given, torch.ones_like(self._penalty)]
        if tensors:
            torch.autograd.backward(tensors, given)
        return self._penalty.item()


def all_answers(
    index: AnswerIndex, of_shard: ShardAnswers, kind: str, penalizes: bool
) -> Callable[[Ids], Answers]:
    """Return the answers of queries, by number, among the rows of a shard.

    Parameters
    ----------
    index : QueryIndex or PairIndex
    of_shard : ShardAnswers
    kind : str
        Kind of the objective.
    penalizes : bool
        Whether the answers are regularized.
    """
    # The count of all answers, not of the shard's: labels sum to 1 over all shards.
    parts = (1 / np.maximum(index.num_answers, 1)).astype(np.float32)

    def answers_of(query_ids: Ids) -> Answers:
        starts, places = of_shard.of(query_ids)
        equal_parts = np.repeat(parts[query_ids], np.diff(starts))
        shares = equal_parts if kind == SOFTMAX else np.ones(len(places), np.float32)
        return Answers(starts, places, shares, equal_parts if penalizes else None)

    return answers_of
