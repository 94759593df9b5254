"""Ranking of a split with the live tables, and its loss, to compare the curves of both splits.

A machine's trainers take turns to score against all its rows. The loss is computed as that of training: the
same objective runs over batches of the split, of the training's size, with as many negatives drawn as in
training, or all candidates, or queries with the split's own answers. Its gradients are dropped. It has no
regularizer and no dropout, and negatives are the same in each evaluation, of all entities where training
takes those of ranges. Relations without training triples are left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dglkge.data.dataset_files import TRAIN
from dglkge.data.known_triples import KnownTriples
from dglkge.data.partition_layout import EdgeTable
from dglkge.distributed.lease import new_nonce
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, RankingResult
from dglkge.model.choices import NO_TRANSFORM, ROW_TRANSFORMS
from dglkge.model.regularizers import REGULARIZERS
from dglkge.sampling.edge_batches import EdgeBatches
from dglkge.sampling.query_batches import TrainingBatches
from dglkge.step.contracts import Objective
from dglkge.step.rows import RowStore, Transforms
from dglkge.training.building.batches import edge_options, query_batches
from dglkge.training.building.step import build_objective, build_transforms
from dglkge.training.job import Job
from dglkge.training.statistics.stats import open_bar
from dglkge.typing import RELATION, RowShard


@dataclass
class SplitLoss:
    """Computes the loss of splits."""

    job: Job

    def __post_init__(self) -> None:
        config = self.job.config
        transform = ROW_TRANSFORMS.get(NO_TRANSFORM).Settings(name=NO_TRANSFORM)
        plain = config.changed(
            regularizer=REGULARIZERS.get("none").Settings(name="none"),
            model=config.model.changed(entity_dropout=0.0, relation_dropout=0.0, row_transform=transform),
            sampling=config.sampling.changed(num_ranges=1),
            training=config.training.changed(batch_statistics=False, compile=False),
        )
        computation = replace(self.job.computation, is_compiled=False)
        self._job = replace(self.job, config=plain, computation=computation)
        self._made: dict[str, tuple[TrainingBatches, Objective, RowStore, Transforms]] = {}

    def __call__(self, split: str, triples: np.ndarray) -> float:
        """Return the mean loss of triples (n, 3) of original ids, or of their queries; a collective."""
        if split not in self._made:
            self._made[split] = self._make(triples)
        batches, objective, store, transforms = self._made[split]
        sums = np.zeros(2)
        for index in range(len(batches)):
            batch = batches.batch(0, index)
            plan = store.prepare(objective.plan(batch))
            transforms.start_batch(plan.number)
            sums += float(objective.gradients(plan, store.rows(plan))().loss), len(batch)
        if self.job.dense is not None:
            self.job.dense.module.zero_grad(set_to_none=True)
        total, count = self.job.cluster.sum(sums)
        return float(total / max(count, 1))

    def _make(self, triples: np.ndarray) -> tuple[TrainingBatches, Objective, RowStore, Transforms]:
        job, dataset = self._job, self._job.dataset
        trained = np.unique(dataset.split(TRAIN)[:, 1])
        triples = np.asarray(triples)[np.isin(triples[:, 1], trained)]
        batches: TrainingBatches
        if job.config.training.objective.by_queries:
            batches = query_batches(job, triples, KnownTriples([triples], dataset.num_relations))
        else:
            nodes = np.empty(triples.shape, np.int64)
            nodes[:, 1] = job.layout.edge_ids(RELATION)[triples[:, 1]]
            for side, name, here in job.entities_by_type(triples):
                nodes[here, side.column] = job.layout.node_ids(name)[triples[here, side.column]]
            # All trainers have all of them, wherever their rows are.
            turn = (job.world.rank, job.world.world_size)
            table = EdgeTable(np.arange(len(triples), dtype=np.int64), nodes, None)
            batches = EdgeBatches(table, edge_options(job, len(triples), turn))
        transforms = build_transforms(job)
        return batches, *build_objective(job, batches, transforms), transforms


@dataclass
class LiveEvaluator:
    """The ranking of a running job.

    With global vectors or features the trainers of a machine rank against a copy of its tables: one for all
    of them, unless they cannot map it (processes in PID namespaces of their own).
    """

    job: Job

    def __post_init__(self) -> None:
        self._loss = SplitLoss(self.job)

    def evaluate(self, split: str, bar: bool, between: Callable[[], None]) -> RankingResult:
        """Rank a split; a collective. The result, with the loss, is the same on every trainer.

        ``between`` is called after each batch of queries; these are the same on every trainer. An exception
        from it ends the ranking.
        """
        job, world, dataset, config = self.job, self.job.world, self.job.dataset, self.job.config
        settings = config.evaluation
        same = {name: getattr(settings, name) for name in ("filtered", "ties", "batch_size")}
        protocol = Protocol(split, num_candidates=settings.num_candidates or None, seed=config.seed, **same)
        known = dataset.known_triples() if protocol.filtered else None
        # All rows of the machine as one shard: every trainer of it reads them from shared memory.
        whole = {name: job.tables[name].shard(0, 1) for name in job.tables.entity_types}
        shards = {name: [replace(shard, rows=self._all_scored(name, shard))] for name, shard in whole.items()}
        triples = dataset.split(split)[: settings.max_triples or None]
        device, relations = job.computation.device, dataset.relations.relations
        evaluator = RankingEvaluator(job.model, relations, protocol, config.training.kernels, device)
        with open_bar(bar, total=2 * len(triples), desc=f"ranking {split}", unit="query") as shown:

            def progress(num_queries: int) -> None:
                shown.update(num_queries)
                between()

            turn = (world.local_rank, world.trainers_per_machine)
            result = evaluator.evaluate(triples, known, self, shards, job.cluster.sum, progress, turn)
        return replace(result, loss=self._loss(split, triples))

    def gather(self, table: str, ids: Tensor) -> Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table, as they are scored."""
        return self._scored(table, ids, self.job.tables.gather(table, ids))

    def _all_scored(self, table: str, shard: RowShard) -> Tensor:
        """Return all rows of the machine as they are scored; a collective: each trainer makes some."""
        rows, world, cluster = shard.rows, self.job.world, self.job.cluster
        if not self._is_changed(table):
            return rows
        if world.trainers_per_machine == 1:
            return self._scored(table, shard.original_ids, rows)
        with open(os.memfd_create(f"dglkge-ranking-{new_nonce()}"), "wb") as file:
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            # The name as well: in another PID namespace the path is that of something else.
            texts = cluster.gather_texts(f"{os.readlink(path)}\n{path}")
            name, path = texts[world.machine * world.trainers_per_machine].split("\n")
            shared = torch.empty(rows.shape) if not rows.numel() else None  # mmap refuses an empty file
            with contextlib.suppress(OSError, RuntimeError):
                if shared is None and os.readlink(path) == name:
                    shared = torch.from_file(path, shared=True, size=rows.numel()).view(rows.shape)
            num_absent = cluster.sum(np.array([shared is None], np.int64))[0]
        if shared is None or num_absent:
            return self._scored(table, shard.original_ids, rows)
        turn, num_turns = world.local_rank, world.trainers_per_machine
        own = slice(len(rows) * turn // num_turns, len(rows) * (turn + 1) // num_turns)
        shared[own] = self._scored(table, shard.original_ids[own], rows[own])
        cluster.barrier()
        return shared

    def _is_changed(self, table: str) -> bool:
        """Whether rows of an entity type are scored with something added."""
        features, vectors = self.job.features, self.job.global_vectors
        has_features = features is not None and table in features.entity_types
        return has_features or (vectors is not None and table in vectors.vectors)

    def _scored(self, table: str, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of ids as they are scored: with features, the vector of a type, or a time."""
        if table == RELATION:
            return self.job.model.set_times(rows, ids % self.job.layout.num_times)
        features, vectors = self.job.features, self.job.global_vectors
        if features is not None and table in features.entity_types:
            return features.scored(table, ids).add_(rows)
        return rows if vectors is None or table not in vectors.vectors else rows + vectors.vectors[table]
