"""Score functions that are linear in each entity, beyond DistMult and ComplEx: RESCAL, SimplE, QuatE, Keci.

Each is h A(r) t for a matrix A(r) that depends on the relation: the query h A(r) is compared with all
candidates by one matmul, and the adjoint is the row of the transposed matrix.
"""

from __future__ import annotations

import math

from dglkge.model.functions import Tensor, autograd_functions, torch
from dglkge.model.functions.bigraph_operators import LinearOperator
from dglkge.model.functions.comparators import Dot
from dglkge.model.score_functions import SCORE_FUNCTIONS, ScoreFunction, ScoreSettings
from dglkge.settings import setting
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

    @property
    def dim_multiple(self) -> tuple[int, str]:
        return 2, "half as head, half as tail"

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        as_head, as_tail = entity.chunk(2, dim=-1)
        forward, backward = relation.chunk(2, dim=-1)
        return torch.cat([as_tail * backward, as_head * forward], dim=-1) / 2

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return [r', r]: exchanging head and tail exchanges the two products."""
        forward, backward = relation.chunk(2, dim=-1)
        return torch.cat([backward, forward], dim=-1)

    def relation_product(self, given: Tensor, answer: Tensor) -> Tensor:
        given_as_head, given_as_tail = given.chunk(2, dim=-1)
        answer_as_head, answer_as_tail = answer.chunk(2, dim=-1)
        return torch.cat([given_as_head * answer_as_tail, answer_as_head * given_as_tail], dim=-1) / 2


@SCORE_FUNCTIONS.register("quate")
class QuatE(Dot, ScoreFunction):
    """QuatE, sum_k <h_k w_k, t_k> of quaternions, w_k = r_k / |r_k| (Zhang et al. 2019, eq. 8 to 10).

    A row is [real parts, i parts, j parts, k parts], each a quarter. h w is Hamilton's product, and
    <a, b> the inner product of quaternions as four real numbers.
    """

    help = "rotation of quaternions by unit quaternions (Zhang et al. 2019)"

    @property
    def dim_multiple(self) -> tuple[int, str]:
        return 4, "quaternions"

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        """Return unit quaternions, at random where the numbers are drawn from a normal distribution."""
        parts = drawn.double().unflatten(-1, (4, -1))
        norms = torch.linalg.vector_norm(parts, dim=1, keepdim=True)
        # A quaternion of four numbers 0 stays 0.
        unit = parts / norms.clamp_min(torch.finfo(torch.float64).tiny)
        return unit.flatten(1).float()

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return _hamilton_product(entity, _unit_quaternions(relation))

    def adjoint(self, relation: Tensor) -> Tensor:
        """Return the conjugate: <h w, t> = <h, t conj(w)>."""
        return _conjugate(relation)

    def relation_query_dim(self, dim: int) -> int:
        return dim

    def relation_query(self, given: Tensor, answer: Tensor, *time: Tensor) -> Tensor:
        """Return conj(h) t: <h w, t> = <w, conj(h) t>."""
        return _hamilton_product(_conjugate(given), answer)

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
    real, *others = rows.chunk(4, dim=-1)
    return torch.cat([real, *(-part for part in others)], dim=-1)


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

        p: int = setting(0, "basis vectors of the Clifford algebra with square 1", ge=0)
        q: int = setting(1, "basis vectors of the Clifford algebra with square -1", ge=0)

    @property
    def p(self) -> int:
        """Basis vectors with square 1."""
        return int(self.settings.p)

    @property
    def q(self) -> int:
        """Basis vectors with square -1."""
        return int(self.settings.q)

    @property
    def dim_multiple(self) -> tuple[int, str]:
        return 1 + self.p + self.q, "1 + p + q"

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        """Multiply by the relation, without the parts of two vectors."""
        scalar, vectors = self._parts(entity)
        of_relation, relation_vectors = self._parts(relation)
        # The scalar of the product: products of equal basis vectors, with the sign of their square.
        squares = vectors * relation_vectors
        product = scalar * of_relation + squares[..., : self.p, :].sum(-2) - squares[..., self.p :, :].sum(-2)
        mixed = scalar.unsqueeze(-2) * relation_vectors + of_relation.unsqueeze(-2) * vectors
        return torch.cat([product, mixed.flatten(-2)], dim=-1)

    def adjoint(self, relation: Tensor) -> Tensor:
        kept = relation.shape[-1] * (1 + self.p) // (1 + self.p + self.q)
        return torch.cat([relation[..., :kept], -relation[..., kept:]], dim=-1)

    def relation_product(self, given: Tensor, answer: Tensor) -> Tensor:
        """Return t times the adjoint of h: the product of h and r is symmetric in them."""
        return self.operate(answer, self.adjoint(given))

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scalars (..., m) and the parts of the basis vectors (..., p + q, m) of rows."""
        parts = rows.unflatten(-1, (1 + self.p + self.q, -1))
        return parts[..., 0, :], parts[..., 1:, :]
