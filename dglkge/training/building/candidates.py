"""Builders of losses of the objectives over all candidates, ``one_vs_all`` and ``k_vs_all``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dglkge.distributed.dgl_compat import request_timeout_seconds
from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.model.choices import OBJECTIVES
from dglkge.model.full_losses import FullLoss, FullSoftmax
from dglkge.model.functions.comparators import Dot
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.optim.alltoall import Alltoall
from dglkge.sampling.query_batches import QueryBatches, ShardAnswers, TrainingBatches
from dglkge.step.objectives.all_candidates import (
    CandidateLoss,
    Candidates,
    QueryMaker,
    QueryOptions,
    only_answers,
)
from dglkge.step.objectives.device_shard import DeviceSoftmaxShard
from dglkge.step.objectives.k_vs_all import all_answers
from dglkge.step.objectives.query_exchange import QueryExchange
from dglkge.step.objectives.relation_prediction import RELATION_BLOCKS, RelationQueries
from dglkge.step.objectives.shard_objective import AutogradShard, FullObjective, ProductShard, ShardObjective
from dglkge.step.planning import EdgePlanner, QueryPlanner
from dglkge.step.rows import Transforms
from dglkge.training.building.components import configured_loss, configured_regularizer
from dglkge.training.job import Job
from dglkge.typing import RELATION, Side


@dataclass(frozen=True)
class _Comparison:
    """Comparison of the queries of a block with rows.

    Attributes
    ----------
    columns : slice
        Part of the rows.
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
    compare: Callable[[Tensor, Tensor], Tensor]
    numbers_a_score: int
    is_product: bool


def _entity_comparisons(job: Job) -> dict[str, _Comparison]:
    """Return the comparison of the queries for entities, by type, in the same order on every trainer."""
    model, tables, is_reference = job.computing, job.tables, job.computation.is_reference
    # Compares types and functions exactly: a subclass may compute other scores than its base.
    is_product = type(model) is KgeModel and type(model.score_function).compare is Dot.compare
    compare = model.compare_plainly if is_reference else model.compare
    # Relations that act on candidates leave a copy of them for each relation until the backward pass.
    copies = 1 + model.dim // 64 * model.score_function.acts_on_candidates
    more = (slice(0, model.dim), model.query_dim, compare, model.query_dim if is_reference else copies)
    return {name: _Comparison(tables[name], *more, is_product) for name in tables.entity_types}


def _relation_comparisons(job: Job) -> dict[str, _Comparison]:
    """Return the comparison of the queries (h, ?, t) of each direction that has relation rows of its own."""
    model, score_function = job.computing, job.computing.score_function
    width, is_product = score_function.relation_dim(model.dim), score_function.has_relation_product
    # One block of queries for each half of reciprocal rows; a row without halves has one score for both.
    sides = (Side.TAIL, Side.HEAD) if model.reciprocal else (Side.TAIL,)
    return {
        RELATION_BLOCKS[side]: _Comparison(
            job.tables[RELATION],
            slice(number * width, (number + 1) * width),
            score_function.relation_query_dim(model.dim),
            score_function.compare_relations,
            1 if is_product else model.query_dim,
            is_product,
        )
        for number, side in enumerate(sides)
    }


def _candidates(
    job: Job, batches: TrainingBatches, name: str, one: _Comparison, loss: FullLoss, penalizes: bool
) -> Candidates:
    """Make this trainer's shard of the candidates of a block."""
    world, computation = job.world, job.computation
    # The machine's rows in equal runs, one for each trainer: a candidate is scored by one trainer only.
    owned = one.table.shard(world.local_rank, world.trainers_per_machine)
    first, stop = owned.first_node_id, owned.first_node_id + owned.rows.shape[0]
    objective = FullObjective(loss, len(one.table), job.config.training.objective.smoothing)
    device, matmul_dtype = computation.device, computation.matmul_dtype
    is_resident = job.device_tables is not None
    shard: ShardObjective
    # Only inner products have loops, with some losses.
    if one.is_product and loss.kernel and not computation.is_reference and not device.is_staged:
        shard = ProductShard(objective, matmul_dtype)
    else:
        is_softmax = is_resident and one.is_product and type(loss) is FullSoftmax
        kind = DeviceSoftmaxShard if is_softmax and not computation.is_reference else AutogradShard
        shard = kind(
            objective, one.compare, one.numbers_a_score, device, matmul_dtype, is_resident=is_resident
        )
    num_times = job.layout.num_times if one.table.name == RELATION else 1
    answers_of = only_answers(first, stop, num_times)
    if isinstance(batches, QueryBatches):
        node_ids = np.asarray(one.table.node_ids)
        if batches.pairs is not None and one.table.name == RELATION:
            is_asked = np.ones(len(batches.pairs), bool)
            of_pairs = ShardAnswers(batches.pairs, is_asked, node_ids, first, stop)
            answers_of = all_answers(batches.pairs, of_pairs, loss.splits_labels, penalizes=False)
        else:
            of_shard = ShardAnswers(batches.index, batches.asks_for(name), node_ids, first, stop)
            answers_of = all_answers(batches.index, of_shard, loss.splits_labels, penalizes)
    resident = None
    if job.device_tables is not None:
        resident = functools.partial(job.device_tables.owned_rows, one.table.name)
    return Candidates(one.table, first, stop, one.columns, shard, answers_of, resident, num_times)


def build_candidate_loss(job: Job, batches: TrainingBatches, transforms: Transforms) -> CandidateLoss:
    """Make the loss against all candidates, with this trainer's shards of the tables; a collective."""
    config, model = job.config, job.computing
    regularizer = configured_regularizer(config, model)
    comparisons = _entity_comparisons(job)
    relation_weight = config.training.relation_prediction
    if relation_weight:
        comparisons.update(_relation_comparisons(job))
    shares_relations = model.score_function.shares_relations and not job.computation.is_reference
    options = QueryOptions(model, regularizer, relation_weight, shares_relations, job.has_loops)
    maker: QueryMaker = OBJECTIVES.get(config.training.objective.name).load()(options)
    sums_batch = config.loss.batch_reduction == "sum"
    planner: EdgePlanner | QueryPlanner = EdgePlanner(list(job.tables), job.pairs, {}, sums_batch)
    if config.training.objective.by_queries:
        planner = QueryPlanner(list(job.tables), sums_batch)
    loss = configured_loss(config).over_candidates()
    return _sharded(job, batches, transforms, planner, maker, comparisons, loss, regularizer)


def build_relation_loss(
    job: Job, batches: TrainingBatches, transforms: Transforms, planner: EdgePlanner
) -> CandidateLoss:
    """Make the softmax of (h, ?, t) over all relations for ``negative_sampling``; a collective."""
    weight = job.config.training.relation_prediction
    maker = RelationQueries(job.computing, weight, job.computation.device.is_staged)
    # Softmax whatever the loss of the sampled negatives is: relations are all candidates, none is sampled.
    return _sharded(job, batches, transforms, planner, maker, _relation_comparisons(job), FullSoftmax())


def _sharded(
    job: Job,
    batches: TrainingBatches,
    transforms: Transforms,
    planner: EdgePlanner | QueryPlanner,
    maker: QueryMaker,
    comparisons: dict[str, _Comparison],
    loss: FullLoss,
    regularizer: Regularizer | None = None,
) -> CandidateLoss:
    """Join the queries of all trainers with the candidates of this one."""
    candidates = [
        _candidates(job, batches, name, one, loss, regularizer is not None)
        for name, one in comparisons.items()
    ]
    blocks = {name: one.query_dim for name, one in comparisons.items()}
    group = Alltoall(
        request_timeout_seconds(),
        purpose="exchange of queries",
        duty="train every batch, also with no triples of its own",
    )
    exchange = QueryExchange(group, list(blocks.values()), job.world.trainers_per_machine)
    return CandidateLoss(planner, maker, blocks, candidates, exchange, job.clock, transforms, regularizer)
