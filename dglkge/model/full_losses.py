"""Losses over all candidates, put together from blocks of scores on shards: none sees all scores at once.

A loss says what it needs of all scores. Shards first give numbers of each query (:meth:`FullLoss.add`), block
by block: sums, and those of softmaxes relative to the greatest score. Those of all shards together are
:class:`Totals`. With these, each block of scores has its gradients (:meth:`FullLoss.score_gradients`). A loss
of pairs asks for the scores of the true answers before the numbers (:attr:`FullLoss.reads_answers`), and gets
the sums of their gradients with the totals.

With s_j the score of candidate j and y_j its label:

    softmax:        log sum_j e^{s_j} - sum_j y_j s_j       (Lacroix et al. 2018, 1vsAll)
    cross entropy:  sum_j (log(1 + e^{s_j}) - y_j s_j)      (Dettmers et al. 2018, KvsAll)
    pointwise:      sum over answers of l(s_j, y_j) + sum over negatives of w_j l(s_j, y_j)
    pairwise:       mean over answers a of sum over negatives of w_j l(s_a, s_j)

w_j is 1, or the softmax of temperature times score over the negatives, held constant. Sums are not divided by
the number of candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dglkge.model.negative_terms import IGNORED_SCORE
from dglkge.typing import Doubles, Floats, Ids

Formula = Callable[[Tensor, Tensor], Tensor]

GREATEST, TOTAL, TARGET, TERMS = range(4)
"""Numbers (3 or 4, Q) of the queries in a shard. GREATEST: the greatest exponent, 0 where there are no
powers. TOTAL: sum of powers of e relative to it, in cross entropy of log(1 + e^s). TARGET: sum of label times
score, or the losses of the answers by themselves. TERMS: weighted sum of the terms of the negatives."""

SOFTMAX, CROSS_ENTROPY = "softmax", "cross_entropy"

#: Scores that are not finite give a loss and gradients that are not; the optimizer reports them, not numpy.
quietly = np.errstate(invalid="ignore", over="ignore", divide="ignore")


class AnswerScores(NamedTuple):
    """Scores (A,) of the true answers of all shards, and the query of each.

    ``local`` are those of this shard's rows, in the order of its answers.
    """

    query_of: Ids
    scores: Floats
    local: slice

    def shares(self) -> Floats:
        """Return 1 / k of each answer (A,) of a query with k answers."""
        return (1 / np.bincount(self.query_of)[self.query_of]).astype(np.float32)


NO_ANSWERS = AnswerScores(np.empty(0, np.int64), np.empty(0, np.float32), slice(0, 0))
"""For a loss that does not read them."""


class Totals(NamedTuple):
    """What the numbers of all shards give.

    Attributes
    ----------
    losses : (Q,) float64
        Of each query, before its factor.
    normalizers : (Q,) float64
        Logarithm of the sum of all powers; 0 where there are none.
    pulls : (A,) float64
        Derivatives of the losses by the scores of the answers, of pairwise losses.
    """

    losses: Doubles
    normalizers: Doubles
    pulls: Doubles


class Pairs(NamedTuple):
    """Answers of all shards on the device of the scores, (A,) each; none if the loss does not read them."""

    query_of: Tensor
    scores: Tensor
    shares: Tensor


@dataclass(frozen=True)
class ScoreBlock:
    """Scores (Q, b) of all queries against some rows of a shard, with their labels.

    ``answers`` are the query and column of each answer among the rows, (a,) int64 each, and ``numbers`` the
    place of each of these among those of :class:`AnswerScores`.
    """

    scores: Tensor
    labels: Tensor
    answers: tuple[Tensor, Tensor]
    numbers: Tensor
    pairs: Pairs


class FullLoss(ABC):
    """A loss over all candidates.

    Attributes
    ----------
    kernel : str
        Name of its compiled form, empty: it has none.
    splits_labels : bool
        Whether each of a query's k answers has label 1 / k, else 1.
    reads_answers : bool
        Whether it needs the scores of the answers before anything else.
    num_numbers : int
    """

    kernel: ClassVar[str] = ""
    splits_labels: ClassVar[bool] = False
    reads_answers: ClassVar[bool] = False
    num_numbers: ClassVar[int] = 3
    least_exponent: float = 0.0

    def first(self, queries: Tensor) -> Tensor:
        """Return the numbers (num_numbers, Q) of no scores."""
        numbers = queries.new_zeros(self.num_numbers, len(queries))
        numbers[GREATEST] = self.least_exponent
        return numbers

    @abstractmethod
    def add(self, numbers: Tensor, pulls: Tensor, block: ScoreBlock) -> None:
        """Add a block to the numbers (num_numbers, Q) and, of a pairwise loss, to the pulls (A,)."""

    @abstractmethod
    def totals(self, numbers: Floats, pulls: Floats, answers: AnswerScores) -> Totals:
        """Return what the numbers (S, num_numbers, Q) and pulls (S, A) of all shards give."""

    @abstractmethod
    def score_gradients(self, block: ScoreBlock, shift: Tensor, pulls: Tensor) -> Tensor:
        """Return the derivatives (Q, b) of the losses, given normalizers (Q, 1) and pulls (A,)."""


_NO_PULLS = np.empty(0)


@quietly
def softmax_totals(numbers: Floats) -> tuple[Doubles, Doubles]:
    """Return the greatest exponents (Q,) of all shards and the sums of powers relative to them."""
    greatest, totals = (numbers[:, place].astype(np.float64) for place in (GREATEST, TOTAL))
    # log-sum-exp over shards, in float64: relative to the greatest score no power overflows.
    top = greatest.max(0)
    return top, (totals * np.exp(greatest - top)).sum(0)


def _summed(numbers: Floats, place: int) -> Doubles:
    """Return one of the numbers (Q,), summed over the shards."""
    return numbers[:, place].astype(np.float64).sum(0)


class FullSoftmax(FullLoss):
    """Cross entropy of the answers among all candidates: needs one normalizer."""

    kernel = SOFTMAX
    splits_labels = True
    least_exponent = IGNORED_SCORE

    def add(self, numbers: Tensor, pulls: Tensor, block: ScoreBlock) -> None:
        scores, greatest = block.scores, numbers[GREATEST]
        numbers[TARGET] += (block.labels * scores).sum(1)
        new = torch.maximum(greatest, scores.amax(1))
        numbers[TOTAL] = numbers[TOTAL] * (greatest - new).exp() + (scores - new[:, None]).exp().sum(1)
        numbers[GREATEST] = new

    @quietly
    def totals(self, numbers: Floats, pulls: Floats, answers: AnswerScores) -> Totals:
        top, sums = softmax_totals(numbers)
        normalizers: Doubles = top + np.log(sums)
        return Totals(normalizers - _summed(numbers, TARGET), normalizers, _NO_PULLS)

    def score_gradients(self, block: ScoreBlock, shift: Tensor, pulls: Tensor) -> Tensor:
        return (block.scores - shift).exp() - block.labels


class FullCrossEntropy(FullLoss):
    """Binary cross entropy of every candidate: needs nothing of other scores."""

    kernel = CROSS_ENTROPY

    def add(self, numbers: Tensor, pulls: Tensor, block: ScoreBlock) -> None:
        numbers[TARGET] += (block.labels * block.scores).sum(1)
        numbers[TOTAL] += torch.nn.functional.softplus(block.scores).sum(1)

    @quietly
    def totals(self, numbers: Floats, pulls: Floats, answers: AnswerScores) -> Totals:
        losses = _summed(numbers, TOTAL) - _summed(numbers, TARGET)
        return Totals(losses, np.zeros(len(losses)), _NO_PULLS)

    def score_gradients(self, block: ScoreBlock, shift: Tensor, pulls: Tensor) -> Tensor:
        return block.scores.sigmoid() - block.labels


class _FullTerms(FullLoss):
    """Sum of terms of the negatives, weighted all alike or by a softmax of their scores.

    The formula takes scores and labels, or the scores of answers and negatives. Without a temperature all
    weights are 1.
    """

    num_numbers = 4
    answer_weight: ClassVar[float]

    def __init__(self, formula: Formula, temperature: float | None) -> None:
        self._formula = formula
        self._temperature = temperature
        self.least_exponent = 0.0 if temperature is None else IGNORED_SCORE

    @abstractmethod
    def _terms(self, block: ScoreBlock, scores: Tensor, positives: Tensor) -> Tensor:
        """Return the terms (Q, b) of scores, those of the answers included."""

    def _exponents(self, block: ScoreBlock) -> Tensor:
        """Return the logarithms (Q, b) of the weights of the negatives."""
        if self._temperature is None:
            return torch.zeros_like(block.scores)
        exponents = self._temperature * block.scores
        exponents[block.answers] = IGNORED_SCORE
        return exponents

    def add(self, numbers: Tensor, pulls: Tensor, block: ScoreBlock) -> None:
        exponents, greatest = self._exponents(block), numbers[GREATEST]
        new = torch.maximum(greatest, exponents.amax(1))
        keeps, powers = (greatest - new).exp(), (exponents - new[:, None]).exp()
        powers[block.answers] = 0
        positives = block.pairs.scores.detach().requires_grad_()
        with torch.enable_grad():
            terms = self._terms(block, block.scores, positives)
            weighted = (powers * terms).sum(1)
            total = weighted.sum()
        if self.reads_answers:
            (block_pulls,) = torch.autograd.grad(total, positives)
            pulls.mul_(keeps[block.pairs.query_of]).add_(block_pulls)
        by_themselves = self.answer_weight * terms.detach()[block.answers]
        numbers[TARGET].index_add_(0, block.answers[0], by_themselves)
        numbers[TOTAL] = numbers[TOTAL] * keeps + powers.sum(1)
        numbers[TERMS] = numbers[TERMS] * keeps + weighted.detach()
        numbers[GREATEST] = new

    @quietly
    def totals(self, numbers: Floats, pulls: Floats, answers: AnswerScores) -> Totals:
        top, sums = softmax_totals(numbers)
        # A query without negatives has no terms, and its weights are those of none.
        sums = np.where(sums > 0, sums, 1.0) if self._temperature is not None else np.ones_like(sums)
        scales = np.exp(numbers[:, GREATEST].astype(np.float64) - top) / sums
        terms = (numbers[:, TERMS] * scales).sum(0)
        pulled = (pulls * scales[:, answers.query_of]).sum(0)
        return Totals(_summed(numbers, TARGET) + terms, top + np.log(sums), pulled)

    def score_gradients(self, block: ScoreBlock, shift: Tensor, pulls: Tensor) -> Tensor:
        weights = (self._exponents(block) - shift).exp()
        weights[block.answers] = self.answer_weight
        with torch.enable_grad():
            leaf = block.scores.detach().requires_grad_()
            terms = self._terms(block, leaf, block.pairs.scores)
            (gradients,) = torch.autograd.grad((weights * terms).sum(), leaf)
        if self.reads_answers:
            gradients[block.answers] += pulls[block.numbers]
        return gradients


class FullPointwise(_FullTerms):
    """A loss of each candidate and its label: needs no other scores, or the normalizer of the weights."""

    answer_weight = 1.0

    def _terms(self, block: ScoreBlock, scores: Tensor, positives: Tensor) -> Tensor:
        return self._formula(scores, block.labels)


class FullPairwise(_FullTerms):
    """A loss of each answer beside each negative: needs the answers' scores first; labels have no effect."""

    splits_labels = True
    reads_answers = True
    answer_weight = 0.0

    def _terms(self, block: ScoreBlock, scores: Tensor, positives: Tensor) -> Tensor:
        pairs = block.pairs
        terms = self._formula(positives[:, None], scores[pairs.query_of]) * pairs.shares[:, None]
        return torch.zeros_like(scores).index_add(0, pairs.query_of, terms)
