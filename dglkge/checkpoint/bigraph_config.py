"""PyTorch-BigGraph's description of a model: its config.json and the attributes of its HDF5 files."""

from __future__ import annotations

import json
from typing import Any

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.relation_layout import is_dynamic, operator_of


def bigraph_config(meta: CheckpointMeta, num_parts: int, path: str) -> dict[str, Any]:
    """Describe the model as PyTorch-BigGraph's configuration does.

    Parameters
    ----------
    meta : CheckpointMeta
    num_parts : int
        Parts of each entity type.
    path : str
        The checkpoint's folder, which also holds the names and counts.

    Returns
    -------
    dict
        What describes the model; keys that only steer training keep PyTorch-BigGraph's defaults.
    """
    operator = operator_of(meta.score_function)
    if is_dynamic(meta):
        lhs, rhs = meta.relation_pairs[0]
        relations = [{"name": "all", "lhs": lhs, "rhs": rhs, "operator": operator.name}]
    else:
        relations = [
            {"name": relation.name, "lhs": relation.lhs, "rhs": relation.rhs, "operator": operator.name}
            for relation in meta.relations
        ]
    return {
        "entities": {entity_type: {"num_partitions": num_parts} for entity_type in meta.entity_types},
        "relations": relations,
        "dynamic_relations": is_dynamic(meta),
        "dimension": meta.dim,
        "comparator": operator.comparator,
        "global_emb": False,
        "bias": False,
        "entity_path": path,
        "edge_paths": [],
        "checkpoint_path": path,
    }


def bigraph_attributes(meta: CheckpointMeta, config: dict[str, Any]) -> dict[str, Any]:
    """Return the root attributes of an HDF5 file, apart from ``format_version``.

    An epoch is one pass over one edge path in one chunk.
    """
    finished = int(meta.progress.get("finished_epochs", 0))
    return {
        "config/json": json.dumps(config, indent=4),
        "iteration/num_epochs": max(
            finished, int(meta.config.get("training", {}).get("num_epochs", finished))
        ),
        "iteration/epoch_idx": finished,
        "iteration/num_edge_paths": 1,
        "iteration/edge_path_idx": 0,
        "iteration/edge_path": "train",
        "iteration/num_edge_chunks": 1,
        "iteration/edge_chunk_idx": 0,
    }
