"""Tables of a model that lie whole in files of another form than a checkpoint's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint, CheckpointTable, FileShard, TablesByName
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import require_known
from dglkge.typing import RELATION

Rows = Mapping[str, torch.Tensor]


class WholeTables(TablesByName):
    """Tables with the interface of :class:`dglkge.checkpoint.reader.Checkpoint`; ids are the rows' numbers.

    Parameters
    ----------
    path : Path
        Folder of the files.
    rows : mapping of str to (n, D) tensor
        By table.
    names : callable
        Reads the names of an entity type, at the first use.
    dense : mapping of str to tensor
        Dense parameters of the score function's module.
    """

    def __init__(
        self, path: Path, meta: CheckpointMeta, rows: Rows, names: Callable[[str], Vocabulary], dense: Rows
    ) -> None:
        self.path, self.meta, self.entity_types = path, meta, list(meta.entity_types)
        self.relations, self._names = RelationVocabulary(list(meta.relations)), functools.cache(names)
        self._dense = dict(dense)
        self._tables = {}
        for table, whole in rows.items():
            shard = FileShard(torch.arange(len(whole)), whole)
            self._tables[table] = CheckpointTable(table, [shard], functools.partial(self._id, table))

    def vocabulary(self, table: str) -> Vocabulary:
        """Return the names of an entity type's rows, or of relations; InputError for other tables."""
        require_known("table", table, [*self.entity_types, RELATION])
        return self.relations.labels if table == RELATION else self._names(table)

    def dense_parameters(self) -> dict[str, torch.Tensor]:
        """Return the dense parameters of the score function's module by name; none where it has none."""
        return self._dense

    def _id(self, table: str, name: str) -> int:
        return self.relations.id(name) if table == RELATION else self.vocabulary(table).id(name)


Tables = Checkpoint | WholeTables
"""Tables of a trained model on files: rows and names by table."""
