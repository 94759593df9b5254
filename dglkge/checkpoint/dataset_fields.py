"""What a checkpoint says of the data set that it belongs to."""

from __future__ import annotations

from typing import Any

from dglkge.data.dataset import Dataset


def dataset_fields(dataset: Dataset) -> dict[str, Any]:
    """Return the fields of :class:`dglkge.checkpoint.manifest.CheckpointMeta` that describe a data set."""
    return {
        "dataset_name": dataset.name,
        "dataset_path": str(dataset.path.resolve()),
        "dataset_fingerprint": dataset.fingerprint,
        "entity_types": {name: dataset.num_entities(name) for name in dataset.entity_types},
        "relations": list(dataset.relations.relations),
    }
