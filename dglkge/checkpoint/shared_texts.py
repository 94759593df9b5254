"""Text files of a checkpoint that belong to no part: config.json, vocabularies, statistics and others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint import hdf5_format, layout, part_files
from dglkge.checkpoint.durable import LeasedFolder
from dglkge.checkpoint.manifest import CheckpointMeta, Manifest, TextEntry
from dglkge.checkpoint.storage import CheckpointStorage, check_file, describe_text, is_there
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION

WRITTEN_IN_PLACE = (layout.CONFIG_FILE, layout.VERSION_FILE)
"""Texts that PyTorch-BigGraph writes when it resumes from a version: they are no links to another's."""


def write(
    folder: LeasedFolder,
    meta: CheckpointMeta,
    config: str,
    names: Mapping[str, Vocabulary],
    older: Path,
    previous: Manifest | None,
) -> tuple[TextEntry, ...]:
    """Write the texts of a version; those that the version before has already are linked.

    Parameters
    ----------
    folder : LeasedFolder
        Of the version.
    meta : CheckpointMeta
    config : str
        The text of config.json.
    names : mapping of str to Vocabulary
        By entity type.
    older : Path
        Folder of the version before.
    previous : Manifest or None
        Of the version before.

    Returns
    -------
    tuple of TextEntry
    """
    wanted = [layout.CONFIG_FILE, layout.VERSION_FILE, layout.RELATION_COUNT_FILE, layout.RELATION_NAMES_FILE]
    wanted += [layout.vocabulary_file(name) for name in meta.entity_types if name in names]
    known = {} if previous is None else previous.all_texts
    texts = []
    for name in wanted:
        old = known.get(name)
        # config.json and the version differ between versions; relations and vocabularies are of one data set.
        if name in WRITTEN_IN_PLACE or old is None or not link_texts(folder, older, [old]):
            old = _write_one(folder, name, meta, config, names)
        texts.append(old)
    return tuple(texts)


def link_texts(folder: LeasedFolder, older: Path, texts: Sequence[TextEntry]) -> bool:
    """Give texts of an older version one more name in the folder of a version, if all are there."""
    if not texts or not all(is_there(older, text) for text in texts):
        return False
    for text in texts:
        folder.link_or_copy(older / text.name, text.name)
    return True


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
    folder = storage.folder(manifest.version)
    damaged = {}
    for text in manifest.all_texts.values():
        try:
            check_file(folder.path, text, checksum=True)
        except CheckpointError as error:
            damaged[text.name] = error
    if not damaged:
        return []
    aside = storage.damaged_folder(manifest.version)
    for name in damaged:
        if (folder.path / name).exists():
            (folder.path / name).replace(aside / name)
    for entry in manifest.files:
        if any(text.name in damaged for text in entry.texts):
            path = folder.path / entry.name
            first_id = sum(one.num_rows for one in manifest.of_table(entry.table)[: entry.part])
            with hdf5_format.open_file(path) as file:
                ids = hdf5_format.original_ids(path, file, first_id).tolist()
            part_files.write_names(folder, entry.table, entry.part, ids, names.get(entry.table))
    (model,) = manifest.of_table(RELATION)
    # The HDF5 files have a copy of config.json as an attribute, and their checksums were verified before.
    config = _config_of(folder.path / model.name)
    for text in manifest.texts:
        if text.name in damaged:
            _write_one(folder, text.name, manifest.meta, config, names)
    # The same names and rows must give the same bytes. Another result means that the names are not those of
    # the run.
    for name in damaged:
        try:
            check_file(folder.path, manifest.all_texts[name], checksum=True)
        except CheckpointError:
            raise CheckpointError(f"{damaged[name]}; written anew it does not come out as it was") from None
    return sorted(damaged)


def _write_one(
    folder: LeasedFolder,
    name: str,
    meta: CheckpointMeta,
    config: str,
    names: Mapping[str, Vocabulary],
) -> TextEntry:
    """Write one of the texts; return its entry."""
    vocabularies = {layout.vocabulary_file(table): vocabulary for table, vocabulary in names.items()}
    labels = list(RelationVocabulary(meta.relations).labels.names)
    contents = {
        layout.CONFIG_FILE: config,
        layout.VERSION_FILE: f"{layout.parse_version_folder(folder.path.name)}\n",
        layout.RELATION_COUNT_FILE: f"{len(labels)}\n",
        layout.RELATION_NAMES_FILE: json.dumps(labels, indent=4),
    }
    if name not in vocabularies and name not in contents:
        raise CheckpointError(f"{folder.path / name} cannot be written anew: the names are not at hand")
    with folder.new_file(name) as path:
        if name in vocabularies:
            vocabularies[name].save(path)
        else:
            path.write_text(contents[name], encoding="utf-8")
        return describe_text(path, name)


def _config_of(model: Path) -> str:
    """Return the text of config.json, which the HDF5 files of a version hold as well."""
    with hdf5_format.open_file(model) as file:
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


def write_stats(folder: LeasedFolder, older: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write ``training_stats.json`` of a version: the records of the one before, and new ones.

    New records replace those of the same passes and of later ones: an interrupted save leaves records of
    passes that are trained again. Without any the file is empty: PyTorch-BigGraph's readers expect one.
    """
    first = min((pass_of(record) for record in records), default=None)
    kept = [record for record in read_stats(older) if first is None or pass_of(record) < first]
    folder.write_text(layout.STATS_FILE, "".join(json.dumps(record) + "\n" for record in [*kept, *records]))


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
