"""One vector for each entity type that is added to all its rows (PyTorch-BigGraph's ``global_emb``).

A row is scored as e + g, with e the entity's row and g its type's vector, so the gradient of g is the sum of
the gradients of all rows of the type. Every trainer holds the vectors and makes the same updates: they are
small, and no table has a place for them. PyTorch-BigGraph updates them by Adagrad with a number for each
coordinate (Duchi, Hazan and Singer 2011), and so does this module, whatever the optimizer of the rows. Their
learning rate is that of the entities; clipping treats their gradient as one more row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import torch

from dglkge.checkpoint.relation_layout import global_sums_path, global_vector_path
from dglkge.errors import CheckpointError
from dglkge.step.contracts import Parameters, RowGradients, RowTransform

EPS = 1e-10
"""Added to the root, as PyTorch-BigGraph does."""


class GlobalVectors(RowTransform, Parameters):
    """The vectors of all entity types, on one trainer: a row transform, and parameters of their own.

    Parameters
    ----------
    entity_types : sequence of str
    dim : int
    group : mapping of str to Any
        Parameter group of the entities: its ``lr`` is read at each update.
    sum_over_trainers : callable
        Sums an array over all trainers; a collective.
    clip_value : float
        Limit of the size of each number of the summed gradient; 0: none.

    Attributes
    ----------
    vectors : dict of str to (D,) float32 tensor
        By entity type; they keep their place in memory. Zeros at the start.
    """

    def __init__(
        self,
        entity_types: Sequence[str],
        dim: int,
        group: Mapping[str, Any],
        sum_over_trainers: Callable[[np.ndarray], np.ndarray],
        clip_value: float = 0.0,
    ) -> None:
        self.vectors = {name: torch.zeros(dim) for name in entity_types}
        self._sums = {name: torch.zeros(dim) for name in entity_types}
        self._group = group
        self._sum = sum_over_trainers
        self._clip_value = clip_value
        self._gradients = torch.zeros(len(entity_types), dim)
        self._total = np.zeros(self._gradients.shape)

    def start_batch(self, number: int) -> None:
        """Drop the gradients of the batch before."""
        self._total = np.zeros(self._gradients.shape)

    def forward(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the vector of a type to its rows."""
        rows += self.vectors[table]

    def backward(self, table: str, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add the gradients of a type's rows to that of its vector; a row's own gradient is the same."""
        # In float64, so that the order of trainers and rows shows in the last bits of float32 only.
        self._total[list(self.vectors).index(table)] += gradients.sum(0, dtype=torch.float64).numpy()

    def sum_gradients(self, gradients: Sequence[RowGradients]) -> float:
        """Sum the gradients of all trainers, and clip them by value; see :class:`Parameters`."""
        total = self._sum(self._total)
        # A gradient that is not finite is not applied; the optimizer reports the rows that it comes from.
        total[~np.isfinite(total).all(1)] = 0
        self._gradients = torch.from_numpy(total).float()
        if self._clip_value:
            self._gradients.clamp_(-self._clip_value, self._clip_value)
        return float(self._gradients.double().square().sum())

    def update(self, factor: float) -> None:
        """Update all vectors by the summed gradients times a factor."""
        for name, gradient in zip(self.vectors, self._gradients * factor):
            # A type without gradients stays as it is: 0 / (0 + EPS).
            self._sums[name].add_(gradient.square())
            self.vectors[name].sub_(self._group["lr"] * gradient / (self._sums[name].sqrt() + EPS))

    @property
    def is_collective(self) -> bool:
        return False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the vectors and of Adagrad's sums, by dataset of a model file."""
        return {path: values.clone() for path, values in self._by_path().items()}

    def load_state_dict(self, state: h5py.File) -> None:
        """Take the vectors and sums of a model file.

        Raises
        ------
        CheckpointError
            If it has them in another width.
        """
        for path, values in self._by_path().items():
            found = state[path][...]
            if found.shape != tuple(values.shape):
                raise CheckpointError(
                    f"{state.filename}:{path} has shape {found.shape}, expected {tuple(values.shape)}"
                )
            values.copy_(torch.from_numpy(found))

    def _by_path(self) -> dict[str, torch.Tensor]:
        """Return the vectors and sums by dataset of a model file."""
        named = {global_vector_path(name): vector for name, vector in self.vectors.items()}
        return named | {global_sums_path(name): sums for name, sums in self._sums.items()}
