"""Ranking against every row of a shard: float32 products decide most pairs, float64 the close ones."""

from __future__ import annotations

import math

import torch

from dglkge.errors import InputError
from dglkge.evaluation.counting import count_greater
from dglkge.evaluation.exact_scores import exact_scores
from dglkge.evaluation.scored_queries import ScoredQueries
from dglkge.model.kge_model import KgeModel
from dglkge.typing import RowShard

QUERY_TILE = 1024
CANDIDATE_TILE = 1024
"""Queries and candidates multiplied at a time: 4 MiB of scores, counted while they are still in cache."""


def rank_against_shard(
    model: KgeModel, queries: ScoredQueries, shard: RowShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the rows of a shard that score higher than, and the same as, each true answer.

    Known answers and the true answer itself are left out.

    Returns
    -------
    num_greater, num_equal : (K,) int64 tensor

    Raises
    ------
    InputError
        If rows or queries are not finite, or too large for float32 scores.
    """
    num_greater, num_equal = torch.zeros_like(queries.true_ids), torch.zeros_like(queries.true_ids)
    rows = shard.rows
    if not len(rows):
        return num_greater, num_equal
    original_ids = shard.original_ids.to(rows.device)
    query, limits = queries.query.float(), _limits(model, queries, rows)
    known = _KnownPlaces(queries, shard)
    for first in range(0, len(rows), CANDIDATE_TILE):
        block = rows[first : first + CANDIDATE_TILE].float()
        greater, close, place = _count_block(model, query, queries.query_of, limits, block, first, known)
        others = original_ids[place] != queries.true_ids[close]
        close, place = close[others], place[others]
        exact = exact_scores(model, queries.query, queries.query_of[close], rows, place)
        true_scores = queries.true_scores[close]
        num_greater += greater + torch.bincount(close[exact > true_scores], minlength=len(num_greater))
        num_equal += torch.bincount(close[exact == true_scores], minlength=len(num_equal))
    return num_greater, num_equal


def _count_block(
    model: KgeModel,
    query: torch.Tensor,
    query_of: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor],
    block: torch.Tensor,
    first_place: int,
    known: _KnownPlaces,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score queries (U, D) against a block of candidates (N, D) in float32.

    Returns
    -------
    num_greater : (K,) int64 tensor
        Candidates that are greater for certain.
    close, place : (m,) int64 tensor
        Candidates too close to tell: for which true answer, and where in the shard.
    """
    low, high = limits
    starts = range(0, len(query), QUERY_TILE)
    answer_starts = torch.searchsorted(query_of, torch.tensor([*starts, len(query)], device=low.device))
    counts, closes, places = [], [], []
    for tile, first in enumerate(starts):
        scores = model.compare(query[first : first + QUERY_TILE], block)
        known.leave_out(scores, first, first_place)
        answers = slice(int(answer_starts[tile]), int(answer_starts[tile + 1]))
        row_of = query_of[answers] - first
        greater, close, column = count_greater(scores, row_of, low[answers], high[answers])
        counts.append(greater)
        closes.append(close + answers.start)
        places.append(column + first_place)
    return torch.cat(counts), torch.cat(closes), torch.cat(places)


def _limits(model: KgeModel, queries: ScoredQueries, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 limits, (K,) each, outside which a float32 score decides."""
    norms = [
        rows[i : i + CANDIDATE_TILE].float().norm(dim=1).max() for i in range(0, len(rows), CANDIDATE_TILE)
    ]
    max_norm = float(torch.stack(norms).max())
    true_queries = queries.query[queries.query_of]
    bound = model.score_function.rounding_bound(true_queries, max_norm, queries.true_scores)
    if not bool(torch.isfinite(bound).all() and torch.isfinite(queries.true_scores).all()):
        raise InputError(
            "the embeddings cannot be ranked: a score is not finite or overflows float32 (the longest "
            f"candidate row has norm {max_norm:g}); the training diverged, or the rows are not this model's"
        )
    low = torch.nextafter((queries.true_scores - bound).float(), torch.tensor(-math.inf, device=bound.device))
    high = torch.nextafter((queries.true_scores + bound).float(), torch.tensor(math.inf, device=bound.device))
    return low, high


class _KnownPlaces:
    """Where in a shard the known answers of a batch of queries lie, sorted by tile of candidates."""

    def __init__(self, queries: ScoredQueries, shard: RowShard) -> None:
        place = shard.locate(queries.known_ids.cpu()).to(queries.known_ids.device)
        here = place >= 0
        place, query = place[here], queries.known_query[here]
        order = torch.argsort(place // CANDIDATE_TILE, stable=True)
        self._place, self._query = place[order], query[order]
        num_tiles = math.ceil(len(shard.rows) / CANDIDATE_TILE)
        tiles = torch.arange(num_tiles + 1, device=place.device)
        self._starts = torch.searchsorted(self._place // CANDIDATE_TILE, tiles)

    def leave_out(self, scores: torch.Tensor, first_query: int, first_place: int) -> None:
        """Give minus infinity to the known answers in a tile of scores."""
        tile = first_place // CANDIDATE_TILE
        start, end = int(self._starts[tile]), int(self._starts[tile + 1])
        limits = torch.tensor([first_query, first_query + len(scores)], device=scores.device)
        from_, to = (start + torch.searchsorted(self._query[start:end], limits)).tolist()
        scores[self._query[from_:to] - first_query, self._place[from_:to] - first_place] = -math.inf
