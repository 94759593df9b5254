"""Reductions of the terms of a query's negatives to one number: mean, sum, self-adversarial mean."""

from __future__ import annotations

from dglkge.model.functions import Tensor

IGNORED_SCORE = -1e30
"""Score of an ignored negative: it adds nothing to any loss and gets no gradient. Finite: if all negatives of
a query are ignored, its loss is a number and not NaN."""


class Mean:
    """Mean over the negatives that are not ignored, as every reduction one number for each query, (B,).

    It is called with the losses of the negatives (B, N), 0 where they are ignored, with their scores, and
    with those that are ignored; 0 where all are.
    """

    def __call__(self, terms: Tensor, negative: Tensor, ignored: Tensor | None) -> Tensor:
        # Ignored terms are 0 already, so only the count needs correction.
        return terms.sum(1) / counted(terms, ignored).clamp_min(1)


class Sum:
    """Sum over the negatives, as in PyTorch-BigGraph's ranking loss (Lerer et al. 2019)."""

    def __call__(self, terms: Tensor, negative: Tensor, ignored: Tensor | None) -> Tensor:
        return terms.sum(1)


class Adversarial:
    """Mean weighed by the softmax of temperature times score (Sun et al. 2019, eq. 5).

    No gradient flows through the weights.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, terms: Tensor, negative: Tensor, ignored: Tensor | None) -> Tensor:
        return (self._scores(negative, ignored).softmax(1) * terms).sum(1)

    def log_shares(self, negative: Tensor, ignored: Tensor | None) -> Tensor:
        """Return log(K w) of the weights w of K negatives, (B, N): 0 for equal ones, undefined if ignored."""
        weights = self._scores(negative, ignored).log_softmax(1)
        return weights + counted(negative, ignored).clamp_min(1).log().unsqueeze(1)

    def _scores(self, negative: Tensor, ignored: Tensor | None) -> Tensor:
        # Ignored scores are set after the temperature: a temperature of 0 would turn -1e30 into 0, and
        # ignored negatives would get weight.
        return without(negative.detach() * self.temperature, ignored)


Reduction = Mean | Sum | Adversarial


def without(scores: Tensor, ignored: Tensor | None, value: float = IGNORED_SCORE) -> Tensor:
    """Return scores with a value in place of ignored ones, through which no gradient flows."""
    return scores if ignored is None else scores.masked_fill(ignored, value)


def counted(scores: Tensor, ignored: Tensor | None) -> Tensor:
    """Return the number of negatives of each query that are not ignored, (B,)."""
    if ignored is None:
        return scores.new_full((len(scores),), scores.shape[1])
    return scores.shape[1] - ignored.sum(1)
