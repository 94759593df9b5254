"""Compiled Manhattan distances to candidates whose numbers each query scales, and their gradients.

No intermediate of (B, N, D) numbers is written.
"""

from __future__ import annotations

import numpy as np

from dglkge.kernels.jit import compiled, compiled_unaliased

CANDIDATE_BLOCK = 32
"""Candidates in a block: all queries use it before the next, so that rows and gradients stay in cache."""


@compiled
def fill_scaled_distances(
    offset: np.ndarray, scale: np.ndarray, candidates: np.ndarray, distances: np.ndarray
) -> None:
    """Write sum_k |a_k - s_k c_k| of all pairs: offsets a, scales s (B, D), candidates (N, D) -> (B, N)."""
    for first in range(0, len(candidates), CANDIDATE_BLOCK):
        for i in range(len(offset)):
            for j in range(first, min(first + CANDIDATE_BLOCK, len(candidates))):
                total = offset.dtype.type(0)
                for k in range(offset.shape[1]):
                    total += abs(offset[i, k] - scale[i, k] * candidates[j, k])
                distances[i, j] = total


@compiled_unaliased
def _add_gradients(
    offset: np.ndarray,
    scale: np.ndarray,
    candidate: np.ndarray,
    gradient: float,
    of_offset: np.ndarray,
    of_scale: np.ndarray,
    of_candidate: np.ndarray,
) -> None:
    """Add the gradients of one pair; rows "(D,)"."""
    zero = gradient - gradient
    for k in range(offset.shape[0]):
        difference = offset[k] - scale[k] * candidate[k]
        weight = gradient if difference > 0 else (-gradient if difference < 0 else zero)
        of_offset[k] += weight
        of_scale[k] -= weight * candidate[k]
        of_candidate[k] -= weight * scale[k]


@compiled
def add_scaled_gradients(
    offset: np.ndarray,
    scale: np.ndarray,
    candidates: np.ndarray,
    gradients: np.ndarray,
    of_offset: np.ndarray,
    of_scale: np.ndarray,
    of_candidates: np.ndarray,
) -> None:
    """Add the gradients of all rows, given those of the distances (B, N); 0 where a term is 0."""
    for first in range(0, len(candidates), CANDIDATE_BLOCK):
        for i in range(len(offset)):
            for j in range(first, min(first + CANDIDATE_BLOCK, len(candidates))):
                _add_gradients(
                    offset[i],
                    scale[i],
                    candidates[j],
                    gradients[i, j],
                    of_offset[i],
                    of_scale[i],
                    of_candidates[j],
                )
