"""Queries of a set of triples, batched by entity types, and exact scores of their true answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dglkge.data.known_triples import KnownTriples
from dglkge.data.sorted_arrays import is_first
from dglkge.errors import InputError
from dglkge.evaluation.metrics import places_by_id
from dglkge.model.kge_model import KgeModel
from dglkge.typing import RELATION, Ids, Relation, RowSource, Side

BLOCK_ELEMENTS = 30_000
"""Elements of a block: just below torch's threshold for multithreading, which costs more than this work."""

RELATION_NUMBERS = 1 << 22
"""Most numbers of relations' rows, one for each query, that are copied at a time."""

TRIPLES_AT_A_TIME = 8192
"""Triples whose rows are in memory while they are scored."""

Bonus = Callable[[Side, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Of queries (Q,) of a side, by anchors and relations: query (M,), candidate (M,) and what is added to its
score (M,), not below 0; each pair once."""


def exact_scores(
    model: KgeModel, query: Tensor, query_index: Tensor, rows: Tensor, row_index: Tensor
) -> Tensor:
    """Score pairs of a query, of (U, D) float64, and a row, of (N, D), given by indices (M,): (M,) float64.

    The score of a pair depends only on its two rows: equal rows have equal scores at any position, so ties
    are preserved.
    """
    # All blocks have one shape, the last one padded: on an accelerator torch's order of summation, and with
    # it the rounding, may depend on the number of rows.
    num_pairs, block_pairs = len(query_index), pairs_per_block(query.shape[1])
    scores = torch.empty(num_pairs, dtype=torch.float64, device=query.device)
    for first in range(0, num_pairs, block_pairs):
        queries, places = query_index[first : first + block_pairs], row_index[first : first + block_pairs]
        num_kept = len(queries)
        if num_kept < block_pairs:
            queries, places = _filled_up(queries, block_pairs), _filled_up(places, block_pairs)
        block = model.compare_pairs(query.index_select(0, queries), rows.index_select(0, places).double())
        scores[first : first + num_kept] = block[:num_kept]
    return scores


def pairs_per_block(dim: int) -> int:
    """Return the number of pairs of rows of a width that are scored at a time."""
    return min(512, max(8, BLOCK_ELEMENTS // dim))


def _filled_up(index: Tensor, size: int) -> Tensor:
    """Return the index with its first entry repeated up to a size."""
    return torch.cat([index, index[:1].expand(size - len(index))])


@dataclass(frozen=True)
class QueryBatch:
    """Distinct queries of one side with answers of one type, and the triples that they come from.

    Many triples have the same query, (h, r, ?) or (?, r, t), and differ only in the true answer. A query is
    scored once in a batch, and all its true answers are ranked against the same scores.

    Attributes
    ----------
    side : Side
        The missing side.
    anchor_type, candidate_type : str
        Entity types of the given entities and of the answers.
    anchor_ids, relation_ids : (U,) int64 array
        The queries.
    places : (K,) int64 array
        Rows of the triples.
    query_of : (K,) int64 array
        Index of each triple's query, ascending.
    true_ids : (K,) int64 array
        The true answers.
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
    """Yield batches of at most so many true answers that cover both sides of every triple (n, 3)."""
    pairs = sorted({(relation.lhs, relation.rhs) for relation in relations})
    pair_of_relation = np.array([pairs.index((relation.lhs, relation.rhs)) for relation in relations])
    places_by_pair = places_by_id(pair_of_relation[triples[:, 1]])
    for side in Side:
        for pair, places in places_by_pair.items():
            # A batch has few relations: those of few rows, and of few rules.
            pairs_asked = triples[places][:, [1, side.anchor_column]]
            queries, query_of = np.unique(pairs_asked, axis=0, return_inverse=True)
            query_of = query_of.reshape(-1)  # numpy 2.0 gave it the shape of its argument
            # In the order of queries a batch needs few: a query is scored in two batches at most twice.
            order = np.argsort(query_of, kind="stable")
            places, query_of = places[order], query_of[order]
            for start in range(0, len(places), batch_size):
                part = slice(start, start + batch_size)
                batch_places, batch_queries = places[part], query_of[part]
                relation_ids, anchor_ids = queries[batch_queries[0] : batch_queries[-1] + 1].T
                yield QueryBatch(
                    side=side,
                    anchor_type=pairs[pair][side is Side.HEAD],
                    candidate_type=pairs[pair][side is Side.TAIL],
                    anchor_ids=anchor_ids,
                    relation_ids=relation_ids,
                    places=batch_places,
                    query_of=batch_queries - batch_queries[0],
                    true_ids=triples[batch_places, side.column],
                )


@dataclass(frozen=True)
class PairScores:
    """Numbers that are added to the scores of pairs of a query and an entity; 0 for all other pairs.

    Attributes
    ----------
    query, ids : (M,) int64 tensor
        Each pair once, in ascending order.
    values : (M,) float64 tensor
        Minus infinity excludes an entity.
    """

    query: Tensor
    ids: Tensor
    values: Tensor

    @classmethod
    def from_pairs(cls, query: np.ndarray, ids: np.ndarray, values: np.ndarray) -> PairScores:
        """Return pairs in any order as sorted ones; the first of equal pairs counts."""
        order = np.lexsort((ids, query))
        query, ids, values = query[order], ids[order], values[order]
        kept = is_first(query, ids)
        return cls(*(torch.from_numpy(column[kept]) for column in (query, ids, values)))

    def of(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Return the numbers of pairs (n,), 0 for others: float64."""
        if not len(self.ids) or not len(ids):
            return torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
        # A pair becomes one integer, and a sorted search replaces a hash table.
        base = int(max(self.ids.max(), ids.max())) + 1
        keys, looked_up = self.query * base + self.ids, queries * base + ids
        place = torch.searchsorted(keys, looked_up).clamp_max(len(keys) - 1)
        return torch.where(keys[place] == looked_up, self.values[place], 0.0)

    def to(self, device: torch.device) -> PairScores:
        """Return the same on a device."""
        return PairScores(self.query.to(device), self.ids.to(device), self.values.to(device))


@dataclass(frozen=True)
class ScoredQueries:
    """Queries and true scores as tensors on the device of the candidates' rows.

    Attributes
    ----------
    query : (U, D) float64 tensor
    query_of : (K,) int64 tensor
        Index of each true answer's query, ascending.
    true_ids : (K,) int64 tensor
    true_scores : (K,) float64 tensor
        With what is added to them.
    added : PairScores
        Known answers are excluded, but in raw ranking.
    """

    query: Tensor
    query_of: Tensor
    true_ids: Tensor
    true_scores: Tensor
    added: PairScores

    def known_among(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Return for pairs of a query and an entity whether the entity is one of its known answers: bool."""
        return self.added.of(queries, ids) == -torch.inf


def score_queries(
    model: KgeModel,
    batch: QueryBatch,
    rows: RowSource,
    known: KnownTriples | None,
    device: torch.device,
    bonus: Bonus | None = None,
) -> ScoredQueries:
    """Look up the rows of a batch and score its true answers; ``known`` None is for raw ranking.

    Scores are exactly comparable only if one device computed them: that of the candidates' rows.
    """
    query = _queries(model, batch, rows, device)
    query_of, true_ids = (torch.from_numpy(ids).to(device) for ids in (batch.query_of, batch.true_ids))
    answers, place = _gather(rows, batch.candidate_type, batch.true_ids, device)
    true_scores = exact_scores(model, query, query_of, answers, place)
    keys = (batch.side, batch.anchor_ids, batch.relation_ids)
    index, ids = np.zeros((2, 0), np.int64) if known is None else known.answers(*keys)
    pairs = [(index, ids, np.full(len(ids), -np.inf))]
    if bonus is not None:
        rule_scores = bonus(*keys)
        true_scores = true_scores + PairScores.from_pairs(*rule_scores).to(device).of(query_of, true_ids)
        pairs.append(rule_scores)
    added = PairScores.from_pairs(*(np.concatenate(columns) for columns in zip(*pairs))).to(device)
    return ScoredQueries(query, query_of, true_ids, true_scores, added)


def _queries(model: KgeModel, batch: QueryBatch, rows: RowSource, device: torch.device) -> Tensor:
    """Return the queries of a batch in float64, (U, Dq)."""
    anchors, anchor_of = _gather(rows, batch.anchor_type, batch.anchor_ids, device)
    relations, relation_of = _gather(rows, RELATION, batch.relation_ids, device)
    anchors = anchors[anchor_of]
    keys = torch.from_numpy(batch.relation_ids).to(device)
    # Blocks: a relation's row may be a matrix, and there is one for each query.
    step = max(1, RELATION_NUMBERS // model.relation_width)
    # Float64 here decides every comparison; the float32 copy of the query only preselects.
    parts = zip(*(column.split(step) for column in (anchors, relation_of, keys)))
    blocks = [model.query(part.double(), relations[at].double(), batch.side, ids) for part, at, ids in parts]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _gather(rows: RowSource, table: str, ids: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Look up each distinct row once: ids (n,) -> rows (U, D), and the place of that of each id (n,)."""
    # A lookup may be a request to another machine, and a batch has few distinct relations.
    unique_ids, place = np.unique(ids, return_inverse=True)
    return rows.gather(table, torch.from_numpy(unique_ids)).to(device), torch.from_numpy(place).to(device)


@contextmanager
def full_float32_matmuls() -> Iterator[None]:
    """Disable matmuls in bfloat16 and TF32, which training may have enabled: the bounds assume float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def score_triples(
    model: KgeModel, triples: Ids, relations: Sequence[Relation], rows: RowSource, bonus: Bonus | None = None
) -> dict[Side, np.ndarray]:
    """Score triples (n, 3) in float64 as answers to (h, r, ?) and to (?, r, t): by side (n,) each.

    The two differ only with reciprocal relations, which have a row for each direction. A score that is not
    finite is an InputError.
    """
    scores = {side: np.empty(len(triples)) for side in Side}
    if not len(triples):
        return scores
    with torch.no_grad():
        for batch in plan_queries(triples, relations, TRIPLES_AT_A_TIME):
            scored = score_queries(model, batch, rows, None, torch.device("cpu"), bonus)
            scores[batch.side][batch.places] = scored.true_scores.numpy()
    if not all(np.isfinite(values).all() for values in scores.values()):
        raise InputError("a score is not finite; the training diverged, or the rows are not this model's")
    return scores
