"""Counts of candidates above and equal to each true answer: all rows of a shard, or sampled candidates.

A full ranking is exact at the speed of float32: matmuls in float32 give scores with a known rounding bound. A
score farther from the true one than the bound is decided; the few others are computed again in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dglkge.errors import InputError
from dglkge.evaluation.queries import QueryBatch, ScoredQueries, exact_scores
from dglkge.kernels.full_scores import count_scores, list_close
from dglkge.kernels.hashing import column_bits, in_range, row_keys, stream_key
from dglkge.model.functions.comparators import FLOAT32_UNIT
from dglkge.model.kge_model import KgeModel
from dglkge.optim.workspace import split
from dglkge.typing import RowShard


def count_greater(scores: Tensor, row_of: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare scores (b, n) with float32 limits (K,) of true answers, of which each has a row of scores.

    Returns
    -------
    num_greater : (K,) int64 tensor
        Scores above ``high``.
    close, column : (m,) int64 tensor
        The scores in [low, high]: index of the true answer, and column.
    """
    # Two passes, so that the list of close scores is allocated once at its exact size.
    arrays = (scores.contiguous().numpy(), row_of.numpy(), low.numpy(), high.numpy())
    num_greater, num_close = np.empty((2, len(row_of)), np.int64)

    def count(part: slice) -> None:
        pieces = (array[part] for array in arrays[1:])
        count_scores(arrays[0], *pieces, num_greater[part], num_close[part])

    split(len(row_of), scores.shape[1], count)
    close = np.repeat(np.arange(len(row_of)), num_close)
    column = np.empty(len(close), np.int64)
    list_close(*arrays, num_close, column)
    return torch.from_numpy(num_greater), torch.from_numpy(close), torch.from_numpy(column)


def count_greater_plainly(
    scores: Tensor, row_of: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as :func:`count_greater` by torch's operations: the reference, and for accelerators."""
    answer_scores = scores[row_of]
    greater = answer_scores > high.unsqueeze(1)
    close, column = ((answer_scores >= low.unsqueeze(1)) & ~greater).nonzero(as_tuple=True)
    return greater.sum(1), close, column


QUERY_TILE = 1024
CANDIDATE_TILE = 1024
"""Queries and candidates of one matmul: 4 MiB of scores, counted while they are in the cache."""

DEVICE_CANDIDATE_TILE = 8192
"""Candidates of one matmul on a device, where a small one would not be worth its start."""

COPIED_PAIRS = 1 << 16
"""Pairs whose candidates are copied to a device at a time; a multiple of every block of exact scores."""


Count = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
""":func:`count_greater`, or its plain twin."""


class RankedShard:
    """A shard during one ranking; rows and ids may be copied to a device."""

    def __init__(self, shard: RowShard, device: torch.device | None = None) -> None:
        self._shard = shard
        self.rows, self.original_ids = shard.rows, shard.original_ids
        if device is not None:
            self.rows = self.rows.to(device, copy=True)
            self.original_ids = self.original_ids.to(device)

    def locate(self, ids: Tensor) -> Tensor:
        """Return the place of each original id, -1 where it is not here; on the host."""
        return self._shard.locate(ids)

    @functools.cached_property
    def max_norm(self) -> float:
        """Greatest Euclidean norm of a row, which bounds the rounding of all scores; rows are read once."""
        norms = [block.float().norm(dim=1).max() for block in self.rows.split(CANDIDATE_TILE)]
        return float(torch.stack(norms).max())


def rank_against_shard(
    model: KgeModel, queries: ScoredQueries, shard: RankedShard, count: Count, on_device: bool
) -> tuple[Tensor, Tensor]:
    """Count the rows of a shard that score higher than, and the same as, each true answer: (K,) int64 each.

    Known answers and the true answer itself are excluded. Rows that are not on the queries' device are copied
    there, tile by tile; on an accelerator with as many candidates at a time as suit it. Rows or queries that
    are not finite, or too large for float32 scores, are an InputError.
    """
    num_greater, num_equal = torch.zeros_like(queries.true_ids), torch.zeros_like(queries.true_ids)
    rows = shard.rows
    if not len(rows):
        return num_greater, num_equal
    device, tile = queries.query.device, DEVICE_CANDIDATE_TILE if on_device else CANDIDATE_TILE
    original_ids, query_of = shard.original_ids.to(device), queries.query_of
    query, (low, high) = queries.query.float(), _limits(model, queries, shard.max_norm)
    added = _AddedPlaces(queries, shard, tile)
    starts = range(0, len(query), QUERY_TILE)
    ends = torch.searchsorted(query_of, torch.tensor([*starts, len(query)], device=device)).tolist()
    for first in range(0, len(rows), tile):
        block = rows[first : first + tile].to(device)
        narrow, counted = block.float(), []
        for start, begin, end in zip(starts, ends, ends[1:]):
            scores = model.compare(query[start : start + QUERY_TILE], narrow)
            added.add_to(scores, start, first)
            tile_counts = count(scores, query_of[begin:end] - start, low[begin:end], high[begin:end])
            counted.append((tile_counts[0], tile_counts[1] + begin, tile_counts[2]))
        greater, close, column = (torch.cat(parts) for parts in zip(*counted))
        ids = original_ids[first + column]
        # The true answer is always among the close ones, so it is excluded here and not from the tiles.
        competes = ids != queries.true_ids[close]
        close, column, ids = close[competes], column[competes], ids[competes]
        exact = exact_scores(model, queries.query, query_of[close], block, column)
        exact += queries.added.of(query_of[close], ids)
        true_scores = queries.true_scores[close]
        num_greater += greater + torch.bincount(close[exact > true_scores], minlength=len(num_greater))
        num_equal += torch.bincount(close[exact == true_scores], minlength=len(num_equal))
    return num_greater, num_equal


def _limits(model: KgeModel, queries: ScoredQueries, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the float32 limits (K,) below and above which a float32 score is decided."""
    true_queries = queries.query[queries.query_of]
    added = queries.added.values
    most = max(float(added.max()), 0.0) if len(added) else 0.0
    # A candidate's own score may be less than the true one by what is added to it. Each part of a bound
    # grows or falls with the score, so the sum of both ends bounds what is between. A bound depends on the
    # score of distances only, which is at most 0.
    ends = [queries.true_scores - added for added in {0.0, most}]
    bounds = [model.score_function.rounding_bound(true_queries, max_norm, end.clamp_max(0)) for end in ends]
    bound = torch.stack(bounds).sum(0)
    if most:
        bound += 4 * FLOAT32_UNIT * (queries.true_scores.abs() + most + bound)
    if not bool(torch.isfinite(bound).all() and torch.isfinite(queries.true_scores).all()):
        raise InputError(
            "the embeddings cannot be ranked: a score is not finite or overflows float32 (the longest "
            f"candidate row has norm {max_norm:g}); the training diverged, or the rows are not this model's"
        )
    # Rounding the limits to float32 must not narrow the interval, hence one more step outwards.
    low = torch.nextafter((queries.true_scores - bound).float(), torch.tensor(-math.inf, device=bound.device))
    high = torch.nextafter((queries.true_scores + bound).float(), torch.tensor(math.inf, device=bound.device))
    return low, high


class _AddedPlaces:
    """Positions in a shard of pairs to whose scores something is added, sorted by tile of candidates."""

    def __init__(self, queries: ScoredQueries, shard: RowShard, tile: int) -> None:
        self._tile = tile
        added = queries.added
        place = shard.locate(added.ids.cpu()).to(added.ids.device)
        here = place >= 0
        place, query = place[here], added.query[here]
        # The pairs arrive sorted by query; a stable sort by tile keeps that order within a tile, so the pairs
        # of a tile of scores are one slice.
        order = torch.argsort(place // tile, stable=True)
        self._place, self._query, self._values = place[order], query[order], added.values[here][order].float()
        tiles = torch.arange(math.ceil(len(shard.rows) / tile) + 1, device=place.device)
        self._starts = torch.searchsorted(self._place // tile, tiles)

    def add_to(self, scores: Tensor, first_query: int, first_place: int) -> None:
        """Add to the scores of a tile, minus infinity to those of known answers."""
        tile = first_place // self._tile
        start, end = int(self._starts[tile]), int(self._starts[tile + 1])
        limits = torch.tensor([first_query, first_query + len(scores)], device=scores.device)
        from_, to = (start + torch.searchsorted(self._query[start:end], limits)).tolist()
        index = self._query[from_:to] - first_query, self._place[from_:to] - first_place
        scores.index_put_(index, self._values[from_:to], accumulate=True)


def draw_candidates(batch: QueryBatch, num_candidates: int, num_entities: int, seed: int) -> Tensor:
    """Sample candidates of each true answer of a batch with replacement, (K, num_candidates) int64.

    They depend only on seed, side and the triple's row, so all processes have the same ones.
    """
    # Keyed by the triple and not by the batch: batch size and number of processes must not change a rank.
    keys = row_keys(stream_key("candidates", seed, batch.side.value), batch.places)
    return torch.from_numpy(in_range(column_bits(keys, num_candidates), num_entities))


def competing(queries: ScoredQueries, candidates: Tensor) -> Tensor:
    """Return which candidates (K, N) are neither the true answer nor a known one; (K, N) bool."""
    query_places = queries.query_of.unsqueeze(1).expand_as(candidates).reshape(-1)
    known = queries.known_among(query_places, candidates.reshape(-1)).reshape(candidates.shape)
    return ~known & (candidates != queries.true_ids.unsqueeze(1))


def rank_against_candidates(
    model: KgeModel, queries: ScoredQueries, shard: RowShard, candidates: Tensor, competes: Tensor
) -> tuple[Tensor, Tensor]:
    """Count the candidates (K, N) in a shard that score higher than, and the same as, each true answer.

    Those count that compete (K, N). Returns two (K,) int64 tensors.
    """
    answer, _ = competes.nonzero(as_tuple=True)
    ids = candidates[competes]
    place = shard.locate(ids.cpu()).to(answer.device)
    is_here = place >= 0
    answer, place, ids = answer[is_here], place[is_here], ids[is_here]
    scores = _scores_at(model, queries, answer, shard.rows, place)
    scores = scores + queries.added.of(queries.query_of[answer], ids)
    true_scores, num_answers = queries.true_scores[answer], len(queries.true_ids)
    greater = torch.bincount(answer[scores > true_scores], minlength=num_answers)
    return greater, torch.bincount(answer[scores == true_scores], minlength=num_answers)


def _scores_at(
    model: KgeModel, queries: ScoredQueries, answer: Tensor, rows: Tensor, place: Tensor
) -> Tensor:
    """Score candidates at some places (M,), each for a true answer (M,), in float64."""
    query_index = queries.query_of[answer]
    if rows.device == place.device:
        return exact_scores(model, queries.query, query_index, rows, place)
    # The rows of a batch's candidates may be more than the device holds.
    scores = []
    for first in range(0, len(place), COPIED_PAIRS):
        pairs = slice(first, first + COPIED_PAIRS)
        distinct, index = place[pairs].unique(return_inverse=True)
        copied = rows.index_select(0, distinct.to(rows.device)).to(place.device)
        scores.append(exact_scores(model, queries.query, query_index[pairs], copied, index))
    return torch.cat(scores) if scores else queries.query.new_empty(0)
