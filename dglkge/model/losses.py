"""Losses of one true answer against its negatives, one number per query.

Queries are not reduced here: the trainer sums over a global batch and divides by its size. How the negatives
of a query are reduced is in :mod:`.negative_terms`, for all losses alike.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from dglkge.model.negative_terms import (
    IGNORED_SCORE,
    Adversarial,
    Mean,
    Reduction,
    Sum,
    adversarial_log_shares,
    counted,
    without,
)
from dglkge.registry import Registry, deferred
from dglkge.settings import ComponentSettings, setting, settings_of

if TYPE_CHECKING:
    import torch
    from torch.nn import functional

    from dglkge.kernels import losses as kernels
    from dglkge.kernels import softmax as softmax_kernels
else:
    torch = deferred("torch")
    functional = deferred("torch.nn.functional")
    kernels = deferred("dglkge.kernels.losses")
    softmax_kernels = deferred("dglkge.kernels.softmax")

__all__ = [
    "BCE",
    "IGNORED_SCORE",
    "LOSSES",
    "Hinge",
    "Logistic",
    "Loss",
    "MarginRanking",
    "SelfAdversarial",
    "Softmax",
    "Squared",
    "build_loss",
]


class LossSettings(ComponentSettings):
    """Settings of every loss."""

    batch_reduction: Literal["mean", "sum"] = setting(
        "mean", "over the triples (k_vs_all: queries) of a global batch: mean, or sum as in PyTorch-BigGraph"
    )
    relation_weights: dict[str, Annotated[float, Field(ge=0)]] = setting(
        {},
        "weights of relations by name, e.g. {born_in: 2, near: 0.5}; others have 1; they multiply the loss "
        "and the regularizer of a triple, as its own weight does",
    )

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

    reduction: Literal["mean", "sum"] = setting(
        "mean", "over the negatives of a query: mean, or sum as in PyTorch-BigGraph's ranking loss"
    )


class AdversarialSettings(LossSettings):
    """Settings of losses that can weigh their negatives."""

    adversarial_weights: bool = setting(
        False,
        "weigh the negatives of a query by the softmax of their scores times adversarial_temperature, as the "
        "loss self_adversarial always does (Sun et al. 2019)",
    )
    adversarial_temperature: float = setting(
        1.0, "factor on the scores in the softmax of a self-adversarial loss's weights", ge=0
    )


class ConfidenceSettings(LossSettings):
    """Settings of losses that take confidences as labels."""

    confidences: bool = setting(
        False,
        "the weights of the triples are confidences in [0, 1], and the labels of the true answers "
        "(Chen et al. 2019); false: weights multiply losses",
    )


class TermSettings(ConfidenceSettings, AdversarialSettings, ReductionSettings):
    """Settings of losses with a term for each answer by itself."""


class Loss(ABC):
    """Loss of each query.

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
        Whether the class itself has :meth:`loop`. A subclass may compute another loss, so it does not inherit
        the fact.
    candidate_kind : str
        Its form over all candidates (``step/objectives/shard_objective.py``): "softmax", "bce", or empty:
        it has none. Not inherited either.
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
    candidate_kind: ClassVar[str] = ""
    takes_log_odds: ClassVar[bool] = False
    Settings: ClassVar[type[LossSettings]] = LossSettings
    reduction: Reduction = Mean()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # __dict__ and not getattr: an inherited loop would compute the loss of the base.
        cls.compiled = "loop" in cls.__dict__
        cls.candidate_kind = cls.__dict__.get("candidate_kind", "")
        cls.takes_log_odds = cls.__dict__.get("takes_log_odds", False)
        cls.Settings = cls.__dict__.get("Settings", LossSettings)

    def __init__(self, settings: LossSettings | None = None) -> None:
        own: Any = self.Settings() if settings is None else settings
        self.settings = own
        if own.has_adversarial_weights:
            self.reduction = Adversarial(own.adversarial_temperature)
        elif getattr(own, "reduction", "mean") == "sum":
            self.reduction = Sum()

    def loop(self) -> Callable[..., float]:
        """Return the loss and its gradients as one compiled pass over the scores.

        It has the arguments of :func:`dglkge.kernels.losses.loss_loop` after the first one.
        """
        raise NotImplementedError

    @abstractmethod
    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of each query.

        Parameters
        ----------
        positive : (B,) tensor
            Scores of the true answers.
        negative : (B, N) tensor
            Scores of the negatives.
        ignored : (B, N) bool tensor, optional
            Negatives that do not count, such as those that are the true answer.

        Returns
        -------
        (B,) tensor
        """


LOSSES: Registry[type[Loss]] = Registry("loss")


def build_loss(name: str, **options: Any) -> Loss:
    """Build a loss by name.

    Parameters
    ----------
    name : str
        A member of :data:`LOSSES`.
    **options : object
        Its settings, e.g. ``margin``.

    Raises
    ------
    InputError
        If the name is not registered, the loss has no such option, or a value is out of range.
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
    candidate_kind = "softmax"
    takes_log_odds = True
    Settings = AdversarialSettings

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        kept = without(negative, ignored)
        if isinstance(self.reduction, Adversarial):
            shares = adversarial_log_shares(negative, ignored, self.reduction.temperature)
            # Masked again: the share of an ignored negative is about -1e30 too, and float32 ends at 3e38.
            kept = without(negative + shares, ignored)
        # The true answer is column 0 of every row; cross_entropy then subtracts the row's maximum, so no
        # exponential overflows.
        scores = torch.cat([positive.unsqueeze(1), kept], dim=1)
        true_column = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        return functional.cross_entropy(scores, true_column, reduction="none")

    def loop(self) -> Callable[..., float]:
        temperature = self.reduction.temperature if isinstance(self.reduction, Adversarial) else -1
        return functools.partial(softmax_kernels.softmax, np.float32(temperature))


@LOSSES.register("logistic")
class Logistic(Loss):
    """softplus(-p) + mean_j softplus(n_j): binary cross entropy, both classes weighing the same.

    Trouillon et al. 2016; the mean over negatives is PyTorch-BigGraph's ``logistic``.
    """

    help = "binary cross entropy, mean over the negatives (Trouillon et al. 2016)"
    candidate_kind = "bce"
    takes_log_odds = True
    Settings = TermSettings

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        # softplus(x) = -log sigmoid(-x), which does not overflow and has no log(0).
        terms = functional.softplus(without(negative, ignored))
        return _cross_entropy(positive, labels) + self.reduction(terms, negative, ignored)

    def loop(self) -> Callable[..., float]:
        return _terms_loop(self, kernels.logistic_truth, kernels.logistic_term)


@LOSSES.register("bce")
class BCE(Loss):
    """(softplus(-p) + sum_j softplus(n_j)) / (1 + K): binary cross entropy, every answer one of 1 + K terms.

    The cross entropy of Dettmers et al. 2018 over the true answer and its K negatives. :class:`Logistic`
    gives the true answer the weight of all its negatives together. As a sum, or with adversarial weights, it
    is the same number as that one.
    """

    help = "binary cross entropy, mean over the true answer and its negatives (Dettmers et al. 2018)"
    candidate_kind = "bce"
    takes_log_odds = True
    Settings = TermSettings

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        terms = functional.softplus(without(negative, ignored))
        of_truth = _cross_entropy(positive, labels)
        if isinstance(self.reduction, Mean):
            return (of_truth + terms.sum(1)) / (1 + counted(negative, ignored))
        return of_truth + self.reduction(terms, negative, ignored)

    def loop(self) -> Callable[..., float]:
        return _terms_loop(self, kernels.logistic_truth, kernels.logistic_term, mean=kernels.MEAN_WITH_TRUTH)


@LOSSES.register("margin_ranking")
class MarginRanking(Loss):
    """mean_j max(0, margin - p + n_j) (Bordes et al. 2013). The sum is PyTorch-BigGraph's ``ranking``."""

    help = "max(0, margin - positive + negative), mean over the negatives (Bordes et al. 2013)"

    class Settings(AdversarialSettings, ReductionSettings):
        """Its options."""

        margin: float = setting(1.0, "by how much the true answer should outscore a negative", gt=0)

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        shortfall = (without(negative, ignored) + (self.settings.margin - positive).unsqueeze(1)).relu()
        return self.reduction(shortfall, negative, ignored)

    def loop(self) -> Callable[..., float]:
        return _terms_loop(self, kernels.no_truth, kernels.ranking_term, self.settings.margin)


@LOSSES.register("hinge")
class Hinge(Loss):
    """max(0, margin - p) + mean_j max(0, margin + n_j): each answer against the margin by itself.

    The hinge loss (Cortes and Vapnik 1995) with labels 1 and -1, as DGL-KE's ``Hinge`` without ``pairwise``
    (Zheng et al. 2020).
    """

    help = "max(0, margin - positive) and max(0, margin + negative), mean over the negatives (as DGL-KE's)"

    class Settings(TermSettings):
        """Its options."""

        margin: float = setting(1.0, "score of a true answer, and minus that of a negative", gt=0)

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        of_truth = _expected(lambda score: (self.settings.margin - score).relu(), positive, labels)
        terms = (without(negative, ignored) + self.settings.margin).relu()
        return of_truth + self.reduction(terms, negative, ignored)

    def loop(self) -> Callable[..., float]:
        return _terms_loop(self, kernels.hinge_truth, kernels.hinge_term, self.settings.margin)


@LOSSES.register("squared")
class Squared(Loss):
    """(1 - p)^2 + mean_j n_j^2: squared errors of the labels 1 and 0 (Nickel et al. 2011).

    A confidence c is the label: (c - p)^2 (Chen et al. 2019, UKGE).
    """

    help = "squared error of the labels 1 and 0, mean over the negatives (Nickel et al. 2011)"
    Settings = TermSettings

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        truth = 1.0 if labels is None else labels
        # Not -1e30, whose square overflows.
        terms = without(negative, ignored, 0.0).square()
        return (positive - truth).square() + self.reduction(terms, negative, ignored)

    def loop(self) -> Callable[..., float]:
        return _terms_loop(self, kernels.squared_truth, kernels.squared_term)


@LOSSES.register("self_adversarial")
class SelfAdversarial(Loss):
    """Log-sigmoid loss with negatives weighted by a softmax of their scores (Sun et al. 2019, eq. 6).

    -log sigmoid(margin + p) - sum_j w_j log sigmoid(-margin - n_j), w = softmax_j(temperature n), through
    which no gradient flows. For scores that are minus a distance.
    """

    help = "log-sigmoid with a margin, negatives weighted by their scores (Sun et al. 2019)"
    takes_log_odds = True

    class Settings(ConfidenceSettings):
        """Its options."""

        margin: float = setting(9.0, "distance of an answer that is as likely as not (gamma in DGL-KE)", ge=0)
        adversarial_temperature: float = setting(
            1.0, "factor on the scores in the softmax of the weights; 0 weighs all negatives the same", ge=0
        )

    def __init__(self, settings: LossSettings | None = None) -> None:
        super().__init__(settings)
        self.reduction = Adversarial(self.settings.adversarial_temperature)

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        terms = functional.softplus(without(negative, ignored) + self.settings.margin)
        of_truth = _cross_entropy(positive + self.settings.margin, labels)
        return of_truth + self.reduction(terms, negative, ignored)

    def loop(self) -> Callable[..., float]:
        return _terms_loop(self, kernels.logistic_truth, kernels.logistic_term, self.settings.margin)


def _terms_loop(
    loss: Loss, truth: Callable, term: Callable, margin: float = 0.0, mean: int = 0
) -> Callable[..., float]:
    """Return the loop of a loss that is a sum of terms, with its margin and reduction."""
    temperature = getattr(loss.reduction, "temperature", 0.0)
    kind = {Sum: kernels.SUM, Adversarial: kernels.ADVERSARIAL}.get(type(loss.reduction), mean)
    numbers = (np.float32(margin), kind, np.float32(temperature))
    return functools.partial(kernels.loss_loop(truth, term), numbers)


def _cross_entropy(score: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    """Return -c log sigmoid(s) - (1 - c) log sigmoid(-s), (B,); without labels c = 1."""
    return _expected(lambda s: functional.softplus(-s), score, labels)


def _expected(
    loss: Callable[[torch.Tensor], torch.Tensor], score: torch.Tensor, labels: torch.Tensor | None
) -> torch.Tensor:
    """Return the expected loss (B,) of answers, each true with the probability of its label.

    ``loss`` is that of the score of a true answer; a false one has the loss of the opposite score.
    """
    if labels is None:
        return loss(score)
    return labels * loss(score) + (1 - labels) * loss(-score)
