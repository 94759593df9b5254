"""Scores of all pairs in blocks of bounded memory, for comparators without a matmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from dglkge.kernels.scaled_l1 import add_scaled_gradients, fill_scaled_distances
from dglkge.model.functions.autograd import NEGLIGIBLE_GRADIENT, may_use_loops

BLOCK_NUMBERS = 1 << 21
"""Numbers that a block holds for each operation: 8 MiB."""

Distances = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_blocks(
    distances: Distances, query: torch.Tensor, candidates: torch.Tensor, numbers_a_pair: int
) -> torch.Tensor:
    """Return a function of every pair of rows, computed block by block.

    Parameters
    ----------
    distances : callable
        Takes queries (b, Q) and candidates (n, D); returns (b, n), differentiable by autograd.
    query : (B, Q) tensor
    candidates : (N, D) tensor
    numbers_a_pair : int
        Numbers that it holds for each pair.

    Returns
    -------
    (B, N) tensor
        Its gradients are computed block by block too: nothing is kept but queries and candidates.
    """
    found: torch.Tensor = _ByBlocks.apply(distances, numbers_a_pair, query, candidates)
    return found


class _ByBlocks(torch.autograd.Function):
    """Calls a function for each block, and once more with autograd for its gradients."""

    @staticmethod
    def forward(
        ctx: Any, distances: Distances, numbers_a_pair: int, query: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Return (B, N)."""
        ctx.distances, ctx.numbers_a_pair = distances, numbers_a_pair
        ctx.save_for_backward(query, candidates)
        found = query.new_empty(len(query), len(candidates))
        for rows, columns in _blocks(len(query), len(candidates), numbers_a_pair):
            found[rows, columns] = distances(query[rows], candidates[columns])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of queries and candidates."""
        query, candidates = ctx.saved_tensors
        of_query = torch.zeros_like(query)
        of_candidates = torch.zeros_like(candidates)
        for rows, columns in _blocks(len(query), len(candidates), ctx.numbers_a_pair):
            with torch.enable_grad():
                pair = [query[rows].detach().requires_grad_(), candidates[columns].detach().requires_grad_()]
                found = ctx.distances(*pair)
            of_rows, of_columns = torch.autograd.grad(found, pair, grad[rows, columns])
            of_query[rows] += of_rows
            of_candidates[columns] += of_columns
        return None, None, of_query, of_candidates


class ScaledManhattan(torch.autograd.Function):
    """sum_k |a_k - s_k c_k| of every pair; the gradient of a term of 0 is 0."""

    @staticmethod
    def forward(
        ctx: Any, offset: torch.Tensor, scale: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Return the distances, (B, N), of offsets and scales (B, D) and candidates (N, D)."""
        ctx.save_for_backward(offset, scale, candidates)
        distances = offset.new_empty(len(offset), len(candidates))
        if _is_compiled(offset):
            fill_scaled_distances(_array(offset), _array(scale), _array(candidates), distances.numpy())
            return distances
        for rows, columns in _blocks(len(offset), len(candidates), offset.shape[1]):
            terms = offset[rows, None] - scale[rows, None] * candidates[None, columns]
            distances[rows, columns] = terms.abs_().sum(2)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of offsets, scales and candidates."""
        rows_of = ctx.saved_tensors
        # A softmax leaves gradients of 1e-40 here, and arithmetic on denormal numbers is 100 times slower.
        grad = grad.masked_fill(grad.abs() < NEGLIGIBLE_GRADIENT, 0)
        offset, scale, candidates = rows_of
        gradients = [torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in rows_of]
        if _is_compiled(offset):
            add_scaled_gradients(
                *(_array(one) for one in (*rows_of, grad)), *(one.numpy() for one in gradients)
            )
            return gradients[0], gradients[1], gradients[2]
        for rows, columns in _blocks(len(offset), len(candidates), offset.shape[1]):
            terms = offset[rows, None] - scale[rows, None] * candidates[None, columns]
            terms = terms.sign_().mul_(grad[rows, columns].unsqueeze(2))
            gradients[0][rows] += terms.sum(1)
            gradients[1][rows] -= torch.einsum("bnd,nd->bd", terms, candidates[columns])
            gradients[2][columns] -= torch.einsum("bnd,bd->nd", terms, scale[rows])
        return gradients[0], gradients[1], gradients[2]


def _is_compiled(rows: torch.Tensor) -> bool:
    """Return whether the compiled loops can work on these rows."""
    return may_use_loops() and rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def _array(rows: torch.Tensor) -> np.ndarray:
    return rows.detach().contiguous().numpy()


def _blocks(num_queries: int, num_candidates: int, numbers_a_pair: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the queries and of the candidates that cover all pairs."""
    # As many candidates as fit beside one query, then as many queries as fit beside those.
    columns = max(1, min(num_candidates, BLOCK_NUMBERS // numbers_a_pair))
    rows = max(1, BLOCK_NUMBERS // (numbers_a_pair * columns))
    for first_row in range(0, num_queries, rows):
        for first_column in range(0, num_candidates, columns):
            yield slice(first_row, first_row + rows), slice(first_column, first_column + columns)
