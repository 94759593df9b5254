"""Averages of all rows over the epochs, kept beside the rows that train (``training.averaging``).

Ohad Shamir and Tong Zhang, "Stochastic Gradient Descent for Non-smooth Optimization: Convergence Results and
Optimal Averaging Schemes", ICML 2013: a mean of which later epochs are a larger part, without the need to
know when training ends.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.table_set import TableSet
from dglkge.optim.dgl_tables import make_state
from dglkge.typing import TRAINED_ROWS, TablePart

AVERAGE = "average"

NUMBERS_A_BLOCK = 1 << 16
"""Numbers that are averaged at a time: they stay in the processor's cache between the operations."""


class AveragedTable(EmbeddingTable):
    """A table read as the averages of its rows; the rows that train are part of its state.

    So whatever ranks, writes or restores a table does so with averages, and training goes on from its rows.

    Its constructor is a collective. Averages are float32, whatever the type of the rows that train.
    """

    def __init__(self, trained: EmbeddingTable) -> None:
        # Not EmbeddingTable's constructor: it makes rows.
        self.__dict__.update(trained.__dict__)
        self.trained = trained
        made = make_state(trained.embedding, {AVERAGE: (trained.dim,)}, torch.float32)
        self._average = made[AVERAGE]
        self.local_rows = self._average.local_partition

    def _pulled(self, node_ids: Tensor) -> Tensor:
        rows: Tensor = self._average[node_ids]
        return rows

    def own_part(self, state: dict[str, Any] | None = None) -> TablePart:
        part = super().own_part(state)
        return dataclasses.replace(part, state={**part.state, TRAINED_ROWS: self.trained.local_rows})

    def whole(self, state: dict[str, Any] | None = None) -> TablePart:
        part = super().whole(state)
        return dataclasses.replace(part, state={**part.state, TRAINED_ROWS: self.trained.whole().rows})

    def add(self, weight: float, turn: tuple[int, int]) -> None:
        """Move the averages of one of equal ranges of this machine's rows; weight 1 copies the rows."""
        averages, rows = self.shard(*turn).rows, self.trained.shard(*turn).rows
        size = max(1, NUMBERS_A_BLOCK // self.dim)
        for average, row in zip(averages.split(size), rows.split(size)):
            if weight == 1:
                average.copy_(row)
            else:
                # Two roundings and no fused operation: no number depends on where a range begins.
                average.add_(torch.sub(row, average).mul_(weight))


class Averages:
    r"""The averages of all tables.

    After epoch n, with rows :math:`x_n` and power :math:`\gamma`,

    .. math:: a_n = a_{n-1} + \frac{1 + \gamma}{n + \gamma} (x_n - a_{n-1})

    so that epoch k has a weight of about :math:`k^\gamma`. Until the first epoch ends they are the rows.

    Parameters
    ----------
    tables : TableSet
    power : float
    turn : (int, int)
        (i, k): this trainer is number i of the k of its machine. A collective.

    Attributes
    ----------
    tables : TableSet
        The same tables, read as averages.
    num_epochs : int
        Epochs that are averaged: those that a restored version has finished, and later ones.
    """

    def __init__(self, tables: TableSet, power: float, turn: tuple[int, int]) -> None:
        self._power, self._turn = power, turn
        self.num_epochs = 0
        self._averaged = {name: AveragedTable(table) for name, table in tables.items()}
        self.tables = tables.replaced(self._averaged)

    def add(self, num_epochs: int) -> None:
        """Add the rows after so many epochs, each trainer those of its range; with 0 epochs copy them."""
        weight = (1 + self._power) / (num_epochs + self._power) if num_epochs > 1 else 1.0
        for table in self._averaged.values():
            table.add(weight, self._turn)
        self.num_epochs = num_epochs
