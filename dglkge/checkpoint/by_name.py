"""Which rows of one run are which rows of another: entities and relations are matched by name."""

from __future__ import annotations

import numpy as np
import torch

from dglkge.checkpoint import restore
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError
from dglkge.typing import TablePart


def check_same_model(saved: CheckpointMeta, wanted: CheckpointMeta, where: str) -> None:
    """Refuse rows of another score function or shape.

    Raises
    ------
    CheckpointError
        Naming the first thing that differs, with both values.
    """
    for name in ("score_function", "dim", "reciprocal"):
        old, new = getattr(saved, name), getattr(wanted, name)
        if old != new:
            raise CheckpointError(
                f"{where} has {name} {old!r}, this run has {new!r}: its rows cannot be taken over"
            )


def saved_entity_ids(checkpoint: Checkpoint, entity_type: str, names: Vocabulary) -> np.ndarray:
    """Return the id that each entity of a run has in a checkpoint, -1 where it has none.

    Parameters
    ----------
    checkpoint : Checkpoint
    entity_type : str
    names : Vocabulary
        The run's entities of that type.

    Returns
    -------
    (n,) int64 array
    """
    if entity_type not in checkpoint.entity_types:
        return np.full(len(names), -1, dtype=np.int64)
    return _places(list(checkpoint.vocabulary(entity_type).names), list(names.names))


def saved_relation_ids(checkpoint: Checkpoint, meta: CheckpointMeta) -> np.ndarray:
    """Return the id that each relation of a run has in a checkpoint, by name and both types; else -1."""
    saved, wanted = (
        [(relation.name, relation.lhs, relation.rhs) for relation in side.relations]
        for side in (checkpoint.meta, meta)
    )
    ids = {relation: id_ for id_, relation in enumerate(saved)}
    return np.array([ids.get(relation, -1) for relation in wanted], dtype=np.int64)


def take_over(checkpoint: Checkpoint, part: TablePart, saved_ids: np.ndarray) -> int:
    """Write a checkpoint's rows and state over those of a live part; rows that it lacks stay as they are.

    Parameters
    ----------
    checkpoint : Checkpoint
    part : TablePart
        Filled in place.
    saved_ids : (N,) int64 array
        By original id of the whole table: the id in the checkpoint, or -1.

    Returns
    -------
    int
        How many of the part's rows were taken over.
    """
    wanted = torch.from_numpy(saved_ids)[part.original_ids]
    num_found = int((wanted >= 0).sum())
    if num_found:
        restore.fill_part(checkpoint.storage, checkpoint.manifest, part, wanted)
    return num_found


def _places(known: list[str], wanted: list[str]) -> np.ndarray:
    """Return where each wanted name stands among the known ones, -1 where it does not."""
    if known == wanted:
        return np.arange(len(known), dtype=np.int64)
    import pandas as pd  # here: most runs start from no other, and importing it takes a fifth of a second

    return pd.Index(known, dtype=object).get_indexer(pd.Index(wanted, dtype=object)).astype(np.int64)
