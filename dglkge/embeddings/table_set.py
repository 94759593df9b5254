"""All tables of a model, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dglkge.data.partition_layout import PartitionLayout
from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.typing import RELATION


class TableSet(Mapping[str, EmbeddingTable]):
    """The tables of every entity type and of the relations; looks rows up by original id.

    Parameters
    ----------
    graph : dgl.distributed.DistGraph
    layout : PartitionLayout
    entity_types : sequence of str
    entity_dim, relation_dim : int
        Widths of an entity's and of a relation's row.
    part : int
        The partition on this machine.
    """

    def __init__(
        self,
        graph: Any,
        layout: PartitionLayout,
        entity_types: Sequence[str],
        entity_dim: int,
        relation_dim: int,
        part: int,
    ) -> None:
        self._tables = {name: EmbeddingTable(graph, layout, name, entity_dim, part) for name in entity_types}
        self._tables[RELATION] = EmbeddingTable(graph, layout, RELATION, relation_dim, part)

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

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table."""
        found = self._tables[table]
        return found.gather(found.node_ids[ids])
