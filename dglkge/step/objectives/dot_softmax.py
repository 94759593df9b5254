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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dglkge.kernels import dot, softmax
from dglkge.model.functions.autograd import words
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import IGNORED_SCORE, Loss
from dglkge.optim.scratch import Scratch
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.known_answers import KnownNegatives
from dglkge.step.contracts import BatchMeasures, Gradients, Rows
from dglkge.step.objectives.dot_queries import (
    CompiledQueries,
    DifferentiatedQueries,
    GroupPenalty,
    GroupQueries,
    side_runs,
)
from dglkge.step.objectives.scored_losses import SampledLoss
from dglkge.step.planning import AnswerRanges, Group, Negatives, Plan
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
        self._queries: Callable[[Group, Rows], GroupQueries]
        if model.score_function.compiled:
            penalty = GroupPenalty(model, self.regularizer, self.planner.sides)
            self._queries = functools.partial(CompiledQueries, model, penalty)
        else:
            self._queries = functools.partial(DifferentiatedQueries, model, self.regularizer)
        # In the representation of the scores, float32 or bfloat16 words: the loop only writes it.
        self._ignored = words(torch.tensor([IGNORED_SCORE], dtype=self._dtype))[0]
        self._clock = self.computation.clock
        self._scratch = Scratch()

    def plan(self, batch: EdgeBatch) -> Plan:
        return self.planner.plan(batch)

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        return lambda: self._compute(plan, rows)

    def _compute(self, plan: Plan, rows: Rows) -> Gradients:
        """Write the gradients of a batch's rows."""
        measures = BatchMeasures(self.has_measures)
        # By identity: the groups hold the objects, so no id is used twice within a call.
        seen: set[int] = set()
        loss = sum(self._group_loss(group, plan.divisor, rows, seen, measures) for group in plan.groups)
        return Gradients(plan.divisor * float(loss), measures=measures.sums)

    def _group_loss(
        self, group: Group, divisor: int, batch_rows: Rows, seen: set[int], measures: BatchMeasures
    ) -> float:
        """Return the loss of a group by ``divisor``; ``seen``: negatives that have gradients already."""
        self._clock.enter("score")
        num = len(group)
        numbers = self._scratch.take("numbers", 7, 2 * num).numpy()
        positive, own, factors, missing, own_shares, labels, _ = numbers
        factors[:] = 1 / divisor
        if group.weights is not None:
            factors.reshape(2, num)[:] *= group.weights
        labels.reshape(2, num)[:] = 1 if group.labels is None else group.labels
        room = 2 * num + QUERY_MULTIPLE
        queries = self._scratch.take("queries", room, self.model.dim, self._dtype)
        # Scratch memory may hold NaN, and 0 times NaN in a product is NaN.
        queries[2 * num :] = 0
        of_group = self._queries(group, batch_rows)
        of_group.write(queries[: 2 * num], positive, own)
        self._ignore_own(group, own.reshape(2, num))
        of_queries = self._scratch.take("of_queries", room, self.model.dim, self._dtype)
        loss = 0.0
        for run, negatives, true_ids, known, ranges in _blocks(group):
            sides = [
                side for side, own_run in side_runs(num).items() if run.start <= own_run.start < run.stop
            ]
            # Rows beyond the block are queries of the next block or padding: their scores are set to 0 below.
            shape = slice(run.start, run.start + rounded(len(true_ids)))
            of_block = [array[run] for array in numbers]
            block = _Block(queries[shape], of_queries[shape], true_ids, known, ranges, of_block, sides)
            loss += self._against(block, negatives, batch_rows, id(negatives) in seen, measures)
            seen.add(id(negatives))
        for side, run in side_runs(num).items():
            # A side that is not trained: its queries have no gradients.
            if side not in group.negatives:
                of_queries[run] = 0
                missing[run] = own_shares[run] = 0
        penalty = of_group.differentiate(of_queries[: 2 * num], missing, own_shares, factors[:num])
        measures.add_penalty(penalty * divisor)
        return loss + penalty

    def _ignore_own(self, group: Group, own: np.ndarray) -> None:
        """Overwrite the own entity's scores "(2, B)" where it does not count."""
        # The own entity is no negative where it is the true answer (h == t) or has another type than the
        # answers.
        if self.own_entity and group.lhs == group.rhs:
            own[:, group.head_ids == group.tail_ids] = IGNORED_SCORE
            for of_side, side in zip(own, side_runs(0)):
                if side in group.known:
                    of_side[group.known[side].own] = IGNORED_SCORE
        else:
            own[:] = IGNORED_SCORE

    def _against(
        self, block: _Block, negatives: Negatives, rows: Rows, adds: bool, measures: BatchMeasures
    ) -> float:
        """Score queries against negatives and write or add to their gradients; returns the loss."""
        queries, of_queries, true_ids, known, ranges, numbers, sides = block
        found, gradients = rows.found(negatives.rows), rows.gradients(negatives.rows)
        num, scratch, clock = len(negatives.ids), self._scratch, self._clock
        clock.enter("gather")
        candidates = scratch.take("candidates", num, self.model.dim, self._dtype)
        dot.gather(found.addresses, words(candidates))
        clock.enter("score")
        scores = torch.mm(queries, candidates.T, out=scratch.take("scores", len(queries), num, self._dtype))
        clock.enter("loss")
        if ranges is not None:
            positive, own = numbers[:2]
            softmax.lower_same_range(
                *vars(ranges).values(), np.float32(self.range_offset), words(scores), positive, own
            )
        slots = scratch.take("slots", 1, (2 << num.bit_length()) + num, torch.int32).numpy()[0]
        softmax.ignore_truths(true_ids, negatives.ids, self._ignored, slots, words(scores))
        for number, answers in enumerate(known):
            # Known answers of equally many queries for each side of the block.
            run = slice(number * len(answers.own), (number + 1) * len(answers.own))
            answers.overwrite(words(scores[run]), self._ignored, slots)
        if measures.are_counted:
            each = len(true_ids) // len(sides)
            for turn, side in enumerate(sides):
                run = slice(turn * each, (turn + 1) * each)
                above = softmax.count_above(words(scores[run]), numbers[0][run], numbers[1][run])
                measures.add_violators(side, above)
        loss = self._loop(words(scores[: len(true_ids)]), *numbers)
        scores[len(true_ids) :] = 0
        clock.enter("backward")
        torch.mm(scores, candidates, out=of_queries)
        if self._dtype == torch.float32:
            # Two groups may share negatives: beta=1 adds, and beta=0 ignores what the memory held, NaN
            # included.
            torch.addmm(gradients, scores.T, queries, beta=int(adds), out=gradients)
            return loss
        # bfloat16 cannot be accumulated into float32 gradients by one matmul: product, then sum.
        narrow = torch.mm(
            scores.T, queries, out=scratch.take("of_candidates", num, self.model.dim, self._dtype)
        )
        if adds:
            gradients.add_(narrow)
        else:
            gradients.copy_(narrow)
        return loss


class _Block(NamedTuple):
    """Queries of a group that are scored against the same negatives.

    ``numbers`` are those of :func:`dglkge.kernels.losses.loss_loop`, each (n,). Queries beyond the n only
    fill the shape of the products: what they and ``of_queries`` hold there has no effect.
    """

    queries: torch.Tensor
    of_queries: torch.Tensor
    true_ids: np.ndarray
    known: Sequence[KnownNegatives]
    ranges: AnswerRanges | None
    numbers: Sequence[np.ndarray]
    sides: Sequence[Side]


def rounded(num: int) -> int:
    """Round a number of queries up to that of a matmul."""
    return -(-num // QUERY_MULTIPLE) * QUERY_MULTIPLE


def _blocks(
    group: Group,
) -> list[tuple[slice, Negatives, np.ndarray, list[KnownNegatives], AnswerRanges | None]]:
    """Return runs of the queries, those for tails first: negatives, true and known answers, ranges if any."""
    known, negatives, runs = group.known, group.negatives, side_runs(len(group))
    if negatives.get(Side.TAIL) is negatives.get(Side.HEAD):
        truths = np.concatenate([group.tail_ids, group.head_ids])
        ranges = None
        if group.ranges:
            tail, head = (group.ranges[side] for side in runs)
            anchors = np.concatenate([tail.anchors, head.anchors])
            ranges = AnswerRanges(anchors, np.concatenate([tail.truths, head.truths]), tail.negatives)
        whole = slice(0, 2 * len(group))
        return [
            (whole, negatives[Side.TAIL], truths, [known[side] for side in runs if side in known], ranges)
        ]
    truths_of = {Side.TAIL: group.tail_ids, Side.HEAD: group.head_ids}
    return [
        (
            run,
            negatives[side],
            truths_of[side],
            [known[side]] if side in known else [],
            group.ranges.get(side),
        )
        for side, run in runs.items()
        if side in negatives
    ]
