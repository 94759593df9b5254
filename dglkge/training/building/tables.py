"""The tables of a run, their optimizer, and how remote rows are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dglkge.config import Config
from dglkge.config.schema import OptimizerConfig
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.dgl_compat import request_timeout, request_timeout_seconds
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.embeddings.device_tables import DeviceTables
from dglkge.embeddings.embedding_table import RowStorage
from dglkge.embeddings.table_set import TableSet
from dglkge.errors import InputError
from dglkge.kernels.rules import limit_norms
from dglkge.model.choices import OPTIMIZERS, RelationSettings
from dglkge.model.device import ComputeDevice
from dglkge.model.kge_model import KgeModel
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.rules import UpdateRule
from dglkge.optim.sparse_optimizer import SparseOptimizer
from dglkge.training.building.components import relation_operators
from dglkge.training.building.features import RunFeatures
from dglkge.typing import DEVICE_STORAGE, RELATION

REQUESTS_AHEAD = 4
"""Batches between the request of rows and their use, where machines do not wait for one another."""


def open_tables(
    config: Config, cluster: Cluster, dataset: Dataset, layout: PartitionLayout, model: KgeModel
) -> TableSet:
    """Create the tables on the servers, as zeros; a collective."""
    chosen = config.tables
    storage = RowStorage(
        getattr(torch, chosen.dtype), chosen.rounding, config.seed, kernels=config.training.kernels
    )
    widths = (config.model.dimension, model.relation_width)
    with request_timeout():
        # Creates tensors on all servers by RPC, hence the timeout.
        return TableSet(cluster.graph, layout, dataset.entity_types, *widths, cluster.world.machine, storage)


def fill_tables(
    tables: TableSet,
    model: KgeModel,
    config: Config,
    cluster: Cluster,
    dataset: Dataset,
    features: RunFeatures | None,
) -> None:
    """Fill the tables, each trainer its share of the machine's rows.

    Rows are keyed by original id, so a table starts the same however it is partitioned.
    """
    world, operators = cluster.world, relation_operators(config, dataset)
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
            if operators and name == RELATION:
                rows = model.operator_rows([operators[id_] for id_ in ids.tolist()])
            shard.rows[start : start + 65536] = rows
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
    chosen = config.optimizer
    # Trainers of one machine exchange gradients in shared memory, where bfloat16 would save nothing.
    wire_dtype = getattr(torch, config.training.wire) if num_machines > 1 else None
    relations = relation_group(chosen)
    params: Any = embeddings
    if relations:
        params = [{"params": embeddings[:-1]}, {"params": embeddings[-1:], **relations}]
    optimizer = SparseOptimizer(
        params,
        configured_rule(chosen),
        chosen.lr,
        weight_decay=chosen.weight_decay,
        decoupled_weight_decay=chosen.decoupled_weight_decay,
        synchronous=config.training.synchronous,
        max_lag=config.training.max_lag,
        wire_dtype=wire_dtype,
        timeout_seconds=request_timeout_seconds(),
        kernels=config.training.kernels,
    )
    limits = {"norm": chosen.clip_norm, "value": chosen.clip_value}
    limits = {name: limit for name, limit in limits.items() if limit}
    if limits:
        optimizer.clip_gradients(**limits)
    return optimizer


def describe_optimizer(chosen: OptimizerConfig) -> dict[str, Any]:
    """Return name and learning rate for a checkpoint, and those of the relations where they differ."""
    described: dict[str, Any] = {"name": chosen.name, "lr": chosen.lr}
    if chosen.relations.name not in ("", chosen.name):
        described["relation_name"] = chosen.relations.name
    if chosen.relations.lr not in (0, chosen.lr):
        described["relation_lr"] = chosen.relations.lr
    return described


def configured_rule(settings: OptimizerConfig | RelationSettings) -> UpdateRule:
    """Return the update rule of the rows of entities or of relations, with its hyper-parameters."""
    rule = OPTIMIZERS.get(settings.name)()
    return rule.of({name: getattr(settings, name) for name in rule.hyper})


def relation_group(chosen: OptimizerConfig) -> dict[str, Any]:
    """Return what differs in the parameter group of the relations; empty if nothing does."""
    lr = chosen.relations.lr or chosen.lr
    group: dict[str, Any] = {} if lr == chosen.lr else {"lr": lr}
    rule = configured_rule(chosen.relations) if chosen.relations.name else configured_rule(chosen)
    return group if rule == configured_rule(chosen) else {**group, "rule": rule}


def choose_lookup(config: Config, tables: TableSet, num_machines: int) -> None:
    """Select how remote rows are fetched, as configured; a collective."""
    chosen = config.training
    # On one machine every row is in shared memory.
    if num_machines == 1:
        return
    if not chosen.synchronous:
        # Trainers that do not wait for one another have no collective: DGL's servers answer at any time.
        tables.use_requests(min(REQUESTS_AHEAD, chosen.max_lag))
    elif chosen.lookup == "exchange":
        group = Alltoall(
            request_timeout_seconds(),
            # The exchange runs in a background thread; in a shared group its collectives would mix with the
            # step's.
            own_group=True,
            purpose="lookup of rows",
            duty="train every batch, also with no triples of its own",
        )
        tables.use_exchange(group, getattr(torch, chosen.wire), chosen.staleness)


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
