"""Tables of a model that lie whole in files of another form than a checkpoint's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint, CheckpointTable, FileShard, TablesByName
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.typing import RELATION


class WholeTables(TablesByName):
    """Tables with the interface of :class:`dglkge.checkpoint.reader.Checkpoint`; ids are the rows' numbers.

    Parameters
    ----------
    path : Path
        Folder of the files.
    rows : mapping of str to (n, D) tensor
        By table.
    """

    def __init__(self, path: Path, meta: CheckpointMeta, rows: Mapping[str, torch.Tensor]) -> None:
        self.path = path
        self.meta = meta
        self.relations = RelationVocabulary(list(meta.relations))
        self._vocabularies: dict[str, Vocabulary] = {}
        self._tables = {
            table: CheckpointTable(
                table, [FileShard(torch.arange(len(whole)), whole)], partial(self._id, table)
            )
            for table, whole in rows.items()
        }

    @property
    def entity_types(self) -> list[str]:
        """The entity types, in their order."""
        return list(self.meta.entity_types)

    def vocabulary(self, entity_type: str) -> Vocabulary:
        """Return the names of an entity type, which are read at the first call."""
        if entity_type not in self._vocabularies:
            self._vocabularies[entity_type] = self._read_names(entity_type, len(self[entity_type]))
        return self._vocabularies[entity_type]

    @abstractmethod
    def _read_names(self, entity_type: str, count: int) -> Vocabulary:
        """Read the names of the rows of an entity type."""

    def _id(self, table: str, name: str) -> int:
        lookup: Callable[[str], int] = self.relations.id if table == RELATION else self.vocabulary(table).id
        return lookup(name)


Tables = Checkpoint | WholeTables
"""Tables of a trained model on files: rows and names by table."""
