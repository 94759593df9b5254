"""Losses of queries from the rows that they are compared with: plain torch, or compiled by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dglkge.model.compiled_losses import with_loops
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss
from dglkge.step.computation import Computation
from dglkge.step.objectives.group_inputs import RangeTensors

LEAST_COMPILED = 2
"""Queries, and negatives, from which the compiled function is used: torch.compile makes code of its own for 0
and for 1."""


class ScoredLosses:
    """Scores queries against their true answers and negatives, and returns their losses.

    A function of tensors only, so that ``torch.compile`` can fuse it: scores, masks and losses then go
    through memory once, and the terms of a distance never do.

    Parameters
    ----------
    model : KgeModel
    loss : Loss
    computation : Computation
    counts_above : bool
        Count the negatives that score above the true answers.
    range_offset : float
        Subtracted from the scores of answers in the range of the query's own entity, where ranges are given.
    """

    def __init__(
        self,
        model: KgeModel,
        loss: Loss,
        computation: Computation,
        counts_above: bool = False,
        range_offset: float = 0.0,
    ) -> None:
        self._model = model
        is_reference = computation.is_reference
        self._device = computation.device
        self._matmul_dtype = computation.matmul_dtype
        self._compare = model.compare_plainly if is_reference else model.compare
        self._loss = loss if is_reference else with_loops(loss)
        self._counts_above = counts_above
        self._range_offset = range_offset
        self._run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = self._compute
        if computation.is_compiled:
            from torch._inductor import config

            # Otherwise each trainer starts a process for each core to compile a few small graphs.
            config.compile_threads = 1
            self._compare, self._loss = model.compare_fused, loss
            # One graph where terms of all pairs would be in memory without it.
            self._run = torch.compile(self._compute, dynamic=True, fullgraph=model.score_function.fuses_pairs)

    def __call__(
        self,
        query: torch.Tensor,
        candidates: torch.Tensor,
        own: torch.Tensor | None,
        truths: torch.Tensor,
        ignored: torch.Tensor,
        labels: torch.Tensor | None = None,
        ranges: RangeTensors | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of queries.

        Parameters
        ----------
        query : (B, query_dim) tensor
        candidates : (N, D) tensor
            Rows of the negatives.
        own : (B, D) tensor, optional
            Row of one negative more for each query.
        truths : (B, D) tensor
        ignored : (B, N) or (B, N + 1) bool tensor
            Which scores are of no negative; the last column is that of ``own``.
        labels : (B,) tensor, optional
            Confidences, where the loss takes them.
        ranges : three bool tensors, optional
            In which of two ranges the queries' entities, the true answers and the negatives are.

        Returns
        -------
        losses : (B,) tensor
        above : () int64 tensor or None
            Negatives that score above the true answer, of all queries; None unless they are counted.
        """
        is_small = min(len(query), len(candidates)) < LEAST_COMPILED
        run = self._compute if is_small else self._run
        return run(query, candidates, own, truths, ignored, labels, ranges)

    def try_out(self, dim: int, own_entity: bool) -> None:
        """Compute losses and gradients of made-up rows; the compiler runs in the first call.

        Parameters
        ----------
        dim : int
            Width of an entity's row.
        own_entity : bool
            Whether queries will have a negative more of their own.
        """
        query_dim, device = self._model.query_dim, self._device.device
        # Sizes that are equal in the first call would be taken to be always equal.
        sizes = [one for one in (37, 41, 43, 47) if one not in (dim, query_dim)]
        num_queries, num_negatives = sizes[:2]

        def rows(number: int, width: int) -> torch.Tensor:
            values = torch.linspace(-1, 1, number * width, device=device)
            return values.view(number, width).requires_grad_()

        leaves = [rows(num_queries, query_dim), rows(num_negatives, dim), rows(num_queries, dim)]
        query, candidates, truths = leaves
        own = rows(num_queries, dim) if own_entity else None
        num_scores = num_negatives + own_entity
        ignored = torch.zeros(num_queries, num_scores, dtype=torch.bool, device=device)
        # As queries are in training: results of a function of the rows.
        ranges: RangeTensors | None = None
        if self._range_offset:
            of_queries, of_negatives = (
                torch.arange(number, device=device) % 2 == 0 for number in (num_queries, num_negatives)
            )
            ranges = of_queries, of_queries.flip(0), of_negatives
        losses, _ = self(query * 1, candidates, own, truths, ignored, None, ranges)
        torch.autograd.grad(losses.sum(), leaves if own is None else [*leaves, own])

    def _compute(
        self,
        query: torch.Tensor,
        candidates: torch.Tensor,
        own: torch.Tensor | None,
        truths: torch.Tensor,
        ignored: torch.Tensor,
        labels: torch.Tensor | None,
        ranges: RangeTensors | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._device.autocast(self._matmul_dtype):
            scores = self._compare(query, candidates).to(query.dtype)
        positive = self._model.compare_pairs(query, truths)
        own_scores = None if own is None else self._model.compare_pairs(query, own)
        if ranges is not None:
            anchors, of_truths, of_negatives = ranges
            # 1 where both are in the same of two ranges: the product goes through the scores once, where a
            # mask of their size takes three passes.
            same = _columns(anchors, scores.dtype), _columns(of_negatives, scores.dtype).T
            scores = torch.addmm(scores, *same, alpha=-self._range_offset)
            positive = positive - self._range_offset * (anchors == of_truths)
            own_scores = None if own_scores is None else own_scores - self._range_offset
        if own_scores is not None:
            scores = torch.cat([scores, own_scores[:, None]], dim=1)
        above = None
        if self._counts_above:
            above = ((scores.detach() > positive.detach()[:, None]) & ~ignored).sum()
        # Only a loss that declares confidences gets labels, and has the parameter.
        loss: Any = self._loss
        more = {} if labels is None else {"labels": labels}
        return loss(positive, scores, ignored, **more), above


def _columns(is_first: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 in the first column (n, 2) of what is in the first range, and in the second of the others."""
    return torch.stack([is_first, ~is_first], dim=1).to(dtype)
