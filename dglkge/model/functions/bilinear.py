"""Score functions linear in each entity, beyond DistMult and ComplEx, and those of relations at a time.

RESCAL, SimplE, QuatE and Keci are h A(r) t each for a matrix A(r) that depends on the relation: the query
h A(r) is compared with all candidates by one matmul, and the adjoint is the row of the transposed matrix.

TComplEx, TNTComplEx (Lacroix et al. 2020) and DE-SimplE have times. The row of a relation at a time is the
relation's, and the number of the time as the last number of each direction. What reads rows writes that
number; in the relations' table it is 0 and has no gradient. In TComplEx and TNTComplEx times have own rows,
which are dense parameters: they are few, and their smoothness has a gradient for all of them in a batch. In
DE-SimplE the entities' rows depend on the time.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from dglkge.model.functions import Tensor, autograd_functions, torch
from dglkge.model.functions.bigraph_operators import LinearOperator
from dglkge.model.functions.comparators import SAFE_UNIT, TINY_PER_DIM, Dot, complex_product, unless_overflow
from dglkge.model.score_functions import SCORE_FUNCTIONS, ScoreFunction, ScoreSettings, product_by_adjoint
from dglkge.typing import Side

LINEAR = LinearOperator()
"""PyTorch-BigGraph's, which multiplies by a matrix from the left."""

NO_NORM = 1e-12
"""Least norm that a quaternion is divided by; torch's ``normalize`` has the same."""


@SCORE_FUNCTIONS.register("rescal")
class RESCAL(Dot, ScoreFunction):
    """RESCAL, h R t with a matrix R of the relation (Nickel et al. 2011, eq. 1).

    A relation's row is R, row by row: D D numbers. PyTorch-BigGraph: operator ``linear``, comparator ``dot``.
    """

    help = "a matrix of each relation between two vectors (Nickel et al. 2011)"
    shares_relations = True
    maps_widths = True

    def relation_dim(self, dim: int) -> int:
        return LINEAR.row_dim(dim)

    def shared_query(self, entity: Tensor, relations: Tensor, places: Tensor, side: Side) -> Tensor:
        dim = entity.shape[-1]
        matrices = relations.unflatten(-1, (dim, dim))
        if side is Side.HEAD:
            matrices = matrices.transpose(-1, -2)
        return autograd_functions.GroupedProducts.apply(entity, matrices, places)

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return LINEAR.transposed(entity, relation)

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return the transposed matrix: h R t = t R^T h."""
        dim = math.isqrt(relation.shape[-1])
        return relation.unflatten(-1, (dim, dim)).transpose(-1, -2).flatten(-2)


@SCORE_FUNCTIONS.register("simple")
class SimplE(Dot, ScoreFunction):
    """SimplE, sum_k (h_k r_k t'_k + t_k r'_k h'_k) / 2 (Kazemi and Poole 2018, section 4).

    h, t are the first halves of the entities' rows, for entities as heads; h', t' the second halves, for
    entities as tails; r, r' the halves of the relation's row. DGL-KE's SimplE is the same, clamped to
    [-20, 20], which would make equal all scores beyond.
    """

    help = "two vectors of each entity, as head and as tail (Kazemi and Poole 2018)"
    dim_multiple = (2, "half as head, half as tail")

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        as_head, as_tail = entity.chunk(2, dim=-1)
        forward, backward = relation.chunk(2, dim=-1)
        return torch.cat([as_tail * backward, as_head * forward], dim=-1) / 2

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return [r', r]: exchanging head and tail exchanges the two products."""
        forward, backward = relation.chunk(2, dim=-1)
        return torch.cat([backward, forward], dim=-1)

    relation_product = product_by_adjoint


@SCORE_FUNCTIONS.register("quate")
class QuatE(Dot, ScoreFunction):
    """QuatE, sum_k <h_k w_k, t_k> of quaternions, w_k = r_k / |r_k| (Zhang et al. 2019, eq. 8 to 10).

    A row is [real parts, i parts, j parts, k parts], each a quarter. h w is Hamilton's product, and
    <a, b> the inner product of quaternions as four real numbers.
    """

    help = "rotation of quaternions by unit quaternions (Zhang et al. 2019)"

    dim_multiple = (4, "quaternions")

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        """Return unit quaternions, at random where the numbers are drawn from a normal distribution."""
        parts = drawn.double().unflatten(-1, (4, -1))
        norms = torch.linalg.vector_norm(parts, dim=1, keepdim=True)
        # A quaternion of four numbers 0 stays 0.
        return (parts / norms.clamp_min(torch.finfo(torch.float64).tiny)).flatten(1).float()

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return _hamilton_product(entity, _unit_quaternions(relation))

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return the conjugate: <h w, t> = <h, t conj(w)>."""
        return _conjugate(relation)

    def relation_query_dim(self, dim: int) -> int:
        return dim

    def relation_query(self, anchor: Tensor, answer: Tensor, *time: Tensor) -> Tensor:
        """Return conj(h) t: <h w, t> = <w, conj(h) t>."""
        return _hamilton_product(_conjugate(anchor), answer)

    def compare_relations(self, query: Tensor, relations: Tensor) -> Tensor:
        return query @ _unit_quaternions(relations).T


def _hamilton_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply rows of quaternions (..., D) by rows of quaternions, one by one."""
    a, b, c, d = left.chunk(4, dim=-1)
    p, q, u, v = right.chunk(4, dim=-1)
    parts = [
        a * p - b * q - c * u - d * v,
        a * q + b * p + c * v - d * u,
        a * u - b * v + c * p + d * q,
        a * v + b * u - c * q + d * p,
    ]
    return torch.cat(parts, dim=-1)


def _conjugate(rows: Tensor) -> Tensor:
    """Negate all but the real parts."""
    real, *imaginary = rows.chunk(4, dim=-1)
    return torch.cat([real, *(-part for part in imaginary)], dim=-1)


def _unit_quaternions(rows: Tensor) -> Tensor:
    """Divide each quaternion of rows (..., D) by its norm."""
    parts = rows.unflatten(-1, (4, -1))
    norms = torch.linalg.vector_norm(parts, dim=-2, keepdim=True)
    return (parts / norms.clamp_min(NO_NORM)).flatten(-2)


@SCORE_FUNCTIONS.register("keci")
class Keci(Dot, ScoreFunction):
    """Keci, the part of (h r) . t in the span of 1, e_1, ..., e_(p+q) (Demir and Ngonga Ngomo 2023).

    A row is [scalars, e_1 parts, ..., e_(p+q) parts], each 1 / (1 + p + q) of it. The product is that of the
    Clifford algebra Cl_(p,q): e_i e_i = 1 for i <= p, else -1. Its parts of two vectors, e_i e_j, which the
    tail does not have, meet nothing in the inner product. Cl_(0,0) is DistMult and Cl_(0,1) ComplEx.

    p and q are the numbers of basis vectors with square 1 and with square -1.
    """

    help = "product in the Clifford algebra Cl_(p,q) (Demir and Ngonga Ngomo 2023)"

    class Settings(ScoreSettings):
        """Its options."""

        p: int = Field(0, ge=0)
        """basis vectors of the Clifford algebra with square 1."""
        q: int = Field(1, ge=0)
        """basis vectors of the Clifford algebra with square -1."""

    @property
    def dim_multiple(self) -> tuple[int, str]:
        return 1 + self.settings.p + self.settings.q, "1 + p + q"

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        """Multiply by the relation, without the parts of two vectors."""
        scalar, vectors = self._parts(entity)
        relation_scalar, relation_vectors = self._parts(relation)
        # The scalar of the product: products of equal basis vectors, with the sign of their square.
        positive, negative = (vectors * relation_vectors).split([self.settings.p, self.settings.q], dim=-2)
        product = scalar * relation_scalar + positive.sum(-2) - negative.sum(-2)
        mixed = scalar.unsqueeze(-2) * relation_vectors + relation_scalar.unsqueeze(-2) * vectors
        return torch.cat([product, mixed.flatten(-2)], dim=-1)

    def adjoint(self, relation: Tensor) -> Tensor:
        kept = relation.shape[-1] * (1 + self.settings.p) // self.dim_multiple[0]
        return torch.cat([relation[..., :kept], -relation[..., kept:]], dim=-1)

    relation_product = product_by_adjoint

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scalars (..., m) and the parts of the basis vectors (..., p + q, m) of rows."""
        parts = rows.unflatten(-1, (self.dim_multiple[0], -1))
        return parts[..., 0, :], parts[..., 1:, :]


class TimeSettings(ScoreSettings):
    """Settings of score functions with times."""

    num_times: int = Field(0, ge=0)
    """number of times; 0: that of the data set."""


class RowSettings(TimeSettings):
    """Settings of score functions whose times have rows."""

    smoothness: float = Field(0.0, ge=0)
    """factor on differences of consecutive times (Lacroix et al. 2020)."""
    smoothness_power: float = Field(3.0, ge=1, le=5)
    """power of the complex moduli of these differences."""


class TimedScore(ScoreFunction):
    """A score function with times: base class."""

    has_times = True

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        drawn[..., -1] = 0  # the number of no time
        return drawn

    @property
    def has_relation_product(self) -> bool:
        """Whether :meth:`relation_query`, which has 0 for the number of the time, is the class's own."""
        return "relation_query" in vars(type(self))


class TemporalScore(Dot, TimedScore):
    """Re sum_k h_k q_k conj(t_k), with q made of a relation's row and a time's: base class."""

    complex_valued = True

    Settings = RowSettings

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        from dglkge.model.dense_modules import TimeRows  # here: it imports torch

        return TimeRows(seed, self.settings.num_times, dim, self.settings.smoothness_power)

    def module_numbers(self, dim: int) -> int:
        return int(self.settings.num_times) * dim

    def module_penalty(self) -> Tensor | None:
        weight: float = self.settings.smoothness
        if not weight or self.settings.num_times < 2:
            return None
        times: Any = self.module
        return weight * times.roughness()

    def composed(self, relation: Tensor) -> Tensor:
        """Return q: (..., Dr) -> (..., D)."""
        return self.run_module(relation)

    def query(self, entity: Tensor, relation: Tensor, side: Side) -> Tensor:
        real, imaginary = self.composed(relation).chunk(2, dim=-1)
        return complex_product(entity, real, imaginary if side is Side.TAIL else -imaginary)

    # No adjoint: conj(q) is of no relation's row, as the time's is not conjugated.
    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return self.query(entity, relation, Side.TAIL)


@SCORE_FUNCTIONS.register("tcomplex")
class TComplEx(TemporalScore):
    """TComplEx: q = r u, the product of a relation's and a time's complex rows (Lacroix et al. 2020, eq. 3).

    PyTorch-BigGraph has no equal.
    """

    help = "product of four complex vectors, one of the time (Lacroix et al. 2020)"

    def relation_dim(self, dim: int) -> int:
        return dim + 1

    def penalized(self, relation: Tensor) -> Tensor:
        """Return r u, of which the authors take the norm."""
        return self.composed(relation)

    def relation_query(self, anchor: Tensor, answer: Tensor, *time: Tensor) -> Tensor:
        """Return [conj(h u) t, 0]."""
        moved = self.composed(torch.cat([anchor, *time], dim=-1))
        return torch.cat([_adjoint_product(moved, answer), *map(torch.zeros_like, time)], dim=-1)


@SCORE_FUNCTIONS.register("tntcomplex")
class TNTComplEx(TemporalScore):
    """TNTComplEx: q = r u + r', with a second row of the relation for what always holds (eq. 4).

    A relation's row is [r, r', time]. PyTorch-BigGraph has no equal.
    """

    help = "TComplEx, and a row of the relation that does not depend on time (Lacroix et al. 2020)"

    def relation_dim(self, dim: int) -> int:
        return 2 * dim + 1

    def penalized(self, relation: Tensor) -> Tensor:
        """Return r u and r', of both of which the authors take the norm: real parts, then imaginary ones."""
        dim = relation.shape[-1] // 2
        constant = relation[..., dim : 2 * dim]
        changing = self.composed(relation) - constant
        (real, imaginary), (more_real, more_imaginary) = changing.chunk(2, dim=-1), constant.chunk(2, dim=-1)
        return torch.cat([real, more_real, imaginary, more_imaginary], dim=-1)

    def relation_query(self, anchor: Tensor, answer: Tensor, *time: Tensor) -> Tensor:
        """Return [conj(h u) t, conj(h) t, 0]."""
        moved = self.composed(torch.cat([anchor, torch.zeros_like(anchor), *time], dim=-1))
        products = [_adjoint_product(rows, answer) for rows in (moved, anchor)]
        return torch.cat([*products, *map(torch.zeros_like, time)], dim=-1)


def _adjoint_product(left: Tensor, right: Tensor) -> Tensor:
    """Return conj(left) right of complex rows."""
    real, imaginary = left.chunk(2, dim=-1)
    return complex_product(right, real, -imaginary)


class DiachronicSettings(TimeSettings):
    """Settings of DE-SimplE."""

    temporal_share: float = Field(0.64, gt=0, le=1)
    """share of an entity's numbers that change with time."""


@SCORE_FUNCTIONS.register("de_simple")
class DESimplE(TimedScore):
    """DE-SimplE: SimplE of entities at a time (Goel et al. 2020, eq. 1; Kazemi and Poole 2018).

    Half of an entity's row is the entity as head, half as tail; each half is [s, a, w, b], and at time u the
    entity is [s, a sin(w u + b)], with as many numbers a as are :attr:`DiachronicSettings.temporal_share` of
    these. A relation's row is [r, r', time], a query [numbers for a tail as head, as tail, time].
    """

    help = "SimplE with numbers of entities that swing with the time (Goel et al. 2020)"
    memory_passes = 8
    Settings = DiachronicSettings
    dim_multiple = SimplE.dim_multiple

    def widths(self, dim: int) -> tuple[int, int]:
        """Return the numbers s, and a, of a half of an entity's row."""
        half = dim // 2
        changing = int(half / (2 + 1 / self.settings.temporal_share))
        return half - 3 * changing, changing

    def relation_dim(self, dim: int) -> int:
        return 2 * sum(self.widths(dim)) + 1

    def query_dim(self, dim: int) -> int:
        return self.relation_dim(dim)

    def penalized(self, relation: Tensor) -> Tensor:
        return relation[..., :-1]

    def at_time(self, entity: Tensor, time: Tensor) -> Tensor:
        """Return entities at times, as head and as tail: (..., D), (..., 1) -> (..., 2 v)."""
        constant, changing = self.widths(entity.shape[-1])
        parts = entity.unflatten(-1, (2, -1)).split([constant, changing, changing, changing], dim=-1)
        swing = parts[1] * torch.sin(parts[2] * time.unsqueeze(-1) + parts[3])
        return torch.cat([parts[0].expand(*swing.shape[:-1], constant), swing], dim=-1).flatten(-2)

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        """Return [h' r', h r] / 2 and the time, without gradient, to be compared with [t, t'] at it."""
        time = relation[..., -1:].detach()
        as_head, as_tail = self.at_time(entity, time).chunk(2, dim=-1)
        forward, backward = relation[..., :-1].chunk(2, dim=-1)
        products = torch.cat([as_tail * backward, as_head * forward], dim=-1) / 2
        return torch.cat([products, time.expand(*products.shape[:-1], 1)], dim=-1)

    def relation_query(self, anchor: Tensor, answer: Tensor, *time: Tensor) -> Tensor:
        """Return [h t', h' t, 0] / 2 of entities at the time."""
        (as_head, as_tail), (answer_as_head, answer_as_tail) = (
            self.at_time(entity, *time).chunk(2, dim=-1) for entity in (anchor, answer)
        )
        products = as_head * answer_as_tail, as_tail * answer_as_head
        return torch.cat([*products, *map(torch.zeros_like, time)], dim=-1) / 2

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return [r', r, time]: exchanging head and tail exchanges the two products."""
        forward, backward = relation[..., :-1].chunk(2, dim=-1)
        return torch.cat([backward, forward, relation[..., -1:]], dim=-1)

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every pair, one matrix product for each time of the queries."""
        blocks = autograd_functions.blocks_of_equal(query[:, -1])
        return autograd_functions.ByBlocks.apply(self._at_one_time, blocks, query, candidates)

    def _at_one_time(self, query: Tensor, candidates: Tensor) -> Tensor:
        return autograd_functions.product(query[:, :-1], self.at_time(candidates, query[0, -1:].detach()))

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        return (query[..., :-1] * self.at_time(candidates, query[..., -1:])).sum(-1)

    def rounding_bound(self, query: Tensor, max_candidate_norm: float, true_scores: Tensor) -> Tensor:
        """Return (v + 8) u |q| C + 3 u (u + 1) |q| C^2 with C = max|c|, for 2 v numbers at time u.

        A phase w u + b is off by at most 3 u (u + 1) C, and so is its sine, which a multiplies; the rest is
        the bound of :class:`Dot`.
        """
        lengths, times = query[:, :-1].norm(dim=1), query[:, -1]
        dim = query.shape[1]
        swings = 3 * (times + 1) * max_candidate_norm
        bound = SAFE_UNIT * lengths * max_candidate_norm * (dim + 8 + swings)
        magnitude = torch.maximum(lengths * max_candidate_norm, swings)
        return unless_overflow(bound + dim * TINY_PER_DIM, magnitude)
