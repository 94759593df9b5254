"""Losses of one true answer against its negatives, one number per query.

Nothing is reduced here: the trainer sums over a global batch and divides by its size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Optional

from dglkge.model.options import build_with_options, checked_number, option_names
from dglkge.registry import Registry, deferred

if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:
    torch = deferred("torch")
    functional = deferred("torch.nn.functional")

IGNORED_SCORE = -1e30
"""Score of an ignored negative: it adds nothing to any loss and gets no gradient. Finite: if all negatives of
a query are ignored, its loss is a number and not NaN."""


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
        Whether the compiled training step (``training/dot_softmax.py``) computes exactly this loss and its
        gradient. A subclass may compute another one, so it does not inherit the fact.
    candidate_kind : str
        Its form over all candidates (``training/shard_objective.py``): "softmax", "bce", or empty: it has
        none. Not inherited either.
    """

    help: ClassVar[str] = ""
    bigraph_name: ClassVar[str] = ""
    compiled: ClassVar[bool] = False
    candidate_kind: ClassVar[str] = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # __dict__ and not getattr: an inherited True would send a subclass to loops that compute its base's
        # loss.
        cls.compiled = cls.__dict__.get("compiled", False)
        cls.candidate_kind = cls.__dict__.get("candidate_kind", "")

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
    Lacroix et al. 2018 use it with all entities as negatives.
    """

    help = "cross entropy of the true answer among its negatives"
    bigraph_name = "softmax"
    compiled = True
    candidate_kind = "softmax"

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        # The true answer is column 0 of every row; cross_entropy then subtracts the row's maximum, so no
        # exponential overflows.
        scores = torch.cat([positive.unsqueeze(1), _without(negative, ignored)], dim=1)
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

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        # softplus(x) = -log sigmoid(-x), which does not overflow and has no log(0).
        terms = functional.softplus(_without(negative, ignored))
        return functional.softplus(-positive) + _mean_kept(terms, ignored)


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

    def __init__(self, margin: float = 1.0) -> None:
        self.margin = checked_number("the margin", margin, 0, exclusive=True)

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        shortfall = (_without(negative, ignored) + (self.margin - positive).unsqueeze(1)).relu()
        return _mean_kept(shortfall, ignored)


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

    def __init__(self, margin: float = 9.0, adversarial_temperature: float = 1.0) -> None:
        self.margin = checked_number("the margin", margin, 0)
        self.adversarial_temperature = checked_number(
            "the adversarial temperature", adversarial_temperature, 0
        )

    def __call__(
        self, positive: torch.Tensor, negative: torch.Tensor, ignored: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the loss of each query."""
        # Ignored scores are set after the temperature: a temperature of 0 would turn -1e30 into 0, and
        # ignored negatives would get weight.
        weights = _without(negative.detach() * self.adversarial_temperature, ignored)
        terms = functional.softplus(_without(negative, ignored) + self.margin)
        return functional.softplus(-positive - self.margin) + (weights.softmax(1) * terms).sum(1)


def _without(scores: torch.Tensor, ignored: Optional[torch.Tensor]) -> torch.Tensor:
    return scores if ignored is None else scores.masked_fill(ignored, IGNORED_SCORE)


def _mean_kept(terms: torch.Tensor, ignored: Optional[torch.Tensor]) -> torch.Tensor:
    """Mean over the negatives kept, of terms that are 0 where ignored; 0 where none is kept."""
    if ignored is None:
        return terms.mean(1)
    # Ignored terms are 0 already (softplus or relu of -1e30), so only the count needs correction.
    num_kept = terms.shape[1] - ignored.sum(1)
    return terms.sum(1) / num_kept.clamp_min(1)
