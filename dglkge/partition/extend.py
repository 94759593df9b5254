"""Adds triples and entities to a data set: a new folder in which every old id and partition stays.

Original ids of entities and relations stay, and new ones follow after the last; times are numbered in their
order. An entity stays in its partition. Files of a checkpoint have the rows of a partition by original id, so
new rows are the last there. DGL's node ids, which are contiguous in a partition, are drawn anew; nothing
outside of the data set has them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dglkge import __version__
from dglkge.data import dataset_files
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import EDGE_SETS, NUMERIC_LITERALS, SPLITS, TRAIN, TRAIN_WEIGHTS, Field
from dglkge.data.quality import measure_quality
from dglkge.data.text_format import Columns
from dglkge.data.triples import TripleFile
from dglkge.data.vocabulary import RelationVocabulary, extended
from dglkge.errors import InputError
from dglkge.partition.dataset_writer import finish_dataset, staged, write_triples
from dglkge.partition.entity_types import assign_ids
from dglkge.partition.ingest import IdTriples, ingest, table_chunks
from dglkge.partition.name_index import name_list
from dglkge.partition.readers.id_folders import read_pairs
from dglkge.typing import RELATION

SLACK = 1.05
"""Largest partition over the mean, of entities, that placing new ones beside their neighbours may lead to."""


class _Extension(NamedTuple):
    """All names of each entity type and all relations at all times, old ones first; new triples by ids."""

    names: dict[str, list[str]]
    relations: RelationVocabulary
    triples: np.ndarray
    weights: np.ndarray | None


def extend_dataset(
    source: Path,
    inputs: Sequence[Path],
    output: Path,
    name: str,
    columns: Columns | None = None,
    delimiter: str | None = None,
    entity_types: Path | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Make a data set of an old one, which stays, and of further training triples, an edge set of their own.

    Parameters
    ----------
    inputs : sequence of Path
        Files of triples by name, as the partitioner reads tables.
    output : Path
        The folder to make.
    name : str
        Name of the edge set, for ``training.edge_sets``.
    columns, delimiter
        As of the partitioner.
    entity_types : Path, optional
        Lines of entity and type, for new entities that no known relation gives a type.
    overwrite : bool
        Replace a data set at the output.

    Returns
    -------
    dict
        Content of ``partitions/report.json``, and in ``added`` the new triples, entities and relations.

    Raises
    ------
    InputError
        If the input is wrong.
    """
    dataset = Dataset.open(source)
    dataset.verify()
    if output.resolve() == source.resolve():
        raise InputError(f"the output {output} is the data set itself; choose another folder")
    if name in dataset.edge_set_names:
        known = ", ".join(dataset.edge_set_names)
        raise InputError(f"the data set has an edge set {name!r} already ({known}); give another --name")
    files = {TRAIN: [TripleFile(path, columns or Columns(), delimiter) for path in inputs]}
    known_times = dataset.relations.times
    triples = ingest(table_chunks(files, lambda path, position: None), known_times=known_times)
    if bool(triples.times) != bool(known_times):
        having, lacking = ("data set", "input") if known_times else ("input", "data set")
        fault = f"the triples of the {having} have times, and those of the {lacking} have none"
        raise InputError(f"{fault}; both must have them, or neither (see --columns)")
    new = _resolve(dataset, triples, entity_types)
    if new.weights is not None and not dataset.has_weights:
        raise InputError("the input has weights, and the triples of the data set have none; leave them out")
    with staged(output, overwrite) as folder:
        description = _write(folder, dataset, new, name)
        parts = _assign(dataset, new)
        by_type = [parts[ntype] for ntype in (*dataset.entity_types, RELATION)]
        np.save(folder / dataset_files.GIVEN_PARTS, np.concatenate(by_type))
        quality = measure_quality(Dataset(folder, description).numbered()).report
        added = {
            "edge_set": name,
            "triples": len(new.triples),
            "entities": sum(len(names) - dataset.num_entities(type_) for type_, names in new.names.items()),
            "relations": len(new.relations.timeless) - len(dataset.relations.timeless),
            "times": len(new.relations.times) - len(known_times),
        }
        facts = {Field.INPUT: {"extends": str(source), "added": added}, "warnings": [], "dropped_leaks": {}}
        figures = finish_dataset(folder, description, quality, facts, has_parts=True)
    return {**figures, "added": added}


def _resolve(dataset: Dataset, triples: IdTriples, entity_types: Path | None) -> _Extension:
    """Find the old ids of names, and give new ones to others."""
    rows = triples.splits[TRAIN]
    types = dataset.entity_types
    type_of, ids = (np.full(len(triples.entities), -1, np.int64) for _ in range(2))
    for number, type_ in enumerate(types):
        known_ids = dataset.vocabulary(type_).find(triples.entities)
        is_known = known_ids >= 0
        for place in np.flatnonzero(is_known & (type_of >= 0))[:1].tolist():
            fault = f"{triples.entities[place]!r} is the name of a {types[type_of[place]]} and of a {type_}"
            raise InputError(f"{fault}; allowed: names that one type has")
        type_of[is_known], ids[is_known] = number, known_ids[is_known]
    _find_types(type_of, triples, dataset, entity_types)
    names = {type_: list(dataset.vocabulary(type_).names) for type_ in types}
    for place in np.flatnonzero(ids < 0).tolist():
        names_of_type = names[types[type_of[place]]]
        ids[place] = len(names_of_type)
        names_of_type.append(triples.entities[place])
    typed = assign_ids(triples, types, type_of)
    number_of = {relation: number for number, relation in enumerate(dataset.relations.timeless)}
    relation_ids = [number_of.setdefault(relation, len(number_of)) for relation in typed.relations.timeless]
    at_times = extended(np.array(relation_ids), triples.num_times)
    columns = ids[rows[:, 0]], at_times[typed.relation_ids(rows)], ids[rows[:, 2]]
    relations = RelationVocabulary(list(number_of), triples.times)
    return _Extension(names, relations, np.stack(columns, axis=1), triples.weights.get(TRAIN))


def _find_types(type_of: np.ndarray, triples: IdTriples, dataset: Dataset, path: Path | None) -> None:
    """Give each new entity a type: the only one, that of the file, or that of a known relation; in place."""
    number = {type_: place for place, type_ in enumerate(dataset.entity_types)}
    if len(number) == 1:
        type_of[:] = 0
        return
    if path is not None:
        types = {name: type_ for _, name, type_ in read_pairs(path, ("entity", "type"), more_columns=True)}
        for place in np.flatnonzero(type_of < 0).tolist():
            name = triples.entities[place]
            if name in types and types[name] not in number:
                fault = f"{name!r} has the type {types[name]!r}, which the data set lacks"
                raise InputError(f"{path}: {fault}; known: {', '.join(number)}")
            type_of[place] = number[types[name]] if name in types else -1
    pairs: dict[str, set[tuple[int, int]]] = {}
    for relation in dataset.relations.timeless:
        pairs.setdefault(relation.name, set()).add((number[relation.lhs], number[relation.rhs]))
    rows = triples.splits[TRAIN]
    for head, relation_id, tail in rows[(type_of[rows[:, [0, 2]]] < 0).any(1)].tolist():
        joined = pairs.get(triples.relations[relation_id // triples.num_times], set())
        ends = type_of[[head, tail]]
        fitting = [pair for pair in joined if ((ends == pair) | (ends < 0)).all()]
        if len(fitting) == 1:
            type_of[head], type_of[tail] = fitting[0]
    missing = np.flatnonzero(type_of < 0)
    if len(missing):
        fault = f"{len(missing)} new entities have no type, the first is {triples.entities[missing[0]]!r}"
        advice = "give --entity-types with lines of entity and type"
        raise InputError(f"{fault}: no known relation gives it one; {advice}")


def _write(folder: Path, dataset: Dataset, new: _Extension, set_name: str) -> dict[str, Any]:
    """Write all files but the partitions; return the fields of the description."""
    sets = dataset.edge_set_of_triples()
    sets = np.zeros(len(dataset.split(TRAIN)), np.int32) if sets is None else sets
    set_names = [*dataset.edge_set_names, set_name]
    new_sets = np.full(len(new.triples), len(set_names) - 1, np.int32)
    columns = {EDGE_SETS: np.concatenate([sets, new_sets])}
    weights = dataset.train_weights()
    if weights is not None:
        new_weights = np.ones(len(new.triples), np.float32) if new.weights is None else new.weights
        columns = {TRAIN_WEIGHTS: np.concatenate([weights, new_weights]), **columns}
    splits = {split: _at_new_times(dataset, new.relations.times, split) for split in SPLITS}
    splits[TRAIN] = np.concatenate([splits[TRAIN], new.triples])
    names = ((type_, name_list(names)) for type_, names in new.names.items())
    written = write_triples(folder, names, new.relations, splits, columns)
    # Ids of entities, and the triples of valid and test, are the old ones.
    kept = (NUMERIC_LITERALS, *(dataset_files.candidates_path(folder, split).name for split in SPLITS))
    for name in kept:
        if (dataset.path / name).is_file():
            shutil.copyfile(dataset.path / name, folder / name)
    changed = {Field.EDGE_SET_NAMES: set_names, Field.CREATED_BY: f"dglkge {__version__}"}
    return {**dataset.description, **written, **changed}


def _at_new_times(dataset: Dataset, times: Sequence[str], split: str) -> np.ndarray:
    """Return the triples of a split with the numbers of relations at all times, old and new ones."""
    triples, old = dataset.split(split), dataset.relations
    if list(times) == list(old.times):
        return triples
    number = {time: place for place, time in enumerate(times)}
    places = np.array([number[time] for time in old.times])
    rows, old_times = np.divmod(triples[:, 1], old.num_times)
    return np.stack([triples[:, 0], rows * len(times) + places[old_times], triples[:, 2]], axis=1)


def _assign(dataset: Dataset, new: _Extension) -> dict[str, np.ndarray]:
    """Return the partition of each node by type: old ones stay, new ones go where most neighbours are.

    A greedy streaming rule with a limit on the size of a partition (LDG without its penalty; Stanton and
    Kliot 2012).
    """
    layout, parts = dataset.layout(), {}
    nodes: dict[str, Sequence[Any]] = {**new.names, RELATION: new.relations.timeless}
    for ntype, members in nodes.items():
        known = layout.part_of(ntype, np.asarray(layout.node_ids(ntype)))
        parts[ntype] = np.append(known, np.full(len(members) - len(known), -1))
    sizes = np.sum([np.diff(layout.range_starts(name)) for name in new.names], axis=0)
    total = sum(map(len, new.names.values()))
    limit = max(SLACK * total / layout.num_parts, total / layout.num_parts + 1)
    # Neighbours of each new entity, in both directions.
    neighbours: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for head, relation_id, tail in new.triples.tolist():
        relation = new.relations[relation_id]
        ends = (relation.lhs, head), (relation.rhs, tail)
        for entity, neighbour in (ends, ends[::-1]):
            if entity[1] >= dataset.num_entities(entity[0]):
                neighbours.setdefault(entity, []).append(neighbour)
    for (type_, id_), adjacent in neighbours.items():
        placed = [int(parts[name][neighbour]) for name, neighbour in adjacent if parts[name][neighbour] >= 0]
        votes = np.bincount(np.array(placed, np.int64), minlength=layout.num_parts)
        # Among equal votes the smallest partition; full ones only if all are.
        best = np.lexsort((sizes, -votes, sizes >= limit))[0]
        parts[type_][id_] = best
        sizes[best] += 1
    counts = np.diff(layout.range_starts(RELATION))
    for place in np.flatnonzero(parts[RELATION] < 0).tolist():
        parts[RELATION][place] = counts.argmin()
        counts[counts.argmin()] += 1
    return parts
