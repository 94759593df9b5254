"""Objectives over all candidates of a table, computed on shards: each trainer scores its own rows only.

The losses, and what they need of all scores, are in :mod:`dglkge.model.full_losses`. Labels are
(1 - smoothing) times the share of a true answer, plus smoothing / N for each of all N candidates.

A shard computes in two halves. ``score`` returns numbers for each query; those of all shards together give
the query's loss and normalizer. ``differentiate`` then gives the shard's part of the queries' gradients,
which are to be summed over shards, and the gradients of the shard's own rows, which are complete.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dglkge.kernels import full_scores as kernels
from dglkge.model import full_losses
from dglkge.model.device import HOST, ComputeDevice
from dglkge.model.full_losses import AnswerScores, FullLoss, Pairs, ScoreBlock, Totals
from dglkge.model.functions.autograd import words
from dglkge.model.negative_terms import IGNORED_SCORE
from dglkge.optim.workspace import Scratch
from dglkge.planning.memory import DEVICE_BLOCK_NUMBERS, KEPT_ROW_BYTES, KEPT_SCORE_BYTES, ROWS_A_PANEL
from dglkge.step.objectives.dot_softmax import rounded
from dglkge.typing import Doubles, Floats, Ids

QUERIES_A_BLOCK = 2048
"""Queries that are scored at a time, before the product that reads their scores."""

TWIN_BLOCK_NUMBERS = 1 << 22
"""Numbers that the plain twin holds at a time, for each operation of autograd."""


@dataclass(frozen=True)
class Answers:
    """True answers of queries among the rows of one shard, in CSR form.

    Attributes
    ----------
    starts, places : (Q + 1,) and (A,) int64
        Rows of the shard: those of query i are ``places[starts[i]:starts[i + 1]]``, each once.
    shares : (A,) float32
        Label of each before smoothing: 1, or 1 / k in a softmax over k answers.
    penalty_shares : (A,) float32 or None
        Share of each in the regularizer of its query; None: none is computed with the candidates.
    """

    starts: Ids
    places: Ids
    shares: Floats
    penalty_shares: Floats | None = None

    @functools.cached_property
    def query_of(self) -> Ids:
        """Query of each answer, (A,)."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def sum_by_query(self, values: np.ndarray) -> Doubles:
        """Sum one number of each answer (A,) over the answers of each query, (Q,)."""
        return np.bincount(self.query_of, weights=values, minlength=len(self.starts) - 1).astype(np.float64)


@dataclass(frozen=True)
class FullObjective:
    """Objective over all candidates of all shards together; labels are smoothed by at least 0, below 1."""

    loss: FullLoss
    num_candidates: int
    label_smoothing: float = 0.0

    @property
    def background(self) -> float:
        """Label of a candidate that is no answer."""
        return self.label_smoothing / self.num_candidates


class ShardNumbers(NamedTuple):
    """What one shard gives for the totals of all: numbers (3 or 4, Q), and pulls (A,) of a pairwise loss."""

    numbers: Floats
    pulls: Floats = np.empty(0, np.float32)


@dataclass
class ProductShard:
    """Scores that are inner products, by three matrix products and compiled loops, of losses with a kernel.

    The first product gives the scores of a block of queries, which a loop replaces by powers relative to the
    greatest score of their row of this shard; the second product of these is the shard's part of the queries'
    gradients but for one factor a query. That factor is known when the numbers of all shards are there. Then
    the third product, with the queries scaled, gives the gradients of the rows. So no score is touched again
    between the products, and none is computed twice as long as the powers are kept (``kept_bytes``).

    Attributes
    ----------
    objective : FullObjective
    matmul_dtype : torch.dtype
        Type of the matrix products, ``torch.float32`` or ``torch.bfloat16``. Scores and gradients of true
        answers are float32 in any case.
    kept_bytes : int
        Limit of the powers that are kept between the two halves; others are computed a second time.
    rows_a_panel : int
    """

    objective: FullObjective
    matmul_dtype: torch.dtype
    kept_bytes: int = KEPT_SCORE_BYTES
    rows_a_panel: int = ROWS_A_PANEL

    def __post_init__(self) -> None:
        self._dtype = self.matmul_dtype
        self._is_binary = self.objective.loss.kernel == full_losses.CROSS_ENTROPY
        self._replace = kernels.sigmoids if self._is_binary else kernels.exponentials
        self._ignored = words(torch.tensor([IGNORED_SCORE], dtype=self.matmul_dtype))[0]
        self._scratch = Scratch()

    def score_answers(self, queries: Tensor, rows: Tensor, answers: Answers) -> Floats:
        """Return the scores (a,) of the answers among the rows, for a loss that reads them."""
        scores = np.empty(len(answers.places), np.float32)
        kernels.score_answers(queries.numpy(), rows.numpy(), answers.starts, answers.places, scores)
        return scores

    @full_losses.quietly
    def score(self, queries: Tensor, rows: Tensor, answers: Answers, scores: AnswerScores) -> ShardNumbers:
        """Score all queries (Q, D) against the rows (R, D); the answers' scores if the loss reads them."""
        num, dim = queries.shape
        # See QUERY_MULTIPLE: oneDNN compiles a matmul for each shape.
        padded = rounded(num)
        self._queries, self._rows, self._answers, self._padded = queries, rows, answers, padded
        self._ones = np.ones(max(padded, len(rows)), np.float32)
        self._operand = self._scratch.take("queries", padded, dim, self._dtype)
        self._operand[num:] = 0
        kernels.narrow_rows(queries.numpy(), self._ones, words(self._operand))
        self._candidates = rows
        if self._dtype != rows.dtype or not rows.is_contiguous():
            self._candidates = self._scratch.take("candidates", len(rows), dim, self._dtype)
            kernels.narrow_rows(rows.numpy(), self._ones, words(self._candidates))
        self._panels = self._plan_panels(len(rows))
        self._greatest = self._scratch.take("greatest", len(self._panels), padded).numpy()
        # The queries' gradients but for a factor; relative to `top`, the greatest score of the panels so far.
        self._gradients = self._scratch.take("query gradients", padded, dim).numpy()
        if not self._panels:
            self._gradients[:] = 0
        top = np.full(padded, IGNORED_SCORE, np.float32)
        totals = np.zeros(padded, np.float32)
        for number, panel in enumerate(self._panels):
            self._score_panel(number, panel, top, totals)
        self._top = top
        return ShardNumbers(self._with_answers(top[:num], totals[:num]))

    def _plan_panels(self, num_rows: int) -> list[_Panel]:
        """Cut the rows into panels, and decide which are kept."""
        spare_bytes, panels = self.kept_bytes, []
        for run in runs_of(num_rows, self.rows_a_panel):
            spare_bytes -= self._padded * (run.stop - run.start) * self._dtype.itemsize
            # A single panel is always kept: its memory is needed for the first half in any case.
            panels.append(_Panel(run, is_kept=spare_bytes >= 0 or num_rows <= self.rows_a_panel))
        return panels

    def _powers(self, panel: _Panel) -> Tensor:
        """Return the memory of a panel's scores, (Q, W): its own if it is kept."""
        name, run = f"powers{panel.run.start}" if panel.is_kept else "powers", panel.run
        return self._scratch.take(name, self._padded, run.stop - run.start, self._dtype)

    def _score_block(self, panel: _Panel, block: slice, greatest: Floats, totals: Floats) -> Tensor:
        """Write the powers (or sigmoids) of a block of queries and a panel; returns them."""
        powers = self._powers(panel)[block]
        torch.mm(self._operand[block], self._candidates[panel.run].T, out=powers)
        scores, answers = words(powers), self._answers
        starts = answers.starts[block.start : block.stop + 1]
        # Answers are added later in float32. With a score of -1e30 their power or sigmoid is 0, or is scaled
        # to 0 where a panel holds nothing but answers.
        kernels.overwrite_answers(starts, answers.places, panel.run.start, self._ignored, scores)
        self._replace(scores, greatest, totals)
        return powers

    def _score_panel(self, number: int, panel: _Panel, top: Floats, totals: Floats) -> None:
        """Score all queries against a panel and merge its numbers into those of the panels before."""
        dim = self._operand.shape[1]
        greatest = self._greatest[number]
        panel_totals = np.empty(self._padded, np.float32)
        candidates = self._candidates[panel.run]
        for block in runs_of(self._padded, QUERIES_A_BLOCK):
            powers = self._score_block(panel, block, greatest[block], panel_totals[block])
            products = self._scratch.take("products", len(powers), dim, self._dtype)
            torch.mm(powers, candidates, out=products)
            new = np.maximum(top[block], greatest[block])
            # Online softmax: when a panel has a greater score, the sums so far are scaled down to it.
            keeps, scales = np.exp(top[block] - new), np.exp(greatest[block] - new)
            if number == 0:
                # The first panel: `_gradients` is still undefined memory, which may hold NaN.
                keeps[:] = 0
            top[block] = new
            totals[block] = keeps * totals[block] + scales * panel_totals[block]
            kernels.add_products(words(products), keeps, scales, self._gradients[block])

    def _with_answers(self, top: Floats, totals: Floats) -> Floats:
        """Add the answers' own scores to the numbers of the other candidates; returns all three."""
        objective, answers = self.objective, self._answers
        queries, rows = self._queries, self._rows
        scores = self._answer_scores = self.score_answers(queries, rows, answers)
        numbers = np.empty((3, len(top)), np.float32)
        if self._is_binary:
            numbers[full_losses.GREATEST] = 0
            terms = np.logaddexp(0, scores.astype(np.float64))
            numbers[full_losses.TOTAL] = totals + answers.sum_by_query(terms)
        else:
            greatest = top.copy()
            # Unbuffered: a query may have several answers, and fancy indexing would keep only the last one.
            np.maximum.at(greatest, answers.query_of, scores)
            powers = np.exp(scores - greatest[answers.query_of])
            numbers[full_losses.GREATEST] = greatest
            numbers[full_losses.TOTAL] = totals * np.exp(top - greatest) + answers.sum_by_query(powers)
        keep = 1 - objective.label_smoothing
        numbers[full_losses.TARGET] = answers.sum_by_query(scores.astype(np.float64) * answers.shares) * keep
        if objective.background:
            # Smoothing adds one label everywhere, so its part of the loss needs only the sum of all rows.
            self._sum_of_rows = rows.sum(0)
            numbers[full_losses.TARGET] += objective.background * (queries @ self._sum_of_rows).numpy()
        return numbers

    @full_losses.quietly
    def differentiate(
        self, totals: Totals, factors: Floats, query_gradients: Tensor, row_gradients: Tensor
    ) -> None:
        """Write the shard's part of the gradients of the queries (Q, D), and those of the rows (R, D), of the
        last call of :meth:`score`. Totals are of all shards.
        """
        num, dim = self._queries.shape
        normalizer = totals.normalizers
        scales = self._scales(self._top[:num], normalizer, factors)
        keeps = np.zeros(num, np.float32)
        kernels.add_products(self._gradients[:num], keeps, scales, query_gradients.numpy())
        scaled = self._scratch.take("scaled", self._padded, dim, self._dtype)
        scaled[num:] = 0
        for number, panel in enumerate(self._panels):
            # Powers come out as before, relative to the same greatest scores, as the rows have not changed
            # since.
            if not panel.is_kept:
                unused = np.empty(self._padded, np.float32)
                for block in runs_of(self._padded, QUERIES_A_BLOCK):
                    self._score_block(panel, block, self._greatest[number][block], unused[block])
            scales = self._scales(self._greatest[number, :num], normalizer, factors)
            kernels.narrow_rows(self._queries.numpy(), scales, words(scaled))
            self._differentiate_rows(scaled, self._powers(panel), row_gradients[panel.run])
        self._differentiate_answers(normalizer, factors, query_gradients, row_gradients)

    def _differentiate_rows(self, scaled: Tensor, powers: Tensor, row_gradients: Tensor) -> None:
        """Write the gradients of a panel's rows (W, D) but for the answers'."""
        if self._dtype == torch.float32:
            torch.mm(powers.T, scaled, out=row_gradients)
            return
        # oneDNN is slow where the first operand of a bfloat16 product is transposed. So the smaller operand
        # is transposed here, and the result, which is copied in any case.
        num, dim = scaled.shape
        turned = self._scratch.take("turned", dim, num, self._dtype).copy_(scaled.T)
        gradients = self._scratch.take("row gradients", dim, len(row_gradients), self._dtype)
        row_gradients.copy_(torch.mm(turned, powers, out=gradients).T)

    def _scales(self, greatest: Floats, normalizer: Doubles, factors: Floats) -> Floats:
        """Return the factors (Q,) that turn powers relative to a greatest score into gradients of scores."""
        if self._is_binary:
            return factors
        return (factors * np.exp(greatest - normalizer)).astype(np.float32)

    def _differentiate_answers(
        self, normalizer: Doubles, factors: Floats, query_gradients: Tensor, row_gradients: Tensor
    ) -> None:
        """Add the gradients from the labels and from the answers' own scores."""
        objective, answers = self.objective, self._answers
        scores, query_of = self._answer_scores.astype(np.float64), answers.query_of
        if self._is_binary:
            predicted = torch.from_numpy(scores).sigmoid().numpy()
        else:
            predicted = np.exp(scores - normalizer[query_of])
        labels = (1 - objective.label_smoothing) * answers.shares
        score_gradients = (factors[query_of] * (predicted - labels)).astype(np.float32)
        rows, places = (self._queries.numpy(), self._rows.numpy()), (answers.starts, answers.places)
        gradients = query_gradients.numpy(), row_gradients.numpy()
        kernels.add_answer_gradients(*rows, places, score_gradients, *gradients)
        if objective.background:
            query_gradients.addr_(torch.from_numpy(factors), self._sum_of_rows, alpha=-objective.background)
            row_gradients.sub_(objective.background * (torch.from_numpy(factors) @ self._queries))


class _Panel(NamedTuple):
    """Consecutive rows of a shard, and whether their powers are kept between the two halves."""

    run: slice
    is_kept: bool


def runs_of(num: int, length: int) -> Iterator[slice]:
    """Yield runs of rows or queries."""
    for start in range(0, num, length):
        yield slice(start, min(start + length, num))


@dataclass
class AutogradShard:
    """Any score function and loss: scores by blocks of rows, gradients by autograd; plain twin of the above.

    Every block is scored twice, first for the numbers and then with autograd. On a device, queries and
    answers are copied there once, rows block by block, and the gradients of a block come back while the next
    block computes. Blocks within ``kept_bytes`` stay on the device between the two halves of a step.

    Attributes
    ----------
    objective : FullObjective
    compare : callable
        Scores queries (Q, D) against rows (b, D'): (Q, b).
    numbers_a_score : int
        Numbers that ``compare`` holds for each score: 1 for a matmul, D where it broadcasts.
    device : ComputeDevice
    matmul_dtype : torch.dtype
        Type of the matmuls on a device; the CPU computes in float32 here.
    kept_bytes : int
        Limit of the rows that stay on the device.
    is_resident : bool
        Whether rows are on the device in any case, and the gradients of rows shall be there.
    """

    objective: FullObjective
    compare: Callable[[Tensor, Tensor], Tensor]
    numbers_a_score: int = 1
    device: ComputeDevice = HOST
    matmul_dtype: torch.dtype = torch.float32
    kept_bytes: int = KEPT_ROW_BYTES
    is_resident: bool = False

    def __post_init__(self) -> None:
        self._dtype = self.matmul_dtype if self.device.is_staged else torch.float32
        self._block_numbers = DEVICE_BLOCK_NUMBERS if self.device.is_staged else TWIN_BLOCK_NUMBERS
        self._kept_bytes = self.kept_bytes if self.device.is_staged else 0
        self._kept: dict[int, Tensor] = {}
        # Two rooms each way: the host fills or empties one while the device uses the other.
        self._pinned, rooms = ([Scratch(pinned=self.device.pins_memory) for _ in range(2)] for _ in range(2))
        self._rooms = itertools.cycle(rooms)
        self._sent: list[Any] = []

    @torch.no_grad()
    def score_answers(self, queries: Tensor, rows: Tensor, answers: Answers) -> Floats:
        """As :meth:`ProductShard.score_answers`."""
        self._queries = queries.to(self.device.device)
        places, columns = np.unique(answers.places, return_inverse=True)
        scores = np.empty(len(columns), np.float32)
        for block in runs_of(len(places), self._block_rows(len(queries) * self.numbers_a_score)):
            is_here = (columns >= block.start) & (columns < block.stop)
            candidates = self._there(rows[torch.from_numpy(places[block]).to(rows.device)])
            matrix = self._scores(self._queries, candidates).cpu().numpy()
            scores[is_here] = matrix[answers.query_of[is_here], columns[is_here] - block.start]
        return scores

    @torch.no_grad()
    def score(self, queries: Tensor, rows: Tensor, answers: Answers, scores: AnswerScores) -> ShardNumbers:
        """As :meth:`ProductShard.score`."""
        self._queries, self._rows = queries.to(self.device.device), rows
        self._take_answers(answers, scores)
        self._kept = {}
        loss, num_pairs = self.objective.loss, len(scores.scores)
        numbers, pulls = loss.first(self._queries), self._queries.new_zeros(num_pairs)
        self._rows_a_block = self._block_rows(max(len(queries) * self.numbers_a_score, num_pairs))
        for run in runs_of(len(rows), self._rows_a_block):
            loss.add(numbers, pulls, self._score_block(run, self._queries, self._block(run)))
        return ShardNumbers(numbers.cpu().numpy(), pulls.cpu().numpy())

    def differentiate(
        self, totals: Totals, factors: Floats, query_gradients: Tensor, row_gradients: Tensor
    ) -> None:
        """As :meth:`ProductShard.differentiate`."""
        queries = self._queries.detach().requires_grad_()
        # Autograd accumulates over blocks: into the caller's memory, if that is where the queries are.
        is_here = query_gradients.device == queries.device
        queries.grad = query_gradients.zero_() if is_here else torch.zeros_like(queries)
        normalizers, pulls = totals.normalizers.astype(np.float32), totals.pulls.astype(np.float32)
        shift, weights = (self._there(torch.from_numpy(array))[:, None] for array in (normalizers, factors))
        answer_pulls = self._there(torch.from_numpy(pulls))
        returning: list[tuple[slice, Tensor, Any]] = []
        for number, run in enumerate(runs_of(len(self._rows), self._rows_a_block)):
            rows = self._block(run).detach().contiguous().requires_grad_()
            with self.device.computing():
                block = self._score_block(run, queries, rows)
                detached = dataclasses.replace(block, scores=block.scores.detach())
                gradients = self.objective.loss.score_gradients(detached, shift, answer_pulls)
                block.scores.backward(gradients * weights)
            if rows.grad is None:
                continue
            if not self.device.is_staged or self.is_resident:
                row_gradients[run] = rows.grad
                continue
            # The block before has come back into the other half of the page-locked memory by now, or is
            # waited for here, while this block still computes.
            _place(returning, row_gradients)
            room = self._pinned[number % 2].take("gradients", *rows.grad.shape)
            returning.append((run, room.copy_(rows.grad, non_blocking=True), self._recorded()))
        _place(returning, row_gradients)
        if not is_here:
            query_gradients.copy_(queries.grad)
        self._kept = {}

    def _take_answers(self, answers: Answers, scores: AnswerScores) -> None:
        """Put the answers on the device, sorted by row so that those of a block are one run."""
        order = np.argsort(answers.places, kind="stable")
        self._sorted = answers.places[order]
        labels = ((1 - self.objective.label_smoothing) * answers.shares[order]).astype(np.float32)
        arrays = (self._sorted, answers.query_of[order], labels, scores.local.start + order)
        self._answers = [self._there(torch.from_numpy(array)) for array in arrays]
        pairs = (scores.query_of, scores.scores, scores.shares())
        self._pairs = Pairs(*(self._there(torch.from_numpy(array)) for array in pairs))

    def _score_block(self, run: slice, queries: Tensor, rows: Tensor) -> ScoreBlock:
        """Score queries against a run of the rows; returns the scores with their labels and answers."""
        scores = self._scores(queries, rows)
        part = slice(*np.searchsorted(self._sorted, [run.start, run.stop]).tolist())
        places, query_of, answer_labels, numbers = (array[part] for array in self._answers)
        labels = torch.full_like(scores, self.objective.background, requires_grad=False)
        # An answer occurs once in a query: no two of them are the same element.
        labels[query_of, places - run.start] += answer_labels
        return ScoreBlock(scores, labels, (query_of, places - run.start), numbers, self._pairs)

    def _scores(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Score queries (Q, D) against rows (b, D') in the type of the matmuls: (Q, b) float32."""
        with self.device.computing(), self.device.autocast(self._dtype):
            return self.compare(queries, rows).to(queries.dtype)

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device: a copy, or itself where the device is the CPU's own path."""
        return tensor.to(self.device.device, copy=True) if self.device.is_staged else tensor

    def _block(self, block: slice) -> Tensor:
        """Return some rows on the device."""
        if self.is_resident:
            return self._rows[block]
        if block.start in self._kept:
            return self._kept[block.start]
        rows = self._started_there(self._rows[block]) if self.device.is_staged else self._rows[block]
        # The rows change after the step only: until then a copy is as good.
        num_bytes = sum(kept.numel() * kept.element_size() for kept in (rows, *self._kept.values()))
        if num_bytes <= self._kept_bytes:
            self._kept[block.start] = rows
        return rows

    def _started_there(self, rows: Tensor) -> Tensor:
        """Begin to copy rows to the device out of page-locked memory; returns the copy."""
        if len(self._sent) == 2:
            self._sent.pop(0).synchronize()  # the room that comes next is free again
        room = next(self._rooms).take("rows", rows.shape[0], rows.shape[1], rows.dtype).copy_(rows)
        there = room.to(self.device.device, non_blocking=True, copy=True)
        self._sent.append(self._recorded())
        return there

    def _recorded(self) -> Any:
        """Return an event behind what is queued on the device so far."""
        event = self.device.backend.Event()
        event.record(self.device.backend.current_stream())
        return event

    def _block_rows(self, numbers_a_row: int) -> int:
        """Return how many rows are scored at a time."""
        return max(1, self._block_numbers // max(1, numbers_a_row))


ShardObjective = ProductShard | AutogradShard
"""The part of an objective that one shard computes; see the module's text."""


def _place(returning: list[tuple[slice, Tensor, Any]], row_gradients: Tensor) -> None:
    """Put the gradients of blocks that are on their way back where they belong."""
    for block, gradients, event in returning:
        event.synchronize()
        row_gradients[block] = gradients
    returning.clear()
