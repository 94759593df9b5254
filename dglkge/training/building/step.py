"""The training step of a job: transforms, objective, row store and updates, as configured."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dglkge.distributed.dgl_compat import request_timeout_seconds
from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.errors import InputError, one_line, require_known
from dglkge.model.choices import NO_TRANSFORM, OBJECTIVES, ROW_TRANSFORMS
from dglkge.model.full_losses import FullLoss, FullSoftmax
from dglkge.model.functions.comparators import Dot
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.optim.alltoall import SharedAlltoall
from dglkge.optim.workspace import sharing
from dglkge.sampling.device_batches import DeviceBatches
from dglkge.sampling.query_batches import AnswerIndex, QueryBatches, ShardAnswers, TrainingBatches
from dglkge.step.contracts import Objective, RowTransform
from dglkge.step.objectives import all_candidates, dot_softmax
from dglkge.step.objectives.all_candidates import CandidateLoss, Candidates, QueryMaker
from dglkge.step.objectives.device_softmax import DeviceSoftmaxShard
from dglkge.step.objectives.one_vs_all import RelationQueries, WithRelations, all_answers
from dglkge.step.objectives.query_exchange import QueryExchange
from dglkge.step.objectives.scored_losses import AutogradLoss
from dglkge.step.objectives.shard_objective import AutogradShard, FullObjective, ProductShard, ShardObjective
from dglkge.step.planning import EdgePlanner, QueryPlanner
from dglkge.step.row_transforms import AddedFeatures, RowDropout, Times
from dglkge.step.rows import DeviceStore, HostStore, RowStore, StagedStore, Transforms
from dglkge.step.train_step import LookAhead, RowUpdates, TrainStep
from dglkge.training.building import batches as batch_building
from dglkge.training.building.components import configured_loss, configured_regularizer
from dglkge.training.job import TRAIN_DUTY, Job
from dglkge.typing import RELATION

logger = logging.getLogger(__name__)


def build_step(job: Job, batches: TrainingBatches) -> TrainStep:
    """Return the step, with the batches and those that it makes ahead; a collective."""
    transforms = build_transforms(job)
    objective, store = build_objective(job, batches, transforms)
    optimizer = job.optimizer if job.device_tables is None else job.device_tables
    optimizer.when_phase(job.clock.enter)
    touched = batch_building.touched_rows(job, batches)
    updates = RowUpdates(job.tables, optimizer, job.untrained_types, touched)
    parameters = [item for item in (job.dense, job.global_vectors) if item is not None]
    ahead = LookAhead(batches, objective, store, job.clock)
    return TrainStep(objective, store, transforms, parameters, updates, ahead, job.clock)


def build_objective(job: Job, batches: TrainingBatches, transforms: Transforms) -> tuple[Objective, RowStore]:
    """Make the objective, and the store of its rows; a collective."""
    over_all, on_device = job.config.training.objective.over_all, isinstance(batches, DeviceBatches)
    with sharing(job.step_memory):
        make = build_candidate_loss if over_all else _build_sampled
        objective = batch_building.build_device_softmax(job) if on_device else make(job, batches, transforms)
        if job.computation.is_compiled and (over_all or on_device):
            # Something small: what the first batch compiles takes long, and its error would come late.
            numbers = torch.ones(2, device=job.computation.device.device)
            _compile(job, lambda: torch.compile(lambda values: 2 * values)(numbers))
        tables, device = job.tables, job.computation.device
        if job.device_tables is not None:
            return objective, DeviceStore(tables, transforms, device, job.device_tables)
        if device.is_staged:
            return objective, StagedStore(tables, transforms, device)
        return objective, HostStore(tables, transforms, objective.reads_in_place)


def _build_sampled(job: Job, batches: TrainingBatches, transforms: Transforms) -> Objective:
    """Make the objective against sampled negatives."""
    config, computation, pairs, model = job.config, job.computation, job.pairs, job.computing
    loss, regularizer = configured_loss(config), configured_regularizer(config, model)
    samplers, known = batch_building.build_negatives(job), batch_building.build_known(job)
    offset, range_of = batch_building.build_range_offset(job, loss)
    sums_batch, own_entity = config.loss.batch_reduction == "sum", config.negatives.scores_own
    planner = EdgePlanner(list(job.tables), pairs, samplers, sums_batch, known, range_of)
    # The loops read all rows at one width.
    has_loops = job.has_loops and not config.model.entity_dimensions
    kind = dot_softmax.DotSoftmax if has_loops and dot_softmax.is_compiled(model, loss) else AutogradLoss
    options = (own_entity, computation, config.training.batch_statistics, offset)
    objective: Objective = kind(planner, model, loss, regularizer, *options)
    if isinstance(objective, AutogradLoss) and computation.is_compiled:
        scores_own = own_entity and any(lhs == rhs for lhs, rhs in pairs)
        _compile(job, functools.partial(objective.try_out, config.model.dimension, scores_own))
    if config.training.relation_prediction:
        # Softmax with every loss of sampled negatives: all relations are candidates, none is sampled.
        maker = RelationQueries(model, config.training.relation_prediction, computation.device.is_staged)
        parts = (planner, maker, [_relation_comparison(job)], FullSoftmax())
        objective = WithRelations(objective, _sharded(job, batches, transforms, *parts))
    return objective


def build_transforms(job: Job) -> Transforms:
    """Return the transforms of each table's rows: what is added, then dropout, then the chosen one."""
    config, tables, settings = job.config, job.tables, job.config.model
    original_ids = {name: torch.from_numpy(job.layout.original_edge_ids(name)) for name in tables}
    transforms: list[RowTransform] = [] if job.global_vectors is None else [job.global_vectors]
    if job.features is not None:
        transforms.append(AddedFeatures(job.features, original_ids))
    rates = dict.fromkeys(tables, settings.entity_dropout) | {RELATION: settings.relation_dropout}
    transforms.append(RowDropout(rates, original_ids, config.seed, config.training.kernels))
    if settings.row_transform.name != NO_TRANSFORM:
        kind = ROW_TRANSFORMS.get(settings.row_transform.name).load()
        chosen = kind(settings.row_transform, original_ids, config.seed)
        for name in chosen.tables:
            require_known(f"table of model.row_transform {settings.row_transform.name}", name, tables)
        transforms.append(chosen)
    if job.model.score_function.has_times:
        # Last: no other transform may change the number of a time.
        transforms.append(Times(job.model, job.layout.num_times))
    return Transforms(transforms)


def _compile(job: Job, call: Callable[[], None]) -> None:
    """Call a compiled function for the first time, before the first batch; a collective."""
    begin = time.monotonic()

    def try_out() -> None:
        try:
            with job.computation.device.computing():
                call()
        except Exception as error:  # torch's own, and those of the compiler, have no common class
            text = "training.compile is true, and torch fails to compile the loss"
            raise InputError(f"{text}: {one_line(error)}; allowed here: false") from None

    job.cluster.agree(try_out)
    logger.info("scores and losses are compiled by torch (%.0f s)", time.monotonic() - begin)


class _Comparison(NamedTuple):
    """Comparison of queries with the rows of a table.

    Attributes
    ----------
    candidates_a_row : int
        As of :class:`Candidates`.
    compare : callable
        Scores queries (Q, D) against rows (b, D'): (Q, b).
    numbers_a_score : int
        Numbers that ``compare`` holds for each score.
    is_product : bool
        Whether it is the inner product.
    """

    table: EmbeddingTable
    candidates_a_row: int
    query_dim: int
    compare: Callable[[Tensor, Tensor], Tensor]
    numbers_a_score: int
    is_product: bool


def _entity_comparisons(job: Job) -> list[_Comparison]:
    """Return the comparison of the queries for entities of each type, in the same order on every trainer."""
    model, tables, is_reference = job.computing, job.tables, job.computation.is_reference
    # Compares types and functions exactly: a subclass may compute other scores than its base.
    is_product = type(model) is KgeModel and type(model.score_function).compare is Dot.compare
    compare = model.compare_plainly if is_reference else model.compare
    # Relations that act on candidates leave a copy of them for each relation until the backward pass.
    copies = 1 + model.dim // 64 * model.score_function.acts_on_candidates
    more = (1, model.query_dim, compare, model.query_dim if is_reference else copies)
    return [_Comparison(tables[name], *more, is_product) for name in tables.entity_types]


def _relation_comparison(job: Job) -> _Comparison:
    """Return the comparison of the queries (h, ?, t)."""
    model, score_function = job.computing, job.computing.score_function
    is_product, dim = score_function.has_relation_product, score_function.relation_query_dim(model.dim)
    scores = (score_function.compare_relations, 1 if is_product else model.query_dim)
    return _Comparison(job.tables[RELATION], 2 if model.reciprocal else 1, dim, *scores, is_product)


def _candidates(
    job: Job, batches: TrainingBatches, comparison: _Comparison, loss: FullLoss, penalizes: bool
) -> Candidates:
    """Make this trainer's shard of the candidates of a table."""
    world, computation, table = job.world, job.computation, comparison.table
    # The machine's rows in equal runs, one for each trainer: a candidate is scored by one trainer only.
    owned = table.shard(world.local_rank, world.trainers_per_machine)
    first, stop = owned.first_node_id, owned.first_node_id + owned.rows.shape[0]
    num_candidates = len(table) * comparison.candidates_a_row
    objective = FullObjective(loss, num_candidates, job.config.training.objective.smoothing)
    numbers, resident = (computation.device, computation.matmul_dtype), None
    if job.device_tables is not None:
        resident = functools.partial(job.device_tables.owned_rows, table.name)
    shard: ShardObjective
    # Only inner products have loops, with some losses.
    if comparison.is_product and loss.kernel and job.has_loops:
        shard = ProductShard(objective, computation.matmul_dtype)
    else:
        is_softmax = resident is not None and comparison.is_product and type(loss) is FullSoftmax
        kind = DeviceSoftmaxShard if is_softmax and not computation.is_reference else AutogradShard
        scores = (comparison.compare, comparison.numbers_a_score)
        shard = kind(objective, *scores, *numbers, is_resident=resident is not None)
    num_times = job.layout.num_times if table.name == RELATION else 1
    answers_of = all_candidates.only_answers(first, stop, num_times)
    if isinstance(batches, QueryBatches):
        index: AnswerIndex
        node_ids = np.asarray(table.node_ids)
        if len(batches.pairs) and table.name == RELATION:
            index, is_asked, penalizes = batches.pairs, np.ones(len(batches.pairs), bool), False
        else:
            index, is_asked = batches.index, batches.asks_for(table.name)
        shard_answers = ShardAnswers(index, is_asked, node_ids, first, stop)
        answers_of = all_answers(index, shard_answers, loss.splits_labels, penalizes)
    if comparison.candidates_a_row > 1:
        answers_of = all_candidates.of_directions(answers_of)
    return Candidates(table, first, stop, comparison.candidates_a_row, shard, answers_of, resident, num_times)


def build_candidate_loss(job: Job, batches: TrainingBatches, transforms: Transforms) -> CandidateLoss:
    """Make the loss against all candidates, with this trainer's shards of the tables; a collective."""
    config, model = job.config, job.computing
    regularizer = configured_regularizer(config, model)
    comparisons = _entity_comparisons(job)
    relation_weight = config.training.relation_prediction
    if relation_weight:
        comparisons.append(_relation_comparison(job))
    shares_relations = model.score_function.shares_relations and not job.computation.is_reference
    loops = (job.has_loops, job.computation.is_compiled)
    options = all_candidates.QueryOptions(model, regularizer, relation_weight, shares_relations, *loops)
    maker: QueryMaker = OBJECTIVES.get(config.training.objective.name).load()(options)
    sums_batch = config.loss.batch_reduction == "sum"
    planner: EdgePlanner | QueryPlanner = EdgePlanner(list(job.tables), job.pairs, {}, sums_batch)
    if config.training.objective.by_queries:
        planner = QueryPlanner(list(job.tables), sums_batch)
    loss = configured_loss(config).over_candidates()
    return _sharded(job, batches, transforms, planner, maker, comparisons, loss, regularizer)


def _sharded(
    job: Job,
    batches: TrainingBatches,
    transforms: Transforms,
    planner: EdgePlanner | QueryPlanner,
    maker: QueryMaker,
    comparisons: Sequence[_Comparison],
    loss: FullLoss,
    regularizer: Regularizer | None = None,
) -> CandidateLoss:
    """Join the queries of all trainers with the candidates of this one."""
    penalizes = regularizer is not None
    candidates = [_candidates(job, batches, item, loss, penalizes) for item in comparisons]
    blocks = {comparison.table.name: comparison.query_dim for comparison in comparisons}
    group = SharedAlltoall(request_timeout_seconds(), purpose="exchange of queries", duty=TRAIN_DUTY)
    exchange = QueryExchange(group, list(blocks.values()), job.world.trainers_per_machine)
    return CandidateLoss(planner, maker, blocks, candidates, exchange, job.clock, transforms, regularizer)
