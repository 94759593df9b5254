"""Builds a trainer from a configuration; every choice of a component by name is made here."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge import __version__
from dglkge.checkpoint.conversion import dataset_fields
from dglkge.checkpoint.courier import Courier
from dglkge.checkpoint.layout import (
    CHECKPOINT_FOLDER,
    RUN_CONFIG_FILE,
    RUN_TRACKERS_FILE,
    RUN_VECTORS_FILE,
    Progress,
)
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.config import Config, save_config
from dglkge.config.refusals import refuse
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN, VALID, load_json
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.dgl_compat import dgl, request_timeout, request_timeout_seconds
from dglkge.distributed.lease import Lease, LeaseTaker, new_nonce
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.embeddings.device_tables import DeviceTables
from dglkge.embeddings.embedding_table import RowStorage
from dglkge.embeddings.table_set import TableSet
from dglkge.errors import CheckpointError, InputError, StorageError, write_error
from dglkge.evaluation.protocol import Protocol
from dglkge.kernels.links import limit_norms
from dglkge.model.choices import K_VS_ALL, NEGATIVE_SAMPLING
from dglkge.model.device import ComputeDevice
from dglkge.model.kge_model import KgeModel
from dglkge.model.precision import ModulePrecision
from dglkge.model.projections import JoinedModules
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.sparse_optimizer import SparseOptimizer
from dglkge.sampling.bucket_batches import BucketBatches
from dglkge.sampling.query_batches import TrainingBatches
from dglkge.step.clock import PhaseClock
from dglkge.step.computation import Computation
from dglkge.step.contracts import Objective, Parameters, RowStore, RowTransform
from dglkge.step.device_rows import DeviceStore
from dglkge.step.look_ahead import LookAhead
from dglkge.step.objectives import dot_softmax
from dglkge.step.objectives.autograd_loss import AutogradLoss
from dglkge.step.objectives.dot_softmax import DotSoftmax
from dglkge.step.objectives.relation_prediction import WithRelations
from dglkge.step.parameters.dense_parameters import DenseParameters
from dglkge.step.planning import EdgePlanner
from dglkge.step.rows import HostStore, Transforms
from dglkge.step.staged_rows import StagedStore
from dglkge.step.train_step import TrainStep
from dglkge.step.transforms.features import AddedFeatures
from dglkge.step.transforms.global_vectors import GlobalVectors
from dglkge.step.transforms.row_dropout import RowDropout
from dglkge.step.updates import RowUpdates
from dglkge.training.building.bucket_order import build_bucket_batches, prefetch_ranges
from dglkge.training.building.candidates import (
    StepParts,
    build_candidate_loss,
    build_query_batches,
    build_relation_loss,
)
from dglkge.training.building.compiled_loss import check_compiled_loss, compile_loss
from dglkge.training.building.components import (
    REFERENCE,
    check_config,
    configured_loss,
    configured_model,
    configured_regularizer,
)
from dglkge.training.building.dense_optimizer import dense_optimizer
from dglkge.training.building.device import check_device, choose_device
from dglkge.training.building.edge_sets import (
    build_edge_batches,
    build_passes,
    configured_order,
    touched_rows,
)
from dglkge.training.building.features import (
    DenseWithFeatures,
    RunFeatures,
    build_features,
    frozen_types,
)
from dglkge.training.building.given_vectors import fill_from_vectors
from dglkge.training.building.loss_settings import check_data_of_loss, relation_weights
from dglkge.training.building.matmul_dtype import with_matmul_dtype
from dglkge.training.building.mirrored import open_mirror
from dglkge.training.building.module_precision import build_precision, check_precision
from dglkge.training.building.negatives import build_known, build_negatives, build_range_offset
from dglkge.training.building.optimizer_options import (
    clipping_of,
    configured_rule,
    describe_optimizer,
    relation_group,
)
from dglkge.training.building.warm_start import refuse_bigraph_output
from dglkge.training.early_stopping import check_common_disk
from dglkge.training.epochs import JOB
from dglkge.training.join import opened_dataset
from dglkge.training.live_evaluator import LiveEvaluator
from dglkge.training.trackers import Trackers
from dglkge.training.trainer import Trainer
from dglkge.typing import DEVICE_STORAGE, RELATION

ATTEMPT_SECONDS = 5.0
"""Time that one trainer tries before all of them exchange their results: well below their timeout."""


def hold_run(output: Path, cluster: Cluster) -> Lease:
    """Take the lease on a run's folder, released when this trainer ends, however it ends; a collective.

    Rank 0 takes it, and where machines share no disk one trainer of each machine. The others get a lease of
    the same nonce, which they can check.

    Raises
    ------
    CheckpointError
        On all trainers, if another job holds a folder or it may not be written to.
    StorageError
        On all trainers, if a disk is full or fails.
    """
    world = cluster.world
    # One nonce for the whole job: trainers that hold no lease check by it that the file is still this job's.
    nonce = cluster.gather_texts(new_nonce())[0]
    is_taker = world.rank == 0 or (world.has_own_disk and world.is_machine_leader)
    taker = LeaseTaker(output, nonce, world.job) if is_taker else None
    lease: Lease | None = None
    # Short attempts instead of one long wait: between them all trainers exchange results, within the timeout
    # of a collective.
    while True:
        problem: tuple[str, str] | None = None
        if taker is not None and lease is None:
            try:
                lease = taker.attempt(ATTEMPT_SECONDS)
            except (CheckpointError, StorageError) as error:
                problem = (type(error).__name__, str(error))
            if lease is not None:
                cluster.on_exit(lease.release)
        mine = {"problem": problem, "waits": taker is not None and lease is None}
        found = [json.loads(text) for text in cluster.gather_texts(json.dumps(mine))]
        # All trainers raise the first problem, in the order of ranks: none is left waiting in a collective.
        for kind, text in (one["problem"] for one in found if one["problem"]):
            raise StorageError(text) if kind == StorageError.__name__ else CheckpointError(text)
        if not any(one["waits"] for one in found):
            break
    holder_nonce = cluster.gather_texts("" if lease is None else lease.holder_nonce)[0]
    return lease if lease is not None else Lease.of_job(output, nonce, holder_nonce)


def configured_storage(config: Config) -> RowStorage:
    """Return how the rows of entities are stored."""
    chosen = config.tables
    return RowStorage(
        getattr(torch, chosen.dtype), chosen.rounding, config.seed, kernels=config.training.kernels
    )


def choose_lookup(config: Config, tables: TableSet, num_machines: int) -> None:
    """Select how remote rows are fetched, as configured; a collective.

    Parameters
    ----------
    config : Config
    tables : TableSet
    num_machines : int

    Raises
    ------
    InputError
        If rows that the kvstore fetches are configured to be stale.
    """
    refuse(config, num_machines)
    chosen = config.training
    if chosen.lookup == "kvstore":
        return
    # On one machine every row is in shared memory.
    if num_machines > 1:
        group = Alltoall(
            request_timeout_seconds(),
            # The exchange runs in a background thread; in a shared group its collectives would mix with the
            # step's.
            own_group=True,
            purpose="lookup of rows",
            duty="train every batch, also with no triples of its own",
        )
        tables.use_exchange(group, getattr(torch, chosen.wire), chosen.staleness)


def check_training(config: Config, num_machines: int) -> None:
    """Refuse a configuration that cannot be trained on a number of machines, whatever the data set.

    Raises
    ------
    InputError
        For an unknown component, or values that do not fit each other.
    """
    check_config(config, num_machines)
    check_device(config)
    check_precision(config)
    check_compiled_loss(config)


def build_trainer(config: Config, cluster: Cluster) -> Trainer:
    """Build a trainer; it resumes from the newest checkpoint in ``config.output``.

    A collective: every trainer calls it. SIGTERM, SIGINT and SIGHUP end it at once: nothing is trained yet.

    Raises
    ------
    InputError
        For an unknown component, values that do not fit each other, or a checkpoint that
        does not fit the configuration.
    Preempted
        If this trainer received a signal to stop.
    """
    with cluster.stop.leaving_at_once():
        return _build(config, cluster)


def _build(config: Config, cluster: Cluster) -> Trainer:
    world = cluster.world
    check_training(config, world.num_machines)
    check_common_disk(config, world)
    dataset = opened_dataset(config)
    refuse_empty_splits(config, dataset)
    check_data_of_loss(config, dataset)
    refuse_bigraph_output(config)
    output = Path(config.output)
    # The lease creates the folder and excludes other jobs from here on.
    lease = hold_run(output, cluster)
    device = choose_device(config, cluster)
    mirror = open_mirror(config, cluster, lease)
    layout = dataset.layout()
    # After the lease: the choice is read from the run's folder, which no other job may change now.
    config = with_matmul_dtype(config, cluster, device)
    model = configured_model(config)
    widths = (config.model.dimension, model.relation_width)
    with request_timeout():
        # Creates tensors on all servers by RPC, hence the timeout.
        tables = TableSet(
            cluster.graph, layout, dataset.entity_types, *widths, world.machine, configured_storage(config)
        )
    features = build_features(config, cluster, dataset)
    _initialize(tables, model, config, cluster, features)
    embeddings = [table.embedding for table in tables.values()]
    with request_timeout():
        optimizer = build_optimizer(config, embeddings, world.num_machines)
    if config.model.max_norm:
        for name in tables.entity_types:
            optimizer.limit_norms(tables[name].embedding, config.model.max_norm)
    choose_lookup(config, tables, world.num_machines)
    device_tables = _build_device_tables(config, tables, optimizer, world, device)
    computing = model.copied_to(device.device) if device.is_staged else model
    precision = build_precision(config, computing, device, cluster)
    dense = _build_dense(config, model, computing, features, cluster, precision)
    if precision is not None:
        computing = computing.in_precision(precision)
    # Registered before the Trainer's own: an exchange in the background ends before the last commit.
    cluster.on_leave(tables.lookup.finish)
    pairs = [(lhs, rhs) for lhs, rhs, _, _ in dataset.edge_types]
    batches: TrainingBatches
    if config.training.objective.name == K_VS_ALL:
        batches = build_query_batches(config, dataset, world)
    else:
        of_edges: dict[str, Any] = {
            "pair_of_relation": _pair_of_relation(dataset, layout, pairs),
            "num_triples": len(dataset.split(TRAIN)),
            "batch_size": config.training.batch_size,
            "chunk_size": config.negatives.chunk_size,
            "local_rank": world.local_rank,
            "trainers_per_machine": world.trainers_per_machine,
            "seed": config.seed,
            "relation_weights": _by_node(relation_weights(config, dataset), layout),
            "has_confidences": config.loss.has_confidences,
        }
        if config.sampling.num_ranges > 1:
            order = configured_order(config, dataset)
            batches = build_bucket_batches(config, layout, cluster, pairs, order, of_edges)
        else:
            batches = build_edge_batches(config, dataset, layout, cluster, of_edges)
    if isinstance(batches, BucketBatches):
        prefetch_ranges(batches, tables, optimizer, cluster)
    clock = PhaseClock(config.training.profile)
    global_vectors: GlobalVectors | None = None
    if config.model.global_vectors:
        # The first group is that of the entities.
        group, clip_value = optimizer.param_groups[0], config.optimizer.clip_value
        global_vectors = GlobalVectors(tables.entity_types, model.dim, group, cluster.sum, clip_value)
    computation = Computation(
        device,
        getattr(torch, config.training.matmul_dtype),
        config.training.kernels == REFERENCE,
        config.training.compile,
        clock,
    )
    transforms = _build_transforms(config, tables, global_vectors, features)
    parts = StepParts(config, tables, batches, world, computation, transforms, pairs, device_tables)
    parameters = [one for one in (dense, global_vectors) if one is not None]
    frozen = frozen_types(config, features, tables.entity_types)
    train_step, ahead = _build_train_step(
        parts, dataset, layout, computing, cluster, optimizer, parameters, frozen
    )
    # Only the trainer that writes a machine's files needs names, and only in the first version of a run.
    writes = world.is_machine_leader
    names = {name: dataset.mapped_vocabulary(name) for name in dataset.entity_types if writes}
    checkpoints = CheckpointManager(
        output / CHECKPOINT_FOLDER,
        world.rank,
        world.is_machine_leader,
        cluster.barrier,
        names,
        dataset.num_parts,
        world.timeout_seconds,
        courier=_build_courier(world),
        lease=lease,
        gather=cluster.gather_texts,
        mirror=mirror,
    )
    evaluator = LiveEvaluator(
        dataset,
        model,
        tables,
        cluster,
        _protocol(config),
        config.training.kernels,
        global_vectors,
        features,
        device,
    )
    meta = _meta(config, dataset)

    def fill_new_run() -> None:
        """Give entities the vectors that are configured."""
        write = functools.partial(checkpoints.records.write_json, RUN_VECTORS_FILE)
        fill_from_vectors(config, cluster, dataset, tables, write)

    trainer = Trainer(
        config, cluster, tables, optimizer, ahead, train_step, evaluator, checkpoints, meta, JOB, clock,
        global_vectors, fill_new_run, _build_trackers(config, cluster, checkpoints),
        build_passes(config, dataset, batches, model, evaluator.gather, cluster), dense, device_tables,
    )  # fmt: skip
    # Last: the Trainer has checked by now that the folder's checkpoint belongs to this run.
    if world.rank == 0:
        _record(config, output)
    return trainer


def _record(config: Config, output: Path) -> None:
    """Write the run's configuration.

    Raises
    ------
    InputError
        If the folder may not be written to.
    StorageError
        If the disk is full or fails.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        save_config(config, output / RUN_CONFIG_FILE)
    except OSError as error:
        raise write_error(f"cannot write to {output}", error) from error


def refuse_empty_splits(config: Config, dataset: Dataset) -> None:
    """Refuse, before anything is trained, to rank a split that has no triples.

    Raises
    ------
    InputError
        Naming the setting that requests it.
    """
    wanted: list[tuple[str, str, str, str]] = []
    if config.evaluation.split != "none":
        wanted.append(("evaluation.split", config.evaluation.split, config.evaluation.split, "none"))
    if config.evaluation.valid_every_epochs:
        every = str(config.evaluation.valid_every_epochs)
        wanted.append(("evaluation.valid_every_epochs", every, VALID, "0"))
    for setting, value, split, allowed in wanted:
        if not len(dataset.split(split)):
            raise InputError(
                f"{setting} is {value}, and {dataset.path} has no {split} triples to rank; "
                f"allowed is {allowed}, or a data set with that split"
            )


def build_optimizer(config: Config, embeddings: Sequence[Any], num_machines: int) -> Any:
    """Build the optimizer of all tables, of which the relations are the last.

    Raises
    ------
    InputError
        If it is unknown, or trainers of several machines are configured not to wait for one another.
    """
    refuse(config, num_machines)
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
        wire_dtype=wire_dtype,
        timeout_seconds=request_timeout_seconds(),
        kernels=config.training.kernels,
    )
    limits = clipping_of(chosen)
    if limits:
        optimizer.clip_gradients(**limits)
    return optimizer


def _build_device_tables(
    config: Config, tables: TableSet, optimizer: Any, world: World, device: ComputeDevice
) -> DeviceTables | None:
    """Make room for this trainer's shards on its device; None where tables train in memory. A collective.

    Raises
    ------
    InputError
        If the device is too small.
    """
    if config.tables.storage != DEVICE_STORAGE:
        return None
    place, limit = (world.local_rank, world.trainers_per_machine), request_timeout_seconds()
    try:
        return DeviceTables(tables, optimizer, *place, device.device, limit)
    except torch.cuda.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"tables.storage is {DEVICE_STORAGE} and the share of trainer {world.rank} does not fit its GPU "
            f"({reason}); dglkge plan shows what it takes; allowed: storage memory"
        ) from None


def _build_train_step(
    parts: StepParts,
    dataset: Dataset,
    layout: PartitionLayout,
    model: KgeModel,
    cluster: Cluster,
    optimizer: Any,
    parameters: Sequence[Parameters],
    frozen: Sequence[str],
) -> tuple[TrainStep, LookAhead]:
    """Return the step, and the batches that it makes ahead."""
    config, tables, device, clock = (
        parts.config,
        parts.tables,
        parts.computation.device,
        parts.computation.clock,
    )
    regularizer = configured_regularizer(config, model)
    objective: Objective
    if config.training.objective.name != NEGATIVE_SAMPLING:
        objective = build_candidate_loss(parts, model, regularizer)
    else:
        objective = _build_sampled(parts, dataset, layout, model, cluster)
    store: RowStore
    if parts.device_tables is not None:
        store = DeviceStore(tables, parts.transforms, device, parts.device_tables)
    elif device.is_staged:
        store = StagedStore(tables, parts.transforms, device)
    else:
        store = HostStore(tables, parts.transforms, objective.reads_in_place)
    touched = touched_rows(config, dataset, layout, parts.batches)
    updates = RowUpdates(tables, parts.device_tables or optimizer, frozen, touched)
    ahead = LookAhead(parts.batches, objective, store, clock)
    (parts.device_tables or optimizer).when_phase(clock.enter)
    return TrainStep(objective, store, parts.transforms, parameters, updates, ahead, clock), ahead


def _build_sampled(
    parts: StepParts, dataset: Dataset, layout: PartitionLayout, model: KgeModel, cluster: Cluster
) -> Objective:
    """Make the objective against sampled negatives."""
    config, computation, pairs = parts.config, parts.computation, parts.pairs
    loss, regularizer = configured_loss(config), configured_regularizer(config, model)
    negatives = build_negatives(config, dataset, layout, parts.tables, pairs)
    offset, range_of = build_range_offset(config, dataset, layout, loss)
    known = build_known(config, dataset, layout)
    sums_batch = config.loss.batch_reduction == "sum"
    planner = EdgePlanner(list(parts.tables), pairs, negatives, sums_batch, known, range_of)
    # It is among all entities already.
    own_entity = config.negatives.own_entity and not config.negatives.all_entities
    has_measures = config.training.batch_statistics
    objective: Objective
    if dot_softmax.is_compiled(model, loss) and parts.has_loops:
        objective = DotSoftmax(planner, model, regularizer, own_entity, computation, has_measures, offset)
    else:
        objective = sampled = AutogradLoss(
            planner, model, loss, regularizer, own_entity, computation, has_measures, offset
        )
        if computation.is_compiled:
            has_own = own_entity and any(lhs == rhs for lhs, rhs in pairs)
            compile_loss(sampled.scored, config.model.dimension, has_own, computation.device, cluster)
    if config.training.relation_prediction:
        objective = WithRelations(objective, build_relation_loss(parts, model, planner))
    return objective


def _build_transforms(
    config: Config,
    tables: TableSet,
    global_vectors: GlobalVectors | None,
    features: RunFeatures | None,
) -> Transforms:
    """Return the transforms of each table's rows: what is added to them, then dropout."""
    original_ids = {name: table.original_ids for name, table in tables.items()}
    chains: dict[str, list[RowTransform]] = {name: [] for name in tables}
    if global_vectors is not None:
        for name in global_vectors.vectors:
            chains[name].append(global_vectors)
    if features is not None:
        for name in features.entity_types:
            chains[name].append(AddedFeatures(features, original_ids))
    chosen = config.model
    rates = dict.fromkeys(tables.entity_types, chosen.entity_dropout) | {RELATION: chosen.relation_dropout}
    dropout = RowDropout(rates, original_ids, config.seed, config.training.kernels)
    for name in dropout.tables:
        chains[name].append(dropout)
    return Transforms(chains)


def _build_dense(
    config: Config,
    model: KgeModel,
    computing: KgeModel,
    features: RunFeatures | None,
    cluster: Cluster,
    precision: ModulePrecision | None,
) -> DenseParameters | None:
    """Return the dense parameters of the score function's module and of the projections of features.

    None where there are none. A collective. `computing` is the model of the batches: this one, or a copy on a
    device.
    """
    others: Any = (
        functools.partial(dense_optimizer, config.dense), cluster.sum, cluster.world.rank == 0,
        config.optimizer.clip_value, None if computing is model else computing.module,
        # One trainer has all of them in any case.
        Path(config.output) if config.dense.sharding == "fsdp" and cluster.world.world_size > 1 else None,
        None if precision is None else precision.loss_scale,
        [] if model.module is None else [name for name, _ in model.module.named_parameters()],
    )  # fmt: skip
    if features is not None:
        projections = features.projections
        modules = projections if model.module is None else JoinedModules(model.module, projections)
        return DenseWithFeatures(features, modules, *others)
    return None if model.module is None else DenseParameters(model.module, *others)


def _build_trackers(config: Config, cluster: Cluster, checkpoints: CheckpointManager) -> Trackers:
    """Return the trackers, which end when this trainer ends; none on ranks above 0."""
    if cluster.world.rank != 0:
        return Trackers()
    path = Path(config.output) / RUN_TRACKERS_FILE

    def recall() -> dict[str, str]:
        """Return the ids that earlier starts recorded."""
        try:
            return {str(name): str(id_) for name, id_ in load_json(path).items()}
        except InputError:  # no earlier start had a tracker, or the file is damaged: its run is a new one
            return {}

    write = functools.partial(checkpoints.records.write_json, RUN_TRACKERS_FILE)
    trackers = Trackers(config.training.loggers, Path(config.output), config.to_dict(), recall, write)
    cluster.on_exit(trackers.finish)
    return trackers


def _build_courier(world: World) -> Courier | None:
    """Return the transfer of checkpoints to the first machine; None where machines share a disk."""
    if not world.has_own_disk or world.num_machines == 1:
        return None
    leaders = range(0, world.world_size, world.trainers_per_machine)
    return Courier(world.rank, leaders, world.timeout_seconds)


def _pair_of_relation(dataset: Dataset, layout: PartitionLayout, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return the number of each relation's edge type, by node id; -1 where no training triple has it."""
    number = {pair: index for index, pair in enumerate(pairs)}
    # Batches have node ids of relations, the data set lists relations by original id.
    by_original = np.array(
        [number.get((relation.lhs, relation.rhs), -1) for relation in dataset.relations.relations],
        dtype=np.int64,
    )
    return by_original[layout.original_ids(RELATION)]


def _by_node(weights: np.ndarray | None, layout: PartitionLayout) -> np.ndarray | None:
    """Return weights of relations by node id, given by original id."""
    return None if weights is None else weights[layout.original_ids(RELATION)]


def _initialize(
    tables: TableSet, model: KgeModel, config: Config, cluster: Cluster, features: RunFeatures | None
) -> None:
    """Fill the tables, each trainer its share of the machine's rows.

    Rows are keyed by original id, so a table starts the same however it is partitioned.
    """
    world = cluster.world
    alone = features.entity_types if features is not None and config.features.use == "alone" else ()
    for name, table in tables.items():
        if name in alone:  # its rows are f(x) alone: zeros, as the servers have made them
            continue
        shard = table.shard(world.local_rank, world.trainers_per_machine)
        scale = config.model.init_scale
        # In blocks: the rows are drawn in private memory before they are copied to the table.
        for start in range(0, shard.rows.shape[0], 65536):
            ids = shard.original_ids[start : start + 65536]
            rows = model.initial_rows(name, ids, config.seed, scale)
            if config.model.max_norm and name != RELATION:
                limit_norms(rows.numpy(), config.model.max_norm)
            shard.rows[start : start + 65536] = rows
    # A lookup of the first batch may read rows that another trainer initialises.
    cluster.barrier()


def _protocol(config: Config) -> Protocol:
    chosen = config.evaluation
    return Protocol(
        split=chosen.split,
        filtered=chosen.filtered,
        num_candidates=chosen.num_candidates or None,
        ties=chosen.ties,
        batch_size=chosen.batch_size,
        seed=config.seed,
    )


def _meta(config: Config, dataset: Dataset) -> CheckpointMeta:
    return CheckpointMeta(
        config=config.to_dict(),
        **dataset_fields(dataset),
        progress={
            Progress.FINISHED_EPOCHS: 0,
            Progress.BATCHES_DONE: 0,
            Progress.GLOBAL_BATCH_SIZE: config.training.batch_size,
        },
        seed=config.seed,
        score_function=config.model.score_function.name,
        score_options=configured_model(config).score_function.options,
        dim=config.model.dimension,
        reciprocal=config.model.reciprocal_relations,
        optimizer=describe_optimizer(config.optimizer),
        versions={"dglkge": __version__, "dgl": dgl.__version__, "torch": torch.__version__},
    )
