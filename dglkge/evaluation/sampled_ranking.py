"""Ranking against a few entities drawn for each true answer."""

from __future__ import annotations

import torch

from dglkge.evaluation.exact_scores import exact_scores
from dglkge.evaluation.query_plan import QueryBatch
from dglkge.evaluation.scored_queries import ScoredQueries
from dglkge.kernels.hashing import column_bits, in_range, row_keys, stream_key
from dglkge.model.kge_model import KgeModel
from dglkge.typing import RowShard


def draw_candidates(batch: QueryBatch, num_candidates: int, num_entities: int, seed: int) -> torch.Tensor:
    """Draw the candidates of each true answer of a batch.

    They depend on seed, side and the triple's row alone, so every process draws the same.

    Parameters
    ----------
    batch : QueryBatch
    num_candidates : int
        Draws for each true answer, with replacement.
    num_entities : int
        Entities of the candidates' type.
    seed : int

    Returns
    -------
    (K, num_candidates) int64 tensor
    """
    keys = row_keys(stream_key("candidates", seed, batch.side.value), batch.places)
    return torch.from_numpy(in_range(column_bits(keys, num_candidates), num_entities))


def competing(queries: ScoredQueries, candidates: torch.Tensor) -> torch.Tensor:
    """Say which candidates (K, N) compete: neither the true answer nor a known one; (K, N) bool."""
    of_queries = queries.query_of.unsqueeze(1).expand_as(candidates).reshape(-1)
    known = queries.known_among(of_queries, candidates.reshape(-1)).reshape(candidates.shape)
    return ~known & (candidates != queries.true_ids.unsqueeze(1))


def rank_against_candidates(
    model: KgeModel, queries: ScoredQueries, shard: RowShard, candidates: torch.Tensor, competes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the candidates in a shard that score higher than, and the same as, each true answer.

    Parameters
    ----------
    model : KgeModel
    queries : ScoredQueries
    shard : RowShard
    candidates : (K, N) int64 tensor
    competes : (K, N) bool tensor

    Returns
    -------
    num_greater, num_equal : (K,) int64 tensor
    """
    answer, _ = competes.nonzero(as_tuple=True)
    place = shard.locate(candidates[competes].cpu()).to(answer.device)
    answer, place = answer[place >= 0], place[place >= 0]
    scores = exact_scores(model, queries.query, queries.query_of[answer], shard.rows, place)
    true_scores = queries.true_scores[answer]
    num_answers = len(queries.true_ids)
    return (
        torch.bincount(answer[scores > true_scores], minlength=num_answers),
        torch.bincount(answer[scores == true_scores], minlength=num_answers),
    )
