"""Modules with dense parameters: of score functions, and projections of features, the vectors of entities.

No module here has random dropout or batch normalization: the query of a row depends on that row and the
parameters only, so the result does not depend on how a batch is divided among trainers. Layer normalization
(Ba, Kiros and Hinton 2016) stands where the papers have batch normalization. Initial values are keyed by
(seed, name of the parameter, place), as those of rows are.

With features a row is scored as e + f(x), with e the entity's trained row (or 0), x its frozen vector and f
the projection of its type: a matrix and an offset, or layers with an activation between. An entity without a
vector has x = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dglkge.errors import InputError
from dglkge.model.functions import hashing
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
    with torch.random.fork_rng(devices=[]):
        # A module of the user's may draw its initial values by torch.
        torch.default_generator.manual_seed(int(hashing.stream_key(seed, "module").reshape(-1)[0]) >> 1)
        module = build(dim, seed)
    if module is None:
        raise InputError(f"the score function {name} built no module; expected a torch.nn.Module")
    for parameter, values in module.named_parameters():
        if "/" in parameter:
            # A checkpoint has a dataset of this name, in which it would be a folder.
            raise InputError(f"the parameter {parameter!r} of the score function {name} has a / in its name")
        if values.dtype != torch.float32:
            raise InputError(f"the parameter {parameter} of {name} is {values.dtype}; allowed: torch.float32")
    for path, layer in module.named_modules():
        is_dropout = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        # The common base of batch and instance normalization, which keeps running statistics.
        if is_dropout or isinstance(layer, nn.modules.batchnorm._NormBase):
            raise InputError(
                f"the layer {path} of {name} is a {type(layer).__name__}, whose result depends on how a "
                "batch is divided; allowed: LayerNorm, model.entity_dropout and relation_dropout"
            )
    return module


def run(module: nn.Module, *rows: Tensor, forward: Callable[..., Tensor] | None = None) -> Tensor:
    """Return a module's output for rows, (..., D_i) each -> (..., Dq); see ``ScoreFunction.run_module``.

    ``forward`` computes it where the parameters need no other type; default: the module.
    """
    shape = torch.broadcast_shapes(*(row.shape[:-1] for row in rows))
    flat = tuple(row.expand(*shape, row.shape[-1]).reshape(-1, row.shape[-1]) for row in rows)
    dtype, step = flat[0].dtype, len(flat[0]) if torch.is_grad_enabled() else ROWS_WITHOUT_GRADIENTS
    converted: dict[str, Tensor] = {}
    if dtype != torch.float32:
        # Ranking is exact in float64: the parameters are converted for this call, the module keeps its own.
        tensors = [*module.named_parameters(), *module.named_buffers()]
        converted = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors}
    pieces = [
        torch.func.functional_call(module, converted, part) if converted else (forward or module)(*part)
        for part in zip(*(row.split(max(1, step)) for row in flat))
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
            raise InputError(f"{where}: dense parameter {name!r} has shape {got}, expected {tuple(shape)}")
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
        outputs = functional.conv2d(images, self.weight, padding=self.padding)
        outputs = functional.layer_norm(outputs, outputs.shape[1:]) * self.gain + self.offset
        return functional.relu(outputs).flatten(1)


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
        queries, keys, values = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in functional.linear(tokens, self.attended).chunk(3, dim=-1)
        )
        weights = (queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])).softmax(-1)
        mixed = (weights @ values).transpose(1, 2).flatten(-2)
        tokens = self.first_norm(tokens + self.mixed(mixed))
        return self.second_norm(tokens + self.outer(functional.gelu(self.inner(tokens))))


class EncoderModule(nn.Module):
    """An encoder over the tokens (query, head, relation); its output at the first; see ``transformer``."""

    def __init__(self, seed: int, num_layers: int, num_heads: int, dim: int) -> None:
        super().__init__()
        self.positions = normal(seed, "positions", 3, dim, std=POSITION_STD)
        self.normalized = nn.LayerNorm(dim)
        layers = [EncoderLayer(seed, f"layers.{number}", dim, num_heads) for number in range(num_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, entity: Tensor, relation: Tensor) -> Tensor:
        tokens = torch.stack([torch.zeros_like(entity), entity, relation], dim=1)
        tokens = self.normalized(tokens + self.positions)
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens[:, 0]


class TimeRows(nn.Module):
    """Complex rows (T, D) of times, and the products of relations with them.

    They start near 0, as rows of entities do. Gradients of products are small there, and small steps beside a
    penalty leave TComplEx where it is.
    """

    def __init__(self, seed: int, num_times: int, dim: int, power: float) -> None:
        super().__init__()
        self.rows = normal(seed, "times", max(1, num_times), dim, std=0.001)
        self.power = power

    def forward(self, relation: Tensor) -> Tensor:
        """Return r u of relations (n, D + 1), r u + r' of relations (n, 2 D + 1): (n, D)."""
        dim = self.rows.shape[1]
        real, imaginary = self.rows[relation[:, -1].long()].chunk(2, dim=1)
        products = complex_product(relation[:, :dim], real, imaginary)
        return products if relation.shape[1] == dim + 1 else products + relation[:, dim : 2 * dim]

    def roughness(self) -> Tensor:
        """Return the mean over consecutive times of sum_k |u_k - u'_k|^p, (), over complex moduli."""
        differences = (self.rows[1:] - self.rows[:-1]).unflatten(1, (2, -1))
        # The gradient of this norm is 0 at 0, where that of a square root of squares would be NaN.
        moduli = torch.linalg.vector_norm(differences, dim=1)
        return moduli.pow(self.power).sum() / len(differences)


PREFIX = "features."
"""Names of the parameters begin with it: ``features.{entity type}.{layer}.weight`` and ``.bias``."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}

ROWS_AT_A_TIME = 65536
"""Vectors that are projected at a time."""


class FeatureProjections(nn.Module):
    """The projection of each entity type that has features.

    Parameters
    ----------
    widths : mapping of str to int
        Numbers in a vector, by entity type.
    dim : int
        Numbers in a row.
    hidden : iterable of int
        Widths of the hidden layers; none: linear.
    activation : str
        Of :data:`ACTIVATIONS`.
    seed : int
        Of the initial matrices; offsets start at 0.
    """

    def __init__(
        self, widths: Mapping[str, int], dim: int, hidden: Iterable[int], activation: str, seed: int
    ) -> None:
        super().__init__()
        self.widths = dict(widths)
        self.dim = dim
        self._activation = ACTIVATIONS[activation]
        sizes = [*hidden, dim]
        # A plain dict: torch allows no dot in the name of a registered module, an entity type may have one.
        self._layers: dict[str, list[Linear]] = {}
        for name, width in widths.items():
            steps = enumerate(zip([width, *sizes], sizes))
            self._layers[name] = [Linear(seed, f"{PREFIX}{name}.{number}", *step) for number, step in steps]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, layers in self._layers.items():
            for number, layer in enumerate(layers):
                for parameter, values in layer.named_parameters():
                    yield f"{PREFIX}{name}.{number}.{parameter}", values

    def project(self, name: str, vectors: Tensor) -> Tensor:
        """Return f(x), (n, D), of vectors (n, F) of an entity type, in their type of numbers."""
        rows = vectors
        for number, layer in enumerate(self._layers[name]):
            rows = self._activation(rows) if number else rows
            rows = functional.linear(rows, layer.weight.to(rows.dtype), layer.bias.to(rows.dtype))
        return rows


def projections_of(
    parameters: Mapping[str, Tensor], dim: int, activation: str, where: str
) -> FeatureProjections:
    """Return the projections that saved parameters are of, by their names and shapes; an InputError if of
    none.
    """
    layers: dict[str, dict[int, Tensor]] = {}
    for name, values in parameters.items():
        entity_type, number, kind = name[len(PREFIX) :].rsplit(".", 2)
        if kind == "weight":
            layers.setdefault(entity_type, {})[int(number)] = values
    widths = {name: int(weights[0].shape[1]) for name, weights in layers.items()}
    weights = next(iter(layers.values()))  # the layers of all types have the same widths
    hidden = [int(weights[number].shape[0]) for number in sorted(weights)[:-1]]
    made = FeatureProjections(widths, dim, hidden, activation, 0)
    load_parameters(made, parameters, where)
    made.requires_grad_(False)
    return made


class JoinedModules(nn.Module):
    """Modules with one optimizer, whose parameters keep their names."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self._parts = modules

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self._parts:
            yield from part.named_parameters()


class ProjectedFeatures:
    """Features of entities, and their projections.

    The vectors (N, F) by entity type, in the order of original ids, are float32 or float16, usually mapped
    from a file.
    """

    def __init__(self, projections: FeatureProjections, vectors: Mapping[str, np.ndarray]) -> None:
        self.projections = projections
        self._vectors = dict(vectors)

    @property
    def entity_types(self) -> list[str]:
        """The entity types that have features."""
        return list(self._vectors)

    @torch.no_grad()
    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return f(x), (n, D) float32, of original ids (n,), as training has it."""
        unique, places = _distinct(ids)
        rows = torch.empty(len(unique), self.projections.dim)
        for run, block in self._blocks(name, unique):
            rows[run] = self.projections.project(name, block)
        return rows if places is None else rows[places]

    @torch.no_grad()
    def scored(self, name: str, ids: Tensor) -> Tensor:
        """Return f(x), (n, D) float32, of original ids (n,), as rankings have it.

        Computed in float64: a product in float32 has other last bits for another number of rows, and rankings
        of live tables and of files would differ.
        """
        rows = torch.empty(len(ids), self.projections.dim)
        for run, block in self._blocks(name, ids.numpy()):
            rows[run] = self.projections.project(name, block.double())
        return rows

    def backward(self, name: str, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients of the parameters, given those (n, D) of the rows of original ids (n,).

        The projection is computed again: keeping it from :meth:`rows` would hold all layers of all rows.
        """
        unique, places = _distinct(ids)
        merged = gradients
        if places is not None:
            merged = torch.zeros(len(unique), gradients.shape[1]).index_add_(0, places, gradients)
        for run, block in self._blocks(name, unique):
            with torch.enable_grad():
                self.projections.project(name, block).backward(merged[run])

    def _blocks(self, name: str, ids: np.ndarray) -> Iterator[tuple[slice, Tensor]]:
        """Yield runs of original ids with their vectors, float32."""
        for start in range(0, len(ids), ROWS_AT_A_TIME):
            run = slice(start, start + ROWS_AT_A_TIME)
            yield run, torch.from_numpy(np.asarray(self._vectors[name][ids[run]], dtype=np.float32))


def _distinct(ids: Tensor) -> tuple[np.ndarray, Tensor | None]:
    """Return the distinct ids, ascending, and the place of each id among them; None if they are these."""
    unique, places = np.unique(ids.numpy(), return_inverse=True)
    is_same = len(unique) == len(ids) and bool((np.diff(places) > 0).all())
    return unique, None if is_same else torch.from_numpy(places.reshape(-1))
