"""Making a checkpoint of a run on a dataset out of rows from elsewhere, matched by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dglkge.checkpoint import by_name, training_stats
from dglkge.checkpoint.dataset_fields import dataset_fields
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.lease import hold
from dglkge.errors import CheckpointError, InputError
from dglkge.typing import RELATION, TablePart


def save_converted(
    output: Path,
    meta: CheckpointMeta,
    parts: Mapping[str, TablePart],
    names: Mapping[str, Vocabulary],
    stats: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Write whole tables as the first version of a run.

    Parameters
    ----------
    output : Path
        The run's folder.
    meta : CheckpointMeta
    parts : mapping of str to TablePart
        Every table, the relations among them, each as one part.
    names : mapping of str to Vocabulary
        The entities' names by type.
    stats : sequence of mapping
        What was measured while the rows were trained, for training_stats.json.

    Returns
    -------
    int
        The version.

    Raises
    ------
    CheckpointError
        If the folder holds a checkpoint already, or cannot be written to.
    """
    with hold(output, "a conversion") as lease:
        folder = output / CHECKPOINT_FOLDER
        manager = CheckpointManager(folder, 0, True, lambda: None, names, 1, lease=lease)
        if manager.latest() is not None:
            raise CheckpointError(f"{output} holds a checkpoint already; take another folder")
        for record in stats:
            manager.add_stats(record)
        return manager.save([parts[name] for name in meta.entity_types], parts[RELATION], meta)


def convert_to_run(source: Checkpoint, dataset: Dataset, output: Path, type_pairs: Sequence[str] = ()) -> int:
    """Write a checkpoint, PyTorch-BigGraph's for one, as that of a run on a dataset, which can be resumed.

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
        If the checkpoint lacks an entity or relation of the dataset.
    InputError
        If the entity types do not fit each other.
    """
    source.storage.check_texts(source.manifest)  # rows are checked where they are read
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    types = by_name.saved_types(source.entity_types, dataset.entity_types, type_pairs)
    _check_types(source, dataset, types)
    meta = _meta(source, dataset)
    parts = {}
    for table, count in {**meta.entity_types, RELATION: len(meta.relations)}.items():
        saved = RELATION if table == RELATION else str(types[table])
        if table == RELATION:
            saved_ids = by_name.saved_relation_ids(source, meta, types)
        else:
            saved_ids = by_name.saved_entity_ids(source, saved, names[table])
        missing = int((saved_ids < 0).sum())
        if missing:
            raise CheckpointError(
                f"{source.path} lacks {missing} of the {count} rows of table {table!r}; "
                "to start a run with what it has, set checkpoint.init_path"
            )
        width = source[saved].shape[1]
        shapes = source.state_shapes(saved)
        state = {name: torch.zeros(count, *shape[1:]) for name, shape in shapes.items()}
        part = TablePart(table, 0, torch.arange(count), torch.empty(count, width), state)
        by_name.take_over(source, part, saved_ids, saved)
        parts[table] = part
    stats = [one for one in training_stats.read(source.path) if isinstance(one.get("epoch_idx"), int)]
    return save_converted(output, meta, parts, names, stats)


def _check_types(source: Checkpoint, dataset: Dataset, types: Mapping[str, str | None]) -> None:
    """Refuse a data set with an entity type that the checkpoint has not."""
    lacking = [name for name, saved in types.items() if saved is None]
    if lacking:
        theirs, ours, wanted = (
            ", ".join(map(repr, sorted(some)))
            for some in (source.entity_types, dataset.entity_types, lacking)
        )
        raise InputError(
            f"the checkpoint {source.path} has the entity types {theirs}, the data set has {ours}: "
            f"give --type THEIRS=OURS for {wanted}"
        )


def _meta(source: Checkpoint, dataset: Dataset) -> CheckpointMeta:
    """Describe the run that the checkpoint becomes."""
    old = source.meta
    return CheckpointMeta(
        config={},
        **dataset_fields(dataset),
        progress={**old.progress, "batches_done": 0},
        seed=old.seed,
        score_function=old.score_function,
        dim=old.dim,
        reciprocal=old.reciprocal,
        optimizer=old.optimizer,
        versions=old.versions,
    )
