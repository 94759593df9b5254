"""Losses of one true answer against its negatives, one number per query.

Queries are not reduced here: the trainer sums over a global batch and divides by its size. How the negatives
of a query are reduced is in :mod:`.negative_terms`, for all losses alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Optional

from dglkge.model.negative_terms import (
    IGNORED_SCORE,
    Adversarial,
    Mean,
    Reduction,
    adversarial_log_shares,
    counted,
    without,
)
from dglkge.model.options import build_with_options, checked_number, option_names
from dglkge.registry import Registry, deferred

if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:
    torch = deferred("torch")
    functional = deferred("torch.nn.functional")

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

REDUCTION, ADVERSARIAL_WEIGHTS, CONFIDENCES = SETTINGS = ("reduction", "adversarial_weights", "confidences")
"""Fields of the configuration's section ``loss`` that only some losses have."""


class Loss(ABC):
    """Loss of each query.

    The options of a loss are the parameters of its constructor; those that the configuration has a field
    for (``loss.margin``, ``loss.adversarial_temperature``) are set by it.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    bigraph_name : str
        PyTorch-BigGraph's name of the loss; empty where it has no equal.
    compiled : bool
        Whether the compiled training step (``step/objectives/dot_softmax.py``) computes exactly this loss
        and its gradient. A subclass may compute another one, so it does not inherit the fact.
    candidate_kind : str
        Its form over all candidates (``step/objectives/shard_objective.py``): "softmax", "bce", or empty:
        it has none. Not inherited either.
    takes_log_odds : bool
        Whether it takes scores for log-odds, up to one constant: a share of the true answers that is c times
        as large then moves the scores of these by log c. Not inherited either.
    settings : tuple of str
        Those of :data:`SETTINGS` that it obeys. Not inherited either. With ``"reduction"`` or
        ``"adversarial_weights"`` it reduces its negatives by ``reduction``. With ``"confidences"`` its call
        has a fourth parameter, ``labels=None``: a (B,) tensor of confidences in [0, 1] that the true answers
        are true, in place of 1.
    reduction : Reduction
        Of the terms of a query's negatives; :data:`dglkge.model.negative_terms.Mean` unless it is set.
    """

    help: ClassVar[str] = ""
    bigraph_name: ClassVar[str] = ""
    compiled: ClassVar[bool] = False
    candidate_kind: ClassVar[str] = ""
    takes_log_odds: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ()
    reduction: Reduction = Mean()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # __dict__ and not getattr: an inherited True would send a subclass to loops that compute its base's
        # loss.
        cls.compiled = cls.__dict__.get("compiled", False)
        cls.candidate_kind = cls.__dict__.get("candidate_kind", "")
        cls.takes_log_odds = cls.__dict__.get("takes_log_odds", False)
        cls.settings = cls.__dict__.get("settings", ())

    @classmethod
    def options(cls) -> list[str]:
        """Return the names of the loss's options."""
        return option_names(cls)

    @abstractmethod
    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
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


def build_loss(name: str, **options: float) -> Loss:
    """Build a loss by name.

    Parameters
    ----------
    name : str
        A member of :data:`LOSSES`.
    **options : float
        Its own keyword arguments, e.g. ``margin``.

    Raises
    ------
    InputError
        If the name is not registered, the loss has no such option, or a value is out of range.
    """
    return build_with_options(LOSSES, name, options)


@LOSSES.register("softmax")
class Softmax(Loss):
    """Cross entropy of the true answer among itself and its negatives.

    -log(exp(p) / (exp(p) + sum_j exp(n_j))). As PyTorch-BigGraph's ``softmax``;
    Lacroix et al. 2018 use it with all entities as negatives. With adversarial weights w the sum is
    K sum_j w_j exp(n_j), K the number of negatives (Robinson et al. 2021, with w held constant).
    """

    help = "cross entropy of the true answer among its negatives"
    bigraph_name = "softmax"
    compiled = True
    candidate_kind = "softmax"
    takes_log_odds = True
    settings = (ADVERSARIAL_WEIGHTS,)

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
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


@LOSSES.register("logistic")
class Logistic(Loss):
    """softplus(-p) + mean_j softplus(n_j): binary cross entropy, both classes weighing the same.

    Trouillon et al. 2016; the mean over negatives is PyTorch-BigGraph's ``logistic``.
    """

    help = "binary cross entropy, mean over the negatives (Trouillon et al. 2016)"
    candidate_kind = "bce"
    bigraph_name = "logistic"
    takes_log_odds = True
    settings = SETTINGS

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: Optional[torch.Tensor] = None,
        labels: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        # softplus(x) = -log sigmoid(-x), which does not overflow and has no log(0).
        terms = functional.softplus(without(negative, ignored))
        return _cross_entropy(positive, labels) + self.reduction(terms, negative, ignored)


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
    settings = SETTINGS

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: Optional[torch.Tensor] = None,
        labels: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        terms = functional.softplus(without(negative, ignored))
        of_truth = _cross_entropy(positive, labels)
        if isinstance(self.reduction, Mean):
            return (of_truth + terms.sum(1)) / (1 + counted(negative, ignored))
        return of_truth + self.reduction(terms, negative, ignored)


@LOSSES.register("margin_ranking")
class MarginRanking(Loss):
    """mean_j max(0, margin - p + n_j) (Bordes et al. 2013). PyTorch-BigGraph's ``ranking`` is the sum over j.

    Parameters
    ----------
    margin : float
        By how much the true answer should outscore a negative; greater than 0.
    """

    help = "max(0, margin - positive + negative), mean over the negatives (Bordes et al. 2013)"
    bigraph_name = "ranking"
    settings = (REDUCTION, ADVERSARIAL_WEIGHTS)

    def __init__(self, margin: float = 1.0) -> None:
        self.margin = checked_number("the margin", margin, 0, exclusive=True)

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        shortfall = (without(negative, ignored) + (self.margin - positive).unsqueeze(1)).relu()
        return self.reduction(shortfall, negative, ignored)


@LOSSES.register("hinge")
class Hinge(Loss):
    """max(0, margin - p) + mean_j max(0, margin + n_j): each answer against the margin by itself.

    The hinge loss (Cortes and Vapnik 1995) with labels 1 and -1, as DGL-KE's ``Hinge`` without ``pairwise``
    (Zheng et al. 2020).

    Parameters
    ----------
    margin : float
        The score that a true answer should reach, and a negative its opposite; greater than 0.
    """

    help = "max(0, margin - positive) and max(0, margin + negative), mean over the negatives (as DGL-KE's)"
    settings = SETTINGS

    def __init__(self, margin: float = 1.0) -> None:
        self.margin = checked_number("the margin", margin, 0, exclusive=True)

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: Optional[torch.Tensor] = None,
        labels: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        of_truth = _expected(lambda score: (self.margin - score).relu(), positive, labels)
        terms = (without(negative, ignored) + self.margin).relu()
        return of_truth + self.reduction(terms, negative, ignored)


@LOSSES.register("squared")
class Squared(Loss):
    """(1 - p)^2 + mean_j n_j^2: squared errors of the labels 1 and 0 (Nickel et al. 2011).

    A confidence c is the label: (c - p)^2 (Chen et al. 2019, UKGE).
    """

    help = "squared error of the labels 1 and 0, mean over the negatives (Nickel et al. 2011)"
    settings = SETTINGS

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: Optional[torch.Tensor] = None,
        labels: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        truth = 1.0 if labels is None else labels
        # Not -1e30, whose square overflows.
        terms = without(negative, ignored, 0.0).square()
        return (positive - truth).square() + self.reduction(terms, negative, ignored)


@LOSSES.register("self_adversarial")
class SelfAdversarial(Loss):
    """Log-sigmoid loss with negatives weighted by a softmax of their scores (Sun et al. 2019, eq. 6).

    -log sigmoid(margin + p) - sum_j w_j log sigmoid(-margin - n_j), w = softmax_j(temperature n), through
    which no gradient flows. For scores that are minus a distance.

    Parameters
    ----------
    margin : float
        The distance at which an answer is as likely as not; at least 0.
    adversarial_temperature : float
        0 weighs all negatives the same.
    """

    help = "log-sigmoid with a margin, negatives weighted by their scores (Sun et al. 2019)"
    takes_log_odds = True
    settings = (CONFIDENCES,)

    def __init__(self, margin: float = 9.0, adversarial_temperature: float = 1.0) -> None:
        self.margin = checked_number("the margin", margin, 0)
        self.adversarial_temperature = checked_number(
            "the adversarial temperature", adversarial_temperature, 0
        )
        self.reduction = Adversarial(self.adversarial_temperature)

    def __call__(
        self,
        positive: torch.Tensor,
        negative: torch.Tensor,
        ignored: Optional[torch.Tensor] = None,
        labels: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the loss of each query."""
        terms = functional.softplus(without(negative, ignored) + self.margin)
        of_truth = _cross_entropy(positive + self.margin, labels)
        return of_truth + self.reduction(terms, negative, ignored)


def _cross_entropy(score: torch.Tensor, labels: Optional[torch.Tensor]) -> torch.Tensor:
    """Return -c log sigmoid(s) - (1 - c) log sigmoid(-s), (B,); without labels c = 1."""
    return _expected(lambda s: functional.softplus(-s), score, labels)


def _expected(
    loss: Callable[[torch.Tensor], torch.Tensor], score: torch.Tensor, labels: Optional[torch.Tensor]
) -> torch.Tensor:
    """Return the expected loss (B,) of answers, each true with the probability of its label.

    ``loss`` is that of the score of a true answer; a false one has the loss of the opposite score.
    """
    if labels is None:
        return loss(score)
    return labels * loss(score) + (1 - labels) * loss(-score)
