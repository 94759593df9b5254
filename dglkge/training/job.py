"""What belongs together for the life of a trainer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.dgl_compat import request_timeout, request_timeout_seconds
from dglkge.distributed.process_group import DeviceGroups
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.embeddings.device_tables import DeviceTables
from dglkge.embeddings.table_set import Averages, TableSet
from dglkge.model.dense_modules import JoinedModules
from dglkge.model.device import LossScale
from dglkge.model.kge_model import KgeModel
from dglkge.optim.workspace import Pieces
from dglkge.step.contracts import Computation, PhaseClock
from dglkge.step.dense_parameters import DenseParameters
from dglkge.step.row_transforms import GlobalVectors
from dglkge.training.building import tables as building
from dglkge.training.building.components import REFERENCE, configured_model, dense_optimizer, with_num_times
from dglkge.training.building.computing import build_precision, choose_device, with_matmul_dtype
from dglkge.training.script import opened_dataset
from dglkge.typing import RELATION, TablePart


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
    features: building.RunFeatures | None = None
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
    def has_loops(self) -> bool:
        """Whether compiled loops may compute: they read rows in the host's memory."""
        return not (self.computation.is_reference or self.computation.device.is_staged)

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
    config = with_num_times(config, dataset)
    device = choose_device(config, cluster)
    # After the lease: the choice is read from the run's folder, which no other job may change now.
    config = with_matmul_dtype(config, cluster, device)
    model = configured_model(config)
    tables = building.open_tables(config, cluster, dataset, layout, model)
    features = building.build_features(config, cluster, dataset)
    building.fill_tables(tables, model, config, cluster, features, meta)
    optimizer = building.open_optimizer(config, tables, world.num_machines)
    building.choose_lookup(config, tables, world.num_machines)
    device_tables = building.build_device_tables(config, tables, optimizer, world, device)
    model = computing = model.on_device(device.device)
    precision = build_precision(config, computing, device, cluster)
    loss_scale = None if precision is None else precision.loss_scale
    dense = _build_dense(config, model, features, cluster, loss_scale)
    if precision is not None:
        computing = computing.in_precision(precision)
    global_vectors: GlobalVectors | None = None
    if config.model.global_vectors:
        # The first group is that of the entities.
        group, clip_value = optimizer.param_groups[0], config.optimizer.clip_value
        global_vectors = GlobalVectors(tables.entity_types, model.dim, group, cluster.sum, clip_value)
    averages, settings = None, config.training
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
    config: Config,
    model: KgeModel,
    features: building.RunFeatures | None,
    cluster: Cluster,
    loss_scale: LossScale | None,
) -> DenseParameters | None:
    """Return the dense parameters of the score function's module and of the projections of features.

    None where there are none. A collective.
    """
    module, world = model.module, cluster.world
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
