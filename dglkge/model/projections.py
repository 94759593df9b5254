"""Frozen vectors of entities (features), and the trained projections from them to rows.

A row is scored as e + f(x), with e the entity's trained row (or 0), x its frozen vector and f the projection
of its type: a matrix and an offset, or layers with an activation between. An entity without a vector has
x = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dglkge.errors import InputError
from dglkge.model.dense_modules import Linear, load_parameters

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
        self._layers = {
            name: [
                Linear(seed, f"{PREFIX}{name}.{number}", before, after)
                for number, (before, after) in enumerate(zip([width, *sizes], sizes))
            ]
            for name, width in self.widths.items()
        }

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, layers in self._layers.items():
            for number, layer in enumerate(layers):
                for one, values in layer.named_parameters():
                    yield f"{PREFIX}{name}.{number}.{one}", values

    def project(self, name: str, vectors: Tensor) -> Tensor:
        """Return f(x), (n, D), of vectors (n, F) of an entity type, in their type of numbers."""
        rows = vectors
        layers = self._layers[name]
        for number, layer in enumerate(layers):
            rows = functional.linear(rows, layer.weight.to(rows.dtype), layer.bias.to(rows.dtype))
            if number + 1 < len(layers):
                rows = self._activation(rows)
        return rows


def projections_of(
    parameters: Mapping[str, Tensor], dim: int, activation: str, where: str
) -> FeatureProjections:
    """Return the projections that saved parameters are of, by their names and shapes; an InputError if of
    none.
    """
    layers: dict[str, dict[int, Tensor]] = {}
    for name, values in parameters.items():
        of_type, number, kind = name[len(PREFIX) :].rsplit(".", 2)
        if kind == "weight":
            layers.setdefault(of_type, {})[int(number)] = values
    widths = {name: int(found[0].shape[1]) for name, found in layers.items()}
    hidden = {tuple(int(found[one].shape[0]) for one in sorted(found)[:-1]) for found in layers.values()}
    if len(hidden) != 1:
        raise InputError(f"{where}: the projections of features have different layers")
    made = FeatureProjections(widths, dim, hidden.pop(), activation, 0)
    load_parameters(made, parameters, where)
    made.requires_grad_(False)
    return made


class JoinedModules(nn.Module):
    """Modules with one optimizer, whose parameters keep their names."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self._parts = modules

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for one in self._parts:
            yield from one.named_parameters()


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
        made = [self.projections.project(name, one) for one in self._blocks(name, unique)]
        if not made:
            return torch.zeros(0, self.projections.dim)
        found = made[0] if len(made) == 1 else torch.cat(made)
        return found if places is None else found[places]

    @torch.no_grad()
    def scored(self, name: str, ids: Tensor) -> Tensor:
        """Return f(x), (n, D) float32, of original ids (n,), as rankings have it.

        Computed in float64: a product in float32 has other last bits for another number of rows, and rankings
        of live tables and of files would differ.
        """
        made = torch.empty(len(ids), self.projections.dim)
        start = 0
        for one in self._blocks(name, ids.numpy()):
            made[start : start + len(one)] = self.projections.project(name, one.double())
            start += len(one)
        return made

    def backward(self, name: str, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients of the parameters, given those (n, D) of the rows of original ids (n,).

        The projection is computed again: keeping it from :meth:`rows` would hold all layers of all rows.
        """
        unique, places = _distinct(ids)
        merged = gradients
        if places is not None:
            merged = torch.zeros(len(unique), gradients.shape[1]).index_add_(0, places, gradients)
        start = 0
        for one in self._blocks(name, unique):
            with torch.enable_grad():
                self.projections.project(name, one).backward(merged[start : start + len(one)])
            start += len(one)

    def _blocks(self, name: str, ids: np.ndarray) -> Iterator[Tensor]:
        """Yield the vectors of original ids in blocks, float32."""
        vectors = self._vectors[name]
        for start in range(0, len(ids), ROWS_AT_A_TIME):
            some: Any = np.asarray(vectors[ids[start : start + ROWS_AT_A_TIME]], dtype=np.float32)
            yield torch.from_numpy(some)


def _distinct(ids: Tensor) -> tuple[np.ndarray, Tensor | None]:
    """Return the distinct ids, ascending, and the place of each id among them; None if they are these."""
    unique, places = np.unique(ids.numpy(), return_inverse=True)
    is_same = len(unique) == len(ids) and bool((np.diff(places) > 0).all())
    return unique, None if is_same else torch.from_numpy(places.reshape(-1))
