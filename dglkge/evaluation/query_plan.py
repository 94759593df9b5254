"""Which queries a set of triples asks: grouped by entity types, equal queries side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dglkge.typing import Relation, Side


@dataclass(frozen=True)
class QueryBatch:
    """Distinct queries of one side whose answers have one type, with the triples that ask them.

    Many triples ask the same query, (h, r, ?) or (?, r, t), and differ in the true answer only: the query
    is scored once in a batch and every true answer is ranked against the same scores.

    Attributes
    ----------
    side : Side
        The side asked for.
    anchor_type, candidate_type : str
        Entity types of the entities given and of the answers.
    anchor_ids, relation_ids : (U,) int64 array
        The queries.
    places : (K,) int64 array
        Rows of the triples that ask them.
    query_of : (K,) int64 array
        Which query each of those triples asks, ascending.
    true_ids : (K,) int64 array
        Their true answers.
    """

    side: Side
    anchor_type: str
    candidate_type: str
    anchor_ids: np.ndarray
    relation_ids: np.ndarray
    places: np.ndarray
    query_of: np.ndarray
    true_ids: np.ndarray


def plan_queries(triples: np.ndarray, relations: Sequence[Relation], batch_size: int) -> Iterator[QueryBatch]:
    """Yield batches of queries that together rank both sides of every triple.

    Parameters
    ----------
    triples : (n, 3) int64 array
        Head, relation and tail, original ids.
    relations : sequence of Relation
        By relation id.
    batch_size : int
        Greatest number of true answers in a batch.
    """
    pairs = sorted({(relation.lhs, relation.rhs) for relation in relations})
    pair_of_relation = np.array([pairs.index((relation.lhs, relation.rhs)) for relation in relations])
    pair_of_triple = pair_of_relation[triples[:, 1]]
    for side in Side:
        for pair in np.unique(pair_of_triple):
            lhs, rhs = pairs[pair]
            types = (rhs, lhs) if side is Side.HEAD else (lhs, rhs)
            places = np.flatnonzero(pair_of_triple == pair)
            yield from _batches(side, types, triples, places, batch_size)


def _batches(
    side: Side, types: tuple[str, str], triples: np.ndarray, places: np.ndarray, batch_size: int
) -> Iterator[QueryBatch]:
    """Yield the batches of one side and one pair of (anchor, candidate) types."""
    asked = triples[places][:, [side.anchor_column, 1]]
    queries, query_of = np.unique(asked, axis=0, return_inverse=True)
    query_of = query_of.reshape(-1)  # numpy 2.0 gave it the shape of its argument
    order = np.argsort(query_of, kind="stable")
    places, query_of = places[order], query_of[order]
    for start in range(0, len(places), batch_size):
        end = min(start + batch_size, len(places))
        first = query_of[start]
        chosen = queries[first : query_of[end - 1] + 1]
        yield QueryBatch(
            side=side,
            anchor_type=types[0],
            candidate_type=types[1],
            anchor_ids=chosen[:, 0],
            relation_ids=chosen[:, 1],
            places=places[start:end],
            query_of=query_of[start:end] - first,
            true_ids=triples[places[start:end], side.column],
        )
