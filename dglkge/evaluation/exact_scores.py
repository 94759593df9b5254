"""Scores of pairs in float64: what every rank is defined by."""

from __future__ import annotations

import torch

from dglkge.model.kge_model import KgeModel

BLOCK_ELEMENTS = 30_000
"""Numbers of a block: just too few for torch to wake its threads, which costs more than the work itself."""


def exact_scores(
    model: KgeModel,
    query: torch.Tensor,
    query_index: torch.Tensor,
    rows: torch.Tensor,
    row_index: torch.Tensor,
) -> torch.Tensor:
    """Score pairs of a query and a row in float64.

    The score of a pair depends on nothing but the two rows. On an accelerator the order in which torch adds
    up a row may depend on the number of rows, so pairs are always scored in blocks of one shape, the last
    one filled up. Equal rows therefore get equal scores wherever they lie, and ties stay ties.

    Parameters
    ----------
    model : KgeModel
    query : (U, D) float64 tensor
    query_index : (M,) int64 tensor
    rows : (N, D) float32 tensor
    row_index : (M,) int64 tensor

    Returns
    -------
    (M,) float64 tensor
    """
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
    """Return how many pairs of rows of that width are scored at a time."""
    return min(512, max(8, BLOCK_ELEMENTS // dim))


def _filled_up(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return the index with its first entry repeated up to a size."""
    return torch.cat([index, index[:1].expand(size - len(index))])
