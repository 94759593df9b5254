"""Queries with all their answers at once (KvsAll, Dettmers et al. 2018): one query for all that share it.

Where a loss compares answers (softmax, pairs), each of k answers has label 1 / k; else label 1.
The regularizer takes the given entity, the relation and the mean over the answers of each query; the answers'
part is computed where their rows are stored. Relation prediction adds queries (h, ?, t) with all relations of
the pair, their losses times a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from dglkge.sampling.query_batches import AnswerIndex, ShardAnswers
from dglkge.step.contracts import Rows
from dglkge.step.objectives.all_candidates import ModelQueries, Piece, TakeBack
from dglkge.step.objectives.one_vs_all import differentiated, places_on
from dglkge.step.objectives.relation_prediction import relation_pieces
from dglkge.step.objectives.shard_objective import Answers
from dglkge.step.planning import Plan

Ids = npt.NDArray[np.int64]


class AnsweredQueries(ModelQueries):
    """Queries with all their answers."""

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        model = self._model
        pieces: list[Piece] = []
        total = torch.zeros(())
        for group in plan.groups:
            anchors, relations = rows.leaf(group.anchors), rows.leaf(group.relations)
            # Divided by the global batch, as shares of trainers are uneven and gradients are summed.
            factors = np.full(len(group.query_ids), 1 / plan.divisor, np.float32)
            arrays = (group.relation_places, group.relation_ids)
            places, ids = (places_on(array, anchors.device) for array in arrays)
            query = model.query(anchors, relations, group.side, ids, places)
            pieces.append(Piece(group.answer_type, query, group.query_ids, factors))
            if self._regularizer is not None:
                rows_of_query = (anchors, relations, None, group.side, query, places)
                penalty = self._regularizer.penalties(model, *rows_of_query)
                total = total + penalty.sum() / plan.divisor
        for pairs in plan.pairs:
            share = np.full(len(pairs.pair_ids), self._relation_weight / plan.divisor, np.float32)
            heads, tails = rows.leaf(pairs.heads), rows.leaf(pairs.tails)
            pieces += relation_pieces(model, pairs.pair_ids, pairs.times, heads, tails, share)
        return pieces, functools.partial(differentiated, [piece.queries for piece in pieces], total)


def all_answers(
    index: AnswerIndex, of_shard: ShardAnswers, splits_labels: bool, penalizes: bool
) -> Callable[[Ids], Answers]:
    """Return the answers of queries, by number, among the rows of a shard.

    ``splits_labels``: each of a query's k answers has label 1 / k, else 1. ``penalizes``: they are
    regularized.
    """
    # The count of all answers, not of the shard's: labels sum to 1 over all shards.
    parts = (1 / np.maximum(index.num_answers, 1)).astype(np.float32)

    def answers_of(query_ids: Ids) -> Answers:
        starts, places = of_shard.of(query_ids)
        equal_parts = np.repeat(parts[query_ids], np.diff(starts))
        shares = equal_parts if splits_labels else np.ones(len(places), np.float32)
        return Answers(starts, places, shares, equal_parts if penalizes else None)

    return answers_of
