"""Score functions with dense parameters: a module computes the query, an inner product compares it.

Candidates are rows as with every other score function, so that sampled negatives, all candidates, exact
ranking and search work as they do elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from dglkge.model.functions import Tensor, autograd_functions, torch
from dglkge.model.functions.comparators import Dot, complex_product
from dglkge.model.score_functions import SCORE_FUNCTIONS, ScoreFunction, ScoreSettings
from dglkge.registry import deferred
from dglkge.typing import Side

if TYPE_CHECKING:
    from dglkge.model import dense_modules
else:
    dense_modules = deferred("dglkge.model.dense_modules")

MATRIX_NUMBERS = 1 << 24
"""Numbers of matrices M(r) that TuckER makes at a time where each query has one of its own."""


class DenseScore(Dot, ScoreFunction):
    """<module(h, r), t>: base class for modules that carry a head to its tail and have no way back.

    A subclass needs :meth:`build_module` only. Heads are predicted by relation rows of their own.
    """

    # The query is not a product of the rows, for which dura and ivr are defined.
    has_offset = True

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return self.run_module(entity, relation)


@SCORE_FUNCTIONS.register("tucker")
class TuckER(Dot, ScoreFunction):
    """TuckER, sum_ijk W_ijk r_i h_j t_k with one core tensor W for all relations (Balazevic et al. 2019).

    With M(r) = sum_i r_i W_i the score is h M(r) t, so a query for heads is t M(r)^T: exact with one row of a
    relation for both sides. The paper's batch normalization and dropout are left out.
    """

    help = "core tensor, multiplied by relation, head and tail (Balazevic et al. 2019)"
    shares_relations = True

    class Settings(ScoreSettings):
        """Its options."""

        relation_dimension: int = Field(0, ge=0)
        """numbers in a relation's row; 0: as in an entity's."""

    def relation_dim(self, dim: int) -> int:
        return self.settings.relation_dimension or dim

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        # The core tensor W (Dr, D, D), uniform in [-1, 1] at the start, as in the authors' code.
        core = dense_modules.uniform(seed, "core", self.relation_dim(dim), dim, dim, limit=1.0)
        return torch.nn.ParameterDict({"core": core})

    def module_numbers(self, dim: int) -> int:
        return self.relation_dim(dim) * dim * dim

    def query_numbers(self, dim: int) -> int:
        """Return a bound for M(r), once for each relation of a batch: at most 64 KiB of each query."""
        # Relations are far fewer than queries; a batch of many relations needs more, up to D D each.
        return min(dim * dim, 1 << 14)

    def _core(self, rows: Tensor) -> Tensor:
        """Return W (Dr, D * D) in the type of some rows."""
        core: Tensor = self.module.core  # type: ignore[assignment]
        return core.flatten(1).to(rows.dtype)

    def _matrices(self, relations: Tensor, core: Tensor, side: Side) -> Tensor:
        """Return M(r), or its transpose, (n, D, D) of relations (n, Dr)."""
        dim = math.isqrt(core.shape[1])
        matrices = (relations @ core).unflatten(-1, (dim, dim))
        return matrices if side is Side.TAIL else matrices.transpose(-1, -2)

    def query(self, entity: Tensor, relation: Tensor, side: Side) -> Tensor:
        shape = torch.broadcast_shapes(entity.shape[:-1], relation.shape[:-1])
        entities, relations = (
            rows.expand(*shape, -1).reshape(-1, rows.shape[-1]) for rows in (entity, relation)
        )

        def compute(entities: Tensor, relations: Tensor) -> Tensor:
            core = self._core(entities)
            step = max(1, MATRIX_NUMBERS // core.shape[1])
            pieces = [
                (rows.unsqueeze(1) @ self._matrices(relation_rows, core, side)).squeeze(1)
                for rows, relation_rows in zip(entities.split(step), relations.split(step))
            ]
            return torch.cat(pieces)

        return self.run_precisely(compute, entities, relations).reshape(*shape, entities.shape[-1])

    def shared_query(self, entity: Tensor, relations: Tensor, places: Tensor, side: Side) -> Tensor:
        def compute(entity: Tensor, relations: Tensor) -> Tensor:
            matrices = self._matrices(relations, self._core(relations), side)
            # Autocast converts operands of torch's functions, not of this one.
            return autograd_functions.GroupedProducts.apply(entity.to(matrices.dtype), matrices, places)

        return self.run_precisely(compute, entity, relations)

    # No adjoint: M(r)^T is the matrix of no other row.
    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        return self.query(entity, relation, Side.TAIL)

    def relation_product(self, anchor: Tensor, answer: Tensor) -> Tensor:
        def compute(anchor: Tensor, answer: Tensor) -> Tensor:
            return (anchor.unsqueeze(-1) * answer.unsqueeze(-2)).flatten(-2) @ self._core(anchor).T

        return self.run_precisely(compute, anchor, answer)


class ConvolutionSettings(ScoreSettings):
    """Settings of a score function with a convolution."""

    channels: int = Field(32, ge=1)
    """filters of the convolution."""


@SCORE_FUNCTIONS.register("conve")
class ConvE(DenseScore):
    """ConvE, <ReLU(A conv([h; r]) + b), t> + t_0 (Dettmers et al. 2018, eq. 1).

    h, r and t are rows without an entity's first number t_0, which is its bias. They are read as images,
    the head's above the relation's, whose height is the largest divisor of their width up to its root (10 x
    20 for dimension 201). Filters are 3 x 3 without padding. Layer normalization of the image, of the
    filters' outputs and before the last ReLU stands where the authors' code has batch normalization.
    """

    help = "convolution over head and relation as images (Dettmers et al. 2018)"

    Settings = ConvolutionSettings
    has_bias = True

    def relation_dim(self, dim: int) -> int:
        return dim - 1

    @staticmethod
    def image(dim: int) -> tuple[int, int]:
        """Return height and width of the image of an entity."""
        height = next(size for size in range(math.isqrt(dim - 1), 0, -1) if (dim - 1) % size == 0)
        return height, (dim - 1) // height

    def _features(self, dim: int) -> int:
        """Return the filters' outputs, C (2 height - kernel + 1) (width - kernel + 1)."""
        height, width = self.image(dim)
        return self.settings.channels * (2 * height - min(3, 2 * height) + 1) * (width - min(3, width) + 1)

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        height, width = self.image(dim)
        return dense_modules.ConvolutionModule(seed, self.settings.channels, (2 * height, width), 0, dim - 1)

    def module_numbers(self, dim: int) -> int:
        """Return the sum over filters, their normalization, the linear layer and two normalizations."""
        height, width = self.image(dim)
        filters = self.settings.channels * (min(3, 2 * height) * min(3, width) + 2)
        return filters + (self._features(dim) + 1) * (dim - 1) + 6 * (dim - 1)

    def query_numbers(self, dim: int) -> int:
        """Return the filters' outputs before and after normalization and ReLU, and the narrow layers."""
        return 4 * self._features(dim) + 8 * dim

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        """Return [1, module(h, r)]: the product with [t_0, t] adds the bias."""
        made = self.run_module(entity[..., 1:], relation)
        return torch.cat([torch.ones_like(made[..., :1]), made], dim=-1)


@SCORE_FUNCTIONS.register("conex")
class ConEx(DenseScore):
    """ConEx, Re sum_k c_k h_k r_k conj(t_k), c = ReLU(A conv(h, r) + b) (Demir and Ngonga Ngomo 2021).

    Rows are [real parts, imaginary parts]. The filters, 3 x 3 with padding 1, go over an image of four
    lines: the parts of head and relation. Layer normalization stands where the authors' code has batch
    normalization.
    """

    help = "ComplEx times a convolution over head and relation (Demir and Ngonga Ngomo 2021)"
    complex_valued = True

    Settings = ConvolutionSettings

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        # Real and imaginary parts of head and relation are the four lines of an image.
        return dense_modules.ConvolutionModule(seed, self.settings.channels, (4, dim // 2), 1, dim)

    def module_numbers(self, dim: int) -> int:
        return 11 * self.settings.channels + (2 * self.settings.channels * dim + 1) * dim + 6 * dim

    def query_numbers(self, dim: int) -> int:
        return 8 * self.settings.channels * dim + 12 * dim

    def operate(self, entity: Tensor, relation: Tensor) -> Tensor:
        factors = self.run_module(entity, relation)
        product = complex_product(entity, *relation.chunk(2, dim=-1))
        return complex_product(factors, *product.chunk(2, dim=-1))


@SCORE_FUNCTIONS.register("transformer")
class Transformer(DenseScore):
    """<encoder(query, h, r), t>: an encoder over a triple's tokens, its output at a token for the answer.

    CoKE without its output layer (Wang et al. 2019, section 3.2), and the bottom block of HittER (Chen et al.
    2021, section 3.1): a learned token, the head and the relation get positions and layer normalization, and
    go through layers of attention and a feed-forward layer of width 2 D with GELU.
    """

    help = "encoder over head and relation as tokens (Wang et al. 2019, Chen et al. 2021)"

    class Settings(ScoreSettings):
        """Its options."""

        layers: int = Field(1, ge=1)
        """layers of the encoder."""
        heads: int = Field(4, ge=1)
        """heads of the attention, which divide the dimension."""

    @property
    def dim_multiple(self) -> tuple[int, str]:
        return int(self.settings.heads), "heads of the attention"

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        return dense_modules.EncoderModule(seed, self.settings.layers, self.settings.heads, dim)

    def module_numbers(self, dim: int) -> int:
        inner = 2 * dim
        attention = 4 * dim * dim + dim
        feed_forward = (dim + 1) * inner + (inner + 1) * dim
        return 5 * dim + self.settings.layers * (attention + feed_forward + 4 * dim)

    def query_numbers(self, dim: int) -> int:
        """Return the tokens of all layers: each has about 16 D numbers in a layer."""
        return 3 * (4 * dim + self.settings.layers * (16 * dim + 6 * self.settings.heads))
