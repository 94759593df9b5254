"""Text files of a checkpoint that belong to no part: config.json, vocabularies, statistics and others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint import hdf5_format, layout, part_files
from dglkge.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest, TextEntry
from dglkge.checkpoint.storage import CheckpointStorage, check_text, describe_text, is_there
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION


def write(
    storage: CheckpointStorage,
    version: int,
    meta: CheckpointMeta,
    config: str,
    names: Mapping[str, Vocabulary],
    previous: Manifest | None,
) -> tuple[TextEntry, ...]:
    """Write the texts of a version; those that the version before has already are not written again.

    Parameters
    ----------
    storage : CheckpointStorage
    version : int
    meta : CheckpointMeta
    config : str
        The text of config.json; staged where it differs.
    names : mapping of str to Vocabulary
        By entity type.
    previous : Manifest or None
        Of the version before.

    Returns
    -------
    tuple of TextEntry
    """
    wanted = [layout.CONFIG_FILE, layout.RELATION_COUNT_FILE, layout.RELATION_NAMES_FILE]
    wanted += [layout.vocabulary_file(name) for name in meta.entity_types if name in names]
    known = {} if previous is None else previous.all_texts
    texts = []
    for name in wanted:
        old = known.get(name)
        if name == layout.CONFIG_FILE:
            # config.json has the number of epochs and other values that differ between versions, so it is
            # written for each.
            entry = _write_one(storage, layout.staged_file(name, version), name, meta, config, names)
        elif old is None or not is_there(storage.path, old):
            entry = _write_one(storage, name, name, meta, config, names)
        else:
            entry = old  # of the same data set: relations and vocabularies stay the same
        texts.append(entry)
    return tuple(texts)


def write_anew(storage: CheckpointStorage, manifest: Manifest, names: Mapping[str, Vocabulary]) -> list[str]:
    """Write the damaged and the missing text files of a version again, from its rows and the names.

    Damaged files are moved to a folder of damaged files.

    Parameters
    ----------
    storage : CheckpointStorage
    manifest : Manifest
        Of the version that counts, the HDF5 files of which are whole.
    names : mapping of str to Vocabulary
        By entity type.

    Returns
    -------
    list of str
        The files that were written.

    Raises
    ------
    CheckpointError
        If a text differs from the lost one.
    """
    damaged = {}
    for text in manifest.all_texts.values():
        try:
            check_text(storage.path, text, manifest.version, checksum=True)
        except CheckpointError as error:
            damaged[text.name] = error
    if not damaged:
        return []
    aside = storage.damaged_folder(manifest.version)
    for name in damaged:
        for place in (name, layout.staged_file(name, manifest.version)):
            if (storage.path / place).exists():
                (storage.path / place).replace(aside / place)
    for entry in manifest.files:
        if any(text.name in damaged for text in entry.texts):
            path = storage.path / entry.name
            first_id = sum(one.num_rows for one in manifest.of_table(entry.table)[: entry.part])
            with hdf5_format.open_file(path) as file:
                ids = hdf5_format.original_ids(path, file, first_id).tolist()
            part_files.write_names(
                storage, manifest.version, entry.table, entry.part, ids, names.get(entry.table)
            )
    for text in manifest.texts:
        if text.name in damaged:
            (model,) = manifest.of_table(RELATION)
            staged = layout.is_replaced_text(text.name)
            target = layout.staged_file(text.name, manifest.version) if staged else text.name
            # The HDF5 files have a copy of config.json as an attribute, and their checksums were verified
            # before.
            config = _config_of(storage, model)
            _write_one(storage, target, text.name, manifest.meta, config, names)
    storage.place_texts(manifest)
    # The same names and rows must give the same bytes. Another result means that the names are not those of
    # the run.
    for name in damaged:
        try:
            check_text(storage.path, manifest.all_texts[name], manifest.version, checksum=True)
        except CheckpointError:
            raise CheckpointError(f"{damaged[name]}; written anew it does not come out as it was") from None
    return sorted(damaged)


def _write_one(
    storage: CheckpointStorage,
    target: str,
    name: str,
    meta: CheckpointMeta,
    config: str,
    names: Mapping[str, Vocabulary],
) -> TextEntry:
    """Write one of the texts under a given name; return its entry."""
    vocabularies = {layout.vocabulary_file(table): vocabulary for table, vocabulary in names.items()}
    labels = list(RelationVocabulary(meta.relations).labels.names)
    with storage.new_file(target) as path:
        if name in vocabularies:
            vocabularies[name].save(path)
        elif name == layout.CONFIG_FILE:
            path.write_text(config, encoding="utf-8")
        elif name == layout.RELATION_COUNT_FILE:
            path.write_text(f"{len(labels)}\n", encoding="utf-8")
        elif name == layout.RELATION_NAMES_FILE:
            path.write_text(json.dumps(labels, indent=4), encoding="utf-8")
        else:
            raise CheckpointError(f"{storage.path / name} cannot be written anew: the names are not at hand")
        return describe_text(path, name)


def _config_of(storage: CheckpointStorage, model: FileEntry) -> str:
    """Return the text of config.json, which the HDF5 files of a version hold as well."""
    with hdf5_format.open_file(storage.path / model.name) as file:
        return str(file.attrs["config/json"])


def epoch_record(
    epoch: int,
    num_triples: int,
    mean_loss: float,
    edge_set: int = 0,
    chunk: int = 0,
    num_sets: int = 1,
    num_chunks: int = 1,
    measures: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the record of a pass of an epoch, in PyTorch-BigGraph's form for a pass over one bucket.

    Parameters
    ----------
    epoch : int
        From 0 on.
    num_triples : int
        Triples trained, those before a restart among them.
    mean_loss : float
        Per triple.
    edge_set, chunk : int
        The pass in the epoch, from 0 on.
    num_sets, num_chunks : int
        Edge sets of an epoch, and chunks of each.
    measures : mapping of str to float, optional
        Further means, by name.
    """
    return {
        "lhs_partition": 0,
        "rhs_partition": 0,
        "index": (epoch * num_sets + edge_set) * num_chunks + chunk,
        "stats": {"count": num_triples, "metrics": {"loss": mean_loss, **(measures or {})}},
        "epoch_idx": epoch,
        "edge_path_idx": edge_set,
        "edge_chunk_idx": chunk,
    }


def append_stats(storage: CheckpointStorage, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records to ``training_stats.json`` atomically; replaces those of the same passes.

    An interrupted save leaves records of passes that are trained again. Without records an empty file is made
    if there is none: PyTorch-BigGraph's readers expect one.
    """
    if not records:
        if not (storage.path / layout.STATS_FILE).exists():
            storage.write_text(layout.STATS_FILE, "")
        return
    first = min(pass_of(record) for record in records)
    kept = [record for record in read_stats(storage.path) if pass_of(record) < first]
    storage.write_text(layout.STATS_FILE, "".join(json.dumps(record) + "\n" for record in [*kept, *records]))


def pass_of(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return epoch, edge set and chunk of a record; -1 for each that a record of another program lacks."""
    found = [record.get(name, -1) for name in ("epoch_idx", "edge_path_idx", "edge_chunk_idx")]
    epoch, edge_set, chunk = (value if isinstance(value, int) else -1 for value in found)
    return epoch, edge_set, chunk


def read_stats(folder: Path) -> list[dict[str, Any]]:
    """Return the records of ``training_stats.json``, PyTorch-BigGraph's or ours, except torn lines."""
    path = folder / layout.STATS_FILE
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
