"""PyTorch-BigGraph's description of a model: its config.json and the attributes of its HDF5 files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.relation_layout import is_dynamic, operator_of
from dglkge.formats import bigraph

DEFAULTS: dict[str, Any] = {
    "init_scale": 1e-3,
    "max_norm": None,
    "bias": False,
    "loss_fn": "softmax",
    "margin": 0.1,
    "init_path": None,
    "checkpoint_preservation_interval": None,
    "max_edges_per_chunk": 1_000_000_000,
    "bucket_order": "inside_out",
    "workers": None,
    "batch_size": 1000,
    "num_uniform_negs": 50,
    "disable_lhs_negs": False,
    "disable_rhs_negs": False,
    "lr": 1e-2,
    "relation_lr": None,
    "eval_num_batch_negs": 1000,
    "eval_num_uniform_negs": 1000,
    "background_io": False,
    "verbose": 0,
    "hogwild_delay": 2.0,
    "num_machines": 1,
    "num_partition_servers": -1,
    "distributed_init_method": None,
    "distributed_tree_init_order": True,
}
"""PyTorch-BigGraph's defaults of the keys that do not depend on the run."""


@dataclass(frozen=True)
class PassCount:
    """Passes of a run, as PyTorch-BigGraph counts them.

    Attributes
    ----------
    edge_sets : sequence of str
        Names of the edge sets of an epoch; one where all training triples are one.
    num_chunks : int
        Chunks of each edge set.
    finished : int
        Passes since the beginning of the run.
    """

    edge_sets: tuple[str, ...]
    num_chunks: int
    finished: int

    @classmethod
    def of(cls, meta: CheckpointMeta) -> PassCount:
        """Count the finished passes of a version."""
        training = meta.config.get("training", {})
        sets = tuple(training.get("edge_sets", ())) or ("train",)
        num_chunks = int(training.get("edge_chunks", 1))
        epochs = int(meta.progress.get(Progress.FINISHED_EPOCHS, 0))
        # A pass that is open is not counted: it is trained from its beginning, as after a crash there.
        of_open_epoch = int(meta.progress.get(Progress.PASSES_DONE, 0))
        return cls(sets, num_chunks, epochs * len(sets) * num_chunks + of_open_epoch)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of HDF5 files that name the pass just trained; before the first one, that."""
        epoch, place = divmod(max(0, self.finished - 1), len(self.edge_sets) * self.num_chunks)
        edge_set, chunk = divmod(place, self.num_chunks)
        return {
            "iteration/epoch_idx": epoch,
            "iteration/num_edge_paths": len(self.edge_sets),
            "iteration/edge_path_idx": edge_set,
            "iteration/edge_path": self.edge_sets[edge_set],
            "iteration/num_edge_chunks": self.num_chunks,
            "iteration/edge_chunk_idx": chunk,
        }


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
        Every key of the schema of PyTorch-BigGraph 1.0.0, which refuses any other. Those that have no equal
        here, or that a run without a configuration leaves open, have its defaults. Names of operators,
        comparators and losses that it lacks are ours; it refuses them when it trains.
    """
    operator = operator_of(meta)
    if is_dynamic(meta):
        # Dynamic relations share one entry in the schema: their number is in dynamic_rel_count.txt.
        lhs, rhs = meta.relation_pairs[0]
        relations = [_relation("all", lhs, rhs, operator.name)]
    else:
        weights = meta.config.get("loss", {}).get("relation_weights", {})
        relations = [
            _relation(one.name, one.lhs, one.rhs, operator.name, weights.get(one.name, 1.0))
            for one in meta.relations
        ]
    # Rows that were converted from another program come without a configuration, so any key may be missing.
    sections = ("model", "loss", "negatives", "training", "checkpoint", "evaluation")
    chosen = {name: meta.config.get(name, {}) for name in sections}
    held_out = chosen["evaluation"].get("held_out") or {}
    loss = chosen["loss"].get("name", DEFAULTS["loss_fn"])
    loss_fn = bigraph.LOSSES.get(loss, "")
    described = {
        "entities": {name: {"num_partitions": num_parts, "featurized": False} for name in meta.entity_types},
        "relations": relations,
        "dimension": meta.dim,
        "init_scale": float(chosen["model"].get("init_scale", DEFAULTS["init_scale"])),
        "max_norm": float(chosen["model"].get("max_norm", 0)) or None,
        "global_emb": bool(chosen["model"].get("global_vectors", False)),
        "comparator": operator.comparator,
        "bias": operator.bias,
        "loss_fn": loss_fn or loss,
        "margin": float(chosen["loss"].get("margin", DEFAULTS["margin"])),
        "entity_path": path,
        "edge_paths": [],
        "checkpoint_path": path,
        "num_epochs": num_epochs(meta),
        "num_edge_chunks": PassCount.of(meta).num_chunks,
        "batch_size": int(chosen["training"].get("batch_size", DEFAULTS["batch_size"])),
        # PyTorch-BigGraph refuses batches that are no multiple of these. All negatives are declared uniform.
        "num_batch_negs": 0,
        "disable_lhs_negs": chosen["negatives"].get("num_for_heads") == 0,
        "disable_rhs_negs": chosen["negatives"].get("num_for_tails") == 0,
        "num_uniform_negs": int(chosen["negatives"].get("num_uniform", DEFAULTS["num_uniform_negs"])),
        "lr": learning_rate(meta),
        "relation_lr": meta.optimizer.get("relation_lr"),
        "init_path": chosen["checkpoint"].get("init_path") or None,
        "checkpoint_preservation_interval": int(chosen["checkpoint"].get("keep_every_epochs", 0)) or None,
        "eval_fraction": float(held_out.get("fraction", 0.0)),
        "eval_num_batch_negs": int(held_out.get("batch_negatives", DEFAULTS["eval_num_batch_negs"])),
        "eval_num_uniform_negs": int(held_out.get("uniform_negatives", DEFAULTS["eval_num_uniform_negs"])),
        "dynamic_relations": is_dynamic(meta),
    }
    return {**DEFAULTS, **described}


def _relation(name: str, lhs: str, rhs: str, operator: str, weight: float = 1.0) -> dict[str, Any]:
    """Describe one relation."""
    return {"name": name, "lhs": lhs, "rhs": rhs, "weight": weight, "operator": operator, "all_negs": False}


def learning_rate(meta: CheckpointMeta) -> float:
    """Return the run's learning rate, or PyTorch-BigGraph's default for converted rows."""
    return float(meta.optimizer.get("lr", DEFAULTS["lr"]))


def num_epochs(meta: CheckpointMeta) -> int:
    """Return how many epochs the run is to have, at least those that it has finished."""
    finished = int(meta.progress.get(Progress.FINISHED_EPOCHS, 0))
    return max(finished, int(meta.config.get("training", {}).get("num_epochs", finished)))


def bigraph_attributes(meta: CheckpointMeta, config: dict[str, Any]) -> dict[str, Any]:
    """Return the root attributes of an HDF5 file, apart from ``format_version``."""
    return {
        "config/json": json.dumps(config, indent=4),
        "iteration/num_epochs": num_epochs(meta),
        **PassCount.of(meta).attributes(),
    }
