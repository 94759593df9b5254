"""Modules of score functions with dense parameters: building, running and loading them; the library's own.

No module here has random dropout or batch normalization: the query of a row depends on that row and the
parameters only, so the result does not depend on how a batch is divided among trainers. Layer normalization
(Ba, Kiros and Hinton 2016) stands where the papers have batch normalization. Initial values are keyed by
(seed, name of the parameter, place), as those of rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dglkge.errors import InputError
from dglkge.kernels.hashing import stream_key
from dglkge.model.functions.comparators import complex_product
from dglkge.model.initializers import normal_rows, uniform_rows

ROWS_WITHOUT_GRADIENTS = 256
"""Rows that a module computes at a time where nothing is kept for a backward pass: ranking and prediction."""

POSITION_STD = 0.02
"""Standard deviation of the positions of tokens at the start (Devlin et al. 2019)."""

FEED_FORWARD = 2
"""Width of a transformer's inner layer as a multiple of the dimension (256 and 512 in Wang et al. 2019)."""


def built(name: str, build: Callable[[int, int], nn.Module | None], dim: int, seed: int) -> nn.Module:
    """Build and check the module of a score function; the global generator of torch stays as it is.

    ``build`` takes dim and seed; the name is for messages. An InputError if a parameter is not float32, or a
    layer has random dropout or batch normalization.
    """
    before = torch.random.get_rng_state()
    try:
        # A module of the user's may draw its initial values by torch.
        torch.default_generator.manual_seed(int(stream_key(seed, "module").reshape(-1)[0]) >> 1)
        module = build(dim, seed)
    finally:
        torch.random.set_rng_state(before)
    if module is None:
        raise InputError(f"the score function {name} built no module; expected a torch.nn.Module")
    for parameter, values in module.named_parameters():
        if "/" in parameter:
            # A checkpoint has a dataset of this name, in which it would be a folder.
            raise InputError(f"the parameter {parameter!r} of the score function {name} has a / in its name")
        if values.dtype != torch.float32:
            raise InputError(
                f"the parameter {parameter} of the score function {name} is {values.dtype}; allowed: "
                "torch.float32"
            )
    for path, layer in module.named_modules():
        is_dropout = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        # The common base of batch and instance normalization, which keeps running statistics.
        if is_dropout or isinstance(layer, nn.modules.batchnorm._NormBase):
            raise InputError(
                f"the layer {path} of the score function {name} is a {type(layer).__name__}, whose result "
                "depends on how a batch is divided among trainers; allowed: LayerNorm, and "
                "model.entity_dropout and relation_dropout"
            )
    return module


def run(module: nn.Module, *rows: Tensor, forward: Callable[..., Tensor] | None = None) -> Tensor:
    """Return a module's output for rows, (..., D_i) each -> (..., Dq); see ``ScoreFunction.run_module``.

    ``forward`` computes it where the parameters need no other type; default: the module.
    """
    shape = torch.broadcast_shapes(*(one.shape[:-1] for one in rows))
    flat = tuple(one.expand(*shape, one.shape[-1]).reshape(-1, one.shape[-1]) for one in rows)
    dtype, step = flat[0].dtype, len(flat[0])
    if not torch.is_grad_enabled():
        step = ROWS_WITHOUT_GRADIENTS
    converted: dict[str, Tensor] = {}
    if dtype != torch.float32:
        # Ranking is exact in float64: the parameters are converted for this call, the module keeps its own.
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        converted = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    pieces = [
        torch.func.functional_call(module, converted, part) if converted else (forward or module)(*part)
        for part in zip(*(one.split(max(1, step)) for one in flat))
    ]
    made = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return made.reshape(*shape, made.shape[-1])


def values_of(shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any], where: str) -> list[Any]:
    """Return the values, tensors or arrays, of a module's parameters in their order.

    An InputError if a parameter is missing, has another shape, or is none of the module's.
    """
    wrong = [name for name in (*shapes, *values) if name not in values or name not in shapes]
    if wrong:
        state = "missing" if wrong[0] in shapes else "none of the score function's"
        raise InputError(f"{where}: the dense parameter {wrong[0]!r} is {state}")
    for name, shape in shapes.items():
        if (got := tuple(values[name].shape)) != tuple(shape):
            raise InputError(
                f"{where}: the dense parameter {name!r} has shape {got}, expected {tuple(shape)}"
            )
    return [values[name] for name in shapes]


def load_parameters(module: nn.Module, values: Mapping[str, Tensor], where: str) -> None:
    """Copy values into the parameters of a module; none of them after an error of :func:`values_of`."""
    parameters = dict(module.named_parameters())
    shapes = {name: live.shape for name, live in parameters.items()}
    with torch.no_grad():
        for live, value in zip(parameters.values(), values_of(shapes, values, where)):
            live.copy_(value)


def normal(seed: int, name: str, *shape: int, std: float) -> nn.Parameter:
    """Return a parameter from a normal distribution of mean 0."""
    rows = normal_rows(np.arange(math.prod(shape[:-1])), shape[-1], seed, f"module.{name}", std)
    return nn.Parameter(torch.from_numpy(rows).view(shape))


def uniform(seed: int, name: str, *shape: int, limit: float) -> nn.Parameter:
    """Return a parameter from the uniform distribution on [-limit, limit]."""
    rows = uniform_rows(np.arange(math.prod(shape[:-1])), shape[-1], seed, f"module.{name}", limit)
    return nn.Parameter(torch.from_numpy(rows).view(shape))


class Linear(nn.Module):
    """x W' + b; W (out, in) starts normal with deviation 1 / sqrt(in) (LeCun et al. 1998), b at 0."""

    def __init__(self, seed: int, name: str, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = normal(seed, f"{name}.weight", num_out, num_in, std=1 / math.sqrt(num_in))
        self.bias = nn.Parameter(torch.zeros(num_out))

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)


class Convolution(nn.Module):
    """Filters (C, 1, kh, kw) over images of one channel, layer normalization over all outputs, and ReLU.

    The normalization has a gain and an offset for each filter, as the papers' batch normalization has.
    """

    def __init__(self, seed: int, num_filters: int, kernel: tuple[int, int], padding: int) -> None:
        super().__init__()
        size = kernel[0] * kernel[1]
        self.weight = normal(seed, "convolution", num_filters, 1, *kernel, std=1 / math.sqrt(size))
        self.gain = nn.Parameter(torch.ones(num_filters, 1, 1))
        self.offset = nn.Parameter(torch.zeros(num_filters, 1, 1))
        self.padding = padding

    def forward(self, images: Tensor) -> Tensor:
        found = functional.conv2d(images, self.weight, padding=self.padding)
        found = functional.layer_norm(found, found.shape[1:]) * self.gain + self.offset
        return functional.relu(found).flatten(1)


class TuckerCore(nn.Module):
    """The core tensor W (Dr, D, D) of TuckER; uniform in [-1, 1] at the start, as in the authors' code."""

    def __init__(self, seed: int, relation_dim: int, dim: int) -> None:
        super().__init__()
        self.core = uniform(seed, "core", relation_dim, dim, dim, limit=1.0)


class ConvolutionModule(nn.Module):
    """ReLU(LN(A conv(LN(image)) + b)) of images that are an entity's row and then a relation's.

    Filters are 3 x 3, or as large as the image with its padding.
    """

    def __init__(self, seed: int, num_filters: int, shape: tuple[int, int], padding: int, dim: int) -> None:
        super().__init__()
        self.shape = shape
        height, width = (size + 2 * padding for size in shape)
        kernel = (min(3, height), min(3, width))
        num_features = num_filters * (height - kernel[0] + 1) * (width - kernel[1] + 1)
        self.normalized = nn.LayerNorm(math.prod(shape))
        self.convolution = Convolution(seed, num_filters, kernel, padding)
        self.linear = Linear(seed, "linear", num_features, dim)
        self.output = nn.LayerNorm(dim)

    def forward(self, entity: Tensor, relation: Tensor) -> Tensor:
        images = self.normalized(torch.cat([entity, relation], dim=1)).unflatten(1, (1, *self.shape))
        return functional.relu(self.output(self.linear(self.convolution(images))))


class EncoderLayer(nn.Module):
    """A layer of an encoder, normalized after each half (Vaswani et al. 2017, section 3.1).

    Written out, as ``nn.TransformerEncoderLayer`` takes another path without gradients than with them.
    """

    def __init__(self, seed: int, name: str, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # Matrices without offsets, as the paper has them: an offset of the keys changes no weight, so its
        # gradient would be rounding, of which Adam makes whole steps.
        self.attended = normal(seed, f"{name}.attended", 3 * dim, dim, std=1 / math.sqrt(dim))
        self.mixed = Linear(seed, f"{name}.mixed", dim, dim)
        self.first_norm = nn.LayerNorm(dim)
        self.inner = Linear(seed, f"{name}.inner", dim, FEED_FORWARD * dim)
        self.outer = Linear(seed, f"{name}.outer", FEED_FORWARD * dim, dim)
        self.second_norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        # (n, heads, T, D / heads) each.
        asked, keys, values = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in functional.linear(tokens, self.attended).chunk(3, dim=-1)
        )
        weights = (asked @ keys.transpose(-1, -2) / math.sqrt(asked.shape[-1])).softmax(-1)
        mixed = (weights @ values).transpose(1, 2).flatten(-2)
        tokens = self.first_norm(tokens + self.mixed(mixed))
        inner = functional.gelu(self.inner(tokens))
        normalized: Tensor = self.second_norm(tokens + self.outer(inner))
        return normalized


class EncoderModule(nn.Module):
    """An encoder over the tokens (query, head, relation); its output at the first; see ``transformer``."""

    def __init__(self, seed: int, num_layers: int, num_heads: int, dim: int) -> None:
        super().__init__()
        self.positions = normal(seed, "positions", 3, dim, std=POSITION_STD)
        self.normalized = nn.LayerNorm(dim)
        layers = [EncoderLayer(seed, f"layers.{number}", dim, num_heads) for number in range(num_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, entity: Tensor, relation: Tensor) -> Tensor:
        given = torch.stack([torch.zeros_like(entity), entity, relation], dim=1)
        tokens = self.normalized(given + self.positions)
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens[:, 0]


class TimeRows(nn.Module):
    """Complex rows (T, D) of times, and the products of relations with them.

    They start as rows of entities do where ``init_scale`` is 1: a product of rows that are all near 0 would
    have no gradient.
    """

    def __init__(self, seed: int, num_times: int, dim: int, power: float) -> None:
        super().__init__()
        self.rows = normal(seed, "times", max(1, num_times), dim, std=0.001)
        self.power = power

    def forward(self, relation: Tensor) -> Tensor:
        """Return r u of relations (n, D + 1), r u + r' of relations (n, 2 D + 1): (n, D)."""
        dim = self.rows.shape[1]
        moments = self.rows[relation[:, -1].long()]
        real, imaginary = moments.chunk(2, dim=1)
        products = complex_product(relation[:, :dim], real, imaginary)
        return products if relation.shape[1] == dim + 1 else products + relation[:, dim : 2 * dim]

    def roughness(self) -> Tensor:
        """Return the mean over consecutive times of sum_k |u_k - u'_k|^p, (), over complex moduli."""
        differences = (self.rows[1:] - self.rows[:-1]).unflatten(1, (2, -1))
        # The gradient of this norm is 0 at 0, where that of a square root of squares would be NaN.
        moduli = torch.linalg.vector_norm(differences, dim=1)
        return moduli.pow(self.power).sum() / len(differences)
