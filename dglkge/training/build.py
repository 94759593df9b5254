"""Builds a trainer from a configuration; every choice of a component by name is made here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np
import torch

from dglkge import __version__
from dglkge.checkpoint.courier import Courier
from dglkge.checkpoint.dataset_fields import dataset_fields
from dglkge.checkpoint.manager import WRITER_LIMIT_SECONDS, CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.config import Config, save_config
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.preemption import StopRequest
from dglkge.distributed.request_limit import limited_requests
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.embeddings.table_set import TableSet
from dglkge.errors import InputError
from dglkge.evaluation.protocol import Protocol
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.losses import build_loss
from dglkge.model.regularizers import build_regularizer
from dglkge.optim import RowAdagrad, SparseAdagrad, SparseAdam
from dglkge.registry import Registry
from dglkge.sampling.edge_batches import EdgeBatches
from dglkge.sampling.mixed_negatives import MixedNegatives
from dglkge.training import dot_softmax
from dglkge.training.autograd_loss import AutogradLoss
from dglkge.training.dot_softmax import DotSoftmax
from dglkge.training.epochs import JOB
from dglkge.training.hold_run import hold_run
from dglkge.training.live_evaluator import LiveEvaluator
from dglkge.training.lookup_choice import choose_lookup
from dglkge.training.phase_clock import PhaseClock
from dglkge.training.products import with_products_chosen
from dglkge.training.train_step import TrainStep
from dglkge.training.trainer import Trainer
from dglkge.training.warm_start import refuse_bigraph_output
from dglkge.typing import RELATION

OPTIMIZERS: Registry[Any] = Registry("optimizer")
OPTIMIZERS.register("sparse_adagrad")(SparseAdagrad)
OPTIMIZERS.register("row_adagrad")(RowAdagrad)
OPTIMIZERS.register("sparse_adam")(SparseAdam)

LOSS_OPTIONS = {
    "margin_ranking": ("margin",),
    "self_adversarial": ("margin", "adversarial_temperature"),
}
"""Which fields of the loss's configuration each loss takes."""


def build_trainer(config: Config, cluster: Cluster) -> Trainer:
    """Make everything that training needs; goes on from the newest checkpoint in ``config.output``.

    A collective: every trainer calls it. SIGTERM and SIGINT take effect at once: nothing is trained yet.

    Raises
    ------
    InputError
        For a name that no component has, values that do not fit each other, or a checkpoint that
        does not fit the configuration.
    Preempted
        If this trainer was asked to stop.
    """
    with cluster.stop.leaving_at_once():
        return _build(config, cluster)


def _build(config: Config, cluster: Cluster) -> Trainer:
    refuse_bigraph_output(config)
    output = Path(config.output)
    lease = hold_run(output, cluster)
    dataset = Dataset.open(config.dataset)
    layout = dataset.layout()
    config = with_products_chosen(config, cluster)
    chosen = config.model
    model = build_model(chosen.score_function, chosen.dimension, chosen.reciprocal_relations)
    world = cluster.world
    widths = (config.model.dimension, model.relation_width)
    with limited_requests():
        tables = TableSet(cluster.graph, layout, dataset.entity_types, *widths, world.machine)
    _initialize(tables, model, config, cluster)
    embeddings = [table.embedding for table in tables.values()]
    with limited_requests():
        optimizer = build_optimizer(config, embeddings, world.num_machines)
    choose_lookup(config, tables, world.num_machines)
    cluster.when_left(tables.lookup.finish)
    pairs = [(lhs, rhs) for lhs, rhs, _, _ in dataset.edge_types]
    edge_batches = EdgeBatches(
        layout.edge_table(world.machine),
        _pair_of_relation(dataset, layout, pairs),
        len(dataset.split("train")),
        config.training.batch_size,
        config.negatives.chunk_size,
        world.local_rank,
        world.trainers_per_machine,
        config.seed,
    )
    clock = PhaseClock(config.training.profile)
    train_step = _build_train_step(
        config, dataset, layout, model, tables, optimizer, pairs, clock, cluster.stop, edge_batches
    )
    if world.rank == 0:
        save_config(config, output / "config.json")
    names = (
        {name: dataset.vocabulary(name) for name in dataset.entity_types} if world.is_machine_leader else {}
    )
    checkpoints = CheckpointManager(
        output / "checkpoint",
        world.rank,
        world.is_machine_leader,
        cluster.barrier,
        names,
        dataset.num_parts,
        courier=_build_courier(world),
        lease=lease,
        gather=cluster.gather_texts,
    )
    evaluator = LiveEvaluator(dataset, model, tables, cluster, _protocol(config))
    meta = _meta(config, dataset)
    return Trainer(
        config, cluster, tables, optimizer, edge_batches, train_step, evaluator, checkpoints, meta, JOB, clock
    )


def build_optimizer(config: Config, embeddings: Sequence[Any], num_machines: int) -> Any:
    """Make the optimizer of all tables.

    Raises
    ------
    InputError
        If nobody knows it, or trainers of several machines are not to wait for one another.
    """
    synchronous = config.training.synchronous
    if not synchronous and num_machines > 1:
        raise InputError(
            "training.synchronous: false is for trainers that share one machine's memory, "
            f"got {num_machines} machines"
        )
    make = OPTIMIZERS.get(config.optimizer.name)
    # Gradients are narrowed on their way to other machines only.
    wire_dtype = getattr(torch, config.training.wire) if num_machines > 1 else None
    return make(embeddings, lr=config.optimizer.lr, synchronous=synchronous, wire_dtype=wire_dtype)


def _build_train_step(
    config: Config,
    dataset: Dataset,
    layout: PartitionLayout,
    model: KgeModel,
    tables: TableSet,
    optimizer: Any,
    pairs: list[tuple[str, str]],
    clock: PhaseClock,
    stop: StopRequest,
    edge_batches: EdgeBatches,
) -> TrainStep:
    options = {name: getattr(config.loss, name) for name in LOSS_OPTIONS.get(config.loss.name, ())}
    loss = build_loss(config.loss.name, **options)
    regularizer = None
    if config.regularizer.name != "none" and config.regularizer.weight > 0:
        regularizer = build_regularizer(
            config.regularizer.name,
            config.regularizer.weight,
            config.regularizer.p,
            model.score_function.complex_valued,
        )
    negatives = _build_negatives(config, dataset, layout, tables, pairs)
    own_entity = config.negatives.own_entity
    of_groups: Union[AutogradLoss, DotSoftmax]
    if dot_softmax.is_known(model, loss):
        products = getattr(torch, config.training.products)
        of_groups = DotSoftmax(model, regularizer, own_entity, products, clock)
    else:
        of_groups = AutogradLoss(model, loss, regularizer, own_entity, clock)
    return TrainStep(of_groups, tables, optimizer, negatives, pairs, clock, stop, edge_batches.following)


def _build_negatives(
    config: Config, dataset: Dataset, layout: PartitionLayout, tables: TableSet, pairs: list[tuple[str, str]]
) -> MixedNegatives:
    chosen = config.negatives
    return MixedNegatives(
        chosen.num_uniform,
        (chosen.global_share, chosen.local_share, chosen.in_batch_share),
        {name: np.asarray(layout.node_ids(name)) for name in dataset.entity_types},
        {name: (tables[name].first_node_id, tables[name].end_node_id) for name in dataset.entity_types},
        pairs,
        config.seed,
    )


def _build_courier(world: World) -> Courier | None:
    """Return what brings checkpoints to the first machine where machines share no disk."""
    if not world.has_own_disk or world.num_machines == 1:
        return None
    leaders = range(0, world.world_size, world.trainers_per_machine)
    return Courier(world.rank, leaders, WRITER_LIMIT_SECONDS)


def _pair_of_relation(dataset: Dataset, layout: PartitionLayout, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return the number of each relation's edge type, by node id; -1 where no training triple has it."""
    number = {pair: index for index, pair in enumerate(pairs)}
    by_original = np.array(
        [number.get((relation.lhs, relation.rhs), -1) for relation in dataset.relations.relations],
        dtype=np.int64,
    )
    return by_original[layout.original_ids(RELATION)]


def _initialize(tables: TableSet, model: KgeModel, config: Config, cluster: Cluster) -> None:
    """Fill the tables, each trainer its share of the machine's rows.

    Rows are keyed by original id, so a table starts the same however it is partitioned.
    """
    world = cluster.world
    for name, table in tables.items():
        shard = table.shard(world.local_rank, world.trainers_per_machine)
        scale = config.model.init_scale
        for start in range(0, shard.rows.shape[0], 65536):
            ids = shard.original_ids[start : start + 65536]
            shard.rows[start : start + 65536] = model.initial_rows(name, ids, config.seed, scale)
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
        progress={"finished_epochs": 0, "batches_done": 0, "global_batch_size": config.training.batch_size},
        seed=config.seed,
        score_function=config.model.score_function,
        dim=config.model.dimension,
        reciprocal=config.model.reciprocal_relations,
        optimizer={"name": config.optimizer.name, "lr": config.optimizer.lr},
        versions={"dglkge": __version__, "dgl": dgl.__version__, "torch": torch.__version__},
    )
