"""PyTorch-BigGraph's files beside the rows: config.json, training_stats.json, lists of names.

They are written with our versions, and read from its checkpoints.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.checkpoint import layout
from dglkge.checkpoint.layout import Progress
from dglkge.data.vocabulary import Vocabulary
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError, os_errors
from dglkge.formats.operators import LOSSES, score_function_of
from dglkge.formats.relation_parameters import is_dynamic, operator_of
from dglkge.model.functions.bigraph_operators import OPERATORS, SEPARATOR
from dglkge.model.functions.bigraph_scores import COMPARATORS
from dglkge.typing import Relation

if TYPE_CHECKING:
    from dglkge.checkpoint.manifest import CheckpointMeta

DEFAULTS: dict[str, Any] = {
    "init_scale": 1e-3,
    "loss_fn": "softmax",
    "margin": 0.1,
    "max_edges_per_chunk": 1_000_000_000,
    "bucket_order": "inside_out",
    "workers": None,
    "batch_size": 1000,
    "num_uniform_negs": 50,
    "lr": 1e-2,
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
    """Passes of a run, as PyTorch-BigGraph counts them: edge sets of an epoch, chunks of each, finished."""

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
        open_passes = int(meta.progress.get(Progress.PASSES_DONE, 0))
        return cls(sets, num_chunks, epochs * len(sets) * num_chunks + open_passes)

    def place(self, number: int) -> tuple[int, int, int]:
        """Return epoch, edge set and chunk of a pass, all counted from 0."""
        epoch, place = divmod(number, len(self.edge_sets) * self.num_chunks)
        return epoch, *divmod(place, self.num_chunks)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of HDF5 files that name the pass just trained; before the first one, that."""
        epoch, edge_set, chunk = self.place(max(0, self.finished - 1))
        return {
            "iteration/epoch_idx": epoch,
            "iteration/num_edge_paths": len(self.edge_sets),
            "iteration/edge_path_idx": edge_set,
            "iteration/edge_path": self.edge_sets[edge_set],
            "iteration/num_edge_chunks": self.num_chunks,
            "iteration/edge_chunk_idx": chunk,
        }


def bigraph_config(meta: CheckpointMeta, num_parts: int, path: str) -> dict[str, Any]:
    """Describe the model as PyTorch-BigGraph's configuration does; `path` is the version's folder.

    It has every key of the schema of PyTorch-BigGraph 1.0.0, which refuses any other. Those that have no
    equal here, or that a run without a configuration leaves open, have its defaults. Names of operators,
    comparators and losses that it lacks are ours; it refuses them when it trains.
    """
    operator = operator_of(meta)
    if is_dynamic(meta):
        # Dynamic relations share one entry in the schema: their number is in dynamic_rel_count.txt.
        lhs, rhs = meta.relation_pairs[0]
        relations = [_relation("all", lhs, rhs, operator.name)]
    else:
        weights = meta.config.get("loss", {}).get("relation_weights", {})
        operators = meta.operators or [operator.name] * len(meta.relations)
        relations = [
            _relation(relation.name, relation.lhs, relation.rhs, acts, weights.get(relation.name, 1.0))
            for relation, acts in zip(meta.relations, operators)
        ]
    # Rows that were converted from another program come without a configuration, so any key may be missing.
    settings: Mapping[str, Any] = defaultdict(dict, meta.config)
    held_out = settings["evaluation"].get("held_out") or {}
    loss = settings["loss"].get("name", DEFAULTS["loss_fn"])
    entity = {"num_partitions": num_parts, "featurized": False}
    entities = {name: dict(entity) for name in meta.entity_types}
    for name, width in meta.dims.items():
        entities[name]["dimension"] = width
    described = {
        "entities": entities,
        "relations": relations,
        "dimension": meta.dim,
        "init_scale": float(settings["model"].get("init_scale", DEFAULTS["init_scale"])),
        "max_norm": float(settings["model"].get("max_norm", 0)) or None,
        "global_emb": bool(settings["model"].get("global_vectors", False)),
        "comparator": operator.comparator,
        "bias": operator.bias,
        "loss_fn": LOSSES.get(loss) or loss,
        "margin": float(settings["loss"].get("margin", DEFAULTS["margin"])),
        "entity_path": path,
        "edge_paths": [],
        "checkpoint_path": path,
        "num_epochs": num_epochs(meta),
        "num_edge_chunks": PassCount.of(meta).num_chunks,
        "batch_size": int(settings["training"].get("batch_size", DEFAULTS["batch_size"])),
        # PyTorch-BigGraph refuses batches that are no multiple of these. All negatives are declared uniform.
        "num_batch_negs": 0,
        "disable_lhs_negs": settings["negatives"].get("num_for_heads") == 0,
        "disable_rhs_negs": settings["negatives"].get("num_for_tails") == 0,
        "num_uniform_negs": int(settings["negatives"].get("num_uniform", DEFAULTS["num_uniform_negs"])),
        "lr": learning_rate(meta),
        "relation_lr": meta.optimizer.get("relation_lr"),
        "init_path": settings["checkpoint"].get("init_path") or None,
        "checkpoint_preservation_interval": int(settings["checkpoint"].get("keep_every_epochs", 0)) or None,
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
    passes = PassCount.of(meta).attributes()
    return {"config/json": json.dumps(config, indent=4), "iteration/num_epochs": num_epochs(meta), **passes}


def read_entity_names(
    folder: Path, config: Mapping[str, Any], entity_type: str, num_parts: int
) -> Vocabulary | None:
    """Return the names of a type from PyTorch-BigGraph's lists; None where there are none."""
    names: list[str] = []
    for part in range(num_parts):
        path = _beside(folder, config, layout.entity_names_file(entity_type, part))
        if path is None:
            return None
        names += _json(path)
    return Vocabulary([str(name) for name in names], "entity")


def read_score_function(config: Mapping[str, Any], folder: Path) -> str:
    """Return our name of the model; CheckpointError if dglkge has none."""
    where = folder / layout.CONFIG_FILE
    operator = SEPARATOR.join(dict.fromkeys(read_operators(config)))
    comparator = config.get("comparator", "cos")
    if any(entity.get("featurized") for entity in config["entities"].values()):
        # They have no rows of their own.
        raise CheckpointError(f"{where}: featurized entities are not dglkge's; allowed is False")
    name = score_function_of(operator, comparator, bool(config.get("bias")))
    if name is None:
        got = f"operator {operator} with comparator {comparator}"
        allowed = f"one of {', '.join(OPERATORS)} with one of {', '.join(COMPARATORS)}"
        raise CheckpointError(f"{where}: {got}; allowed is {allowed}")
    return name


def read_operators(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the operator of each entry of the relations."""
    return tuple(relation["operator"] for relation in config["relations"])


def read_relations(config: Mapping[str, Any], folder: Path) -> Sequence[Relation]:
    """Return the relations in the order of their ids."""
    relations = config["relations"]
    if not config.get("dynamic_relations"):
        return [Relation(relation["name"], relation["lhs"], relation["rhs"]) for relation in relations]
    file = layout.RELATION_NAMES_FILE
    path = _beside(folder, config, file)
    if path is None:
        raise CheckpointError(f"{file} is neither in {config['entity_path']} nor in {folder}")
    return [Relation(str(name), relations[0]["lhs"], relations[0]["rhs"]) for name in _json(path)]


def _beside(folder: Path, config: Mapping[str, Any], name: str) -> Path | None:
    """Find a file in the checkpoint's folder, else in PyTorch-BigGraph's entity_path; None if absent."""
    # The folder first: entity_path is a path on the machine that trained, and need not exist here.
    for place in (folder, Path(config.get("entity_path", folder))):
        if (place / name).is_file():
            return place / name
    return None


def _json(path: Path) -> list[Any]:
    """Read a list, or raise CheckpointError."""
    with os_errors(CheckpointError, f"{path} is damaged", ValueError):
        items = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(items, list):
            raise ValueError("expected a list")
    return items


def epoch_record(
    place: tuple[int, int, int], index: int, num_triples: int, mean_loss: float, measures: Mapping[str, float]
) -> dict[str, Any]:
    """Return the record of a pass of an epoch, in PyTorch-BigGraph's form for a pass over one bucket.

    `place` is its epoch, edge set and chunk, `index` its number, all counted from 0; `num_triples` has those
    before a restart; losses are per triple.
    """
    stats = {"count": num_triples, "metrics": {"loss": mean_loss, **measures}}
    return {"lhs_partition": 0, "rhs_partition": 0, "index": index, "stats": stats, **pass_fields(*place)}


def pass_fields(epoch: int, edge_set: int, chunk: int) -> dict[str, int]:
    """Return the fields by which a record names its pass."""
    return {"epoch_idx": epoch, "edge_path_idx": edge_set, "edge_chunk_idx": chunk}


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
    numbers = [record.get(name) for name in pass_fields(0, 0, 0)]
    epoch, edge_set, chunk = (value if isinstance(value, int) else -1 for value in numbers)
    return epoch, edge_set, chunk


def read_stats(folder: Path) -> list[dict[str, Any]]:
    """Return the records of ``training_stats.json``, PyTorch-BigGraph's or ours, except torn lines."""
    lines = (LeasedFolder(folder).read(layout.STATS_FILE) or b"").splitlines()
    return [record for record in map(layout.parse_object, lines) if record]
