"""Score functions: an operator on the given entity, then a comparison with the candidates.

f(h, r, t) = compare(operate(h, r), t). A query for heads uses the relation's adjoint instead, so that
compare(operate(t, adjoint(r)), h) is the same number; this is what lets all negatives of either side
be scored by one matmul.

PyTorch-BigGraph splits its models the same way (``torchbiggraph/model.py``, operators and comparators):
the docstring of each member names its equals. Its *dynamic* relations operate on whichever entity is
given, as :func:`ScoreFunction.operate` does. Its *static* relations always operate on the right side,
so a static operator holds ``adjoint(r)``.
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dglkge.model.functions import Tensor, comparators, torch
from dglkge.model.functions.comparators import Comparator, Dot, complex_product
from dglkge.registry import Registry, deferred
from dglkge.settings import ComponentSettings
from dglkge.typing import Side

if TYPE_CHECKING:
    from dglkge.model import dense_modules
    from dglkge.model.device import ModulePrecision
else:
    dense_modules = deferred("dglkge.model.dense_modules")
# Not imported while this file is: it declares score functions of its own.
bigraph_scores = deferred("dglkge.model.functions.bigraph_scores")

PHASE = "phase"
"""``relation_init`` of relations whose numbers are phases in radians, uniform in [-pi, pi] at the start."""


Item = TypeVar("Item")


def changed_copy(item: Item, **attributes: Any) -> Item:
    """Return a shallow copy of an object with other values of some attributes."""
    made = copy.copy(item)
    vars(made).update(attributes)
    return made


class ScoreSettings(ComponentSettings):
    """Settings of every score function: none but the name."""


class ScoreFunction(Comparator):
    """Scores triples of rows. Parameters of a constructor are options: fields of ``model``.

    Only :meth:`operate` and a comparator are needed, and without reciprocal relations :meth:`adjoint`; every
    fact below has a default. The comparator adds the costs of a score, see
    :class:`dglkge.model.functions.comparators.Comparator`.

    It is stateless, unless it owns a module with dense parameters, see :meth:`build_module`.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    complex_valued : bool
        Whether an entity's row is complex: first half real parts, second half imaginary parts.
    relation_init : str
        How relation rows start: ``"normal"`` as entities do, or :data:`PHASE`.
    wide_queries : bool
        Whether queries are so wide, as wide as a matrix, that the trainers do not exchange them: objectives
        over all candidates then refuse the score function.
    compiled : bool
        Whether the compiled training step (``step/objectives/dot_softmax.py``) computes exactly this
        score function and its gradient: an element-wise product with the relation, complex if
        ``complex_valued``, compared by the inner product. A subclass may compute something else, so it
        does not inherit the fact.
    has_parameters : bool
        Whether relations have parameters.
    has_offset : bool
        Whether something of the relation is added to the entity's row, so that the score is not a product.
    has_bias : bool
        Whether the first number of an entity's row is a bias.
    acts_on_candidates : bool
        Whether each relation of a batch acts on all candidates at once, so that queries hold relations and
        their ids. :meth:`query` then takes a fourth argument ``relation_ids``, (...) int64, equal for equal
        relations, or None.
    shares_relations : bool
        Whether a relation's row is so wide that a batch should hold it once and not for each triple:
        queries are then asked from :meth:`shared_query`. Not inherited either: a subclass may operate
        otherwise.
    operators : tuple of str
        Names of the operators of relations, where each relation has one of several; otherwise empty.
    maps_widths : bool
        Whether a relation has a matrix, which may map rows of one width to another: rows of an entity type
        may then have fewer numbers than the dimension.
    needs_reciprocal : bool
        Whether nothing carries a tail back to its head, so that heads can be predicted by relation rows of
        their own only. :meth:`adjoint` is then not asked for.
    has_times : bool
        Whether relations have times: their rows then hold the number of the time, as the last number of each
        direction, and ``settings.num_times`` is the number of times.
    """

    help: ClassVar[str] = ""
    Settings: ClassVar[type[ScoreSettings]] = ScoreSettings
    wide_queries: ClassVar[bool] = False
    complex_valued: ClassVar[bool] = False
    relation_init: ClassVar[str] = "normal"
    compiled: ClassVar[bool] = False
    has_parameters: ClassVar[bool] = True
    has_offset: ClassVar[bool] = False
    has_bias: ClassVar[bool] = False
    acts_on_candidates: ClassVar[bool] = False
    shares_relations: ClassVar[bool] = False
    operators: ClassVar[tuple[str, ...]] = ()
    maps_widths: ClassVar[bool] = False
    needs_reciprocal: ClassVar[bool] = False
    has_times: ClassVar[bool] = False
    # Dimension and seed of the module of a bound score function, and the module once it is built.
    _binding: Any = None
    _module: torch.nn.Module | None = None
    # How the module computes in training.
    _precision: ModulePrecision | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # __dict__ and not getattr: an inherited True would send a subclass to loops that compute its base.
        cls.compiled = cls.__dict__.get("compiled", False)
        cls.shares_relations = cls.__dict__.get("shares_relations", False)
        lacks_heads = cls.adjoint is ScoreFunction.adjoint and cls.query is ScoreFunction.query
        cls.needs_reciprocal = cls.__dict__.get("needs_reciprocal", lacks_heads)

    def __init__(self, settings: ScoreSettings | None = None) -> None:
        self.settings: Any = self.Settings() if settings is None else settings

    @property
    def options(self) -> dict[str, Any]:
        """Options of its own; checkpoints record them."""
        return self.settings.options(ScoreSettings)

    def build_module(self, dim: int, seed: int) -> torch.nn.Module | None:
        """Return a new module that computes queries from rows; None where there are no dense parameters.

        The module's parameters are float32 and trained beside the rows. The same dimension and seed give the
        same values. torch's random numbers may be used: they start from the seed, and the global generator
        is left as it was. :meth:`operate` calls the module by :meth:`run_module`. Random dropout and batch
        normalization are refused: the result would depend on how a batch is divided among trainers.
        """
        return None

    def module_penalty(self) -> Tensor | None:
        """Return the penalty, (), of the module's parameters in each batch; None where there is none."""
        return None

    @property
    def has_module(self) -> bool:
        """Whether it owns a module."""
        return type(self).build_module is not ScoreFunction.build_module

    def module_numbers(self, dim: int) -> int:
        """Return the count of dense parameters; by default those of a module that is built to be counted."""
        if not self.has_module:
            return 0
        return sum(parameter.numel() for parameter in self.bound(dim, 0).module.parameters())

    def query_numbers(self, dim: int) -> int:
        """Return how many numbers the module keeps of a query between forward and backward, for planning."""
        return 0

    def bound(self, dim: int, seed: int) -> ScoreFunction:
        """Return this score function with a module of a dimension and seed, which is built when it is used.

        Without a module it is the score function itself.
        """
        if not self.has_module or self._binding == (dim, seed):
            return self
        return changed_copy(self, _binding=(dim, seed), _module=None)

    @property
    def module(self) -> torch.nn.Module:
        """The module of a bound score function, built when it is used; an InputError if it is refused."""
        if self._module is None:
            self._module = dense_modules.built(type(self).__name__, self.build_module, *self._binding)
        return self._module

    def on_device(self, device: torch.device) -> ScoreFunction:
        """Return this score function with a copy of its module on a device."""
        return changed_copy(self, _module=copy.deepcopy(self.module).to(device))

    def in_precision(self, precision: ModulePrecision) -> ScoreFunction:
        """Return this score function, with the same module, as it computes in training."""
        return changed_copy(self, _module=self.module, _precision=precision)

    def run_module(self, *rows: Tensor) -> Tensor:
        """Return the module's output for rows, (..., D_i) each -> (..., Dq), in the rows' type.

        Leading dimensions broadcast; the module gets matrices (n, D_i) and returns a matrix (n, Dq).
        """
        forward = None if self._precision is None else self._precision.forward_of(self.module)
        return self.run_precisely(functools.partial(dense_modules.run, self.module, forward=forward), *rows)

    def run_precisely(self, compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return a function of rows that have gradients and of the module's parameters, as ``dense.autocast``
        has it.

        For score functions that use parameters without :meth:`run_module`; they must use them in no other
        way.
        """
        return compute(*rows) if self._precision is None else self._precision.run(compute, *rows)

    def other_dims(self, dim: int) -> str:
        """Return in words which dimensions have rows, where this one has none; an empty text if it has."""
        multiple, reason = self.dim_multiple
        if dim < 1:
            return "a positive number"
        if dim % multiple:
            return f"even ({reason})" if multiple == 2 else f"a multiple of {multiple} ({reason})"
        return "at least 2 (one number is the bias)" if self.has_bias and dim < 2 else ""

    @property
    def dim_multiple(self) -> tuple[int, str]:
        """Number that every dimension is a multiple of, and the reason."""
        return (2, "half real, half imaginary") if self.complex_valued else (1, "")

    def relation_dim(self, dim: int) -> int:
        """Return the width of a relation's row for entities of width dim."""
        return dim

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        """Return the rows (n, Dr) that relations start with, given rows as entities of width ``dim``
        start.
        """
        return drawn

    def static(self) -> ScoreFunction:
        """Return the form for relations with one row for both sides; by default this one, by adjoint rows."""
        return self

    def penalized(self, relation: Tensor) -> Tensor:
        """Return the numbers of relations that a regularizer takes: (..., Dr) -> (..., n)."""
        return relation

    @abstractmethod
    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        """Carry a head to where its tail should be: (..., D), (..., Dr) -> (..., Dq), see ``query_dim``."""

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return the row of the relation read backwards: (..., Dr) -> (..., Dr).

        A class without it has a :meth:`query` of its own, or reciprocal relations only.
        """
        raise NotImplementedError(f"{type(self).__name__} has no adjoint row")

    def query(self, entity: Tensor, relation: Tensor, side: Side) -> Tensor:
        """Return the query that candidates for one side of a triple are compared with.

        Parameters
        ----------
        entity : (..., D) tensor
            The entity given: the head for ``Side.TAIL``, the tail for ``Side.HEAD``.
        relation : (..., Dr) tensor
        side : Side
            The side of the missing entity.

        Returns
        -------
        (..., query_dim(D)) tensor
        """
        # One operation for both sides: an adjoint relation turns (?, r, t) into a query on t.
        return self.operate(entity, relation if side is Side.TAIL else self.adjoint(relation))

    def shared_query(self, entity: Tensor, relations: Tensor, places: Tensor, side: Side) -> Tensor:
        """Return :meth:`query` of entities (B, D) and the relations (U, Dr) at some places (B,) int64."""
        return self.query(entity, relations[places], side)

    def relation_product(self, anchor: Tensor, answer: Tensor) -> Tensor:
        """Return rows (B, Dr); their inner products with relations are the scores (h, ?, t).

        Optional. It counts for the class that defines it only: a subclass may operate otherwise.
        """
        raise NotImplementedError(f"{type(self).__name__} has no such form")

    @property
    def has_relation_product(self) -> bool:
        """Whether :meth:`relation_product` is there."""
        # vars() and not hasattr(): a subclass with another operate() must not inherit the product.
        return "relation_product" in vars(type(self))

    def relation_query_dim(self, dim: int) -> int:
        """Return the width of :meth:`relation_query` for entities of width dim."""
        return self.relation_dim(dim) if self.has_relation_product else 2 * dim

    def relation_query(self, anchor: Tensor, answer: Tensor, *time: Tensor) -> Tensor:
        """Return the queries (h, ?, t) of pairs of entities: (B, D), (B, D) -> (B, Dq).

        Of score functions with times at the number of one, (B, 1).
        """
        if self.has_relation_product:
            return self.relation_product(anchor, answer)
        # Without a product form the pair itself is the query; compare_relations cuts it apart again.
        return torch.cat([anchor, answer], dim=-1)

    def compare_relations(self, query: Tensor, relations: Tensor) -> Tensor:
        """Score every pair of entities with every relation: (B, Dq), (N, Dr) -> (B, N).

        Without :meth:`relation_product` it takes memory for (B, N, D) numbers.
        """
        if self.has_relation_product:
            return query @ relations.T
        anchor, answer = query.chunk(2, dim=-1)
        # Every relation operates on every head, so the result is (B, N, D): no matmul gives it.
        carried = self.operate(anchor.unsqueeze(1), relations.unsqueeze(0))
        return self.compare_pairs(carried, answer.unsqueeze(1))


_FAMILIES = [f"dglkge.model.functions.{family}" for family in ("bilinear", "projected", "dense")]
SCORE_FUNCTIONS: Registry[type[ScoreFunction]] = Registry(
    "score function", lambda name: bigraph_scores.bigraph_score(name), also=_FAMILIES
)


def product_by_adjoint(function: ScoreFunction, anchor: Tensor, answer: Tensor) -> Tensor:
    """Return t times the adjoint of h: ``relation_product`` where the product of h and r is symmetric.

    For ComplEx it is conj(h) t: Re(h r conj(t)) = Re(r conj(conj(h) t)).
    """
    return function.operate(answer, function.adjoint(anchor))


class Translation(ScoreFunction):
    """h + r (PyTorch-BigGraph's operator ``translation``)."""

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return entity + relation

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return -r: |h + r - t| = |t - r - h|."""
        return -relation


@SCORE_FUNCTIONS.register("transe_l1")
class TransEL1(Translation, comparators.NegativeL1):
    """TransE with the Manhattan distance, -sum_k |h_k + r_k - t_k| (Bordes et al. 2013)."""

    help = "TransE with the Manhattan distance (Bordes et al. 2013)"


@SCORE_FUNCTIONS.register("transe_l2")
class TransEL2(Translation, comparators.NegativeL2):
    """TransE with the Euclidean distance, -|h + r - t| (Bordes et al. 2013).

    PyTorch-BigGraph: operator ``translation``, comparator ``l2``.
    """

    help = "TransE with the Euclidean distance (Bordes et al. 2013)"


@SCORE_FUNCTIONS.register("distmult")
class DistMult(Dot, ScoreFunction):
    """DistMult, sum_k h_k r_k t_k (Yang et al. 2015).

    PyTorch-BigGraph: operator ``diagonal``, comparator ``dot``.
    """

    help = "product of three real vectors (Yang et al. 2015)"
    compiled = True

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return entity * relation

    def adjoint(self, relation: Tensor) -> Tensor:
        return relation

    relation_product = product_by_adjoint


@SCORE_FUNCTIONS.register("complex")
class ComplEx(Dot, ScoreFunction):
    """ComplEx, Re sum_k h_k r_k conj(t_k) (Trouillon et al. 2016); rows are [real parts, imaginary parts].

    PyTorch-BigGraph: operator ``complex_diagonal`` (its ``real`` and ``imag`` are the halves of the
    relation's row), comparator ``dot``.
    """

    help = "product of three complex vectors (Trouillon et al. 2016)"
    compiled = True
    complex_valued = True

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        real, imaginary = relation.chunk(2, dim=-1)
        return complex_product(entity, real, imaginary)

    def adjoint(self, relation: Tensor) -> Tensor:
        real, imaginary = relation.chunk(2, dim=-1)
        return torch.cat([real, -imaginary], dim=-1)

    relation_product = product_by_adjoint


@SCORE_FUNCTIONS.register("rotate")
class RotatE(comparators.NegativeModulus, ScoreFunction):
    """RotatE, -sum_k |h_k exp(i r_k) - t_k| (Sun et al. 2019); a relation's row is D / 2 phases in radians.

    Entity rows are [real parts, imaginary parts]. PyTorch-BigGraph has no equal.
    """

    help = "rotation of complex numbers by phases (Sun et al. 2019)"
    complex_valued = True
    relation_init = PHASE

    def relation_dim(self, dim: int) -> int:
        return dim // 2

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        # exp(i r) = cos r + i sin r: its modulus is 1 by construction, so no normalization is needed.
        return complex_product(entity, relation.cos(), relation.sin())

    def adjoint(self, relation: Tensor) -> Tensor:
        return -relation
