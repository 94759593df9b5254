"""One table of an opened checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Union

import numpy as np
import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry
from dglkge.checkpoint.restore import read_relations
from dglkge.data.relation_vocabulary import RelationVocabulary
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError

Key = Union[int, str, slice, Sequence[int], Sequence[str], np.ndarray, torch.Tensor]


@dataclass(frozen=True)
class FileShard:
    """The rows of one file.

    Attributes
    ----------
    original_ids : (n,) int64 tensor
        Ascending.
    rows : (n, D) float32 tensor
        Mapped from the file.
    """

    original_ids: torch.Tensor
    rows: torch.Tensor

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the place of each original id (m,) among the rows, -1 where it is not here."""
        if not len(self.original_ids):
            return torch.full_like(ids, -1)
        places = torch.searchsorted(self.original_ids, ids).clamp_(max=len(self.original_ids) - 1)
        return torch.where(self.original_ids[places] == ids, places, -1)


class CheckpointTable:
    """Rows of one table, by original id or by name.

    Parameters
    ----------
    name : str
        The entity type, or ``"relation"``.
    shards : sequence of FileShard
        Its rows.
    name_to_id : callable
        Looks up a name's id, or raises InputError.

    Examples
    --------
    ::

        table = open_checkpoint("runs/demo")["entity"]
        table.shape            # (number of entities, D)
        table[7], table["Alice"]   # (D,) each
        table[[7, 8]], table[["Alice", "Bob"]], table[7:9]   # (2, D) each
    """

    def __init__(self, name: str, shards: Sequence[FileShard], name_to_id: Callable[[str], int]) -> None:
        self.name = name
        self.shards = shards
        self._name_to_id = name_to_id

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and their width."""
        return len(self), self.shards[0].rows.shape[1]

    def __len__(self) -> int:
        return sum(len(shard.original_ids) for shard in self.shards)

    def __getitem__(self, key: Key) -> torch.Tensor:
        """Return a copy of the rows of ids or names: (D,) for one, (n, D) for several.

        Raises
        ------
        InputError
            If an id is out of range or a name unknown.
        """
        if isinstance(key, (int, np.integer)):
            return self.gather(torch.tensor([int(key)]))[0]
        if isinstance(key, str):
            return self.gather(torch.tensor([self._name_to_id(key)]))[0]
        if isinstance(key, slice):
            return self.gather(torch.arange(*key.indices(len(self))))
        if not isinstance(key, torch.Tensor):
            key = torch.tensor([self._name_to_id(one) if isinstance(one, str) else int(one) for one in key])
        return self.gather(key.long())

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows (n, D) of original ids (n,).

        Raises
        ------
        InputError
            If an id is out of range.
        """
        count, width = self.shape
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
            raise InputError(
                f"table {self.name!r} has ids 0..{count - 1}; got {int(ids.min())}..{int(ids.max())}"
            )
        rows = torch.empty((len(ids), width), dtype=self.shards[0].rows.dtype)
        for shard in self.shards:
            places = shard.locate(ids)
            here = (places >= 0).nonzero().squeeze(1)
            rows[here] = shard.rows[places[here]]
        return rows


def entity_table(
    folder: Path,
    entries: Sequence[FileEntry],
    opened: Mapping[str, BinaryIO],
    names: Callable[[], Vocabulary],
) -> CheckpointTable:
    """Map the rows of an entity type.

    Parameters
    ----------
    folder : Path
    entries : sequence of FileEntry
        Its files, in the order of parts.
    opened : mapping of str to binary file
        Those files by name, open: training may have dropped them since.
    names : callable
        Returns its vocabulary, which is read only when a name is asked for.
    """
    shards: list[FileShard] = []
    first_id = 0
    for entry in entries:
        path = folder / entry.name
        raw = opened[entry.name]
        with hdf5_format.open_file(path, raw) as file:
            ids = hdf5_format.original_ids(raw, file, first_id)
            rows = hdf5_format.map_rows(raw, file[hdf5_format.EMBEDDINGS])
        shards.append(FileShard(torch.from_numpy(ids), torch.from_numpy(rows)))
        first_id += entry.num_rows
    return CheckpointTable(entries[0].table, shards, lambda name: names().id(name))


def relation_table(
    folder: Path,
    entries: Sequence[FileEntry],
    opened: Mapping[str, BinaryIO],
    meta: CheckpointMeta,
    relations: RelationVocabulary,
) -> CheckpointTable:
    """Read the relations' rows, which are put together from operator parameters."""
    path = folder / entries[0].name
    with hdf5_format.open_file(path, opened[entries[0].name]) as file:
        rows = torch.from_numpy(read_relations(path, file, meta))
    return CheckpointTable(entries[0].table, [FileShard(torch.arange(len(rows)), rows)], relations.id)
