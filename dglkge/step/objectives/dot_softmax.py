"""Losses of scores that are inner products of a query and a row, with gradients written out by hand.

The numbers of :class:`AutogradLoss` at a fraction of its memory traffic: rows are read where they lie, both
sides share three matmuls (scores, gradients of the queries, gradients of the negatives), and the work between
them is one compiled loop each (``kernels.dot``, and that of the loss). The matmuls may be taken in bfloat16,
which processors with such units do several times as fast: then queries, negatives, scores and their
gradients are rounded to bfloat16 around the matmuls; rows, the scores of true answers, sums over negatives
and gradients of rows stay float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dglkge.kernels import dot
from dglkge.kernels import losses as loops
from dglkge.model.functions.autograd import words
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import Loss
from dglkge.model.negative_terms import IGNORED_SCORE
from dglkge.optim import workspace
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.step.contracts import BatchMeasures, Gradients, Rows
from dglkge.step.objectives.dot_queries import CompiledQueries, DifferentiatedQueries, EdgePenalty, QueryRuns
from dglkge.step.objectives.scored_losses import SampledLoss
from dglkge.step.planning import Group, Places, Plan
from dglkge.typing import Side

QUERY_MULTIPLE = 16
"""Matmuls take a multiple of so many queries. On several machines a trainer's shares of batches differ, and
oneDNN, torch's library of matmuls, compiles one for each new shape and keeps it."""


def is_compiled(model: KgeModel, loss: Loss) -> bool:
    """Return whether the gradients written out here are those of a model and a loss, which declare it.

    A subclass of the model may compute anything, so it is not taken for its base.
    """
    function = model.score_function
    # Autograd accumulates the gradients of a module's dense parameters, and of matrices that edges share.
    is_plain = function.is_product and model.module is None and not function.shares_relations
    return type(model) is KgeModel and (function.compiled or is_plain) and loss.compiled


@dataclass
class DotSoftmax(SampledLoss):
    """Losses and gradients for models and losses that :func:`is_compiled` accepts."""

    reads_in_place = True

    def __post_init__(self) -> None:
        model, self._loop, self._dtype = self.model, self.loss.loop(), self.computation.matmul_dtype
        self._queries: Callable[[QueryRuns, Rows], CompiledQueries | DifferentiatedQueries]
        if model.score_function.compiled:
            penalty = EdgePenalty(model, self.regularizer, self.planner.samplers)
            self._queries = functools.partial(CompiledQueries, model, penalty)
        else:
            self._queries = functools.partial(DifferentiatedQueries, model, self.regularizer)
        # In the representation of the scores, float32 or bfloat16 words: the loop only writes it.
        self._ignored = words(torch.tensor([IGNORED_SCORE], dtype=self._dtype))[0]
        self._clock = self.computation.clock
        self._scratch = workspace.Scratch()

    def plan(self, batch: EdgeBatch) -> Plan:
        return self.planner.plan(batch)

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        return lambda: self._compute(plan, rows)

    def _compute(self, plan: Plan, rows: Rows) -> Gradients:
        """Write the gradients of a batch's rows."""
        measures = BatchMeasures(self.has_measures)
        chunks = itertools.groupby(plan.groups, key=lambda group: group.chunk)
        loss = sum(self._chunk_loss(list(groups), plan.divisor, rows, measures) for _, groups in chunks)
        return Gradients(plan.divisor * float(loss), measures=measures.sums)

    def _chunk_loss(
        self, groups: Sequence[Group], divisor: int, batch_rows: Rows, measures: BatchMeasures
    ) -> float:
        """Return the loss of the groups of a chunk by ``divisor``."""
        self._clock.enter("score")
        blocks, runs = blocks_of(groups)
        # A side that is not trained has no negatives: its queries lie behind those that have.
        num = trained = blocks[-1].room.stop
        for side in (side for side in Side if side not in self.planner.samplers):
            for group, group_runs in zip(groups, runs):
                group_runs[side] = slice(num, num + len(group))
                num += len(group)
        numbers = self._scratch.take("numbers", 7, num).numpy()
        positive, own_scores, factors, missing, own_shares, labels, _ = numbers
        queries = self._scratch.take("queries", num, self.model.dim, self._dtype)
        query_runs = QueryRuns(groups, runs)
        tails, heads = query_runs.places
        each_factor = np.concatenate([group.factors(divisor) for group in groups])
        factors[tails] = factors[heads] = each_factor
        labels.fill(1)
        if groups[0].labels is not None:
            labels[tails] = labels[heads] = np.concatenate([group.labels for group in groups])
        true_ids = np.empty(num, np.int64)
        true_ids[tails] = np.concatenate([group.tail_ids for group in groups])
        true_ids[heads] = np.concatenate([group.head_ids for group in groups])
        chunk_queries = self._queries(query_runs, batch_rows)
        chunk_queries.write(queries, positive, own_scores)
        self._ignore_own(query_runs, true_ids, own_scores)
        query_gradients = self._scratch.take("query gradients", num, self.model.dim, self._dtype)
        query_gradients[trained:] = 0
        missing[trained:] = own_shares[trained:] = 0
        loss = 0.0
        for block in blocks:
            # Scratch memory may hold NaN, and 0 times NaN in a product is NaN.
            queries[block.run.stop : block.room.stop] = 0
            arrays = (queries[block.room], query_gradients[block.room], numbers[:, block.run])
            loss += self._against(block, batch_rows, measures, *arrays, true_ids[block.run])
        penalty = chunk_queries.differentiate(query_gradients, missing, own_shares, each_factor)
        measures.add_penalty(penalty * divisor)
        return loss + penalty

    def _ignore_own(self, queries: QueryRuns, true_ids: np.ndarray, own_scores: np.ndarray) -> None:
        """Overwrite the own entity's scores (Q,) where it does not count."""
        if not self.own_entity:
            own_scores.fill(IGNORED_SCORE)
            return
        # The own entity is no negative where it is the true answer (h == t) or has another type than the
        # answers.
        sizes = [len(group) for group in queries.groups]
        is_ignored = np.repeat([group.lhs != group.rhs for group in queries.groups], sizes)
        tails, heads = queries.places
        is_ignored |= true_ids[tails] == true_ids[heads]
        for places in queries.places:
            own_scores[places[is_ignored]] = IGNORED_SCORE
        for group, runs in zip(queries.groups, queries.runs):
            for side, known in group.known.items():
                own_scores[runs[side]][known.is_own_known] = IGNORED_SCORE

    def _against(self, block: Block, rows: Rows, measures: BatchMeasures, *arrays: Any) -> float:
        """Score the queries of a block against its negatives and write their gradients; returns the loss.

        The arrays are queries (m, D) and their gradients, the numbers of
        :func:`dglkge.kernels.losses.loss_loop`, (n,) each, and ids (n,) of the true answers. Queries beyond
        the n only fill the shape of the products: what they and their gradients hold there has no effect.
        """
        queries, query_gradients, numbers, true_ids = arrays
        negatives, scratch, clock = block.negatives, self._scratch, self._clock
        located, gradients = rows.in_place(negatives), rows.gradients(negatives)
        num, num_queries, dim = len(negatives.ids), numbers.shape[1], self.model.dim
        clock.enter("gather")
        candidates = scratch.take("candidates", num, dim, self._dtype)
        candidate_words = words(candidates)
        workspace.split(num, dim, lambda part: dot.gather(located.addresses[part], candidate_words[part]))
        clock.enter("score")
        scores = scratch.take("scores", len(queries), num, self._dtype)
        workspace.matmul(queries, candidates.T, scores)
        clock.enter("loss")
        score_words = words(scores)
        for group, side, run in block.pieces:
            if (ranges := group.ranges.get(side)) is not None:
                run_scores = (score_words[run], numbers[0][run], numbers[1][run])
                loops.lower_same_range(tuple(ranges), np.float32(self.range_offset), *run_scores)
        slots = scratch.take("slots", 1, (2 << num.bit_length()) + num, torch.int32).numpy()[0]
        # Each query has one answer, the true one.
        one_each = np.arange(num_queries), np.ones(num_queries, np.int64), true_ids
        loops.ignore_known(one_each, negatives.ids, self._ignored, slots, score_words)
        for group, side, run in block.pieces:
            if (known := group.known.get(side)) is not None:
                known.overwrite(score_words[run], self._ignored, slots)
            if measures.are_counted:
                above = loops.count_above(score_words[run], numbers[0][run], numbers[1][run])
                measures.add_violators(side, above)
        counted = score_words[:num_queries]
        losses = workspace.split(
            num_queries, num, lambda part: self._loop(counted[part], tuple(numbers[:, part]))
        )
        scores[num_queries:] = 0
        clock.enter("backward")
        workspace.matmul(scores, candidates, query_gradients)
        if self._dtype == torch.float32:
            workspace.matmul(scores.T, queries, gradients)
        else:
            narrow = scratch.take("negative gradients", num, dim, self._dtype)
            workspace.matmul(scores.T, queries, narrow)
            gradients.copy_(narrow)
        return float(sum(losses))


class Block(NamedTuple):
    """Queries of a chunk that have the same negatives.

    ``pieces`` are groups and sides with their runs of the block's queries. ``run`` are the rows of these
    among all queries of the chunk, and ``room`` is the same with more behind them up to a multiple.
    """

    negatives: Places
    pieces: Sequence[tuple[Group, Side, slice]]
    run: slice
    room: slice


def blocks_of(groups: Sequence[Group]) -> tuple[list[Block], list[dict[Side, slice]]]:
    """Return the blocks of a chunk, queries for tails before those for heads; and the rows of each group's
    queries by side.
    """
    # By identity: the groups hold the objects, so no id is used twice within a call.
    members: dict[int, list[tuple[int, Side]]] = {}
    for side in (Side.TAIL, Side.HEAD):
        for number, group in enumerate(groups):
            if side in group.negatives:
                members.setdefault(id(group.negatives[side]), []).append((number, side))
    runs: list[dict[Side, slice]] = [{} for _ in groups]
    blocks, start = [], 0
    for queries in members.values():
        pieces, size = [], 0
        for number, side in queries:
            end = size + len(groups[number])
            pieces.append((groups[number], side, slice(size, end)))
            runs[number][side] = slice(start + size, start + end)
            size = end
        room = slice(start, start + rounded(size))
        # The pieces have the same negatives: those of the last one.
        blocks.append(Block(groups[number].negatives[side], pieces, slice(start, start + size), room))
        start = room.stop
    return blocks, runs


def rounded(num: int) -> int:
    """Round a number of queries up to that of a matmul."""
    return -(-num // QUERY_MULTIPLE) * QUERY_MULTIPLE
