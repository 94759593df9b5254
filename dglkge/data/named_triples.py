"""Reads a file of triples by name as original ids of a trained model or data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from dglkge.data.text_format import ROLES, TIME, Columns
from dglkge.data.triples import TripleFile
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary, label_at
from dglkge.errors import InputError
from dglkge.typing import Ids

VocabularyOf = Callable[[str], Vocabulary]


def read_named_triples(
    path: Path,
    relations: RelationVocabulary,
    vocabulary: VocabularyOf,
    columns: Columns | None = None,
    delimiter: str | None = None,
) -> np.ndarray:
    """Read triples whose names are known, (n, 3) int64: head, relation and tail.

    The file, its columns and delimiter are as the partitioner has them. A relation's name may join several
    pairs of entity types. It then stands for the one pair whose types have the head and the tail.

    Raises
    ------
    InputError
        If the file cannot be read, or a name is unknown or ambiguous; the message begins with ``file:line``.
    """
    parts, num_rows = [], 0
    file = TripleFile(path, columns or Columns(), delimiter)
    for chunk in file.frames():
        triples, bad = _resolve(chunk, relations, vocabulary)
        if len(bad):
            row, fault = num_rows + int(bad[0]), _fault(chunk.iloc[bad[:1]], relations, vocabulary)
            raise InputError(f"{file.places([row])[row]}: {fault}")
        parts.append(triples)
        num_rows += len(chunk)
    return np.concatenate(parts)


def find_triples(
    frame: pd.DataFrame, relations: RelationVocabulary, vocabulary: VocabularyOf
) -> tuple[np.ndarray, dict[int, str]]:
    """Look up the ids of triples by name.

    Parameters
    ----------
    frame : DataFrame
        Categorical columns head, relation and tail, and time where relations have one.
    relations : RelationVocabulary
    vocabulary : callable
        Returns the names of an entity type.

    Returns
    -------
    triples : (n, 3) int64 array
        -1 in the rows of unknown or ambiguous names.
    faults : dict of int to str
        What is wrong with each of these rows, with the nearest known names.
    """
    triples, bad = _resolve(frame, relations, vocabulary)
    return triples, {row: _fault(frame.iloc[[row]], relations, vocabulary) for row in bad.tolist()}


def _with_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Return triples with relations at their times; without a column of times as they are."""
    if TIME not in frame.columns:
        return frame
    names = [label_at(*pair) for pair in zip(frame["relation"].astype(str), frame[TIME].astype(str))]
    return frame.assign(relation=pd.Categorical(names))


def _resolve(chunk: pd.DataFrame, relations: RelationVocabulary, vocabulary: VocabularyOf) -> tuple[Ids, Ids]:
    """Return the ids (n, 3) of a chunk, and the rows that not exactly one relation fits, where ids are -1."""
    chunk = _with_times(chunk)
    ids = np.full((len(chunk), 3), -1, dtype=np.int64)
    num_fitting = np.zeros(len(chunk), dtype=np.int64)
    for name, rows in chunk.groupby("relation", observed=True).indices.items():
        try:
            relation_ids = relations.ids_of(name)
        except InputError:
            continue  # no relation fits these rows, and the caller names the first of them
        for relation_id in relation_ids:
            relation = relations[relation_id]
            heads = _entity_ids(chunk["head"], rows, vocabulary(relation.lhs))
            tails = _entity_ids(chunk["tail"], rows, vocabulary(relation.rhs))
            fits = (heads >= 0) & (tails >= 0)
            num_fitting[rows[fits]] += 1
            ids[rows[fits]] = np.stack([heads, np.full(len(rows), relation_id), tails], axis=1)[fits]
    bad = np.flatnonzero(num_fitting != 1)
    ids[bad] = -1
    return ids, bad


def _entity_ids(column: pd.Series, rows: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Return the ids of a categorical column's rows, -1 for unknown names."""
    codes, place = np.unique(column.cat.codes.to_numpy()[rows], return_inverse=True)
    return vocabulary.find(column.cat.categories[codes])[place]


def _fault(triple: pd.DataFrame, relations: RelationVocabulary, vocabulary: VocabularyOf) -> str:
    """Describe why a triple of names, a frame of one row, is not one triple of ids."""
    head, relation_name, tail = (str(name) for name in _with_times(triple)[list(ROLES)].iloc[0])
    try:
        relation_ids = relations.ids_of(relation_name)
        if len(relation_ids) == 1:
            relation = relations[relation_ids[0]]
            vocabulary(relation.lhs).id(head)
            vocabulary(relation.rhs).id(tail)
    except InputError as error:
        return str(error)
    known = ", ".join(repr(relations.labels[id_]) for id_ in relation_ids)
    several = "joins several pairs of entity types, and not exactly one of them has"
    return f"relation {relation_name!r} {several} {head!r} and {tail!r}; known: {known}"
