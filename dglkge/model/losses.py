"""Losses of one true answer against its negatives, one number per query.

Queries are not reduced here: the trainer sums over a global batch and divides by its size. How the negatives
of a query are reduced is in :mod:`.negative_terms`, for all losses alike; the form over all candidates, which
follows from the same formulas, in :mod:`.full_losses`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from dglkge.model.functions import Tensor, functional, torch
from dglkge.model.negative_terms import IGNORED_SCORE, Adversarial, Mean, Reduction, Sum, counted, without
from dglkge.registry import Registry, deferred
from dglkge.settings import ComponentSettings, settings_of

if TYPE_CHECKING:
    import numpy as np

    from dglkge.kernels import losses as kernels
    from dglkge.model import full_losses
else:
    np, kernels = deferred("numpy"), deferred("dglkge.kernels.losses")
    full_losses = deferred("dglkge.model.full_losses")


class LossSettings(ComponentSettings):
    """Settings of every loss."""

    batch_reduction: Literal["mean", "sum"] = "mean"
    """over the triples (k_vs_all: queries) of a global batch: mean, or sum as in PyTorch-BigGraph."""
    relation_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """weights of relations, e.g. {born_in: 2, near: 0.5}; others: 1; they multiply loss and regularizer."""

    @property
    def has_confidences(self) -> bool:
        """Whether weights of triples are labels."""
        return bool(getattr(self, "confidences", False))

    @property
    def has_adversarial_weights(self) -> bool:
        """Whether negatives are weighed by their scores, apart from losses that always do."""
        return bool(getattr(self, "adversarial_weights", False))


class ReductionSettings(LossSettings):
    """Settings of losses whose terms of the negatives can be added."""

    reduction: Literal["mean", "sum"] = "mean"
    """over the negatives of a query: mean, or sum as in PyTorch-BigGraph's ranking loss."""


class AdversarialSettings(LossSettings):
    """Settings of losses that can weigh their negatives."""

    adversarial_weights: bool = False
    """weigh negatives by the softmax of their scores, as self_adversarial does (Sun et al. 2019)."""
    adversarial_temperature: float = Field(1.0, ge=0)
    """factor on the scores in this softmax."""


class ConfidenceSettings(LossSettings):
    """Settings of losses that take confidences as labels."""

    confidences: bool = False
    """weights of triples are confidences in [0, 1], labels of the true answers (Chen et al. 2019)."""


class TermSettings(ConfidenceSettings, AdversarialSettings, ReductionSettings):
    """Settings of losses with a term for each answer by itself."""


class Loss(ABC):
    """Loss of each query; a new one is a :class:`PointwiseLoss` or a :class:`PairwiseLoss`.

    Parameters
    ----------
    settings : LossSettings, optional
        An instance of ``Settings``; its defaults if left out. The reduction follows from those of its fields
        that :class:`ReductionSettings` and :class:`AdversarialSettings` declare.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    compiled : bool
        Whether the class itself has :meth:`loop` or ``loop_terms``. A subclass may compute another loss, so
        it does not inherit the fact.
    loop_terms : pair of str
        Formulas of a sum of terms in :mod:`dglkge.kernels.losses`, for the true answer and a negative.
    is_cross_entropy : bool
        Whether its sum over all candidates is binary cross entropy, which has compiled loops. Not inherited
        either.
    takes_log_odds : bool
        Whether it takes scores for log-odds, up to one constant: a share of the true answers that is c times
        as large then moves the scores of these by log c. Not inherited either.
    Settings : type of LossSettings
        Its options; not inherited either. With those of :class:`ConfidenceSettings` its call has a fourth
        parameter, ``labels=None``: a (B,) tensor of confidences in [0, 1] that the true answers are true, in
        place of 1.
    reduction : Reduction
        Of the terms of a query's negatives; :data:`dglkge.model.negative_terms.Mean` unless it is set.
    """

    help: ClassVar[str] = ""
    compiled: ClassVar[bool] = False
    loop_terms: ClassVar[tuple[str, str]]
    is_cross_entropy: ClassVar[bool] = False
    takes_log_odds: ClassVar[bool] = False
    Settings: ClassVar[type[LossSettings]] = LossSettings
    reduction: Reduction = Mean()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # __dict__ and not getattr: an inherited loop would compute the loss of the base.
        cls.compiled = bool({"loop", "loop_terms"} & cls.__dict__.keys())
        cls.is_cross_entropy = cls.__dict__.get("is_cross_entropy", False)
        cls.takes_log_odds = cls.__dict__.get("takes_log_odds", False)
        cls.Settings = cls.__dict__.get("Settings", LossSettings)

    def __init__(self, settings: LossSettings | None = None) -> None:
        options: Any = settings or self.Settings()
        self.settings = options
        if options.has_adversarial_weights:
            self.reduction = Adversarial(options.adversarial_temperature)
        elif getattr(options, "reduction", "mean") == "sum":
            self.reduction = Sum()

    @property
    def adversarial_temperature(self) -> float | None:
        """Temperature of the weights of its negatives; None: they are weighed alike."""
        return self.reduction.temperature if isinstance(self.reduction, Adversarial) else None

    def loop(self) -> Callable[..., float]:
        """Return the loss and its gradients as one compiled pass over the scores.

        Its arguments are those of :func:`dglkge.kernels.losses.loss_loop` after the first one.
        """
        kinds = {Sum: kernels.SUM, Adversarial: kernels.ADVERSARIAL}
        mean = kernels.MEAN_WITH_TRUTH if isinstance(self, BCE) else kernels.MEAN
        temperature = getattr(self.reduction, "temperature", 0.0)
        margin = np.float32(getattr(self.settings, "margin", 0.0))
        numbers = margin, kinds.get(type(self.reduction), mean), np.float32(temperature)
        terms = (getattr(kernels, name) for name in self.loop_terms)
        return functools.partial(kernels.loss_loop(*terms), numbers)

    @abstractmethod
    def __call__(self, positive: Tensor, negative: Tensor, ignored: Tensor | None = None) -> Tensor:
        """Return the loss (B,) of each query.

        Parameters
        ----------
        positive : (B,) tensor
            Scores of the true answers.
        negative : (B, N) tensor
            Scores of the negatives.
        ignored : (B, N) bool tensor, optional
            Negatives that do not count, such as those that are the true answer.
        """

    @abstractmethod
    def over_candidates(self) -> full_losses.FullLoss:
        """Return its form over all candidates."""


class PointwiseLoss(Loss):
    """Sum of one term for each answer by itself: true with label 1, a negative with label 0.

    Over all candidates, every answer has label 1, and the terms of the negatives are added; adversarial
    weights make a mean of them.
    """

    ignored_score: ClassVar[float] = IGNORED_SCORE

    @abstractmethod
    def true(self, scores: Tensor) -> Tensor:
        """Return the loss of each true answer, of any shape."""

    @abstractmethod
    def false(self, scores: Tensor) -> Tensor:
        """Return the loss of each negative, of any shape."""

    def labeled(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the expected loss of answers that are true with the probability of their labels."""
        return labels * self.true(scores) + (1 - labels) * self.false(scores)

    def __call__(
        self, positive: Tensor, negative: Tensor, ignored: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        true = self.true(positive) if labels is None else self.labeled(positive, labels)
        terms = self.false(without(negative, ignored, self.ignored_score))
        return true + self.reduction(terms, negative, ignored)

    def over_candidates(self) -> full_losses.FullLoss:
        temperature = self.adversarial_temperature
        if self.is_cross_entropy and temperature is None:
            return full_losses.FullCrossEntropy()
        return full_losses.FullPointwise(self.labeled, temperature)


class PairwiseLoss(Loss):
    """Sum of one term for each pair of the true answer and a negative.

    Over all candidates, the terms of the negatives are added; adversarial weights make a mean of them. A
    query with k answers has the mean over its answers.
    """

    @abstractmethod
    def pairs(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the loss (B, N) of true answers (B, 1), each beside its negatives (B, N)."""

    def __call__(self, positive: Tensor, negative: Tensor, ignored: Tensor | None = None) -> Tensor:
        terms = self.pairs(positive.unsqueeze(1), without(negative, ignored))
        return self.reduction(terms, negative, ignored)

    def over_candidates(self) -> full_losses.FullLoss:
        return full_losses.FullPairwise(self.pairs, self.adversarial_temperature)


LOSSES: Registry[type[Loss]] = Registry("loss")


def build_loss(name: str, **options: Any) -> Loss:
    """Build a loss of :data:`LOSSES` by name, with its settings, e.g. ``margin``.

    An InputError if the name is not registered, the loss has no such option, or a value is out of range.
    """
    kind = LOSSES.get(name)
    return kind(settings_of("loss", kind.Settings, {"name": name, **options}))


@LOSSES.register("softmax")
class Softmax(Loss):
    """Cross entropy of the true answer among itself and its negatives.

    -log(exp(p) / (exp(p) + sum_j exp(n_j))). As PyTorch-BigGraph's ``softmax``;
    Lacroix et al. 2018 use it with all entities as negatives. With adversarial weights w the sum is
    K sum_j w_j exp(n_j), K the number of negatives (Robinson et al. 2021, with w held constant).
    """

    help = "cross entropy of the true answer among its negatives"
    takes_log_odds = True
    Settings = AdversarialSettings

    def __call__(self, positive: Tensor, negative: Tensor, ignored: Tensor | None = None) -> Tensor:
        kept = without(negative, ignored)
        if isinstance(self.reduction, Adversarial):
            # Masked again: the share of an ignored negative is about -1e30 too, and float32 ends at 3e38.
            kept = without(negative + self.reduction.log_shares(negative, ignored), ignored)
        # The true answer is column 0 of every row; cross_entropy then subtracts the row's maximum, so no
        # exponential overflows.
        scores = torch.cat([positive.unsqueeze(1), kept], dim=1)
        true_column = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        return functional.cross_entropy(scores, true_column, reduction="none")

    def over_candidates(self) -> full_losses.FullLoss:
        return full_losses.FullSoftmax()

    def loop(self) -> Callable[..., float]:
        temperature = self.adversarial_temperature
        return functools.partial(kernels.softmax, np.float32(-1 if temperature is None else temperature))


@LOSSES.register("logistic")
class Logistic(PointwiseLoss):
    """softplus(-p) + mean_j softplus(n_j): binary cross entropy, both classes weighing the same.

    Trouillon et al. 2016; the mean over negatives is PyTorch-BigGraph's ``logistic``.
    """

    help = "binary cross entropy, mean over the negatives (Trouillon et al. 2016)"
    is_cross_entropy = True
    takes_log_odds = True
    Settings = TermSettings
    loop_terms = "logistic_truth", "logistic_term"

    def true(self, scores: Tensor) -> Tensor:
        # softplus(x) = -log sigmoid(-x), which does not overflow and has no log(0).
        return functional.softplus(-scores)

    def false(self, scores: Tensor) -> Tensor:
        return functional.softplus(scores)


@LOSSES.register("bce")
class BCE(Logistic):
    """(softplus(-p) + sum_j softplus(n_j)) / (1 + K): binary cross entropy, every answer one of 1 + K terms.

    The cross entropy of Dettmers et al. 2018 over the true answer and its K negatives. :class:`Logistic`
    gives the true answer the weight of all its negatives together. As a sum, or with adversarial weights, it
    is the same number as that one.
    """

    help = "binary cross entropy, mean over the true answer and its negatives (Dettmers et al. 2018)"
    is_cross_entropy = True
    takes_log_odds = True
    Settings = TermSettings
    loop_terms = "logistic_truth", "logistic_term"

    def __call__(
        self, positive: Tensor, negative: Tensor, ignored: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        if not isinstance(self.reduction, Mean):
            return super().__call__(positive, negative, ignored, labels)
        true = self.true(positive) if labels is None else self.labeled(positive, labels)
        return (true + self.false(without(negative, ignored)).sum(1)) / (1 + counted(negative, ignored))


@LOSSES.register("margin_ranking")
class MarginRanking(PairwiseLoss):
    """mean_j max(0, margin - p + n_j) (Bordes et al. 2013). The sum is PyTorch-BigGraph's ``ranking``."""

    help = "max(0, margin - positive + negative), mean over the negatives (Bordes et al. 2013)"
    loop_terms = "no_truth", "ranking_term"

    class Settings(AdversarialSettings, ReductionSettings):
        """Its options."""

        margin: float = Field(1.0, gt=0)
        """by how much the true answer should outscore a negative."""

    def pairs(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (negative + (self.settings.margin - positive)).relu()


@LOSSES.register("hinge")
class Hinge(PointwiseLoss):
    """max(0, margin - p) + mean_j max(0, margin + n_j): each answer against the margin by itself.

    The hinge loss (Cortes and Vapnik 1995) with labels 1 and -1, as DGL-KE's ``Hinge`` without ``pairwise``
    (Zheng et al. 2020).
    """

    help = "max(0, margin - positive) and max(0, margin + negative), mean over the negatives (as DGL-KE's)"
    loop_terms = "hinge_truth", "hinge_term"

    class Settings(TermSettings):
        """Its options."""

        margin: float = Field(1.0, gt=0)
        """score of a true answer, and minus that of a negative; in self_adversarial (default 9) the distance
        of an answer that is as likely as not."""

    def true(self, scores: Tensor) -> Tensor:
        return (self.settings.margin - scores).relu()

    def false(self, scores: Tensor) -> Tensor:
        return (scores + self.settings.margin).relu()


@LOSSES.register("squared")
class Squared(PointwiseLoss):
    """(1 - p)^2 + mean_j n_j^2: squared errors of the labels 1 and 0 (Nickel et al. 2011).

    A confidence c is the label: (c - p)^2 (Chen et al. 2019, UKGE).
    """

    help = "squared error of the labels 1 and 0, mean over the negatives (Nickel et al. 2011)"
    # Not -1e30, whose square overflows.
    ignored_score = 0.0
    Settings = TermSettings
    loop_terms = "squared_truth", "squared_term"

    def true(self, scores: Tensor) -> Tensor:
        return (scores - 1.0).square()

    def false(self, scores: Tensor) -> Tensor:
        return scores.square()

    def labeled(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels).square()


@LOSSES.register("self_adversarial")
class SelfAdversarial(PointwiseLoss):
    """Log-sigmoid loss with negatives weighted by a softmax of their scores (Sun et al. 2019, eq. 6).

    -log sigmoid(margin + p) - sum_j w_j log sigmoid(-margin - n_j), w = softmax_j(temperature n), through
    which no gradient flows. For scores that are minus a distance.
    """

    help = "log-sigmoid with a margin, negatives weighted by their scores (Sun et al. 2019)"
    takes_log_odds = True
    loop_terms = "logistic_truth", "logistic_term"

    class Settings(ConfidenceSettings):
        """Its options."""

        margin: float = Field(9.0, ge=0)
        """distance of an answer that is as likely as not (gamma in DGL-KE)."""
        adversarial_temperature: float = Field(1.0, ge=0)
        """factor on the scores in the softmax of the weights; 0: equal weights."""

    def __init__(self, settings: LossSettings | None = None) -> None:
        super().__init__(settings)
        self.reduction = Adversarial(self.settings.adversarial_temperature)

    def true(self, scores: Tensor) -> Tensor:
        return functional.softplus(-(scores + self.settings.margin))

    def false(self, scores: Tensor) -> Tensor:
        return functional.softplus(scores + self.settings.margin)
