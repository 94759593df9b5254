"""Regularizers of the rows of a query: the entity given, the relation, the answer, and products of them.

A triple is two queries, (h, r, ?) and (?, r, t), and each has its penalty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from dglkge.errors import InputError
from dglkge.model.functions import Tensor, autograd_functions, torch
from dglkge.model.functions.comparators import Dot
from dglkge.model.score_functions import PHASE, SCORE_FUNCTIONS, ScoreFunction
from dglkge.registry import Registry
from dglkge.settings import ComponentSettings, at_least_or
from dglkge.typing import Side

if TYPE_CHECKING:
    from dglkge.model.kge_model import KgeModel


class LoopWeights(NamedTuple):
    """What the compiled loops add to the gradients of a triple, see :func:`dglkge.kernels.dot.add_penalties`.

    Weights on each entity's row in a triple, on each query's relation, and on each query (entity times
    relation; always with power 2).
    """

    power: int
    entity: float
    relation: float
    product: float


class RegularizerSettings(ComponentSettings):
    """Settings of every regularizer: none but the name."""


class WeightSettings(RegularizerSettings):
    """Settings of penalties with a weight."""

    weight: Annotated[float, at_least_or(-1, 0)] = -1.0
    """factor before the regularizer; 0: none is computed; -1: 0.01 where there is a regularizer."""


class EntitySettings(WeightSettings):
    """Settings of penalties on the rows of entities."""

    entity_ratio: float = Field(1.0, ge=0)
    """factor besides weight on the terms of entities."""


class RowSettings(EntitySettings):
    """Settings of penalties on each row."""

    relation_ratio: float = Field(1.0, ge=0)
    """factor besides weight on the terms of relations."""


class PowerSettings(RowSettings):
    """Settings of penalties with a power of their own."""

    p: float = Field(3.0, ge=1)
    """the power."""


class ProductSettings(RegularizerSettings):
    """Settings of penalties on products of rows."""

    product_ratio: float = Field(1.0, ge=0)
    """factor besides weight on the terms of products of rows."""


RATIOS = ("entity_ratio", "relation_ratio", "product_ratio")
"""Factors besides the weight on the terms of entities, of relations and of products of rows."""


class Regularizer(ABC):
    """A penalty on the rows of queries, complex where ``complex_valued``: first half real, second half
    imaginary.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    compiled : bool
        Whether the compiled training step (``step/objectives/dot_softmax.py``) computes exactly this
        penalty and its gradient. A subclass may compute another one, so it does not inherit the fact.
    Settings : type of RegularizerSettings
        Its options. Without a weight it is no penalty.
    power : int
        Of the moduli, where ``compiled``.
    needs_answer : bool
        Whether a term multiplies the answer's row with another one: then the penalty needs all rows of a
        query in one place, where ``training.objective: k_vs_all`` does not have them.
    """

    help: ClassVar[str] = ""
    compiled: ClassVar[bool] = False
    Settings: ClassVar[type[RegularizerSettings]] = RowSettings
    needs_answer: ClassVar[bool] = False
    power: ClassVar[int] = 2

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.compiled = cls.__dict__.get("compiled", False)

    def __init__(self, settings: RegularizerSettings, complex_valued: bool = False) -> None:
        self.settings, self.complex_valued = settings, complex_valued
        self.weight = float(getattr(settings, "weight", 0.0))
        self.p = float(getattr(settings, "p", 3.0))
        ratios = (getattr(settings, ratio, 1.0) for ratio in RATIOS)
        self.entity_ratio, self.relation_ratio, self.product_ratio = ratios

    @property
    def loop_weights(self) -> LoopWeights:
        """Weights of the compiled loops; counts only where ``compiled``."""
        # An entity is in both queries of its triple.
        entity, relation = 2 * self.weight * self.entity_ratio, self.weight * self.relation_ratio
        return LoopWeights(self.power, entity, relation, 0)

    @classmethod
    def fits(cls, score_function: type[ScoreFunction]) -> bool:
        """Return whether the penalty is defined for a score function."""
        return True

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the weighted penalty of each entity's row by itself: (..., D) -> (...)."""
        return self.weight * self.entity_ratio * self.penalty(rows)

    def product_penalties(self, rows: Tensor) -> Tensor:
        """Return the weighted penalty of each product of rows: (..., D) -> (...)."""
        return self.weight * self.product_ratio * self.penalty(rows)

    @abstractmethod
    def penalty(self, rows: Tensor) -> Tensor:
        """Return the penalty of each row before its weight, summed over the row: (..., D) -> (...)."""

    def query_penalties(
        self, model: KgeModel, anchor: Tensor, relation_row: Tensor, answer: Tensor | None, side: Side
    ) -> Tensor:
        """Return the penalty of each query (B,); without the answers, all terms but those with the answer.

        Parameters
        ----------
        model : KgeModel
        anchor, answer : (B, D) tensor
            The entity given, and the answer.
        relation_row : (B, relation_width) tensor
            Only the direction that serves the side counts; phases, whose modulus is 1, never do.
        side : Side
            The side of the missing entity.
        """
        total = self(anchor) if answer is None else self(anchor) + self(answer)
        # A phase is an angle: its size has no meaning, and the modulus of exp(i r) is 1 in any case.
        if model.score_function.relation_init == PHASE:
            return total
        relation = model.score_function.penalized(model.direction(relation_row, side))
        return total + self.weight * self.relation_ratio * self.penalty(relation)

    def penalties(
        self,
        model: KgeModel,
        anchor: Tensor,
        relation_row: Tensor,
        answer: Tensor | None,
        side: Side,
        query: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return :meth:`query_penalties`, at the least cost.

        ``query`` (B, query_dim) is that of the same rows, where it is computed already: some penalties need
        nothing else. ``places`` are as for :meth:`KgeModel.query`.
        """
        if query is not None and (penalties := self.from_queries(query, answer)) is not None:
            return penalties
        rows = relation_row if places is None else relation_row[places]
        return self.query_penalties(model, anchor, rows, answer, side)

    def from_queries(self, query: Tensor, answer: Tensor | None) -> Tensor | None:
        """Return :meth:`query_penalties` (B,) from queries (B, D) made before; None if it takes the rows."""
        return None


AUTO, DEFAULT_WEIGHT = "auto", 0.01
"""A weak penalty that gained on every graph where the score is an inner product (docs/quality.md)."""

REGULARIZERS: Registry[type[Regularizer]] = Registry("regularizer", values=(AUTO,))

VALUES: dict[str, type[RegularizerSettings]] = {AUTO: WeightSettings}
"""Names that are no member, and their settings."""


def chosen_regularizer(settings: RegularizerSettings, score_function: str) -> RegularizerSettings:
    """Replace the values that leave a choice, the name :data:`AUTO` and the weight -1.

    :data:`AUTO` is DURA where it is defined, else no regularizer.
    """
    weight = getattr(settings, "weight", 0.0)
    if settings.name == AUTO:
        name = "dura" if Dura.fits(SCORE_FUNCTIONS.get(score_function)) else "none"
        settings = REGULARIZERS.get(name).Settings(name=name)
        if isinstance(settings, WeightSettings):
            settings = settings.changed(weight=weight)
        elif weight > 0:
            raise InputError(
                f"regularizer.weight is {weight:g} and regularizer.name is {AUTO}, which is none for "
                f"model.score_function {score_function}; allowed: weight 0, or a name"
            )
    default = DEFAULT_WEIGHT if isinstance(settings, WeightSettings) else 0.0
    return settings.changed(weight=default) if weight == -1 and default else settings


@REGULARIZERS.register("none")
class NoRegularizer(Regularizer):
    """No penalty."""

    help = "no regularizer"
    Settings = RegularizerSettings

    def penalty(self, rows: Tensor) -> Tensor:
        # A multiple of the rows: the result has their device and dtype, and a gradient (of 0) for autograd.
        return 0 * rows.sum(-1)


@REGULARIZERS.register("n3")
class N3(Regularizer):
    """Nuclear 3-norm, sum_k |x_k|^3 with complex moduli where rows are complex (Lacroix et al. 2018)."""

    help = "sum of |x|^3, complex moduli where rows are complex (Lacroix et al. 2018)"
    compiled = True
    power = 3

    def penalty(self, rows: Tensor) -> Tensor:
        if not self.complex_valued:
            # Real rows: autograd's derivative of |x|^3 is finite at 0.
            return rows.abs().pow(3).sum(-1)
        # Complex rows: autograd through the square root of a modulus is NaN at 0.
        return autograd_functions.CubedModuli.apply(rows)


@REGULARIZERS.register("lp")
class Lp(Regularizer):
    """sum_k |x_k|^p over the numbers of a row, real and imaginary parts alike (as DGL-KE's)."""

    help = "sum of |x|^p over all numbers (as DGL-KE's)"
    Settings = PowerSettings

    def penalty(self, rows: Tensor) -> Tensor:
        return rows.abs().pow(self.p).sum(-1)


@REGULARIZERS.register("f2")
class F2(Regularizer):
    """Squared Frobenius norm, sum_k x_k^2 over the numbers of a row (Nickel et al. 2011)."""

    help = "sum of x^2 (squared Frobenius norm)"
    compiled = True

    def penalty(self, rows: Tensor) -> Tensor:
        return rows.square().sum(-1)


@REGULARIZERS.register("dura")
class Dura(F2):
    """Duality-induced regularizer of inner products (Zhang, Cai and Wang 2020).

    An inner product is a distance but for two squares: -|q - t|^2 = 2 q.t - (|q|^2 + |t|^2), with q the
    query, the given entity operated on by the relation. DURA is these two. With w the weight, a query has

        w (product_ratio |q|^2 + entity_ratio |t|^2),

    so that both queries of a triple together have |h R|^2 + |t|^2 + |t R^T|^2 + |h|^2, the paper's form. With
    reciprocal relations R^T is the row of the other direction. Distances contain the terms already.
    """

    help = "squares of the query (entity times relation) and of the answer (Zhang et al. 2020)"
    compiled = True

    class Settings(ProductSettings, EntitySettings):
        """Its options."""

    @classmethod
    def fits(cls, score_function: type[ScoreFunction]) -> bool:
        return issubclass(score_function, Dot) and not score_function.has_offset

    def query_penalties(
        self, model: KgeModel, anchor: Tensor, relation_row: Tensor, answer: Tensor | None, side: Side
    ) -> Tensor:
        return self._squares(model.query(anchor, relation_row, side), answer)

    def from_queries(self, query: Tensor, answer: Tensor | None) -> Tensor | None:
        """Return :meth:`query_penalties`; a subclass may compute another penalty from the rows."""
        return self._squares(query, answer) if type(self) is Dura else None

    def _squares(self, query: Tensor, answer: Tensor | None) -> Tensor:
        penalties = self.product_penalties(query)
        return penalties if answer is None else penalties + self(answer)

    @property
    def loop_weights(self) -> LoopWeights:
        """An entity is the answer of one query of its triple."""
        return LoopWeights(2, self.weight * self.entity_ratio, 0, self.weight * self.product_ratio)


@REGULARIZERS.register("ivr")
class Ivr(Regularizer):
    """Intermediate-variable regularization of products of three rows (Xiao and Cao 2024).

    The norms of all that is computed on the way to a score: the three rows, and the product of any two. With
    w the weight, p the power, and |x|^p = sum_k |x_k|^p over complex moduli where rows are complex, a query
    has

        w (entity_ratio (|h|^p + |t|^p) + relation_ratio |r|^p + product_ratio (|h r|^p + |r t|^p + |t h|^p)).

    The paper has four weights. For DistMult and ComplEx its terms of lambda_3 equal those of lambda_1, and
    those of lambda_4 equal those of lambda_2, so that two remain: lambda_1 + lambda_3 is w, and lambda_2 +
    lambda_4 is w product_ratio. For other score functions the products are the score function's own, the
    terms of lambda_4.
    """

    help = "sums of |x|^p of the rows and of the products of any two of them (Xiao and Cao 2024)"
    needs_answer = True

    class Settings(ProductSettings, PowerSettings):
        """Its options."""

    @classmethod
    def fits(cls, score_function: type[ScoreFunction]) -> bool:
        return issubclass(score_function, Dot) and "relation_product" in vars(score_function)

    def penalty(self, rows: Tensor) -> Tensor:
        if not self.complex_valued:
            return rows.abs().pow(self.p).sum(-1)
        # The gradient of this norm is 0 at 0, where that of a square root of squares would be NaN.
        return torch.linalg.vector_norm(rows.unflatten(-1, (2, -1)), dim=-2).pow(self.p).sum(-1)

    def query_penalties(
        self, model: KgeModel, anchor: Tensor, relation_row: Tensor, answer: Tensor | None, side: Side
    ) -> Tensor:
        total = super().query_penalties(model, anchor, relation_row, answer, side)
        if answer is None:
            return total
        products = [model.query(anchor, relation_row, side), model.reverse_query(answer, relation_row, side)]
        products.append(model.entity_product(anchor, answer, side))
        return total + sum(map(self.product_penalties, products))
