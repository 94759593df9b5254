"""Sums of the gradients of equal rows, and softmax of scores, by kernels of a GPU or by torch.

On a GPU ``index_add_`` has no fixed order, and torch's form that has one takes 20 times as long as the kernel
and more. Here the rows are walked in the order of their sums, each program some of them: it adds every
run of equal places but its first one to their sum. That one may have begun before: its part is kept as a row
of its own. These rows, one for each program, are walked in the same way, until one program has all.

A softmax over the negatives of a chunk (:func:`differentiate_chunks`) takes two kernels that hold no score in
the GPU's memory, in the manner of Dao et al. 2022, "FlashAttention: fast and memory-efficient exact attention
with IO-awareness". One runs over the candidates of a block of queries: it keeps the greatest score so far,
the sum of powers relative to it, and the candidates weighted by these powers, and scales both sums down when
a greater score comes. The other runs over the queries of a block of candidates, whose logarithms are known
then, and computes the scores again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dglkge.model.negative_terms import IGNORED_SCORE

MOST_COLUMNS = 1 << 14
"""Scores of a query up to which a program of the kernel holds all of them."""

MOST_NUMBERS = 128
"""Numbers of a row up to which a program holds the rows of a block of queries, and of candidates: with twice
as many it needs more shared memory than most GPUs have, 100 KB."""

AVERAGE = {"queries_a_block": 64, "candidates_a_block": 128, "num_warps": 4, "num_stages": 2}
GRADIENTS = {**AVERAGE, "candidates_a_block": 64}
"""Queries and candidates of a block, and warps and stages of a program, of each kernel: the fastest of twelve
on an NVIDIA H100 with D = 100 and 1,000 queries and candidates."""

SCORES_A_BLOCK = 1 << 28
"""Scores that are held at a time without the kernels: 0.5 GiB in bfloat16."""


def sum_by_place(rows: Tensor, places: Tensor, num_sums: int) -> Tensor:
    """Sum rows (n, D) by place (n,) int64 to (num_sums, D), in the same order in every run.

    Examples
    --------
    >>> sum_by_place(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 3).tolist()
    [[2.0], [5.0], [0.0]]
    """
    if rows.is_cuda:
        return sum_in_order(rows, places, num_sums)
    return rows.new_zeros(num_sums, rows.shape[1]).index_add_(0, places, rows)


def sum_in_order(rows: Tensor, places: Tensor, num_sums: int) -> Tensor:
    """Return :func:`sum_by_place` by the kernel."""
    # Here: Triton comes with torch for GPUs only.
    from dglkge.kernels.gpu import COLUMNS, LENGTH, sum_runs

    length, width = LENGTH.value, rows.shape[1]
    sums = rows.new_zeros(num_sums, width)
    ordered, order = places.to(torch.int32).sort(stable=True)
    rows, is_first = rows.contiguous(), True
    while len(rows):
        num_programs = -(-len(rows) // length)
        parts = rows.new_empty(num_programs if num_programs > 1 else 0, width)
        grid = (num_programs, -(-width // COLUMNS.value))
        sum_runs[grid](rows, order, ordered, sums, parts, len(rows), width, adds=not is_first)
        rows, ordered, is_first = parts, ordered[::length].contiguous(), False
        order = torch.arange(len(rows), device=rows.device)
    return sums


def share_scores(scores: Tensor) -> Tensor:
    """Replace scores (Q, N) by e^s / sum of e^s over the row; returns the logarithms (Q,) float32 of the
    sums.
    """
    if scores.is_cuda and scores.shape[1] <= MOST_COLUMNS:
        return share_in_one_pass(scores)
    wide = scores.float()
    logs = wide.logsumexp(1)
    scores.copy_((wide - logs[:, None]).exp())
    return logs


def share_in_one_pass(scores: Tensor) -> Tensor:
    """Return :func:`share_scores` by the kernel."""
    # Here: Triton comes with torch for GPUs only.
    from dglkge.kernels.gpu import share_row

    num, width = scores.shape
    logs = torch.empty(num, device=scores.device)
    num_columns = 1 << (width - 1).bit_length()
    num_warps = min(16, max(4, num_columns // 512))
    share_row[(num,)](scores, logs, width, num_columns=num_columns, num_warps=num_warps)
    return logs


class ChunkedScores(NamedTuple):
    """Scores of queries (B, D) against the candidates (C, N, D) of their chunks, of ``chunk_size`` queries.

    The last chunk may have fewer queries. A candidate that is the answer of the query itself, by ``answers``
    (B,) and ``ids`` (C, N), both int32, is ignored.
    """

    queries: Tensor
    candidates: Tensor
    answers: Tensor
    ids: Tensor
    chunk_size: int

    def runs(self) -> Iterator[tuple[slice, slice]]:
        """Cut chunks of as many queries each into runs of queries and of chunks, or each into some of its
        queries.
        """
        size, most = self.chunk_size, max(1, SCORES_A_BLOCK // self.candidates.shape[1])
        whole, rest = divmod(len(self.queries), size)
        if most < size:
            for start in range(0, len(self.queries), size):
                stop = min(start + size, len(self.queries))
                for first in range(start, stop, most):
                    yield slice(first, min(first + most, stop)), slice(start // size, start // size + 1)
            return
        for first in range(0, whole, most // size):
            stop = min(first + most // size, whole)
            yield slice(first * size, stop * size), slice(first, stop)
        if rest:
            yield slice(whole * size, len(self.queries)), slice(whole, whole + 1)


Weigh = Callable[[slice, Tensor], Tensor]
"""Returns the factors (n,) of a run of queries, given the logarithms (n,) of the sums of their powers."""


def differentiate_chunks(
    chunks: ChunkedScores, dtype: torch.dtype, weigh: Weigh, candidate_gradients: Tensor
) -> Tensor:
    """Return the gradients (B, D) of queries, and add those of the candidates (C, N, D).

    The gradient of a score is the candidate's share in the sum of the query's powers times the query's
    factor. Products are computed in ``dtype``.
    """
    queries = chunks.queries
    if queries.is_cuda and dtype == torch.bfloat16 and queries.shape[1] <= MOST_NUMBERS:
        return differentiate_fused(chunks, dtype, weigh, candidate_gradients)
    query_gradients, num = torch.empty_like(queries), chunks.candidates.shape[1]
    # Products of a width that is no multiple of 8 take four times as long.
    padding = (0, 0, 0, -num % 8)
    for run, some in chunks.runs():
        block = queries[run].unflatten(0, (some.stop - some.start, -1))
        candidates = functional.pad(chunks.candidates[some].to(dtype), padding)
        scores = block.to(dtype) @ candidates.mT
        answers = chunks.answers[run].view(*block.shape[:2], 1)
        scores[..., num:] = IGNORED_SCORE
        scores[..., :num].masked_fill_(answers == chunks.ids[some, None], IGNORED_SCORE)
        weights = weigh(run, share_scores(scores.view(-1, scores.shape[2]))).view(answers.shape)
        query_gradients[run] = (weights * (scores @ candidates)).view(-1, queries.shape[1])
        candidate_gradients[some] += (scores.mT @ (weights * block).to(dtype))[:, :num]
    return query_gradients


def differentiate_fused(
    chunks: ChunkedScores, dtype: torch.dtype, weigh: Weigh, candidate_gradients: Tensor
) -> Tensor:
    """Return :func:`differentiate_chunks` by the kernels."""
    # Here: Triton comes with torch for GPUs only.
    from dglkge.kernels.gpu import add_candidate_gradients, average_candidates

    (num, dim), (num_chunks, num_candidates) = chunks.queries.shape, chunks.ids.shape
    # Rows of whole blocks of 32 bytes, with zeros behind the numbers.
    width = max(16, 1 << (dim - 1).bit_length())
    both = chunks.queries, chunks.candidates
    rows = [part.new_zeros(*part.shape[:-1], width, dtype=dtype) for part in both]
    for wide, part in zip(rows, both):
        wide[..., :dim] = part
    averages, logs = torch.empty_like(chunks.queries), chunks.queries.new_empty(num)
    sizes = num, chunks.chunk_size, num_candidates, dim
    operands = *rows, chunks.answers, chunks.ids
    grid = (num_chunks * -(-chunks.chunk_size // AVERAGE["queries_a_block"]),)
    average_candidates[grid](operands, averages, logs, sizes, width=width, **AVERAGE)
    weights = weigh(slice(0, num), logs)
    grid = (num_chunks * -(-num_candidates // GRADIENTS["candidates_a_block"]),)
    gradients = candidate_gradients, sizes
    add_candidate_gradients[grid](operands, weights, logs, *gradients, width=width, **GRADIENTS)
    return weights[:, None] * averages
