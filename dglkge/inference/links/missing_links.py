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


@dataclass
class Links:
    """Pairs of a query and a candidate, and exact scores; all (n,)."""

    query: Tensor
    candidate: Tensor
    score: Tensor

    def __getitem__(self, which: Tensor) -> Links:
        return Links(self.query[which], self.candidate[which], self.score[which])

    @classmethod
    def join(cls, parts: list[Links]) -> Links:
        """Return all parts in one, in a fixed order: by query, descending score, and candidate."""
        empty = torch.empty(0, dtype=torch.int64)
        if not parts:
            return cls(empty, empty, empty.double())
        every = cls(*(torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])))
        return every[torch.from_numpy(np.lexsort((every.candidate, -every.score, every.query)))]

    def best(self, k: int) -> Links:
        """Return the first k of each query; the order is that of :meth:`join`."""
        starts = torch.searchsorted(self.query, self.query)
        return self[torch.arange(len(self.query)) - starts < k]


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
    low : (Q,) float64 tensor
        Pairs with a lower float32 score are left out.
    """

    model: KgeModel
    query: Tensor
    max_norm: float
    known: tuple[Tensor, Tensor]
    least_score: float
    k: int | None = None
    is_narrow: bool = False
    _found: list[Links] = field(default_factory=list)

    def __post_init__(self) -> None:
        limit = torch.full((len(self.query),), self.least_score, dtype=torch.float64)
        # Without a least score any bound will do for the first panel; it is set by the k-th best.
        scale = limit.masked_fill(limit.isinf(), 0.0)
        bound = self.model.score_function.rounding_bound(self.query, self.max_norm, scale)
        if not bool(torch.isfinite(bound).all()):
            raise InputError(
                "the embeddings cannot be searched: a score is not finite or overflows float32; the training "
                "diverged, or the rows are not this model's"
            )
        self._rounded = self.query.float()
        self.low = limit - bound
        if self.is_narrow:
            self._narrow = self.query.bfloat16()
            self._slack = NARROW_SLACK * self.query.norm(dim=1)

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Search a panel: candidates (n,), ascending, with their rows (n, D)."""
        rows = rows.float()
        place = torch.searchsorted(ids, self.known[1]).clamp_max(len(ids) - 1)
        here = ids[place] == self.known[1]
        known_query, known_place = self.known[0][here], place[here]
        if self.is_narrow:
            narrow, narrow_low = rows.bfloat16(), self.low - self._slack * float(rows.norm(dim=1).max())
        for first in range(0, len(self.query), QUERY_TILE):
            tile = slice(first, first + QUERY_TILE)
            inside = slice(
                *torch.searchsorted(known_query, torch.tensor([first, first + QUERY_TILE])).tolist()
            )
            known = known_query[inside] - first, known_place[inside]
            if self.is_narrow:
                scores = (self._narrow[tile] @ narrow.T).float()
                pairs = self._close(scores, narrow_low[tile], known)
                if len(pairs[0]) * PAIR_COST <= rows.shape[1] * scores.numel():
                    self._keep(tile, pairs, ids, rows)
                    continue
            scores = self.model.compare(self._rounded[tile], rows)
            if self.k is not None:
                self._raise_limit(self.k, tile, scores, known)
            self._keep(tile, self._close(scores, self.low[tile], known), ids, rows)

    def _close(self, scores: Tensor, low: Tensor, known: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return row and column of the scores that are not below the limits (b,), known pairs left out."""
        scores[known] = -torch.inf
        # Finite, so that known pairs are below the limit where there is none.
        below = torch.nextafter(low.float(), torch.tensor(-torch.inf)).clamp_min(
            torch.finfo(torch.float32).min
        )
        _, row, column = count_greater(
            scores, torch.arange(len(scores)), below, torch.full_like(below, torch.inf)
        )
        return row, column

    def _raise_limit(self, k: int, tile: slice, scores: Tensor, known: tuple[Tensor, Tensor]) -> None:
        """Raise the limits of a tile's queries to the k-th best score of a panel, less its rounding."""
        if scores.shape[1] < k:
            return
        scores[known] = -torch.inf
        kth = scores.topk(k, dim=1).values[:, -1].double()
        bound = self.model.score_function.rounding_bound(self.query[tile], self.max_norm, kth)
        # Once for the k-th best, which may be too high, and once for those that are compared with it.
        limit = torch.where(kth.isinf(), kth, kth - 2 * bound)
        self.low[tile] = torch.maximum(self.low[tile], limit)

    def _keep(self, tile: slice, pairs: tuple[Tensor, Tensor], ids: Tensor, rows: Tensor) -> None:
        row, column = pairs[0] + tile.start, pairs[1]
        if len(row):
            scores = exact_scores(self.model, self.query, row, rows, column)
            links = Links(row, ids[column], scores)
            self._found.append(links[(scores >= self.least_score) & ~scores.isinf()])

    def num_found(self) -> int:
        """Return the number of links found and not taken."""
        return sum(len(links.query) for links in self._found)

    def take(self, is_last: bool = True) -> Links:
        """Return the links found; with k only at the end, since until then better ones may come."""
        links = Links.join(self._found)
        self._found = []
        if self.k is None:
            return links
        links = links.best(self.k)
        if is_last:
            return links
        self._found = [links]
        return links[torch.empty(0, dtype=torch.int64)]
