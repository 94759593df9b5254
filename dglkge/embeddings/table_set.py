"""All tables of a model, by name, and the averages of their rows over the epochs (``training.averaging``).

Ohad Shamir and Tong Zhang, "Stochastic Gradient Descent for Non-smooth Optimization: Convergence Results and
Optimal Averaging Schemes", ICML 2013: a mean of which later epochs are a larger part, without the need to
know when training ends.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dglkge.data.partition_layout import PartitionLayout
from dglkge.embeddings.embedding_table import FLOAT32_ROWS, EmbeddingTable, RowStorage
from dglkge.embeddings.row_exchange import RowExchange
from dglkge.embeddings.row_lookup import DirectLookup, ExchangeLookup, RequestedLookup, RowLookup
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.dgl_tables import make_state
from dglkge.typing import RELATION, TRAINED_ROWS, TablePart


class TableSet(UserDict[str, EmbeddingTable]):
    """The tables of every entity type and of the relations; looks rows up by original id.

    Parameters
    ----------
    graph, layout, part
        As of :class:`EmbeddingTable`.
    entity_dims : mapping of str to int
        Width of the rows of each entity type.
    relation_dim : int
        Width of a relation's row.
    storage : RowStorage
        How rows of entities are stored. Relations are few and always float32.

    Attributes
    ----------
    lookup : RowLookup
        Lookup of the rows of a batch; ``use_exchange`` or ``use_requests`` replaces it on several machines.
    """

    def __init__(
        self,
        graph: Any,
        layout: PartitionLayout,
        entity_dims: Mapping[str, int],
        relation_dim: int,
        part: int,
        storage: RowStorage = FLOAT32_ROWS,
    ) -> None:
        self._part = part
        self._num_times = layout.num_times
        tables = {
            name: EmbeddingTable(graph, layout, name, dim, part, storage) for name, dim in entity_dims.items()
        }
        wide = replace(storage, dtype=torch.float32)
        # The order of the tables is that of the exchange's messages, so it must be the same on all trainers.
        tables[RELATION] = EmbeddingTable(graph, layout, RELATION, relation_dim, part, wide)
        super().__init__(tables)
        self.lookup: RowLookup = DirectLookup(self.data)

    @property
    def entity_types(self) -> list[str]:
        """Names of the entity types."""
        return [name for name in self if name != RELATION]

    def replaced(self, tables: Mapping[str, EmbeddingTable]) -> TableSet:
        """Return the set with other tables of the same names, for :meth:`gather`; the lookup is shared."""
        clone = copy.copy(self)
        clone.data = dict(tables)
        return clone

    def use_exchange(self, group: Alltoall, wire_dtype: torch.dtype, staleness: int) -> None:
        """Look rows up through an exchange of all trainers, a group of its own, from now on; a collective."""
        exchange = RowExchange(group, self._part, list(self.values()), wire_dtype)
        self.lookup = ExchangeLookup(self.data, exchange, staleness)

    def use_requests(self, num_ahead: int) -> None:
        """Ask DGL's servers for the rows of batches that many batches ahead from now on."""
        self.lookup = RequestedLookup(self.data, num_ahead)

    def row_ids(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids (n,) of rows: a relation has one for all its times."""
        return ids // self._num_times if table == RELATION and self._num_times > 1 else ids

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table."""
        if isinstance(self.lookup, RequestedLookup):
            self.lookup.finish()
        return self[table].gather(self[table].node_ids[self.row_ids(table, ids)])


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
        self._average = make_state(trained.embedding, {AVERAGE: (trained.dim,)}, torch.float32)[AVERAGE]
        self.local_rows = self._average.local_partition

    def _pulled(self, node_ids: Tensor) -> Tensor:
        return self._average[node_ids]

    def own_part(self, state: dict[str, Any] | None = None) -> TablePart:
        part = super().own_part(state)
        return replace(part, state={**part.state, TRAINED_ROWS: self.trained.local_rows})

    def whole(self, state: dict[str, Any] | None = None) -> TablePart:
        part = super().whole(state)
        return replace(part, state={**part.state, TRAINED_ROWS: self.trained.whole().rows})

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
