"""Tables of a run, their optimizer, how remote rows are fetched; and frozen vectors of entities (features).

The vectors are copied to the run's folder by original id, and mapped by all trainers. One process of each
disk writes the copy, before anything is trained; a resume takes the copy that is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from dglkge.checkpoint import layout
from dglkge.checkpoint.features import open_features, parse_note, record_path
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.storage import file_crc32
from dglkge.config import Config
from dglkge.config.schema import FeaturesConfig, OptimizerConfig
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import PartitionLayout
from dglkge.data.vector_files import FeatureFile, VectorFile, feature_files, open_vectors
from dglkge.distributed.dgl_compat import request_timeout, request_timeout_seconds
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.embeddings.device_tables import DeviceTables
from dglkge.embeddings.embedding_table import RowStorage
from dglkge.embeddings.table_set import TableSet
from dglkge.errors import CheckpointError, InputError
from dglkge.formats.relation_parameters import used_numbers
from dglkge.kernels.rules import limit_norms
from dglkge.model.choices import OPTIMIZERS, RelationSettings
from dglkge.model.dense_modules import FeatureProjections, ProjectedFeatures
from dglkge.model.device import ComputeDevice
from dglkge.model.kge_model import KgeModel
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.rules import UpdateRule
from dglkge.optim.sparse_optimizer import SparseOptimizer
from dglkge.training.building.given_vectors import match_names, nothing_matches, require_finite, together
from dglkge.typing import DEVICE_STORAGE, RELATION

logger = logging.getLogger(__name__)

Records = Mapping[str, Tensor]


class RunFeatures(ProjectedFeatures):
    """Features of the entities of a run, and the records of their files, which every version has.

    Attributes
    ----------
    records : dict of str to (3,) int64 tensor
        By entity type: rows, numbers in each, and CRC-32 of the file.
    untrained_types : list of str
        Entity types without trained rows.
    """

    def __init__(
        self,
        projections: FeatureProjections,
        vectors: Mapping[str, np.ndarray],
        records: Records,
        are_alone: bool,
    ) -> None:
        super().__init__(projections, vectors)
        self.records = dict(records)
        self.untrained_types = self.entity_types if are_alone else []

    is_collective = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the records by dataset of a model file."""
        return {record_path(name): record.clone() for name, record in self.records.items()}

    def load_state_dict(self, state: h5py.File) -> None:
        """Compare the records with those of a model file."""
        for path, record in self.state_dict().items():
            saved = state[path][...].tolist() if path in state else None
            if saved != record.tolist():
                raise CheckpointError(
                    f"{state.filename} was trained with other features: rows, numbers and checksum {saved}, "
                    f"this run's folder has {record.tolist()}"
                )


def build_features(config: Config, cluster: Cluster, dataset: Dataset) -> RunFeatures | None:
    """Return the features of a run and their untrained projections; None without features. A collective."""
    settings, world = config.features, cluster.world
    if settings is None:
        return None
    folder = Path(config.output) / layout.FEATURES_FOLDER
    note = folder / layout.FEATURES_NOTE_FILE
    files = feature_files(settings.files, dataset.entity_types, "features.files")
    # The barrier's limit allows for reading the largest of the files.
    largest = max((file.path for file in files), key=lambda path: path.stat().st_size if path.exists() else 0)

    def copy() -> None:
        if not world.is_disk_leader or _is_kept(config.output, settings, files, note):
            return
        written = LeasedFolder(folder)
        written.make()
        with written.writing():
            _write(settings, dataset, files, written, world.rank == 0)

    together(cluster, largest, copy)
    records, vectors = together(cluster, largest, lambda: _open(folder, note))
    described = {name: record.tolist() for name, record in records.items()}
    if len(set(cluster.gather_texts(json.dumps(described, sort_keys=True)))) > 1:
        raise InputError(f"{largest}: features.files are different files on the machines of the job")
    widths = {name: int(record[1]) for name, record in records.items()}
    dim, mlp = config.model.dimension, settings.mlp
    layers = ((), "relu") if mlp is None else (mlp.hidden or (dim,), mlp.activation)
    made = FeatureProjections(widths, dim, *layers, config.seed)
    return RunFeatures(made, vectors, records, settings.use == "alone")


def _is_kept(output: str, settings: FeaturesConfig, files: list[FeatureFile], note: Path) -> bool:
    """Return whether the copy in the run's folder is taken as it is.

    That of a run with a checkpoint is: the checkpoint has its checksum. One that a start left which trained
    nothing may be of other files, and is taken only where these are not there (any more).
    """
    if not note.is_file():
        return False
    if (Path(output) / layout.CHECKPOINT_FOLDER / layout.VERSION_FILE).is_file():
        return True
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        is_same = json.loads(note.read_text(encoding="utf-8"))["files"] == list(settings.files)
        return is_same and not all(file.path.is_file() for file in files)
    return False


def _open(folder: Path, note: Path) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Open the run's copy."""
    try:
        records = parse_note(note.read_bytes(), note)
        vectors = open_features(folder, records)
    except (OSError, CheckpointError) as error:
        raise InputError(f"{error}; remove {note} to copy the files anew") from None
    return {name: torch.tensor(record) for name, record in records.items()}, vectors


def _write(
    settings: FeaturesConfig, dataset: Dataset, files: list[FeatureFile], folder: LeasedFolder, reports: bool
) -> None:
    """Copy the vectors of all entities to the run's folder; the note comes last."""
    types: dict[str, Any] = {}
    for source in files:
        file = open_vectors(source.path, settings.names, settings.entity_column, settings.vector_column)
        ids = {name: np.arange(dataset.num_entities(name)) for name in source.entity_types}
        _, matches = match_names(file, dataset, ids)
        if not any(len(numbers) for numbers, _ in matches.values()):
            raise nothing_matches(file, dataset, source.entity_types)
        for name, (numbers, places) in matches.items():
            if not len(numbers):
                continue
            num_rows = dataset.num_entities(name)
            target = folder.path / layout.features_array(name)
            crc32 = _write_type(target, file, numbers, places, num_rows, settings.dtype)
            types[name] = {
                "path": str(source.path),
                "shape": [num_rows, file.width],
                "with_vector": len(places),
                "without": num_rows - len(places),
                "crc32": crc32,
            }
            if reports:
                logger.info(
                    "features of %s from %s: %d numbers each; %d entities with a vector, %d without "
                    "(theirs is 0)",
                    *(name, source.path, file.width, len(places), num_rows - len(places)),
                )
    described = {"files": list(settings.files), "dtype": settings.dtype, "types": types}
    folder.write_json(layout.FEATURES_NOTE_FILE, described)


def _write_type(
    target: Path, file: VectorFile, numbers: np.ndarray, places: np.ndarray, num_rows: int, dtype: str
) -> int:
    """Write the vectors of one entity type, 0 where there is none; returns the file's CRC-32."""
    temporary = target.with_name(target.name + layout.TEMPORARY_SUFFIX)
    written = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=(num_rows, file.width))
    # Entities whose names a format makes equal share a vector: numbers may repeat.
    for some, rows in file.rows(np.unique(numbers)):
        with np.errstate(over="ignore"):
            narrowed = rows.astype(dtype)
        require_finite(file, some, rows, np.isfinite(narrowed), f"finite numbers of {dtype}")
        first, end = np.searchsorted(numbers, [some[0], some[-1] + 1])
        written[places[first:end]] = narrowed[np.searchsorted(some, numbers[first:end])]
    written.flush()
    del written
    os.replace(temporary, target)
    return file_crc32(target)


REQUESTS_AHEAD = 4
"""Batches between the request of rows and their use, where machines do not wait for one another."""


def open_tables(
    config: Config, cluster: Cluster, dataset: Dataset, layout: PartitionLayout, model: KgeModel
) -> TableSet:
    """Create the tables on the servers, as zeros; a collective."""
    settings = config.tables
    storage = RowStorage(
        getattr(torch, settings.dtype), settings.rounding, config.seed, kernels=config.training.kernels
    )
    widths = dict.fromkeys(dataset.entity_types, model.dim) | config.model.entity_dimensions
    with request_timeout():
        # Creates tensors on all servers by RPC, hence the timeout.
        return TableSet(cluster.graph, layout, widths, model.relation_width, cluster.world.machine, storage)


def fill_tables(
    tables: TableSet,
    model: KgeModel,
    config: Config,
    cluster: Cluster,
    features: RunFeatures | None,
    meta: CheckpointMeta,
) -> None:
    """Fill the tables, each trainer its share of the machine's rows.

    Rows are keyed by original id, so a table starts the same however it is partitioned.
    """
    world = cluster.world
    relation_numbers = torch.from_numpy(used_numbers(meta, model.relation_width)) if meta.dims else None
    for name, table in tables.items():
        if features is not None and name in features.untrained_types:
            continue  # its rows are f(x) alone: zeros, as the servers have made them
        shard = table.shard(world.local_rank, world.trainers_per_machine)
        scale = config.model.init_scale
        # In blocks: the rows are drawn in private memory before they are copied to the table.
        for start in range(0, shard.rows.shape[0], 65536):
            ids = shard.original_ids[start : start + 65536]
            rows = model.initial_rows(name, ids, config.seed, scale)
            if config.model.max_norm and name != RELATION:
                limit_norms(rows.numpy(), config.model.max_norm)
            if meta.operators and name == RELATION:
                rows = model.operator_rows([meta.operators[id_] for id_ in ids.tolist()])
            if relation_numbers is not None and name == RELATION:
                rows = rows * relation_numbers[ids]
            shard.rows[start : start + 65536] = rows[:, : table.dim]
    # A lookup of the first batch may read rows that another trainer initialises.
    cluster.barrier()


def open_optimizer(config: Config, tables: TableSet, num_machines: int) -> SparseOptimizer:
    """Make the optimizer of all tables; a collective."""
    with request_timeout():
        optimizer = build_optimizer(config, [table.embedding for table in tables.values()], num_machines)
    for name in tables.entity_types if config.model.max_norm else ():
        optimizer.limit_norms(tables[name].embedding, config.model.max_norm)
    return optimizer


def build_optimizer(config: Config, embeddings: Sequence[Any], num_machines: int) -> Any:
    """Build the optimizer of all tables, of which the relations are the last."""
    settings = config.optimizer
    # Trainers of one machine exchange gradients in shared memory, where bfloat16 would save nothing.
    wire_dtype = getattr(torch, config.training.wire) if num_machines > 1 else None
    relations = relation_group(settings)
    params: Any = embeddings
    if relations:
        params = [{"params": embeddings[:-1]}, {"params": embeddings[-1:], **relations}]
    optimizer = SparseOptimizer(
        params,
        configured_rule(settings),
        settings.lr,
        weight_decay=settings.weight_decay,
        decoupled_weight_decay=settings.decoupled_weight_decay,
        synchronous=config.training.synchronous,
        max_lag=config.training.max_lag,
        wire_dtype=wire_dtype,
        timeout_seconds=request_timeout_seconds(),
        kernels=config.training.kernels,
    )
    limits = {"norm": settings.clip_norm, "value": settings.clip_value}
    limits = {name: limit for name, limit in limits.items() if limit}
    if limits:
        optimizer.clip_gradients(**limits)
    return optimizer


def describe_optimizer(settings: OptimizerConfig) -> dict[str, Any]:
    """Return name and learning rate for a checkpoint, and those of the relations where they differ."""
    described: dict[str, Any] = {"name": settings.name, "lr": settings.lr}
    if settings.relations.name not in ("", settings.name):
        described["relation_name"] = settings.relations.name
    if settings.relations.lr not in (0, settings.lr):
        described["relation_lr"] = settings.relations.lr
    return described


def configured_rule(settings: OptimizerConfig | RelationSettings) -> UpdateRule:
    """Return the update rule of the rows of entities or of relations, with its hyper-parameters."""
    rule = OPTIMIZERS.get(settings.name)()
    return rule.of({name: getattr(settings, name) for name in rule.hyper})


def relation_group(settings: OptimizerConfig) -> dict[str, Any]:
    """Return what differs in the parameter group of the relations; empty if nothing does."""
    lr = settings.relations.lr or settings.lr
    group: dict[str, Any] = {} if lr == settings.lr else {"lr": lr}
    rule = configured_rule(settings.relations) if settings.relations.name else configured_rule(settings)
    return group if rule == configured_rule(settings) else {**group, "rule": rule}


def choose_lookup(config: Config, tables: TableSet, num_machines: int) -> None:
    """Select how remote rows are fetched, as configured; a collective."""
    settings = config.training
    # On one machine every row is in shared memory.
    if num_machines == 1:
        return
    if not settings.synchronous:
        # Trainers that do not wait for one another have no collective: DGL's servers answer at any time.
        tables.use_requests(min(REQUESTS_AHEAD, settings.max_lag))
    elif settings.lookup == "exchange":
        group = Alltoall(
            request_timeout_seconds(),
            # The exchange runs in a background thread; in a shared group its collectives would mix with the
            # step's.
            own_group=True,
            purpose="lookup of rows",
            duty="train every batch, also with no triples of its own",
        )
        tables.use_exchange(group, getattr(torch, settings.wire), settings.staleness)


def build_device_tables(
    config: Config, tables: TableSet, optimizer: Any, world: World, device: ComputeDevice
) -> DeviceTables | None:
    """Make room for this trainer's shards on its device; None where tables train in memory. A collective."""
    if config.tables.storage != DEVICE_STORAGE:
        return None
    place, limit = (world.local_rank, world.trainers_per_machine), request_timeout_seconds()
    try:
        return DeviceTables(tables, optimizer, *place, device.device, limit, config.training.compile)
    except torch.cuda.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"tables.storage is {DEVICE_STORAGE} and the share of trainer {world.rank} does not fit its GPU "
            f"({reason}); dglkge plan shows what it takes; allowed: storage memory"
        ) from None
