"""Conversion: rows of another checkpoint to a run on a data set; a version for PyTorch-BigGraph to resume.

Entities and relations are matched by name. PyTorch-BigGraph's version is the number of finished passes, with
which it resumes. Versions of dglkge count commits, at any cadence.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint import hdf5_format, layout, part_files
from dglkge.checkpoint.bigraph import is_bigraph
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, Progress
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint
from dglkge.checkpoint.storage import check_files
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.lease import hold
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError, InputError, require_known
from dglkge.formats.bigraph_files import PassCount, bigraph_attributes, bigraph_config, pass_of, read_stats
from dglkge.formats.relation_parameters import MODEL_GROUP
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Relation, TablePart


def dataset_fields(dataset: Dataset) -> dict[str, Any]:
    """Return the fields of :class:`dglkge.checkpoint.manifest.CheckpointMeta` that describe a data set."""
    return {
        "dataset_name": dataset.name,
        "dataset_path": str(dataset.path.resolve()),
        "dataset_fingerprint": dataset.fingerprint,
        "entity_types": {name: dataset.num_entities(name) for name in dataset.entity_types},
        "relations": list(dataset.relations.timeless),
        "times": tuple(dataset.relations.times),
    }


def saved_types(
    saved: Sequence[str], names: Sequence[str], pairs: Sequence[str] = ()
) -> dict[str, str | None]:
    """Return the entity type of a checkpoint that each of a run's is; None for one that it lacks.

    Types of the same name are the same, and so are two that have no other on their side: PyTorch-BigGraph's
    importers call the one type ``all``. Pairs have the form ``THEIRS=OURS``; one of theirs may be several of
    ours. InputError if a pair is of another form, names an unknown type, or gives one of ours a second time.
    """
    matches: dict[str, str | None] = {}
    for text in pairs:
        source, separator, target = text.partition("=")
        if not (source and separator and target):
            raise InputError(f"--type {text!r} is not of the form THEIRS=OURS, e.g. all=entity")
        require_known("entity type of the checkpoint", source, saved)
        require_known("entity type of the data set", target, names)
        if target in matches:
            raise InputError(f"the entity type {target!r} of the data set is given twice by --type")
        matches[target] = source
    # With one type on each side only one match is possible, whatever the names.
    alone = saved[0] if len(saved) == len(names) == 1 else None
    return {name: matches.get(name, name if name in saved else alone) for name in names}


def saved_entity_ids(checkpoint: Checkpoint, entity_type: str | None, names: Vocabulary) -> np.ndarray:
    """Return the id (n,) that each entity of a run has in a checkpoint, -1 where it has none.

    `entity_type` is the checkpoint's, None where it lacks the run's; `names` are the run's of that type.
    """
    if entity_type is None or entity_type not in checkpoint.entity_types:
        return np.full(len(names), -1, dtype=np.int64)
    known = checkpoint.vocabulary(entity_type)
    # The usual case, a checkpoint of the same data set, needs no index of names.
    sought = list(names.names)
    is_same = list(known.names) == sought
    return np.arange(len(sought), dtype=np.int64) if is_same else known.find(sought)


def saved_relation_ids(
    checkpoint: Checkpoint, meta: CheckpointMeta, types: Mapping[str, str | None]
) -> np.ndarray:
    """Return the id that each relation of a run has in a checkpoint, by name and types; else -1."""
    number = {relation: id_ for id_, relation in enumerate(checkpoint.meta.relations)}
    # No entity type has an empty name.
    theirs = [Relation(r.name, types.get(r.lhs) or "", types.get(r.rhs) or "") for r in meta.relations]
    return np.array([number.get(relation, -1) for relation in theirs], dtype=np.int64)


def saved_times(checkpoint: Checkpoint, meta: CheckpointMeta) -> np.ndarray | None:
    """Return the number (T,) that each time of a run has in a checkpoint, -1 for a new one.

    None if the numbers are equal, or the score function has no times. A CheckpointError if entities at a time
    depend on its number, and this is another one.
    """
    function, times = SCORE_FUNCTIONS.get(meta.score_function), checkpoint.meta.times
    if not function.has_times or tuple(times) == tuple(meta.times):
        return None
    numbers = Vocabulary(times, "time").find(meta.times)
    moved = np.flatnonzero((numbers >= 0) & (numbers != np.arange(len(numbers))))
    if len(moved) and not function().has_module:
        raise CheckpointError(
            f"{checkpoint.path} has the time {meta.times[moved[0]]!r} as number {numbers[moved[0]]}, this "
            f"run as {moved[0]}, and {meta.score_function} computes with it; expected new times behind old "
            "ones"
        )
    return numbers


def at_times(saved: np.ndarray, values: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    """Return rows of all times of a run: those of :func:`saved_times` from ``values``, new ones as others."""
    rows, numbers = initial.detach().clone(), torch.from_numpy(saved)
    rows[numbers >= 0] = values[numbers[numbers >= 0]]
    return rows


def take_over(
    checkpoint: Checkpoint,
    part: TablePart,
    saved_ids: np.ndarray,
    table: str | None = None,
    keeps_projections: bool = False,
) -> int:
    """Copy rows and state of a checkpoint to a live part; rows that the checkpoint lacks keep their values.

    Parameters
    ----------
    checkpoint : Checkpoint
    part : TablePart
        Filled in place.
    saved_ids : (N,) int64 array
        By original id of the whole table: the id in the checkpoint, or -1.
    table : str, optional
        Name of the table in the checkpoint, where it is another than the part's.
    keeps_projections : bool
        Whether the run takes the projections of features over too: rows then come without them.

    Returns
    -------
    int
        How many of the part's rows were taken over.
    """
    # ``saved_ids`` is by original id of the whole table; the part has its rows in the order of the partition.
    saved_rows = torch.from_numpy(saved_ids)[part.original_ids]
    num_saved = int((saved_rows >= 0).sum())
    if num_saved:
        source = dataclasses.replace(part, table=table or part.table)  # the same tensors
        # Entities that were added to an open checkpoint have rows, and no file.
        is_added = saved_rows >= checkpoint.manifest.meta.entity_types.get(source.table, math.inf)
        if is_added.any():
            part.rows[is_added] = checkpoint.gather(source.table, saved_rows[is_added]).to(part.rows.dtype)
            saved_rows[is_added] = -1
        is_filed = saved_rows >= 0
        part_files.fill_part(checkpoint.folder, checkpoint.manifest, source, saved_rows)
        # The rows as they are scored: the new run adds no vector to them, or one that starts at 0.
        if part.table != RELATION and (shift := checkpoint.global_vector(source.table)) is not None:
            part.rows[is_filed] += torch.from_numpy(shift)
        features = None if keeps_projections else checkpoint.features
        if features is not None and source.table in features.entity_types:
            part.rows[is_filed] += features.scored(source.table, saved_rows[is_filed])
    return num_saved


def save_converted(
    output: Path,
    meta: CheckpointMeta,
    parts: Mapping[str, TablePart],
    names: Mapping[str, Vocabulary],
    stats: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Write whole tables, the relations among them, as the first version of a run; return its number.

    `stats` are records of the training of the rows, for training_stats.json. CheckpointError if the folder
    holds a checkpoint already, or cannot be written to.
    """
    with hold(output, "a conversion") as lease:
        manager = CheckpointManager(output / CHECKPOINT_FOLDER, names=names, lease=lease)
        if manager.latest() is not None:
            raise CheckpointError(f"{output} holds a checkpoint already; take another folder")
        for record in stats:
            manager.add_stats(record)
        return manager.save([parts[name] for name in meta.entity_types], parts[RELATION], meta)


def convert_to_run(source: Checkpoint, dataset: Dataset, output: Path, type_pairs: Sequence[str] = ()) -> int:
    """Convert a checkpoint, for instance PyTorch-BigGraph's, to a run on a data set that can be resumed.

    Rows and optimizer state keep their values.

    Parameters
    ----------
    source : Checkpoint
    dataset : Dataset
    output : Path
        The run's folder.
    type_pairs : sequence of str
        Which entity type of the checkpoint is which of the data set, as ``THEIRS=OURS``; needed where names
        differ and one side has several.

    Raises
    ------
    CheckpointError
        If the checkpoint lacks an entity or relation of the dataset, or has times and others.
    InputError
        If the entity types do not fit each other.
    """
    check_files(source.folder, source.manifest.all_texts.values())  # rows are checked where they are read
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    types = saved_types(source.entity_types, dataset.entity_types, type_pairs)
    if missing_types := [name for name, saved in types.items() if saved is None]:
        groups = (source.entity_types, dataset.entity_types, missing_types)
        theirs, ours, lacking = (", ".join(map(repr, sorted(group))) for group in groups)
        raise InputError(
            f"the checkpoint {source.path} has the entity types {theirs}, the data set has {ours}: "
            f"give --type THEIRS=OURS for {lacking}"
        )
    # Progress within an epoch counts positions in the order of the triples, which another data set lacks.
    progress = {**source.meta.progress, Progress.BATCHES_DONE: 0}
    fields, widths = dataset_fields(dataset), source.meta.dims
    dims = {name: widths[saved] for name, saved in types.items() if saved and saved in widths}
    meta = dataclasses.replace(source.meta, config={}, progress=progress, dims=dims, **fields)
    other_way = "to start a run with what it has, set checkpoint.init_path"
    if saved_times(source, meta) is not None:
        raise CheckpointError(f"{source.path} has other times than {dataset.path}; {other_way}")
    relation_ids = saved_relation_ids(source, meta, types)
    saved_ids = {name: saved_entity_ids(source, types[name], names[name]) for name in types}
    parts = {}
    for table, ids in {**saved_ids, RELATION: relation_ids}.items():
        saved, count = types.get(table) or RELATION, len(ids)
        if missing := int((ids < 0).sum()):
            lack = f"{missing} of the {count} rows of table {table!r}"
            raise CheckpointError(f"{source.path} lacks {lack}; {other_way}")
        state = {name: torch.zeros(count, *shape[1:]) for name, shape in source.state_shapes(saved).items()}
        shared = source.dense_tensors() if table == RELATION else {}
        rows = torch.empty(count, source[saved].shape[1])
        parts[table] = TablePart(table, 0, torch.arange(count), rows, state, shared)
        take_over(source, parts[table], ids, saved)
    # The relations' order may be another one.
    operators = tuple(source.meta.operators[id_] for id_ in relation_ids if source.meta.operators)
    meta = dataclasses.replace(meta, operators=operators)
    # Other programs may write records without the number of an epoch, by which append_stats selects.
    stats = [record for record in read_stats(source.folder) if isinstance(record.get("epoch_idx"), int)]
    return save_converted(output, meta, parts, names, stats)


COPIED = (hdf5_format.EMBEDDINGS, MODEL_GROUP, f"{hdf5_format.OPTIMIZER_GROUP}/{hdf5_format.STATE_BLOB}")
"""What PyTorch-BigGraph has in its HDF5 files; ids and plain optimizer state are ours alone."""


def copy_for_bigraph(source: Checkpoint, output: Path) -> int:
    """Write a folder that PyTorch-BigGraph resumes from, as its ``checkpoint_path`` and ``entity_path``.

    Parameters
    ----------
    source : Checkpoint
        All its files are compared with their checksums first.
    output : Path
        A folder that does not exist, or is empty.

    Returns
    -------
    int
        Its version: the passes that are finished.

    Raises
    ------
    InputError
        If the folder is not empty, or PyTorch-BigGraph wrote the checkpoint.
    CheckpointError
        If no pass is finished, or a file is damaged or cannot be written.
    """
    manifest, folder = source.manifest, source.folder
    if is_bigraph(folder, source.version):
        raise InputError(f"{folder} was written by PyTorch-BigGraph, which resumes from it as it is")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists and is no empty folder; take another --output")
    if output.resolve() == Path.cwd():
        raise InputError(f"{output} is the current folder, which would be replaced; take another --output")
    passes = PassCount.of(manifest.meta)
    if not passes.finished:
        raise CheckpointError(
            f"{folder} has no finished pass over the training triples: PyTorch-BigGraph would start anew "
            "from it; expected at least one epoch, edge set or chunk (training.edge_chunks)"
        )
    source.verify()
    with LeasedFolder(output).writing():
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as hidden:
            made = Path(hidden, output.name)
            made.mkdir()
            _write(source, made, output, passes)
            made.rename(output)  # replaces an empty folder
    return passes.finished


def _write(source: Checkpoint, folder: Path, output: Path, passes: PassCount) -> None:
    """Write all files to a folder that will have the name of the output."""
    manifest, version = source.manifest, passes.finished
    num_parts = 1 + max(entry.part for entry in manifest.files)
    config = bigraph_config(manifest.meta, num_parts, str(output.resolve()))
    attributes = bigraph_attributes(manifest.meta, config)
    for entry in manifest.files:
        name = f"{entry.name.removesuffix(f'.v{manifest.version}.h5')}.v{version}.h5"
        with (
            hdf5_format.open_file(source.folder / entry.name) as saved_file,
            hdf5_format.create(folder / name, attributes) as file,
        ):
            for path in COPIED:
                if path in saved_file:
                    parent = path.rpartition("/")[0]
                    saved_file.copy(path, file.require_group(parent) if parent else file)
    part_texts = [text.name for entry in manifest.files for text in entry.texts]
    for name in (layout.RELATION_COUNT_FILE, layout.RELATION_NAMES_FILE, *part_texts):
        shutil.copyfile(source.folder / name, folder / name)
    (folder / layout.CONFIG_FILE).write_text(json.dumps(config, indent=4), encoding="utf-8")
    # A save that was interrupted may have left records of passes that this version does not have.
    kept = [record for record in read_stats(source.folder) if pass_of(record) < passes.place(version)]
    lines = "".join(json.dumps(record) + "\n" for record in kept)
    (folder / layout.STATS_FILE).write_text(lines, encoding="utf-8")
    (folder / layout.VERSION_FILE).write_text(f"{version}\n", encoding="utf-8")
