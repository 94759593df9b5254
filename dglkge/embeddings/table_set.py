"""All tables of a model, by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dglkge.data.partition_layout import PartitionLayout
from dglkge.embeddings.embedding_table import FLOAT32_ROWS, EmbeddingTable, RowStorage
from dglkge.embeddings.row_exchange import RowExchange
from dglkge.embeddings.row_lookup import DirectLookup, ExchangeLookup, RequestedLookup, RowLookup
from dglkge.optim.alltoall import Alltoall
from dglkge.typing import RELATION


class TableSet(Mapping[str, EmbeddingTable]):
    """The tables of every entity type and of the relations; looks rows up by original id.

    Parameters
    ----------
    graph, layout, part
        As of :class:`EmbeddingTable`.
    entity_types : sequence of str
    entity_dim, relation_dim : int
        Widths of an entity's and of a relation's row.
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
        entity_types: Sequence[str],
        entity_dim: int,
        relation_dim: int,
        part: int,
        storage: RowStorage = FLOAT32_ROWS,
    ) -> None:
        self._part = part
        self._num_times = layout.num_times
        self._tables = {
            name: EmbeddingTable(graph, layout, name, entity_dim, part, storage) for name in entity_types
        }
        wide = replace(storage, dtype=torch.float32)
        # The order of the tables is that of the exchange's messages, so it must be the same on all trainers.
        self._tables[RELATION] = EmbeddingTable(graph, layout, RELATION, relation_dim, part, wide)
        self.lookup: RowLookup = DirectLookup(self._tables)

    def __getitem__(self, name: str) -> EmbeddingTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def entity_types(self) -> list[str]:
        """Names of the entity types."""
        return [name for name in self._tables if name != RELATION]

    def replaced(self, tables: Mapping[str, EmbeddingTable]) -> TableSet:
        """Return the set with other tables of the same names, for :meth:`gather`; the lookup is shared."""
        found = copy.copy(self)
        found._tables = dict(tables)
        return found

    def use_exchange(self, group: Alltoall, wire_dtype: torch.dtype, staleness: int) -> None:
        """Look rows up through an exchange of all trainers, a group of its own, from now on; a collective."""
        exchange = RowExchange(group, self._part, list(self._tables.values()), wire_dtype)
        self.lookup = ExchangeLookup(self._tables, exchange, staleness)

    def use_requests(self, num_ahead: int) -> None:
        """Ask DGL's servers for the rows of batches that many batches ahead from now on."""
        self.lookup = RequestedLookup(self._tables, num_ahead)

    def row_ids(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids (n,) of rows: a relation has one for all its times."""
        return ids // self._num_times if table == RELATION and self._num_times > 1 else ids

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table."""
        if isinstance(self.lookup, RequestedLookup):
            self.lookup.finish()
        found = self._tables[table]
        return found.gather(found.node_ids[self.row_ids(table, ids)])
