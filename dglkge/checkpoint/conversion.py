"""Making a checkpoint of a run on a dataset out of rows from elsewhere, matched by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dglkge.checkpoint import by_name
from dglkge.checkpoint.dataset_fields import dataset_fields
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.lease import hold
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, TablePart


def save_converted(
    output: Path, meta: CheckpointMeta, parts: Mapping[str, TablePart], names: Mapping[str, Vocabulary]
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
        return manager.save([parts[name] for name in meta.entity_types], parts[RELATION], meta)


def convert_to_run(source: Checkpoint, dataset: Dataset, output: Path) -> int:
    """Write a checkpoint, PyTorch-BigGraph's for one, as that of a run on a dataset, which can be resumed.

    Rows and optimizer state keep their values.

    Raises
    ------
    CheckpointError
        If the checkpoint lacks an entity or relation of the dataset.
    """
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    meta = _meta(source, dataset)
    parts = {}
    for table, count in {**meta.entity_types, RELATION: len(meta.relations)}.items():
        if table == RELATION:
            saved_ids = by_name.saved_relation_ids(source, meta)
        else:
            saved_ids = by_name.saved_entity_ids(source, table, names[table])
        missing = int((saved_ids < 0).sum())
        if missing:
            raise CheckpointError(
                f"{source.path} lacks {missing} of the {count} rows of table {table!r}; "
                "to start a run with what it has, set checkpoint.init_path"
            )
        width = source[table].shape[1]
        shapes = source.state_shapes(table)
        state = {name: torch.zeros(count, *shape[1:]) for name, shape in shapes.items()}
        part = TablePart(table, 0, torch.arange(count), torch.empty(count, width), state)
        by_name.take_over(source, part, saved_ids)
        parts[table] = part
    return save_converted(output, meta, parts, names)


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
