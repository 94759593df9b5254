"""Likely tails of all queries (h, r, ?) of a relation: float32 panels with bounds, and exact scores of few.

A panel of candidates is compared by the first m principal axes of queries and candidates alone. By Cauchy and
Schwarz what the other axes add is at most the product of two norms, so a pair below the limit is skipped with
m instead of D products. As in maximum inner product search (Li et al. 2017, FEXIPRO), but with axes of each
relation's own queries. All that is left is scored in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dglkge.errors import InputError
from dglkge.evaluation.queries import exact_scores
from dglkge.evaluation.ranking import count_greater
from dglkge.model.functions.comparators import FLOAT32_UNIT
from dglkge.model.kge_model import KgeModel

QUERY_TILE, CANDIDATE_PANEL = 1024, 1024
"""Queries and candidates of one matmul: 4 MiB of scores, read while they are in the cache."""

SAMPLE = 4096
"""Queries, and candidates, that the axes are computed from."""

TESTED = 512
"""Queries, and candidates, that the number of axes is chosen on."""

PAIR_COST = 1e5
"""Time of an exact score, in columns of a matmul for one pair."""

FEWEST_PAIRS = 1 << 24
"""Fewer are compared by all their numbers: computing axes would take longer."""


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
    model : KgeModel
    query : (Q, Dq) float64 tensor
    max_norm : float
        Greatest Euclidean norm of a candidate.
    known : two (M,) int64 tensors
        Query, ascending, and id of the pairs to leave out.
    least_score : float
        -inf for none.
    k : int, optional
        Only the best k of each query.
    axes : Axes, optional
        Skip pairs by bounds.
    low : (Q,) float64 tensor
        Pairs with a lower float32 score are left out.
    """

    model: KgeModel
    query: Tensor
    max_norm: float
    known: tuple[Tensor, Tensor]
    least_score: float
    k: int | None = None
    axes: Axes | None = None
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

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Search a panel: candidates (n,), ascending, with their rows (n, D)."""
        rows = rows.float()
        place = torch.searchsorted(ids, self.known[1]).clamp_max(len(ids) - 1)
        here = ids[place] == self.known[1]
        known_query, known_place = self.known[0][here], place[here]
        projected = self.axes.candidates(rows) if self.axes is not None else None
        for first in range(0, len(self.query), QUERY_TILE):
            tile = slice(first, first + QUERY_TILE)
            inside = slice(
                *torch.searchsorted(known_query, torch.tensor([first, first + QUERY_TILE])).tolist()
            )
            known = known_query[inside] - first, known_place[inside]
            if self.axes is not None and projected is not None:
                pairs = self._close(self.axes.bounds(tile, projected), self.axes.low[tile], known)
                if len(pairs[0]) * PAIR_COST <= rows.shape[1] * len(rows) * QUERY_TILE:
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


class Axes:
    """First principal axes of a relation's queries and candidates, and queries along them.

    Parameters
    ----------
    query : (Q, D) float64 tensor
    basis : (D, m) float32 tensor
        Orthonormal columns, but for rounding.
    max_norm : float
        Greatest Euclidean norm of a candidate.
    low : (Q,) float64 tensor
        Inner products below it are not wanted.

    Attributes
    ----------
    low : (Q,) float64 tensor
        Bounds below it belong to inner products below those limits.
    """

    def __init__(self, query: Tensor, basis: Tensor, max_norm: float, low: Tensor) -> None:
        dim, num_axes = basis.shape
        self._basis = basis
        # A number along an axis is off by at most (D + 4) u |q|, so the m of them by sqrt(m) times that. It
        # enters twice in a product, as the rounding of the product itself, and in what norms have left.
        self._slack = 4 * num_axes**0.5 * (dim + 4) * FLOAT32_UNIT
        self._query = self.candidates(query.float())
        self.low = low - self._slack * query.norm(dim=1) * max_norm

    def candidates(self, rows: Tensor) -> Tensor:
        """Return rows (n, D) along the axes and, in the last column, the norm of the rest: (n, m + 1)."""
        along = rows @ self._basis
        squares = rows.square().sum(1)
        rest = (squares - along.square().sum(1)).clamp_min(0) + self._slack * squares
        return torch.cat([along, rest.sqrt()[:, None]], dim=1)

    def bounds(self, queries: slice, projected: Tensor) -> Tensor:
        """Return bounds (b, n) above the inner products of queries and projected candidates."""
        return self._query[queries] @ projected.T


def choose_axes(query: Tensor, candidates: Tensor, max_norm: float, low: Tensor, seed: int) -> Axes | None:
    """Return axes whose number makes the search shortest; None if all products take no longer.

    Parameters
    ----------
    query : (Q, D) float64 tensor
    candidates : (n, D) tensor
        A sample.
    max_norm : float
    low : (Q,) float64 tensor
    seed : int
    """
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(query), generator=draws)
    sample, rows = query[order[:SAMPLE]].float(), candidates[torch.randperm(len(candidates), generator=draws)]
    moments = [part.T @ part for part in (sample, rows.float())]
    scaled = [moment / moment.trace().clamp_min(1e-30) for moment in moments]
    basis = torch.linalg.eigh((scaled[0] + scaled[1]).double()).eigenvectors.flip(1).float()
    # Others than those of the axes, where there are more: on its own sample a basis looks better than it is.
    tested, limit = query[order[-TESTED:]].float() @ basis, low[order[-TESTED:]].float()[:, None]
    others = rows[-TESTED:].float() @ basis
    dim = query.shape[1]
    best, num_axes = float(dim), 0
    products, start = torch.zeros(len(tested), len(others)), 0
    for end in _numbers_of_axes(dim):
        products += tested[:, start:end] @ others[:, start:end].T
        rest = tested[:, end:].norm(dim=1)[:, None] * others[:, end:].norm(dim=1)
        share = float((products + rest >= limit).float().mean())
        cost = end + min(PAIR_COST * share, dim)
        if cost < best:
            best, num_axes = cost, end
        start = end
    if not num_axes:
        return None
    return Axes(query, basis[:, :num_axes].contiguous(), max_norm, low)


def _numbers_of_axes(dim: int) -> Iterator[int]:
    """Yield the numbers of axes that are tried, by steps of about a quarter."""
    number = 8
    while number < dim:
        yield number
        number += max(8, number // 4 // 8 * 8)
