"""Builders of batches and losses of the objectives over all candidates, ``one_vs_all`` and ``k_vs_all``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

import numpy as np
import torch

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN
from dglkge.distributed.dgl_compat import request_timeout_seconds
from dglkge.distributed.world import World
from dglkge.embeddings.device_tables import DeviceTables
from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.table_set import TableSet
from dglkge.errors import InputError
from dglkge.model.device import HOST, ComputeDevice
from dglkge.model.functions.comparators import Dot
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import LOSSES
from dglkge.model.regularizers import Regularizer
from dglkge.optim.alltoall import Alltoall
from dglkge.sampling.pair_queries import PairIndex
from dglkge.sampling.query_batches import QueryBatches, QueryIndex, ShardAnswers, TrainingBatches
from dglkge.training.building.components import REFERENCE
from dglkge.training.objectives.all_candidates import (
    AllCandidates,
    CandidateLoss,
    Candidates,
    QueryMaker,
    only_answers,
)
from dglkge.training.objectives.k_vs_all import AnsweredQueries, all_answers
from dglkge.training.objectives.one_vs_all import AutogradQueries, LoopQueries, has_loops
from dglkge.training.objectives.query_exchange import QueryExchange
from dglkge.training.objectives.relation_prediction import RELATION_BLOCKS, RelationQueries
from dglkge.training.objectives.row_dropout import RowDropout
from dglkge.training.objectives.rows import Shift
from dglkge.training.objectives.shard_objective import (
    SOFTMAX,
    AutogradShard,
    FullObjective,
    ProductShard,
    ShardObjective,
)
from dglkge.training.stats import PhaseClock
from dglkge.typing import RELATION, Side


def build_query_batches(config: Config, dataset: Dataset, world: World) -> QueryBatches:
    """Make the batches of ``k_vs_all``.

    Raises
    ------
    InputError
        If the training triples have weights: a query stands for several of them.
    """
    if dataset.has_weights:
        raise InputError(
            f"training.objective k_vs_all takes no weights of triples, and {dataset.path} has them; "
            "allowed: negative_sampling, one_vs_all"
        )
    types = [(relation.lhs, relation.rhs) for relation in dataset.relations.relations]
    predicts_relations = config.training.relation_prediction > 0
    return QueryBatches(
        QueryIndex(dataset.known_triples([TRAIN])),
        dataset.layout(),
        types,
        config.training.batch_size,
        world.machine,
        world.local_rank,
        world.trainers_per_machine,
        config.seed,
        PairIndex(dataset.split(TRAIN), types) if predicts_relations else None,
    )


@dataclass(frozen=True)
class _Comparison:
    """Comparison of the queries of a block with rows.

    Attributes
    ----------
    table : EmbeddingTable
    columns : slice
        Part of the rows.
    query_dim : int
    compare : callable
        Scores queries (Q, D) against rows (b, D'): (Q, b).
    numbers_a_score : int
        Numbers that ``compare`` holds for each score.
    is_product : bool
        Whether it is the inner product.
    """

    table: EmbeddingTable
    columns: slice
    query_dim: int
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    numbers_a_score: int
    is_product: bool


def _entity_comparisons(config: Config, model: KgeModel, tables: TableSet) -> dict[str, _Comparison]:
    """Return the comparison of the queries for entities, by type, in the same order on every trainer."""
    dim, score_function = model.dim, model.score_function
    is_reference = config.training.kernels == REFERENCE
    # Compares types and functions exactly: a subclass may compute other scores than its base.
    is_product = type(model) is KgeModel and type(score_function).compare is Dot.compare
    compare = model.compare_plainly if is_reference else model.compare
    # Relations that act on candidates leave a copy of them for each relation until the backward pass.
    numbers = model.query_dim if is_reference else 1 + dim // 64 * score_function.acts_on_candidates
    return {
        name: _Comparison(tables[name], slice(0, dim), model.query_dim, compare, numbers, is_product)
        for name in tables.entity_types
    }


def _relation_comparisons(model: KgeModel, tables: TableSet) -> dict[str, _Comparison]:
    """Return the comparison of the queries (h, ?, t) of each direction that has relation rows of its own."""
    dim, score_function = model.dim, model.score_function
    width = score_function.relation_dim(dim)
    is_product = score_function.has_relation_product
    found = {}
    # One block of queries for each half of reciprocal rows; a row without halves has one score for both.
    for number, side in enumerate((Side.TAIL, Side.HEAD) if model.reciprocal else (Side.TAIL,)):
        found[RELATION_BLOCKS[side]] = _Comparison(
            tables[RELATION],
            slice(number * width, (number + 1) * width),
            score_function.relation_query_dim(dim),
            score_function.compare_relations,
            1 if is_product else model.query_dim,
            is_product,
        )
    return found


def _candidates(
    config: Config,
    name: str,
    one: _Comparison,
    kind: str,
    batches: TrainingBatches,
    world: World,
    penalizes: bool,
    device: ComputeDevice,
    device_tables: DeviceTables | None,
) -> Candidates:
    """Make this trainer's shard of the candidates of a block."""
    chosen = config.training
    # The machine's rows in equal runs, one for each trainer: a candidate is scored by one trainer only.
    owned = one.table.shard(world.local_rank, world.trainers_per_machine)
    first, stop = owned.first_node_id, owned.first_node_id + owned.rows.shape[0]
    objective = FullObjective(kind, len(one.table), chosen.label_smoothing)
    # The general path first; only inner products have loops.
    matmul_dtype = getattr(torch, chosen.matmul_dtype)
    shard: ShardObjective = AutogradShard(
        objective,
        one.compare,
        one.numbers_a_score,
        device,
        matmul_dtype,
        is_resident=device_tables is not None,
    )
    if one.is_product and chosen.kernels != REFERENCE and not device.is_staged:
        shard = ProductShard(objective, matmul_dtype)
    answers_of = only_answers(first, stop)
    if isinstance(batches, QueryBatches):
        node_ids = np.asarray(one.table.node_ids)
        if batches.pairs is not None and one.table.name == RELATION:
            is_asked = np.ones(len(batches.pairs), bool)
            of_pairs = ShardAnswers(batches.pairs, is_asked, node_ids, first, stop)
            answers_of = all_answers(batches.pairs, of_pairs, kind, penalizes=False)
        else:
            of_shard = ShardAnswers(batches.index, batches.asks_for(name), node_ids, first, stop)
            answers_of = all_answers(batches.index, of_shard, kind, penalizes)
    resident = None if device_tables is None else functools.partial(device_tables.owned_rows, one.table.name)
    return Candidates(one.table, first, stop, one.columns, kind, shard, answers_of, resident=resident)


def build_candidate_loss(
    config: Config,
    model: KgeModel,
    regularizer: Regularizer | None,
    tables: TableSet,
    batches: TrainingBatches,
    world: World,
    clock: PhaseClock,
    dropout: RowDropout | None = None,
    shifts: Mapping[str, Shift] | None = None,
    device: ComputeDevice = HOST,
    device_tables: DeviceTables | None = None,
) -> CandidateLoss:
    """Make the loss against all candidates, with this trainer's shards of the tables; a collective."""
    comparisons = _entity_comparisons(config, model, tables)
    relation_weight = config.training.relation_prediction
    if relation_weight:
        comparisons.update(_relation_comparisons(model, tables))
    kind, penalizes = LOSSES.get(config.loss.name).candidate_kind, regularizer is not None
    candidates = [
        _candidates(config, name, one, kind, batches, world, penalizes, device, device_tables)
        for name, one in comparisons.items()
    ]
    if shifts:
        candidates = [dataclasses.replace(one, shift=shifts.get(one.table.name)) for one in candidates]
    maker: QueryMaker
    is_reference = config.training.kernels == REFERENCE
    may_loop = not is_reference and not shifts and not device.is_staged
    shares_relations = model.score_function.shares_relations and not is_reference
    if isinstance(batches, QueryBatches):
        maker = AnsweredQueries(model, regularizer, relation_weight, shares_relations)
    elif may_loop and has_loops(model, regularizer):
        maker = LoopQueries(model, regularizer, relation_weight)
    else:
        maker = AutogradQueries(model, regularizer, relation_weight, shares_relations)
    return _sharded(maker, comparisons, candidates, world, clock, dropout, regularizer)


def build_relation_loss(
    config: Config,
    model: KgeModel,
    tables: TableSet,
    batches: TrainingBatches,
    world: World,
    clock: PhaseClock,
    dropout: RowDropout | None = None,
    device: ComputeDevice = HOST,
    device_tables: DeviceTables | None = None,
) -> CandidateLoss:
    """Make the softmax of (h, ?, t) over all relations for ``negative_sampling``; a collective."""
    comparisons = _relation_comparisons(model, tables)
    # Softmax whatever the loss of the sampled negatives is: relations are all candidates, none is sampled.
    candidates = [
        _candidates(config, name, one, SOFTMAX, batches, world, False, device, device_tables)
        for name, one in comparisons.items()
    ]
    maker = RelationQueries(model, config.training.relation_prediction, device.is_staged)
    return _sharded(maker, comparisons, candidates, world, clock, dropout)


def _sharded(
    maker: QueryMaker,
    comparisons: dict[str, _Comparison],
    candidates: list[Candidates],
    world: World,
    clock: PhaseClock,
    dropout: RowDropout | None,
    regularizer: Regularizer | None = None,
) -> CandidateLoss:
    """Join the queries of all trainers with the candidates of this one."""
    dims = [one.query_dim for one in comparisons.values()]
    group = Alltoall(
        request_timeout_seconds(),
        purpose="exchange of queries",
        duty="train every batch, also with no triples of its own",
    )
    exchange = QueryExchange(group, dims, world.trainers_per_machine)
    scored = AllCandidates(candidates, exchange, clock, regularizer, dropout)
    return CandidateLoss(maker, list(comparisons), dims, scored, clock)
