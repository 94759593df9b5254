"""Ranks a split with the live tables: a machine's trainers take turns to score against all its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from dglkge.data.known_triples import KnownTriples
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, RankingResult
from dglkge.training.job import Job
from dglkge.training.process import open_bar
from dglkge.training.statistics.split_loss import SplitLoss
from dglkge.typing import RELATION


@dataclass
class LiveEvaluator:
    """The ranking of a running job.

    With global vectors or features each trainer ranks against a copy of its machine's tables.
    """

    job: Job
    _known: KnownTriples | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._loss = SplitLoss(self.job)

    def evaluate(self, split: str, bar: bool, between: Callable[[], None]) -> RankingResult:
        """Rank a split; a collective. The result, with the loss, is the same on every trainer.

        ``between`` is called after each batch of queries; these are the same on every trainer. An exception
        from it ends the ranking.
        """
        job, world, dataset, config = self.job, self.job.world, self.job.dataset, self.job.config
        chosen = config.evaluation
        protocol = Protocol(
            split=split,
            filtered=chosen.filtered,
            num_candidates=chosen.num_candidates or None,
            ties=chosen.ties,
            batch_size=chosen.batch_size,
            seed=config.seed,
        )
        if protocol.filtered and self._known is None:
            self._known = dataset.known_triples()
        # All rows of the machine as one shard: every trainer of it reads them from shared memory.
        shards = {}
        for name in job.tables.entity_types:
            shard = job.tables[name].shard(0, 1)
            shards[name] = [
                dataclasses.replace(shard, rows=self._scored(name, shard.original_ids, shard.rows))
            ]
        triples = dataset.split(split)[: chosen.max_triples or None]
        device, relations = job.computation.device, dataset.relations.relations
        evaluator = RankingEvaluator(job.model, relations, protocol, config.training.kernels, device)
        with open_bar(bar, total=2 * len(triples), desc=f"ranking {split}", unit="query") as shown:

            def progress(num_queries: int) -> None:
                shown.update(num_queries)
                between()

            turn = (world.local_rank, world.trainers_per_machine)
            others = (shards, job.cluster.sum, progress, turn)
            result = evaluator.evaluate(triples, self._known, self, *others)
        return dataclasses.replace(result, loss=self._loss(split, triples))

    def gather(self, table: str, ids: Tensor) -> Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table, as they are scored."""
        return self._scored(table, ids, self.job.tables.gather(table, ids))

    def _scored(self, table: str, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of ids as they are scored: with features, the vector of a type, or a time."""
        if table == RELATION:
            return self.job.model.set_times(rows, ids % self.job.layout.num_times)
        features, vectors = self.job.features, self.job.global_vectors
        if features is not None and table in features.entity_types:
            return features.scored(table, ids).add_(rows)
        return rows if vectors is None or table not in vectors.vectors else rows + vectors.vectors[table]
