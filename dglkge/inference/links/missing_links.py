"""Likely tails of all queries (h, r, ?) of a relation, and likely candidates of few queries.

Candidates are compared by products whose rounding has a bound, in float32 or bfloat16. A pair that is farther
than that below the limit is skipped; the few that are left are scored exactly, in float64, or for few queries
in float32. In bfloat16 the bound is wider. Products are several times as fast where the processor has units
for it, and rows of large types, which are kept in bfloat16, take half the time to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dglkge.errors import InputError
from dglkge.evaluation.queries import exact_scores
from dglkge.evaluation.ranking import count_greater
from dglkge.inference.search import BLOCK_BYTES, candidate_blocks
from dglkge.inference.whole_tables import Tables
from dglkge.kernels.full_scores import score_answers
from dglkge.model.device import BFLOAT16, faster_type
from dglkge.model.kge_model import KgeModel
from dglkge.optim.workspace import split
from dglkge.typing import RowShard

QUERY_TILE, CANDIDATE_PANEL = 1024, 1024
"""Queries and candidates of one matmul: 4 MiB of scores, read while they are in the cache."""

PAIR_COST = 1e5
"""Time of an exact score, in multiplications of a matrix product."""

NARROW_SLACK = 3.1 * 2.0**-8
"""Bound of the rounding of an inner product in bfloat16, by the product of the norms: once for each operand
and once for the result, each by half a unit in the last of 8 bits."""


PAIR = np.dtype([("score", "<f8"), ("query", "<i8"), ("candidate", "<i8")])
"""A query, a candidate's id and their exact score."""


def at_least(scores: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of the finite float32 scores (b, n) that are not below the limits (b,)."""
    low = low.clamp_min(torch.finfo(torch.float32).min)
    _, row, column = count_greater(scores, torch.arange(len(scores)), low, torch.full_like(low, torch.inf))
    return row, column


def check_finite(numbers: Tensor) -> None:
    """Refuse rows with a number that is not finite."""
    if not bool(torch.isfinite(numbers).all()):
        raise InputError(
            "the embeddings cannot be searched: a score is not finite or overflows float32; the training "
            "diverged, or the rows are not this model's"
        )


@dataclass
class LinkSearch:
    """Queries of one relation against panels of candidates.

    Attributes
    ----------
    query : (Q, Dq) float64 tensor
    max_norm : float
        Greatest Euclidean norm of a candidate.
    known : two (M,) int64 tensors
        Query, ascending, and id of the pairs to leave out.
    least_score : float
        -inf for none.
    k : int, optional
        Only the best k of each query.
    is_narrow : bool
        Compare in bfloat16 first: with inner products and without ``k``.
    """

    model: KgeModel
    query: Tensor
    max_norm: float
    known: tuple[Tensor, Tensor]
    least_score: float
    k: int | None = None
    is_narrow: bool = False
    links: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        limit = torch.full((len(self.query),), self.least_score, dtype=torch.float64)
        # Without a least score any bound will do for the first panel; it is set by the k-th best.
        scale = limit.masked_fill(limit.isinf(), 0.0)
        bound = self.model.score_function.rounding_bound(self.query, self.max_norm, scale)
        check_finite(bound)
        self._rounded = self.query.float()
        self._low = limit - bound  # pairs with a lower float32 score are left out
        if self.is_narrow:
            self._narrow = self.query.bfloat16()
            self._slack = NARROW_SLACK * self.query.norm(dim=1)

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Search a panel: candidates (n,), ascending, with their rows (n, D); none in an empty shard."""
        if not len(ids):
            return
        rows = rows.float()
        place = torch.searchsorted(ids, self.known[1]).clamp_max(len(ids) - 1)
        here = ids[place] == self.known[1]
        known_query, known_place = self.known[0][here], place[here]
        if self.is_narrow:
            narrow, narrow_low = rows.bfloat16(), self._low - self._slack * float(rows.norm(dim=1).max())
        for first in range(0, len(self.query), QUERY_TILE):
            tile = slice(first, first + QUERY_TILE)
            limits = torch.tensor([first, first + QUERY_TILE])
            inside = slice(*torch.searchsorted(known_query, limits).tolist())
            known = known_query[inside] - first, known_place[inside]
            if self.is_narrow:
                scores = (self._narrow[tile, : narrow.shape[1]] @ narrow.T).float()
                pairs = self._close(scores, narrow_low[tile], known)
                if len(pairs[0]) * PAIR_COST <= rows.shape[1] * scores.numel():
                    self._keep(tile, pairs, ids, rows)
                    continue
            scores = self.model.compare(self._rounded[tile], rows)
            if self.k is not None:
                self._raise_limit(self.k, tile, scores, known)
            self._keep(tile, self._close(scores, self._low[tile], known), ids, rows)

    def _close(self, scores: Tensor, low: Tensor, known: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return row and column of the scores that are not below the limits (b,), known pairs left out."""
        scores[known] = -torch.inf
        return at_least(scores, torch.nextafter(low.float(), torch.tensor(-torch.inf)))

    def _raise_limit(self, k: int, tile: slice, scores: Tensor, known: tuple[Tensor, Tensor]) -> None:
        """Raise the limits of a tile's queries to the k-th best score of a panel, less its rounding."""
        if scores.shape[1] < k:
            return
        scores[known] = -torch.inf
        kth = scores.topk(k, dim=1).values[:, -1].double()
        bound = self.model.score_function.rounding_bound(self.query[tile], self.max_norm, kth)
        # Once for the k-th best, which may be too high, and once for those that are compared with it.
        limit = torch.where(kth.isinf(), kth, kth - 2 * bound)
        self._low[tile] = torch.maximum(self._low[tile], limit)

    def _keep(self, tile: slice, pairs: tuple[Tensor, Tensor], ids: Tensor, rows: Tensor) -> None:
        row, column = pairs[0] + tile.start, pairs[1]
        if len(row):
            scores = exact_scores(self.model, self.query, row, rows, column)
            links = np.empty(len(row), PAIR)
            links["score"], links["query"], links["candidate"] = scores, row, ids[column]
            self.links.append(links[((scores >= self.least_score) & ~scores.isinf()).numpy()])

    def take(self, is_last: bool = True) -> np.ndarray:
        """Return the links found; with k only at the end, since until then better ones may come."""
        links = best_links(np.concatenate([np.empty(0, PAIR), *self.links]), self.k)
        is_final = is_last or self.k is None
        self.links = [] if is_final else [links]
        return links if is_final else links[:0]


def best_links(links: np.ndarray, k: int | None) -> np.ndarray:
    """Return links by query, the best first, at most k of each."""
    links = links[np.lexsort((links["candidate"], -links["score"], links["query"]))]
    starts = np.searchsorted(links["query"], links["query"])
    return links[np.arange(len(links)) - starts < (k or len(links))]


LEAST_ROWS, MOST_BYTES = 100_000, 1 << 30
"""Rows from which a copy of a type is worth its time, and its most bytes."""

SCREENED = 64
"""One candidate of so many may remain; of more, all are scored in float32."""

LEAST_QUERIES = 16
"""A product with fewer is slower."""


def has_fast_bfloat16(model: KgeModel) -> bool:
    """Return whether a model's products are clearly faster in bfloat16 here."""
    if not model.score_function.is_product:
        return False
    # One thread: several wait for each other on a busy machine, which says nothing about the type.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return faster_type((QUERY_TILE, CANDIDATE_PANEL, model.query_dim)) == BFLOAT16
    finally:
        torch.set_num_threads(before)


class LikelyCandidates:
    """Candidates of queries whose scores are not below a limit.

    Rows in bfloat16 are made at the first search of a type and kept.

    Parameters
    ----------
    max_norm : callable
        Returns the greatest Euclidean norm of a row of a type.
    """

    def __init__(self, model: KgeModel, tables: Tables, max_norm: Callable[[str], float]) -> None:
        self._model, self._tables, self._max_norm = model, tables, max_norm
        self.is_narrow = has_fast_bfloat16(model)
        self._narrow: dict[str, list[Tensor]] = {}

    def search(self, entity_type: str, query: Tensor, low: float) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield query, original id and float32 score of candidates of queries (b, Dq), by block and query."""
        shards, model = self._tables.shards(entity_type), self._model
        limits = torch.full((len(query),), low)
        for shard, narrow in zip(shards, self._narrow_rows(entity_type, shards)):
            likely = None if narrow is None else _screened(query, low, self._max_norm(entity_type), narrow)
            if likely is not None:
                (row, column), rows = likely, shard.rows.numpy()
                # Rows may be narrower than queries: they have zeros at their end.
                scores = _products(query[:, : rows.shape[1]].contiguous().numpy(), rows, row, column)
                kept = scores >= low
                yield row[kept], shard.original_ids.numpy()[column[kept]], scores[kept]
                continue
            for _, block in candidate_blocks(len(query), [shard]):
                compared = model.compare(query, shard.rows[block].float())
                places = at_least(compared, limits)
                ids = shard.original_ids[block][places[1]]
                yield places[0].numpy(), ids.numpy(), compared[places].numpy()

    def _narrow_rows(self, entity_type: str, shards: Sequence[RowShard]) -> Sequence[Tensor | None]:
        """Return the rows of the shards in bfloat16; None where that would not pay."""
        num_rows, width = sum(len(shard.rows) for shard in shards), self._tables.meta.dim
        is_float32 = all(shard.rows.dtype == torch.float32 for shard in shards)
        pays = self.is_narrow and num_rows >= LEAST_ROWS and 2 * num_rows * width <= MOST_BYTES and is_float32
        if pays and entity_type not in self._narrow:
            self._narrow[entity_type] = [shard.rows.bfloat16() for shard in shards]
        return self._narrow[entity_type] if pays else [None] * len(shards)


def _screened(query: Tensor, low: float, norm: float, narrow: Tensor) -> tuple[np.ndarray, np.ndarray] | None:
    """Return row and column of what may reach the limit, by row; None if that is too much."""
    slack = NARROW_SLACK * query.norm(dim=1) * norm
    # The limit is rounded as well.
    limits, num_queries = (low - slack - 2.0**-8 * abs(low)).bfloat16(), len(query)
    queries = narrow.new_zeros(max(LEAST_QUERIES, num_queries), narrow.shape[1])
    queries[:num_queries] = query[:, : narrow.shape[1]]
    step = max(1, min(len(narrow), BLOCK_BYTES // (4 * len(queries))))
    scores, flags = narrow.new_empty(step, len(queries)), torch.empty(step, num_queries, dtype=torch.bool)
    remaining, passing = len(narrow) * num_queries // SCREENED, [np.empty(0, np.int64)]
    # Positive numbers and their bits have one order, and integers are compared several times as fast.
    kind = torch.int16 if bool((limits > 0).all()) else torch.bfloat16
    for start in range(0, len(narrow), step):
        rows = narrow[start : start + step]
        torch.mm(rows, queries.T, out=scores[: len(rows)])
        query_scores = scores[: len(rows), :num_queries]
        torch.ge(query_scores.view(kind), limits.view(kind), out=flags[: len(rows)])
        places = np.flatnonzero(flags[: len(rows)].numpy())
        remaining -= len(places)
        if remaining < 0:
            return None
        passing.append(places + start * num_queries)
    column, row = np.divmod(np.concatenate(passing), num_queries)
    order = np.argsort(row, kind="stable")
    return row[order], column[order]


def _products(query: np.ndarray, rows: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return the float32 inner products (m,) of pairs by query."""
    scores = np.empty(len(row), np.float32)

    def score(part: slice) -> None:
        starts = np.searchsorted(row[part], np.arange(len(query) + 1))
        score_answers(query, rows, starts, column[part], scores[part])

    split(len(row), query.shape[1], score)
    return scores
