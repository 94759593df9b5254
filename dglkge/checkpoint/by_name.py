"""Which rows of one run are which rows of another: entities and relations are matched by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dglkge.checkpoint import restore
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError, InputError, unknown_name
from dglkge.typing import RELATION, TablePart


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


def saved_types(
    theirs: Sequence[str], ours: Sequence[str], pairs: Sequence[str] = ()
) -> dict[str, str | None]:
    """Return the entity type of a checkpoint that each of a run's is; None for one that it lacks.

    Types of the same name are the same, and so are two that have no other on their side: PyTorch-BigGraph's
    importers call the one type ``all``.

    Parameters
    ----------
    theirs, ours : sequence of str
        The entity types of the checkpoint and of the run.
    pairs : sequence of str
        Of the form ``THEIRS=OURS``. One of theirs may be several of ours.

    Raises
    ------
    InputError
        If a pair is of another form, names an unknown type, or gives one of ours a second time.
    """
    found: dict[str, str | None] = {}
    for text in pairs:
        left, separator, right = text.partition("=")
        if not (left and separator and right):
            raise InputError(f"--type {text!r} is not of the form THEIRS=OURS, e.g. all=entity")
        if left not in theirs:
            raise unknown_name("entity type of the checkpoint", left, theirs)
        if right not in ours:
            raise unknown_name("entity type of the data set", right, ours)
        if right in found:
            raise InputError(f"the entity type {right!r} of the data set is given twice by --type")
        found[right] = left
    alone = theirs[0] if len(theirs) == len(ours) == 1 else None
    for name in ours:
        if name not in found:
            found[name] = name if name in theirs else alone
    return found


def saved_entity_ids(checkpoint: Checkpoint, entity_type: str | None, names: Vocabulary) -> np.ndarray:
    """Return the id that each entity of a run has in a checkpoint, -1 where it has none.

    Parameters
    ----------
    checkpoint : Checkpoint
    entity_type : str or None
        Of the checkpoint; None where it lacks the run's.
    names : Vocabulary
        The run's entities of that type.

    Returns
    -------
    (n,) int64 array
    """
    if entity_type is None or entity_type not in checkpoint.entity_types:
        return np.full(len(names), -1, dtype=np.int64)
    return _places(list(checkpoint.vocabulary(entity_type).names), list(names.names))


def saved_relation_ids(
    checkpoint: Checkpoint, meta: CheckpointMeta, types: Mapping[str, str | None]
) -> np.ndarray:
    """Return the id that each relation of a run has in a checkpoint, by name and both types; else -1.

    Parameters
    ----------
    checkpoint : Checkpoint
    meta : CheckpointMeta
        Of the run.
    types : mapping of str to str or None
        What :func:`saved_types` returns.
    """
    ids = {
        (relation.name, relation.lhs, relation.rhs): id_
        for id_, relation in enumerate(checkpoint.meta.relations)
    }
    wanted = [(one.name, types.get(one.lhs), types.get(one.rhs)) for one in meta.relations]
    return np.array([ids.get(relation, -1) for relation in wanted], dtype=np.int64)  # type: ignore[arg-type]


def take_over(
    checkpoint: Checkpoint, part: TablePart, saved_ids: np.ndarray, table: str | None = None
) -> int:
    """Write a checkpoint's rows and state over those of a live part; rows that it lacks stay as they are.

    Parameters
    ----------
    checkpoint : Checkpoint
    part : TablePart
        Filled in place.
    saved_ids : (N,) int64 array
        By original id of the whole table: the id in the checkpoint, or -1.
    table : str, optional
        Name of the table in the checkpoint, where it is another than the part's.

    Returns
    -------
    int
        How many of the part's rows were taken over.
    """
    wanted = torch.from_numpy(saved_ids)[part.original_ids]
    num_found = int((wanted >= 0).sum())
    if num_found:
        # One relation of the checkpoint may be several of the run, where a type of it is several types here.
        source = dataclasses.replace(part, table=table or part.table)  # the same tensors
        again = _places_again(wanted) if part.table == RELATION else {}
        once = wanted.clone()
        once[list(again)] = -1
        restore.fill_part(checkpoint.storage, checkpoint.manifest, source, once)
        for place, first in again.items():
            for values in (part.rows, *part.state.values()):
                values[place] = values[first]
    return num_found


def _places_again(wanted: torch.Tensor) -> dict[int, int]:
    """Return the places of ids that stood before, and where each stood first."""
    first: dict[int, int] = {}
    again = {}
    for place, id_ in enumerate(wanted.tolist()):
        if id_ >= 0 and first.setdefault(id_, place) != place:
            again[place] = first[id_]
    return again


def _places(known: list[str], wanted: list[str]) -> np.ndarray:
    """Return where each wanted name stands among the known ones, -1 where it does not."""
    if known == wanted:
        return np.arange(len(known), dtype=np.int64)
    import pandas as pd  # here: most runs start from no other, and importing it takes a fifth of a second

    return pd.Index(known, dtype=object).get_indexer(pd.Index(wanted, dtype=object)).astype(np.int64)
