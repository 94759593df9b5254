"""Search for the best-scored candidates: answers to queries (h, r, ?) and (?, r, t), and similar entities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.inference.whole_tables import Tables
from dglkge.typing import RowShard, Side

BLOCK_BYTES = 64 << 20
"""Most bytes of candidate rows, and of their scores, at a time."""

QUERIES_AT_A_TIME = 256
"""Queries of one matmul. Together with :data:`BLOCK_BYTES` it bounds the memory of a search."""


class LinkQuery(NamedTuple):
    """A triple with the entity on one side missing, in original ids."""

    side: Side
    entity_id: int
    relation_id: int


class Answer(NamedTuple):
    """A candidate; ``known`` is the first split that has the triple, where known answers are marked.

    Scores are comparable within a query only.
    """

    entity_id: int
    score: float
    known: str | None = None


class TopAnswers:
    """The k best-scored candidates of each of Q queries, collected over blocks of candidates."""

    def __init__(self, num_queries: int, k: int) -> None:
        self._k = k
        self._scores = torch.empty((num_queries, 0))
        self._ids = torch.empty((num_queries, 0), dtype=torch.int64)

    def add(self, scores: torch.Tensor, ids: torch.Tensor) -> None:
        """Add candidates (n,) with their scores (Q, n), -inf for excluded ones."""
        # Only the block's own best k can be among the best k of all, so at most 2 k candidates are sorted.
        best, places = scores.topk(min(self._k, scores.shape[1]), dim=1)
        all_scores = torch.cat([self._scores, best], dim=1)
        all_ids = torch.cat([self._ids, ids[places]], dim=1)
        # Two stable sorts order by score, and by id among equal scores, whatever the blocks were.
        by_id = all_ids.argsort(dim=1, stable=True)
        by_score = all_scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
        order = by_id.gather(1, by_score)[:, : self._k]
        self._scores, self._ids = all_scores.gather(1, order), all_ids.gather(1, order)

    def result(self) -> Iterator[list[tuple[int, float]]]:
        """Yield ids and scores of each query, the best first, excluded candidates left out.

        If several candidates have exactly the score of place k, which of them is returned is undefined.
        """
        for ids, scores in zip(self._ids.tolist(), self._scores.tolist()):
            yield [(id_, score) for id_, score in zip(ids, scores) if score != -torch.inf]


Added = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Query (M,), candidate (M,) and what is added to its score (M,)."""

Seen = tuple[torch.Tensor, torch.Tensor]
"""Queries, and the entities that are candidates of these alone."""


def seen_candidates(known: Mapping[str, KnownTriples], side: Side, relation_ids: torch.Tensor) -> list[Seen]:
    """Return the queries of each relation, and the entities that its known triples have on a side."""
    seen_by_relation = []
    for relation_id in relation_ids.unique().tolist():
        ids = np.concatenate([triples.seen(side, relation_id) for triples in known.values()])
        seen_by_relation.append((torch.nonzero(relation_ids == relation_id)[:, 0], torch.from_numpy(ids)))
    return seen_by_relation


def adjust(scores: torch.Tensor, shard: RowShard, first: int, added: list[Added], seen: list[Seen]) -> None:
    """Add to the scores (Q, n) of a block of a shard, in place, and exclude what was not seen."""
    for index, ids, values in added:
        # Candidates of other shards and blocks have places outside of the block.
        places = shard.locate(torch.from_numpy(ids)) - first
        here = (places >= 0) & (places < scores.shape[1])
        scores[torch.from_numpy(index)[here], places[here]] += torch.from_numpy(values)[here].to(scores)
    for rows, seen_ids in seen:
        places = shard.locate(seen_ids) - first
        is_unseen = torch.ones(scores.shape[1], dtype=torch.bool)
        is_unseen[places[(places >= 0) & (places < scores.shape[1])]] = False
        scores[rows] = scores[rows].masked_fill(is_unseen, -torch.inf)


@torch.no_grad()
def most_similar(tables: Tables, table: str, ids: torch.Tensor, k: int = 10) -> list[list[tuple[int, float]]]:
    """Return the entities of a type with the greatest cosines to given ones (Q,), and these cosines.

    A list for each, without the entity itself, the most similar first. With a row of zeros a cosine is 0.
    """
    check_k(k)
    best, anchors = TopAnswers(len(ids), k), normalize(tables.gather(table, ids))
    for shard, block in candidate_blocks(len(ids), tables.shards(table)):
        # Normalized block by block: a normalized copy of the table would double the memory.
        cosines, candidate_ids = anchors @ normalize(shard.rows[block]).T, shard.original_ids[block]
        cosines[ids[:, None] == candidate_ids] = -torch.inf
        best.add(cosines, candidate_ids)
    return list(best.result())


def candidate_blocks(num_queries: int, shards: Iterable[RowShard]) -> Iterator[tuple[RowShard, slice]]:
    """Yield shards in blocks whose rows and scores take :data:`BLOCK_BYTES` at most."""
    for shard in shards:
        # 4 bytes for each float32 of the rows (n, width) and of the scores (queries, n).
        step = max(1, BLOCK_BYTES // (4 * max(num_queries, shard.rows.shape[1])))
        for start in range(0, len(shard.rows), step):
            yield shard, slice(start, start + step)


def check_k(k: int) -> None:
    """Refuse a number of answers that is not whole, or below 1."""
    if not isinstance(k, Integral) or k < 1:
        raise InputError(f"the number of answers must be a whole number of at least 1, got {k}")
