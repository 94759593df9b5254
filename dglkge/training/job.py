"""What belongs together for the life of a trainer, and all that is trained: tables, optimizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.config import Config
from dglkge.config.schema import OptimizerConfig
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.dgl_compat import request_timeout, request_timeout_seconds
from dglkge.distributed.process_group import DeviceGroups
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.embeddings.device_tables import DeviceTables
from dglkge.embeddings.embedding_table import RowStorage
from dglkge.embeddings.table_set import Averages, TableSet
from dglkge.errors import InputError
from dglkge.formats.relation_parameters import used_numbers
from dglkge.kernels.rules import limit_norms
from dglkge.model.choices import OPTIMIZERS, RelationSettings
from dglkge.model.dense_modules import JoinedModules
from dglkge.model.device import ComputeDevice, LossScale
from dglkge.model.kge_model import KgeModel
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.rules import UpdateRule
from dglkge.optim.sparse_optimizer import SparseOptimizer
from dglkge.optim.workspace import Pieces
from dglkge.step.contracts import Computation, PhaseClock
from dglkge.step.dense_parameters import DenseParameters
from dglkge.step.row_transforms import GlobalVectors
from dglkge.training.building.components import REFERENCE, configured_model, dense_optimizer
from dglkge.training.building.computing import build_precision, choose_device, with_matmul_dtype
from dglkge.training.building.given_vectors import RunFeatures, build_features
from dglkge.training.script import opened_dataset
from dglkge.typing import DEVICE_STORAGE, RELATION, Ids, Side, TablePart


@dataclass(frozen=True)
class Job:
    """A running job as one trainer sees it, and all that is trained.

    Attributes
    ----------
    model : KgeModel
        On the host: rankings and files take its parameters.
    computing : KgeModel
        The one that computes batches: the same, or a copy on a device or in another precision.
    device_tables : DeviceTables or None
        Where tables train on devices.
    dense : DenseParameters or None
        Parameters of the score function's module, and of the projections of features.
    averages : Averages or None
        Of the rows, where they are what is ranked and written.
    step_memory : list
        Memory that objectives of the same kind share, see :func:`dglkge.optim.workspace.sharing`.
    """

    config: Config
    cluster: Cluster
    dataset: Dataset
    layout: PartitionLayout
    model: KgeModel
    computing: KgeModel
    computation: Computation
    tables: TableSet
    optimizer: Any
    device_tables: DeviceTables | None = None
    features: RunFeatures | None = None
    global_vectors: GlobalVectors | None = None
    dense: DenseParameters | None = None
    averages: Averages | None = None
    step_memory: list[Pieces] = field(default_factory=list)

    @property
    def world(self) -> World:
        """Place of this trainer in the job."""
        return self.cluster.world

    @property
    def clock(self) -> PhaseClock:
        """Seconds of the phases of batches."""
        return self.computation.clock

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.config.output)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Entity types of the heads and tails of each edge type."""
        return [(lhs, rhs) for lhs, rhs, _, _ in self.dataset.edge_types]

    @property
    def untrained_types(self) -> list[str]:
        """Entity types without trained rows, or whose rows stay as they are."""
        init_from = self.config.model.init_from
        if init_from is not None and init_from.frozen:
            return self.tables.entity_types
        return [] if self.features is None else self.features.untrained_types

    @property
    def averaged(self) -> Job:
        """The job with its tables as they are ranked, written and restored: averages, if there are any."""
        return self if self.averages is None else replace(self, tables=self.averages.tables)

    @property
    def is_lagged(self) -> bool:
        """Whether machines do not wait for one another: no collective then, but at agreed places."""
        return not self.config.training.synchronous and self.world.num_machines > 1

    @property
    def has_loops(self) -> bool:
        """Whether compiled loops may compute: they read rows in the host's memory."""
        return not (self.computation.is_reference or self.computation.device.is_staged)

    def entities_by_type(self, triples: np.ndarray) -> Iterator[tuple[Side, str, Ids]]:
        """Yield side, entity type and places, for triples (n, 3) that have an entity of it there.

        Heads come before tails.
        """
        for side in Side:
            types = np.array([relation.candidate_type(side) for relation in self.dataset.relations.relations])
            for name in self.dataset.entity_types:
                yield side, name, np.flatnonzero((types == name)[triples[:, 1]])

    def optimizer_state(self, table: str) -> dict[str, Any]:
        """Return the optimizer's tensors of a table; waits for this trainer's updates."""
        return self.optimizer.state_tensors(self.tables[table].embedding)

    def own_parts(self) -> list[TablePart]:
        """Return this machine's parts of all tables, with the optimizer's state; the relations' last."""
        names = [*self.tables.entity_types, RELATION]
        return [self.tables[name].own_part(self.optimizer_state(name)) for name in names]

    def parts(self) -> list[TablePart]:
        """Return this machine's parts of the entity tables."""
        return self.own_parts()[:-1]

    def load_devices(self) -> None:
        """Copy the tables to the devices, where they train there; a collective."""
        if self.device_tables is not None:
            self.cluster.barrier()  # all trainers have written their initial rows
            self.device_tables.load()

    def settle(self) -> None:
        """Wait until the updates of all trainers are in the tables; a collective."""
        self.clock.stop()
        self.own_parts()  # waits for this trainer's optimizer
        # The trainer's rows come back from its device; all have done so after the barrier.
        if self.device_tables is not None:
            self.device_tables.store()
        self.cluster.barrier()
        if self.averages is not None and not self.averages.num_epochs:
            self.averages.add(0)
            self.cluster.barrier()

    def average(self, num_epochs: int) -> None:
        """Add the rows after so many epochs to the averages, unless they are in them; a collective."""
        if self.averages is not None and num_epochs > self.averages.num_epochs:
            self.settle()
            self.averages.add(num_epochs)

    @contextlib.contextmanager
    def ranking(self) -> Iterator[None]:
        """Let every trainer have final rows and all dense parameters in a block of code; a collective."""
        self.settle()
        with contextlib.nullcontext() if self.dense is None else self.dense.whole():
            yield


def open_job(config: Config, cluster: Cluster, meta: CheckpointMeta) -> Job:
    """Make everything that is trained, with initial values, for a run; a collective."""
    world, dataset = cluster.world, opened_dataset(config)
    layout = dataset.layout()
    device = choose_device(config, cluster)
    # After the lease: the choice is read from the run's folder, which no other job may change now.
    config = with_matmul_dtype(config, cluster, device)
    model, settings = configured_model(config), config.training
    dtype, rounding = getattr(torch, config.tables.dtype), config.tables.rounding
    storage = RowStorage(dtype, rounding, config.seed, kernels=settings.kernels)
    widths = dict.fromkeys(dataset.entity_types, model.dim) | config.model.entity_dimensions
    with request_timeout():  # tensors are created on all servers by RPC
        tables = TableSet(cluster.graph, layout, widths, model.relation_width, world.machine, storage)
    features = build_features(config, cluster, dataset)
    # Rows that are f(x) alone stay zeros, as the servers have made them.
    untrained = [] if features is None else features.untrained_types
    trained = {name: table for name, table in tables.items() if name not in untrained}
    fill_tables(trained, model, config, world, meta)
    # A lookup of the first batch may read rows that another trainer initialises.
    cluster.barrier()
    with request_timeout():
        embeddings = [table.embedding for table in tables.values()]
        optimizer = build_optimizer(config, embeddings, world.num_machines)
    for name in tables.entity_types if config.model.max_norm else ():
        optimizer.limit_norms(tables[name].embedding, config.model.max_norm)
    choose_lookup(config, tables, world.num_machines)
    device_tables = build_device_tables(config, tables, optimizer, world, device)
    model = computing = model.on_device(device.device)
    precision = build_precision(config, computing, device, cluster)
    loss_scale = None if precision is None else precision.loss_scale
    dense = _build_dense(config, model, features, world, loss_scale)
    if precision is not None:
        computing = computing.in_precision(precision)
    global_vectors: GlobalVectors | None = None
    if config.model.global_vectors:
        # The first group is that of the entities.
        group, clip_value = optimizer.param_groups[0], config.optimizer.clip_value
        global_vectors = GlobalVectors(tables.entity_types, model.dim, group, cluster.sum, clip_value)
    averages = None
    if settings.averaging is not None:
        turn = (world.local_rank, world.trainers_per_machine)
        with request_timeout():
            averages = Averages(tables, settings.averaging, turn)
    dtype, is_reference = getattr(torch, settings.matmul_dtype), settings.kernels == REFERENCE
    computation = Computation(device, dtype, is_reference, settings.compile, PhaseClock(settings.profile))
    # Registered before the Trainer's own: an exchange in the background ends before the last commit.
    cluster.on_leave(tables.lookup.finish)
    return Job(
        config, cluster, dataset, layout, model, computing, computation, tables, optimizer,
        device_tables, features, global_vectors, dense, averages,
    )  # fmt: skip


def _build_dense(
    config: Config, model: KgeModel, features: RunFeatures | None, world: World, loss_scale: LossScale | None
) -> DenseParameters | None:
    """Return the dense parameters of the score function's module and of the projections of features.

    None where there are none. A collective.
    """
    module = model.module
    names = [] if module is None else [name for name, _ in module.named_parameters()]
    if features is not None:
        module = features.projections if module is None else JoinedModules(module, features.projections)
    if module is None:
        return None
    # One trainer has all of them in any case.
    is_sharded = config.dense.sharding == "fsdp" and world.world_size > 1
    make, groups = functools.partial(dense_optimizer, config.dense), DeviceGroups(request_timeout_seconds())
    shards_in = Path(config.output) if is_sharded else None
    options = (world.rank == 0, config.optimizer.clip_value, shards_in, loss_scale, names)
    penalty = model.score_function.module_penalty
    return DenseParameters(module, make, groups, *options, penalty, world.world_size)


TRAIN_DUTY = "train every batch, also with no triples of its own"
"""What a trainer that others wait for has not done, for messages."""

REQUESTS_AHEAD = 4
"""Batches between the request of rows and their use, where machines do not wait for one another."""


def fill_tables(
    tables: Mapping[str, Any], model: KgeModel, config: Config, world: World, meta: CheckpointMeta
) -> None:
    """Fill tables, each trainer its share of the machine's rows.

    Rows are keyed by original id, so a table starts the same however it is partitioned.
    """
    relation_numbers = torch.from_numpy(used_numbers(meta, model.relation_width)) if meta.dims else None
    for name, table in tables.items():
        shard = table.shard(world.local_rank, world.trainers_per_machine)
        # In blocks: the rows are drawn in private memory before they are copied to the table.
        for start in range(0, shard.rows.shape[0], 65536):
            ids = shard.original_ids[start : start + 65536]
            rows = model.initial_rows(name, ids, config.seed, config.model.init_scale)
            if config.model.max_norm and name != RELATION:
                limit_norms(rows.numpy(), config.model.max_norm)
            if meta.operators and name == RELATION:
                rows = model.operator_rows([meta.operators[id_] for id_ in ids.tolist()])
            if relation_numbers is not None and name == RELATION:
                rows = rows * relation_numbers[ids]
            shard.rows[start : start + 65536] = rows[:, : table.dim]


def build_optimizer(config: Config, embeddings: Sequence[Any], num_machines: int) -> Any:
    """Build the optimizer of all tables, of which the relations are the last."""
    settings = config.optimizer
    # Trainers of one machine exchange gradients in shared memory, where bfloat16 would save nothing.
    wire_dtype = getattr(torch, config.training.wire) if num_machines > 1 else None
    relations = relation_group(settings)
    groups = [{"params": embeddings[:-1]}, {"params": embeddings[-1:], **relations}]
    options = {name: getattr(settings, name) for name in ("weight_decay", "decoupled_weight_decay")}
    options |= {name: getattr(config.training, name) for name in ("synchronous", "max_lag", "kernels")}
    options |= {"wire_dtype": wire_dtype, "timeout_seconds": request_timeout_seconds()}
    params = groups if relations else embeddings
    optimizer = SparseOptimizer(params, configured_rule(settings), settings.lr, **options)
    if settings.clip_norm or settings.clip_value:
        optimizer.clip_gradients(settings.clip_norm or None, settings.clip_value or None)
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
    lr, relations = settings.relations.lr or settings.lr, settings.relations
    group: dict[str, Any] = {} if lr == settings.lr else {"lr": lr}
    rule = configured_rule(relations if relations.name else settings)
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
        # The exchange runs in a background thread; in a shared group its collectives would mix with the
        # step's.
        words: Any = {"purpose": "lookup of rows", "duty": TRAIN_DUTY}
        group = Alltoall(request_timeout_seconds(), own_group=True, **words)
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
        share = f"the share of trainer {world.rank} does not fit its GPU ({str(error).splitlines()[0]})"
        problem = f"tables.storage is {DEVICE_STORAGE} and {share}; dglkge plan shows what it takes"
        raise InputError(f"{problem}; allowed: storage memory") from None
