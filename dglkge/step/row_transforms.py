"""Row transforms: what happens to rows between table and objective, and to gradients on the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from dglkge.checkpoint.hdf5_format import global_sums_path
from dglkge.errors import CheckpointError
from dglkge.formats.relation_parameters import global_vector_path
from dglkge.kernels.hashing import column_bits, drop_numbers, row_keys, stream_key
from dglkge.model.dense_modules import ProjectedFeatures
from dglkge.model.kge_model import KgeModel
from dglkge.step.contracts import Parameters, RowGradients, RowTransform
from dglkge.typing import RELATION

_BLOCK_WORDS = 1 << 16
"""Random words drawn at a time: the working arrays stay in cache."""

_LEVELS = 1 << 16
"""A number takes 16 random bits, so that probabilities are multiples of 2^-16."""


@dataclass
class RowDropout(RowTransform):
    """Dropout of the numbers of rows (Srivastava et al. 2014), the same for any number of trainers.

    In each batch the numbers of a row are set to 0 with some probability and the others are divided by the
    probability to keep them, as LibKGE's embedders do it. Which ones is a function of (seed, table, epoch,
    batch, original id, column): a row is the same in a batch wherever it occurs, as the entity given, as
    answer, negative or candidate, and on every trainer. A batch therefore trains the table times a mask.
    Regularizers take the rows after dropout.

    Attributes
    ----------
    rates : mapping of str to float
        By table: probability that a number is dropped; at least 0 and below 1. Tables with 0 may be absent.
    original_ids : mapping of str to (n,) int64 tensor
        By table: original id of each node id.
    seed : int
    kernels : {"auto", "reference"}
        "auto": a compiled loop where rows are in memory; "reference": its plain twin, the same bit for bit.
    """

    rates: Mapping[str, float]
    original_ids: Mapping[str, Tensor]
    seed: int
    kernels: str = "auto"

    def __post_init__(self) -> None:
        limits = {name: min(round(rate * _LEVELS), _LEVELS - 1) for name, rate in self.rates.items()}
        self._limits = {name: limit for name, limit in limits.items() if limit}
        self.tables = list(self._limits)
        self._batch = 0

    def start_batch(self, number: int) -> None:
        self._batch = number

    def backward(self, table: str, ids: Tensor, gradients: Tensor) -> None:
        """Multiply gradients by their masks: a dropped number is the stored one times its mask."""
        self.forward(table, ids, gradients)

    def forward(self, table: str, ids: Tensor, rows: Tensor) -> None:
        limit = self._limits[table]
        node_ids = ids.numpy()
        scale = _LEVELS / (_LEVELS - limit)
        key = stream_key(self.seed, "dropout", table, self._batch)
        original_ids, dim = self.original_ids[table].numpy(), rows.shape[1]
        if rows.device.type == "cpu" and self.kernels != "reference":
            drop_numbers(rows.numpy(), original_ids[node_ids], key[0], np.uint16(limit), np.float32(scale))
            return
        num_words = -(-dim // 4)
        step = max(1, _BLOCK_WORDS // num_words)
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            bits = column_bits(row_keys(key, original_ids[node_ids[block]]), num_words)
            # Four numbers of 16 bits from each word, the lowest bits first.
            numbers = bits.astype("<u8", copy=False).view("<u2")[:, :dim]
            rows[block].mul_(torch.from_numpy(numbers >= limit).to(rows.device)).mul_(scale)


EPS = 1e-10
"""Added to the root, as PyTorch-BigGraph does."""


@dataclass
class GlobalVectors(RowTransform, Parameters):
    """One vector for each entity type that is added to all its rows (PyTorch-BigGraph's ``global_emb``).

    A row is scored as e + g, with e the entity's row and g its type's vector, so the gradient of g is the sum
    of the gradients of all rows of the type. Every trainer holds the vectors and makes the same updates: they
    are small, and no table has a place for them. PyTorch-BigGraph updates them by Adagrad with a number for
    each coordinate (Duchi, Hazan and Singer 2011), and so does this class, whatever the optimizer of the
    rows. Their learning rate is that of the entities; clipping treats their gradient as one more row.

    Attributes
    ----------
    tables : sequence of str
        The entity types.
    dim : int
    group : mapping of str to Any
        Parameter group of the entities: its ``lr`` is read at each update.
    sum_over_trainers : callable
        Sums an array over all trainers; a collective.
    clip_value : float
        Limit of the size of each number of the summed gradient; 0: none.

    vectors : dict of str to (D,) float32 tensor
        By entity type; they keep their place in memory. Zeros at the start.
    """

    tables: Sequence[str]
    dim: int
    group: Mapping[str, Any]
    sum_over_trainers: Callable[[np.ndarray], np.ndarray]
    clip_value: float = 0.0

    is_collective = False

    def __post_init__(self) -> None:
        self.vectors = {name: torch.zeros(self.dim) for name in self.tables}
        self._sums = {name: torch.zeros(self.dim) for name in self.tables}
        self._gradients = torch.zeros(len(self.tables), self.dim)
        self._total = np.zeros(self._gradients.shape)

    def start_batch(self, number: int) -> None:
        self._total = np.zeros(self._gradients.shape)

    def forward(self, table: str, ids: Tensor, rows: Tensor) -> None:
        rows += self.vectors[table]

    def backward(self, table: str, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients of a type's rows to that of its vector; a row's own gradient is the same."""
        # In float64, so that the order of trainers and rows shows in the last bits of float32 only.
        self._total[self.tables.index(table)] += gradients.sum(0, dtype=torch.float64).numpy()

    def sum_gradients(self, gradients: Sequence[RowGradients]) -> float:
        total = self.sum_over_trainers(self._total)
        # A gradient that is not finite is not applied; the optimizer reports the rows that it comes from.
        total[~np.isfinite(total).all(1)] = 0
        self._gradients = torch.from_numpy(total).float()
        if self.clip_value:
            self._gradients.clamp_(-self.clip_value, self.clip_value)
        return float(self._gradients.double().square().sum())

    def update(self, factor: float) -> None:
        for name, gradient in zip(self.vectors, self._gradients * factor):
            # A type without gradients stays as it is: 0 / (0 + EPS).
            self._sums[name].add_(gradient.square())
            self.vectors[name].sub_(self.group["lr"] * gradient / (self._sums[name].sqrt() + EPS))

    def state_dict(self) -> dict[str, Tensor]:
        return {path: values.clone() for path, values in self._by_path().items()}

    def load_state_dict(self, state: h5py.File) -> None:
        for path, values in self._by_path().items():
            saved = state[path][...]
            if saved.shape != tuple(values.shape):
                shapes = f"{saved.shape}, expected {tuple(values.shape)}"
                raise CheckpointError(f"{state.filename}:{path} has shape {shapes}")
            values.copy_(torch.from_numpy(saved))

    def take_sums(self, file: h5py.File, types: Mapping[str, str | None]) -> None:
        """Take Adagrad's sums of another run's model file with rows of the same width, where it has some of a
        type.

        ``types`` are the file's entity types by those of this run.
        """
        for name, saved in types.items():
            if saved is not None and global_sums_path(saved) in file:
                self._sums[name].copy_(torch.from_numpy(file[global_sums_path(saved)][...]))

    def _by_path(self) -> dict[str, Tensor]:
        """Return the vectors and sums by dataset of a model file."""
        named = {global_vector_path(name): vector for name, vector in self.vectors.items()}
        return named | {global_sums_path(name): sums for name, sums in self._sums.items()}


@dataclass
class AddedFeatures(RowTransform):
    """Adds projected features to rows: that of an entity e with vector x is scored as e + f(x).

    Gradients of the projections are left with their parameters.

    Attributes
    ----------
    features : ProjectedFeatures
    original_ids : mapping of str to (n,) int64 tensor
        By table: original id of each node id.
    """

    features: ProjectedFeatures
    original_ids: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        self.tables = self.features.entity_types

    def forward(self, table: str, ids: Tensor, rows: Tensor) -> None:
        rows += self.features.rows(table, self.original_ids[table][ids])

    def backward(self, table: str, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients of the projections: those of e + f(x) are those of f(x), and of e."""
        self.features.backward(table, self.original_ids[table][ids], gradients)


@dataclass
class Times(RowTransform):
    """Writes the number of the time into the rows of relations at a time.

    Attributes
    ----------
    model : KgeModel
    num_times : int
        An id is ``relation * num_times + time``.
    """

    model: KgeModel
    num_times: int

    tables = (RELATION,)

    def forward(self, table: str, ids: Tensor, rows: Tensor) -> None:
        self.model.set_times(rows, ids % self.num_times)
