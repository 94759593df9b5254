"""Every operator of PyTorch-BigGraph with every comparator: score functions named by the pair.

``linear_l2``, ``affine_cos``, ``none_l2``, ``translation_squared_l2``, ...; with ``_bias`` at the end the
first number of a row is a bias. Pairs that have a name of their own keep it: ``translation_l2`` is
``transe_l2``, ``diagonal_dot`` is ``distmult``, ``complex_diagonal_dot`` is ``complex``, ``linear_dot`` is
``rescal``.

Formulas (Lerer et al., "PyTorch-BigGraph: a large-scale graph embedding system", MLSys 2019, section 3.1, and
its documentation): with g_r the operator of a relation and c the comparator,

    static relations:   f(h, r, t) = c(h, g_r(t)),
    dynamic relations:  f(h, r, ?) = c(g_r(h), t) and f(?, r, t) = c(h, g'_r(t)), g and g' each of its own.

``diagonal+translation_l2`` has several operators, of which each relation has one, see
``model.relation_operators``.

Dynamic relations are ``model.reciprocal_relations: true``. With a bias, the operator takes the whole row, and
c(x, y) = x_0 + y_0 + c'(x_1..., y_1...), c' being the comparator without bias.
"""

from __future__ import annotations

import functools
from typing import Any

from dglkge.model.functions import Tensor, autograd_functions, bigraph_operators, comparators, torch
from dglkge.model.functions.bigraph_operators import OPERATORS, SEPARATOR, BigraphOperator, OperatorByRelation
from dglkge.model.functions.comparators import Comparator, Cosine, Dot, NegativeL2, NegativeSquaredL2
from dglkge.model.score_functions import ScoreFunction
from dglkge.typing import Side

COMPARATORS: dict[str, Any] = {"dot": Dot, "cos": Cosine, "l2": NegativeL2, "squared_l2": NegativeSquaredL2}
"""By PyTorch-BigGraph's name."""

BIAS = "_bias"
"""End of the name of a pair whose rows begin with a bias."""

NAMED = {
    "translation_l2": "transe_l2",
    "diagonal_dot": "distmult",
    "complex_diagonal_dot": "complex",
    "linear_dot": "rescal",
}
"""Pairs that are registered under a name of their own."""


class Biased(Comparator):
    """A comparator of rows without their first numbers, which are added: q_0 + c_0 + compare(q_1..,
    c_1..).
    """

    unbiased: Comparator

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        return self.unbiased.compare(query[:, 1:], candidates[:, 1:]) + query[:, :1] + candidates[:, 0]

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        biases = query[..., 0] + candidates[..., 0]
        return self.unbiased.compare_pairs(query[..., 1:], candidates[..., 1:]) + biases

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return the bound of the comparator at any score, and 4 u of what is added."""
        # The comparator's own true scores are not known here: its bound is greatest at a score of 0.
        bound = self.unbiased.rounding_bound(query[:, 1:], max_candidate_norm, torch.zeros_like(true_scores))
        lengths = query.norm(dim=1) + max_candidate_norm
        # The greatest score of the comparator: a product or square, a length, or 1.
        is_square = isinstance(self.unbiased, (Dot, NegativeSquaredL2))
        greatest = lengths.square() if is_square else lengths + 1
        return bound + 4 * comparators.SAFE_UNIT * (lengths + greatest)


class BigraphScore(ScoreFunction):
    """Score function of an operator and a comparator of :data:`COMPARATORS`; :func:`bigraph_score` makes
    the class.
    """

    acts: BigraphOperator
    comparator: str

    @property
    def dim_multiple(self) -> tuple[int, str]:
        return self.acts.dim_multiple, "half real, half imaginary"

    def penalized(self, relation: Tensor) -> Tensor:
        return relation[..., :-1] if self.operators else relation

    def relation_dim(self, dim: int) -> int:
        return self.acts.row_dim(dim)

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        """Return rows of the identity, with which PyTorch-BigGraph starts: (n, Dr) -> (n, Dr)."""
        return self.acts.identity(dim).repeat(len(drawn), 1)

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return self.acts.apply(entity, relation)

    def adjoint(self, relation: Tensor) -> Tensor:
        if type(self.acts) is BigraphOperator:
            return relation
        return super().adjoint(relation)  # refuses: the static() form answers both sides

    def static(self) -> ScoreFunction:
        """Return the form whose operator acts on the tail, whatever side is asked for."""
        if type(self.acts) is BigraphOperator:
            return self
        if _unbiased(self) is Dot:
            return StaticProductPlus(self)
        if self.acts.name == "translation" and _unbiased(self) in (NegativeL2, NegativeSquaredL2):
            return StaticDistance(self)
        return StaticPairs(self)


def _unbiased(pair: BigraphScore) -> type[Comparator]:
    """Return the comparator of a pair, apart from the bias."""
    if isinstance(pair, Biased):
        return type(pair.unbiased)
    return next(kind for kind in COMPARATORS.values() if isinstance(pair, kind))


class StaticScore(BigraphScore):
    """c(h, g_r(t)) for queries of both sides; candidates are rows of the table."""

    FACTS = ("acts", "has_bias", "operators", "maps_widths", "complex_valued", "relation_init", "help")

    def __init__(self, pair: BigraphScore) -> None:
        self.pair, self.settings = pair, pair.settings
        # Instances, as the facts of a pair are those of its class.
        for fact in self.FACTS:
            setattr(self, fact, getattr(pair, fact))

    def static(self) -> ScoreFunction:
        return self

    def compare_relations(self, query: Tensor, relations: Tensor) -> Tensor:
        head, tail = query.chunk(2, dim=-1)
        carried = self.acts.apply(tail.unsqueeze(1), relations.unsqueeze(0))
        return self.pair.compare_pairs(head.unsqueeze(1), carried)


class StaticProductPlus(StaticScore):
    """Inner products with an offset or a bias: a query (q_0 ... q_D) scores <q_0 ... q_D-1, c> + q_D.

    With u = h, or h with a first number of 1 where that is the bias: <h, A t + b> = <A' u, t> + <u, b>, plus
    h_0 where it is the bias.
    """

    matmul_operations = 2
    memory_passes = 0

    def query_dim(self, dim: int) -> int:
        return dim + 1

    def query(self, entity: Tensor, relation: Tensor, side: Side) -> Tensor:
        vector = entity if side is Side.TAIL else self.acts.apply(entity, relation)
        constant = torch.zeros_like(vector[..., :1])
        if self.has_bias:
            constant = vector[..., :1]
            vector = torch.cat([torch.ones_like(constant), vector[..., 1:]], dim=-1)
        if side is Side.TAIL:
            if self.acts.has_offset:
                products = vector * self.acts.offset(relation, entity.shape[-1])
                constant = constant + products.sum(-1, keepdim=True)
            vector = self.acts.transposed(vector, relation)
        return torch.cat([vector, constant.expand(*vector.shape[:-1], 1)], dim=-1)

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        return autograd_functions.product(query[:, :-1], candidates) + query[:, -1:]

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return (query[..., :-1] * candidates).sum(-1) + query[..., -1]

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return the bound of the product and 4 u of both terms."""
        rows, constants = query[:, :-1], query[:, -1]
        bound = Dot.rounding_bound(self, rows, max_candidate_norm, true_scores)  # type: ignore[arg-type]
        return bound + 4 * comparators.SAFE_UNIT * (constants.abs() + rows.norm(dim=1) * max_candidate_norm)


class StaticDistance(StaticScore):
    """Distances of a translated tail, |h - (t + b)| = |(h - b) - t|; a bias b_0 is added on both sides."""

    def query(self, entity: Tensor, relation: Tensor, side: Side) -> Tensor:
        if side is Side.HEAD:
            return entity + relation
        moved = entity - relation
        if not self.has_bias:
            return moved
        return torch.cat([entity[..., :1] + relation[..., :1], moved[..., 1:]], dim=-1)

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        return self.pair.compare(query, candidates)

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return self.pair.compare_pairs(query, candidates)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        return self.pair.rounding_bound(query, max_candidate_norm, true_scores)


NO_RELATION = -1
"""Last number of a query whose candidates are compared as they are."""


class StaticPairs(StaticScore):
    """Pairs for which no row answers a query for tails: the operator is applied to every candidate.

    A query for tails is (h, r, id of r), so the candidates of all queries of one relation are operated on
    once, as PyTorch-BigGraph does with its batches of one relation. A query for heads is (g_r(t), 0, -1). Ids
    are float32 numbers here, exact up to 2^24 relations.
    """

    matmul_operations = 2
    memory_passes = 4
    acts_on_candidates = True

    def query_dim(self, dim: int) -> int:
        return dim + self.relation_dim(dim) + 1

    def query(
        self, entity: Tensor, relation: Tensor, side: Side, relation_ids: Tensor | None = None
    ) -> Tensor:
        leading = torch.broadcast_shapes(entity.shape[:-1], relation.shape[:-1])
        if side is Side.HEAD:
            operated = self.acts.apply(entity, relation)
            rest = operated.new_zeros(*leading, relation.shape[-1] + 1)
            rest[..., -1] = NO_RELATION
            return torch.cat([operated, rest], dim=-1)
        if relation_ids is None:
            relation_ids = torch.arange(leading.numel(), device=entity.device).reshape(leading)
        keys = relation_ids.to(entity).expand(leading).unsqueeze(-1)
        return torch.cat([entity.expand(*leading, -1), relation.expand(*leading, -1), keys], dim=-1)

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        dim = candidates.shape[-1]
        _, group = torch.unique(query.detach()[:, -1], return_inverse=True)
        order = torch.argsort(group, stable=True)
        scores = []
        for places in order.split(torch.bincount(group).tolist()):
            # Queries of one relation have equal rows; the gradient of the relation is that of all of them.
            keyed_relation = query[places[0], dim:]
            operated = self._operated(keyed_relation, candidates)
            scores.append(self.pair.compare(query[places, :dim], operated))
        if not scores:
            return query[:, :dim] @ candidates.T
        return torch.cat(scores)[torch.argsort(order)]

    def _operated(self, keyed_relation: Tensor, candidates: Tensor) -> Tensor:
        """Return the candidates (N, D) as one relation compares them."""
        if keyed_relation[-1] == NO_RELATION:
            return candidates
        relation = keyed_relation[:-1]
        needs_care = self.acts.cancels and _unbiased(self.pair) is Cosine
        if needs_care and not (relation.requires_grad or candidates.requires_grad):
            # A cosine takes the direction of a sum that may cancel: ranking holds to float64.
            return self.acts.apply(candidates.double(), relation.double()).to(candidates.dtype)
        # A product under autocast: its result is narrow, and comparators take both sides in one type.
        return self.acts.apply(candidates, relation).to(candidates.dtype)

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        dim = candidates.shape[-1]
        entity, relation, key = query[..., :dim], query[..., dim:-1], query[..., -1:]
        operated = torch.where(key == NO_RELATION, candidates, self.acts.apply(candidates, relation))
        return self.pair.compare_pairs(entity, operated)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return the comparator's bound for candidates of the length that the operator may give them.

        The operator's own rounding, at most (D + 4) u of that length, is the reason for a length 1.75 times
        as great: it makes the square's bound 3 times as great. The cosine's has room for it; where a sum may
        cancel (``linear``, ``affine``) it is computed in float64, and the bound holds for results above 1e-6
        of the length that the operator may give them.
        """
        dim = query.shape[1] - 1
        dim = next(width for width in range(1, dim + 1) if width + self.relation_dim(width) == dim)
        entity, relation = query[:, :dim], query[:, dim:-1]
        offset = self.acts.offset(relation, dim).norm(dim=-1)
        longest = self.acts.gain(relation, dim) * max_candidate_norm + offset
        longest = torch.where(query[:, -1] == NO_RELATION, max_candidate_norm, longest)
        wide: Any = 1.75 * (entity.norm(dim=1) + longest)
        return self.pair.rounding_bound(entity, wide, true_scores)


@functools.cache
def bigraph_score(name: str) -> type[BigraphScore] | None:
    """Return the score function of a pair by name; None where it is no name of a pair.

    ``{operator}_{comparator}``, with :data:`BIAS` at the end for a bias; or with several operators and ``+``
    between them.
    """
    for comparator in COMPARATORS:
        for bias in ("", BIAS):
            operators = name.removesuffix(f"_{comparator}{bias}").split(SEPARATOR)
            is_named = name.endswith(f"_{comparator}{bias}") and set(operators) <= set(OPERATORS)
            if is_named and len(operators) == len(set(operators)) and name not in NAMED:
                acts = OPERATORS[operators[0]] if len(operators) == 1 else OperatorByRelation(operators)
                return _class_of(acts, comparator, bool(bias))
    return None


def _class_of(acts: BigraphOperator, comparator: str, bias: bool) -> type[BigraphScore]:
    """Make the class of a pair."""
    compares = COMPARATORS[comparator]
    facts: dict[str, Any] = {
        "__doc__": f"PyTorch-BigGraph's operator ``{acts.name}`` with its comparator ``{comparator}``.",
        "__module__": __name__,
        "acts": acts,
        "complex_valued": acts.complex_valued,
        "has_offset": acts.has_offset,
        "help": f"PyTorch-BigGraph's operator {acts.name} with comparator {comparator}",
        "comparator": comparator,
        "has_bias": bias,
        "has_parameters": type(acts) is not BigraphOperator,
        "operators": tuple(acts.name.split(SEPARATOR)) if isinstance(acts, OperatorByRelation) else (),
        "maps_widths": set(acts.name.split(SEPARATOR)) <= bigraph_operators.MATRICES,
    }
    bases: tuple[type, ...] = (compares, BigraphScore)
    if bias:
        bases = (Biased, BigraphScore)
        facts["unbiased"] = compares()
        facts["matmul_operations"], facts["memory_passes"] = compares.matmul_operations, 0
        facts["help"] += ", the first number of a row being a bias"
    words = [acts.name.replace(SEPARATOR, "_"), comparator, *(["bias"] if bias else [])]
    return type("".join(word.capitalize() for word in "_".join(words).split("_")), bases, facts)
