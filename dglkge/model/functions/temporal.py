"""Score functions of relations at a time: TComplEx and TNTComplEx (Lacroix, Obozinski and Usunier 2020).

The row of a relation at a time is the relation's, and the number of the time as the last number of each
direction. What reads rows writes that number; in the relations' table it is 0 and has no gradient. The times'
own rows are dense parameters: they are few, and their smoothness has a gradient for all of them in a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dglkge.model.functions import Tensor, torch
from dglkge.model.functions.comparators import Dot, complex_product
from dglkge.model.score_functions import SCORE_FUNCTIONS, ScoreFunction, ScoreSettings
from dglkge.registry import deferred
from dglkge.settings import setting
from dglkge.typing import Side

if TYPE_CHECKING:
    from dglkge.model import dense_modules
else:
    dense_modules = deferred("dglkge.model.dense_modules")


class TimeSettings(ScoreSettings):
    """Settings of score functions with times."""

    num_times: int = setting(0, "number of times; 0: that of the data set", ge=0)
    smoothness: float = setting(
        0.0, "factor on the differences of the rows of consecutive times (Lacroix et al. 2020)", ge=0
    )
    smoothness_power: float = setting(3.0, "power of the complex moduli of these differences", ge=1, le=5)


class TemporalScore(Dot, ScoreFunction):
    """Re sum_k h_k q_k conj(t_k), with q made of a relation's row and a time's: base class."""

    complex_valued = True
    has_times = True

    Settings = TimeSettings

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        settings = self.settings
        return dense_modules.TimeRows(seed, settings.num_times, dim, settings.smoothness_power)

    def module_numbers(self, dim: int) -> int:
        return int(self.settings.num_times) * dim

    def module_penalty(self) -> Tensor | None:
        weight: float = self.settings.smoothness
        if not weight or self.settings.num_times < 2:
            return None
        times: Any = self.module
        penalty: Tensor = weight * times.roughness()
        return penalty

    def initial_relations(self, drawn: Tensor, dim: int) -> Tensor:
        drawn[..., -1] = 0
        return drawn

    def composed(self, relation: Tensor) -> Tensor:
        """Return q: (..., Dr) -> (..., D)."""
        return self.run_module(relation)

    def query(self, entity: Tensor, relation: Tensor, side: Side) -> Tensor:
        real, imaginary = self.composed(relation).chunk(2, dim=-1)
        return complex_product(entity, real, imaginary if side is Side.TAIL else -imaginary)

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return self.query(entity, relation, Side.TAIL)

    def adjoint(self, relation: Tensor) -> Tensor:
        """Refuse: conj(q) is of no relation's row, as the time's is not conjugated; see :meth:`query`."""
        raise NotImplementedError(f"{type(self).__name__} has no adjoint row: queries are asked for by side")


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
        return self._joined(self.composed(relation) - constant, constant)

    def _joined(self, one: Tensor, other: Tensor) -> Tensor:
        (real, imaginary), (more_real, more_imaginary) = one.chunk(2, dim=-1), other.chunk(2, dim=-1)
        return torch.cat([real, more_real, imaginary, more_imaginary], dim=-1)
