"""Functions with a backward pass written by hand: distances, blocks of pairs, cubes of complex moduli.

Autograd through ``sqrt`` divides by the distance. Near 0 that is a division by rounding noise, so the
functions here give a gradient of 0 where float32 cannot tell two rows apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dglkge.registry import deferred

if TYPE_CHECKING:
    from dglkge.kernels import distances as loops
else:
    loops = deferred("dglkge.kernels.distances")  # numba takes a fifth of a second

BLOCK_NUMBERS = 1 << 18
"""Differences of pairs handled at a time on a CPU: a MiB, which stays in cache."""

CALLED_BLOCK_NUMBERS = 1 << 21
"""The same of a function that :class:`ByBlocks` calls, and of :class:`ScaledManhattan`: 8 MiB."""

DEVICE_BLOCK_NUMBERS = 1 << 25
"""The same of a distance on an accelerator, where each operation should be long beside its start: 128 MiB."""

# Far above float32's denormals, which are below 1.2e-38.
NEGLIGIBLE_GRADIENT = 1e-30


def product(query: Tensor, candidates: Tensor) -> Tensor:
    """Return the inner products (B, N) of query (B, D) and candidates (N, D), in the type of the query.

    Under ``torch.autocast`` the matrix products, also those of the gradients, are in its type.
    """
    return (query @ candidates.T).to(query.dtype)


class EuclideanDistance(torch.autograd.Function):
    """Euclidean distances by one matrix product: |q - c|^2 = |q|^2 + |c|^2 - 2 q.c.

    The product loses about ``eps (|q|^2 + |c|^2)`` of the square. Distances below that are noise, and
    their gradient is 0; above it the gradient (q - c) / |q - c| is bounded as it should be. Under
    ``torch.autocast`` the products are in its type, and lose more.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, candidates: Tensor) -> Tensor:
        query_squares = query.square().sum(1)
        candidate_squares = candidates.square().sum(1)
        # Under autocast this is in its type.
        products = query @ candidates.T
        distances = torch.empty(products.shape, dtype=query.dtype, device=query.device)
        if _compiled(query):
            squares = _array(query_squares), _array(candidate_squares)
            loops.fill_euclidean(words(products), *squares, distances.numpy())
        else:
            squares_of_both = query_squares.unsqueeze(1) + candidate_squares.unsqueeze(0)
            # Rounding can make a square slightly negative, and sqrt(-0.0000001) is NaN: clamped to 0.
            torch.sqrt((squares_of_both - 2 * products).clamp_min_(0), out=distances)
        ctx.save_for_backward(query, candidates, query_squares, candidate_squares, distances)
        ctx.dtype = products.dtype
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, candidates, query_squares, candidate_squares, distances = ctx.saved_tensors
        # Sums of D float32 products lose some units in the last place; rounding a sum to bfloat16 loses half.
        noise = (8 if ctx.dtype == query.dtype else 0.5) * torch.finfo(ctx.dtype).eps
        if _compiled(query):
            weights = torch.empty(distances.shape, dtype=ctx.dtype)
            query_sums, candidate_sums = torch.empty_like(query_squares), torch.empty_like(candidate_squares)
            grads, lengths = _array(grad), _array(distances)
            squares = tuple(map(_array, (query_squares, candidate_squares)))
            sums, least = (query_sums.numpy(), candidate_sums.numpy()), lengths.dtype.type(noise)
            loops.fill_euclidean_weights(grads, lengths, squares, least, words(weights), sums)
        else:
            floor = (query_squares.unsqueeze(1) + candidate_squares.unsqueeze(0)).mul_(noise).sqrt_()
            # Division first: 0 / 0 and x / 0 happen only at distances <= floor, which the mask overwrites.
            weights = (grad / distances).masked_fill_(distances <= floor, 0)
            query_sums, candidate_sums = weights.sum(1), weights.sum(0)
            weights = weights.to(ctx.dtype)
        # sum_j w_ij (q_i - c_j) = q_i sum_j w_ij - (w c)_i: two matmuls, and no (B, N, D) differences.
        weighted_candidates = weights @ candidates.to(ctx.dtype)
        # oneDNN is slow where the first operand of a bfloat16 product is transposed: the smaller one is here.
        weighted_queries = (query.to(ctx.dtype).T.contiguous() @ weights).T
        return (
            query * query_sums.unsqueeze(1) - weighted_candidates,
            candidates * candidate_sums.unsqueeze(1) - weighted_queries,
        )


class ModulusDistance(torch.autograd.Function):
    """Sum of complex moduli |q_k - c_k|; the first half of a row is real, the second half imaginary.

    No matrix product gives this, so it is elementwise: by compiled loops on a CPU, elsewhere by torch, block
    by block. The backward pass computes the moduli again instead of keeping (B, N, D / 2) numbers.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, candidates: Tensor) -> Tensor:
        """Return the distances, (B, N), of query (B, D) and candidates (N, D)."""
        ctx.save_for_backward(query, candidates)
        distances = query.new_empty(len(query), len(candidates))
        if _compiled(query):
            loops.fill_moduli(_array(query), _array(candidates), distances.numpy())
            return distances
        for rows, columns in _blocks(query, candidates):
            real, imaginary = _differences(query[rows], candidates[columns])
            moduli = real.square_().add_(imaginary.square_()).sqrt_()
            distances[rows, columns] = moduli.sum(2)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, candidates = ctx.saved_tensors
        if _compiled(query):
            return _gradients(loops.add_modulus_gradients, query, candidates, grad)
        grad = _without_denormals(grad)
        grad_query = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        grad_candidates = torch.zeros(candidates.shape, dtype=query.dtype, device=query.device)
        half = query.shape[1] // 2
        for rows, columns in _blocks(query, candidates):
            real, imaginary = _differences(query[rows], candidates[columns])
            moduli = real.square().add_(imaginary.square()).sqrt_()
            weights = (grad[rows, columns].unsqueeze(2) / moduli).masked_fill_(moduli == 0, 0)
            for part, columns_of_part in ((real, slice(0, half)), (imaginary, slice(half, None))):
                part.mul_(weights)
                grad_query[rows, columns_of_part] += part.sum(1)
                grad_candidates[columns, columns_of_part] -= part.sum(0)
        return grad_query, grad_candidates


class ManhattanDistance(torch.autograd.Function):
    """Sum of |q_k - c_k|.

    By compiled loops on a CPU, where torch's ``cdist`` takes eight times as long, both passes. Elsewhere by
    ``cdist`` forward, and block by block backward: its own backward keeps (B, N, D) numbers.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(query, candidates)
        if not _compiled(query):
            return torch.cdist(query, candidates, p=1.0)
        padded = _array(_padded(candidates))
        distances = query.new_empty(len(query), len(padded))
        loops.fill_manhattan(_array(query), padded, distances.numpy())
        return distances[:, : len(candidates)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, candidates = ctx.saved_tensors
        if _compiled(query):
            return _gradients(loops.add_manhattan_gradients, query, candidates, grad)
        grad_query, grad_candidates = torch.zeros_like(query), torch.zeros_like(candidates)
        for rows, columns in _blocks(query, candidates):
            terms = (query[rows, None] - candidates[None, columns]).sign_()
            terms.mul_(grad[rows, columns].unsqueeze(2))
            grad_query[rows] += terms.sum(1)
            grad_candidates[columns] -= terms.sum(0)
        return grad_query, grad_candidates


def _gradients(
    loop: Callable[..., Any], query: Tensor, candidates: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and candidates by a compiled loop over some queries at a time."""
    padded = _padded(query)
    grad_query = torch.zeros(padded.shape, dtype=query.dtype)
    grad_candidates = torch.zeros(candidates.shape, dtype=query.dtype)
    # Rows of 0 have gradients of 0 and give none.
    grad = _padded(_without_denormals(grad))
    loop(_array(padded), _array(candidates), _array(grad), grad_query.numpy(), grad_candidates.numpy())
    return grad_query[: len(query)], grad_candidates


def _without_denormals(grad: Tensor) -> Tensor:
    """Return a gradient with 0 for denormal numbers, which softmax leaves: they are 100 times as slow."""
    return grad.masked_fill(grad.abs() < NEGLIGIBLE_GRADIENT, 0)


def _padded(rows: Tensor) -> Tensor:
    """Return rows with rows of 0 behind them, so many that the loops can take them in fours."""
    missing = -len(rows) % loops.AT_ONCE
    # Not torch.nn.functional.pad: in torch 2.6 it refuses tensors without numbers.
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


_may_use_loops = True


@contextlib.contextmanager
def without_loops() -> Iterator[None]:
    """Take torch's operations for tensors on the CPU too, as for those of an accelerator; not thread-safe."""
    global _may_use_loops
    before, _may_use_loops = _may_use_loops, False
    try:
        yield
    finally:
        _may_use_loops = before


def may_use_loops() -> bool:
    """Return whether this is outside of :func:`without_loops`."""
    return _may_use_loops


def _compiled(rows: Tensor) -> bool:
    """Return whether the compiled loops can work on these rows."""
    return _may_use_loops and rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def _array(rows: Tensor) -> np.ndarray:
    return rows.detach().contiguous().numpy()


def words(tensor: Tensor) -> np.ndarray:
    """View a contiguous tensor as compiled loops take it: bfloat16 as 16-bit words, others as they are."""
    if tensor.dtype == torch.bfloat16:
        # numpy has no bfloat16: viewed as int16, and then as the uint16 words of the loops.
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


Block: TypeAlias = tuple[slice | Tensor, slice]
"""Places of queries and of candidates."""


def _blocks(query: Tensor, candidates: Tensor, limit: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the queries and of the candidates that cover all pairs, of ``limit`` numbers each."""
    if limit is None:
        limit = BLOCK_NUMBERS if query.device.type == "cpu" else DEVICE_BLOCK_NUMBERS
    dim = max(1, candidates.shape[1])
    # As many candidates as fit beside one query, then as many queries as fit beside those.
    num_columns = max(1, min(len(candidates), limit // dim))
    num_rows = max(1, limit // (dim * num_columns))
    for first_row in range(0, len(query), num_rows):
        for first_column in range(0, len(candidates), num_columns):
            yield slice(first_row, first_row + num_rows), slice(first_column, first_column + num_columns)


def _differences(query: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return real and imaginary parts of all differences, (b, n, D / 2) each."""
    half = query.shape[1] // 2
    real = query[:, None, :half] - candidates[None, :, :half]
    return real, query[:, None, half:] - candidates[None, :, half:]


class GroupedProducts(torch.autograd.Function):
    """Products of rows with the matrices of their groups, one matmul for each matrix.

    A batched matmul would read, and its gradient write, a matrix for each row.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, places: Tensor) -> Tensor:
        """Return row i times matrix ``places[i]``: (B, D), (U, D, E), (B,) int64 -> (B, E)."""
        order = places.argsort(stable=True)
        ctx.sizes = torch.bincount(places, minlength=len(matrices)).tolist()
        sorted_rows = rows[order]
        products = rows.new_empty(len(rows), matrices.shape[2])
        for matrix, part, out in zip(matrices, sorted_rows.split(ctx.sizes), products.split(ctx.sizes)):
            torch.mm(part, matrix, out=out)
        ctx.save_for_backward(sorted_rows, matrices, order)
        return torch.empty_like(products).index_copy_(0, order, products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        sorted_rows, matrices, order = ctx.saved_tensors
        grad_products = gradients[0][order]
        grad_rows = torch.empty_like(sorted_rows)
        # Of the same layout as the matrices, which may be transposed.
        grad_matrices = torch.empty_like(matrices)
        groups = zip(*(part.split(ctx.sizes) for part in (sorted_rows, grad_products, grad_rows)))
        for number, (part, grads, out) in enumerate(groups):
            torch.mm(grads, matrices[number].T, out=out)
            grad_matrices[number] = part.T @ grads
        return torch.empty_like(grad_rows).index_copy_(0, order, grad_rows), grad_matrices, None


class SummedModuli(torch.autograd.Function):
    """Sum of |z| over complex rows; its gradient z / |z| is 0 at 0.

    ``torch.linalg.vector_norm`` over two numbers gives the same, and takes twenty times as long: it starts a
    loop for each pair.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        moduli = torch.hypot(*rows.chunk(2, dim=-1))
        ctx.save_for_backward(rows, moduli)
        return moduli.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        rows, moduli = ctx.saved_tensors
        factors = (gradients[0].unsqueeze(-1) / moduli).masked_fill_(moduli == 0, 0)
        return rows * torch.cat([factors, factors], dim=-1)


class CubedModuli(torch.autograd.Function):
    """Sum of |z|^3 over complex rows; its gradient 3 |z| z is 0 at 0, where autograd's would be NaN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        real, imaginary = rows.chunk(2, dim=-1)
        squares = real.square().addcmul_(imaginary, imaginary)
        moduli = squares.sqrt()
        ctx.save_for_backward(rows, moduli)
        # In place: neither squares nor its product is saved for backward, only rows and moduli.
        return squares.mul_(moduli).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        rows, moduli = ctx.saved_tensors
        factors = moduli * (3 * gradients[0]).unsqueeze(-1)
        return rows * torch.cat([factors, factors], dim=-1)


class ByBlocks(torch.autograd.Function):
    """A function of every pair of rows, called for each block, and once more with autograd for its gradients.

    It takes queries (b, Q) and candidates (n, D) and returns (b, n). ``blocks`` are the places of both, and
    hold each pair once; None: blocks of few numbers. Nothing is kept but the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], blocks: Any, query: Tensor, candidates: Tensor
    ) -> Tensor:
        ctx.function = function
        ctx.blocks = blocks or list(_blocks(query, candidates, CALLED_BLOCK_NUMBERS))
        ctx.save_for_backward(query, candidates)
        scores = query.new_empty(len(query), len(candidates))
        for rows, columns in ctx.blocks:
            scores[rows, columns] = function(query[rows], candidates[columns])
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, candidates = ctx.saved_tensors
        query_gradients, candidate_gradients = torch.zeros_like(query), torch.zeros_like(candidates)
        for rows, columns in ctx.blocks:
            with torch.enable_grad():
                pair = [query[rows].detach().requires_grad_(), candidates[columns].detach().requires_grad_()]
                scores = ctx.function(*pair)
            parts = torch.autograd.grad(scores, pair, grad[rows, columns])
            query_gradients[rows] += parts[0]
            candidate_gradients[columns] += parts[1]
        return None, None, query_gradients, candidate_gradients


def blocks_of_equal(keys: Tensor) -> list[Block]:
    """Return a block with all candidates for the queries of each key (B,)."""
    keys, places = keys.unique(return_inverse=True)
    order = places.argsort(stable=True)
    sizes = torch.bincount(places, minlength=len(keys)).tolist()
    return [(part, slice(None)) for part in order.split(sizes)]


class ScaledManhattan(torch.autograd.Function):
    """sum_k |a_k - s_k c_k| of every pair; the gradient of a term of 0 is 0."""

    @staticmethod
    def forward(ctx: Any, offset: Tensor, scale: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(offset, scale, candidates)
        distances = offset.new_empty(len(offset), len(candidates))
        if _compiled(offset):
            loops.fill_scaled_distances(_array(offset), _array(scale), _array(candidates), distances.numpy())
            return distances
        for rows, columns in _blocks(offset, candidates, CALLED_BLOCK_NUMBERS):
            terms = offset[rows, None] - scale[rows, None] * candidates[None, columns]
            distances[rows, columns] = terms.abs_().sum(2)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        offset, scale, candidates = operands = ctx.saved_tensors
        grad = _without_denormals(grad)
        gradients = [torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device) for rows in operands]
        if _compiled(offset):
            arrays, sums = tuple(map(_array, operands)), tuple(part.numpy() for part in gradients)
            loops.add_scaled_gradients(arrays, _array(grad), sums)
            return gradients[0], gradients[1], gradients[2]
        for rows, columns in _blocks(offset, candidates, CALLED_BLOCK_NUMBERS):
            terms = offset[rows, None] - scale[rows, None] * candidates[None, columns]
            terms = terms.sign_().mul_(grad[rows, columns].unsqueeze(2))
            gradients[0][rows] += terms.sum(1)
            gradients[1][rows] -= torch.einsum("bnd,nd->bd", terms, candidates[columns])
            gradients[2][columns] -= torch.einsum("bnd,bd->nd", terms, scale[rows])
        return gradients[0], gradients[1], gradients[2]
