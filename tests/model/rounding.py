"""The check of every rounding bound: beyond it, float32 orders candidates as float64 does."""

from __future__ import annotations

from typing import Any

import torch


def check_bound(comparator: Any, query: torch.Tensor, candidates: torch.Tensor, may_overflow=False) -> int:
    """Take each candidate (N, D) float32 in turn as the true answer of each query (B, W) float64.

    Candidates that float32 finds better or worse by more than the bound are so in float64; returns the
    number of the others.
    """
    with torch.no_grad():
        scores = comparator.compare(query.float(), candidates).double()
    max_norm, num_close = float(candidates.norm(dim=1).max()), 0
    for row_scores, row in zip(scores, query):
        repeated = row.expand(len(candidates), -1)
        exact = comparator.compare_pairs(repeated, candidates.double())
        bound = comparator.rounding_bound(repeated, max_norm, exact)
        assert bound.shape == exact.shape and (bound >= 0).all()
        assert may_overflow or torch.isfinite(bound).all()
        greater, less = row_scores > (exact + bound)[:, None], row_scores < (exact - bound)[:, None]
        assert (greater <= (exact > exact[:, None])).all()
        assert (less <= (exact < exact[:, None])).all()
        num_close += int((~greater & ~less).sum())
    return num_close
