"""Likely tails of all queries (h, r, ?) of a relation: panels in float32 or bfloat16, exact scores of few.

A panel is compared by products whose rounding has a bound. A pair that is farther than that below the limit
is skipped; what is left is scored in float64. In bfloat16 the bound is wider, and products are several times
as fast where the processor has units for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dglkge.errors import InputError
from dglkge.evaluation.queries import exact_scores
from dglkge.evaluation.ranking import count_greater
from dglkge.model.kge_model import KgeModel

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
    _links: list[np.ndarray] = field(default_factory=list)

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
            inside = slice(
                *torch.searchsorted(known_query, torch.tensor([first, first + QUERY_TILE])).tolist()
            )
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
            self._links.append(links[((scores >= self.least_score) & ~scores.isinf()).numpy()])

    def num_found(self) -> int:
        """Return the number of links found and not taken."""
        return sum(map(len, self._links))

    def take(self, is_last: bool = True) -> np.ndarray:
        """Return the links found; with k only at the end, since until then better ones may come."""
        links = np.concatenate([np.empty(0, PAIR), *self._links])
        links = links[np.lexsort((links["candidate"], -links["score"], links["query"]))]
        self._links = []
        if self.k is None:
            return links
        starts = np.searchsorted(links["query"], links["query"])
        links = links[np.arange(len(links)) - starts < self.k]
        if is_last:
            return links
        self._links = [links]
        return links[:0]
