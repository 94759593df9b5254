"""Ranks a split with the live tables: a machine's trainers take turns to score against all its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from tqdm import tqdm

from dglkge.data.known_triples import KnownTriples
from dglkge.embeddings.embedding_table import TableShard
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, RankingResult
from dglkge.model.projections import ProjectedFeatures
from dglkge.training.job import Job


class LiveEvaluator:
    """The ranking of a running job.

    With global vectors or features each trainer ranks against a copy of its machine's tables.

    Parameters
    ----------
    job : Job
    """

    def __init__(self, job: Job) -> None:
        chosen = job.config.evaluation
        self._device = job.computation.device
        self._features = job.features
        self._shifts = {} if job.global_vectors is None else job.global_vectors.vectors
        self._kernels = job.config.training.kernels
        self._dataset = job.dataset
        self._model = job.model
        self._tables = job.tables
        self._cluster = job.cluster
        self._protocol = Protocol(
            split=chosen.split,
            filtered=chosen.filtered,
            num_candidates=chosen.num_candidates or None,
            ties=chosen.ties,
            batch_size=chosen.batch_size,
            seed=job.config.seed,
        )
        self._known: KnownTriples | None = None

    def evaluate(self, split: str, max_triples: int, bar: bool, between: Callable[[], None]) -> RankingResult:
        """Rank a split; a collective.

        Parameters
        ----------
        split : str
        max_triples : int
            Rank only this number of triples from the start; 0 for all.
        bar : bool
            Whether to show a progress bar on stderr.
        between : callable
            Called after each batch of queries; these are the same on every trainer. An exception
            from it ends the ranking.

        Returns
        -------
        RankingResult
            The same on every trainer.
        """
        world = self._cluster.world
        turn = (world.local_rank, world.trainers_per_machine)
        # All rows of the machine as one shard: every trainer of it reads them from shared memory.
        shards = {name: [self._tables[name].shard(0, 1)] for name in self._tables.entity_types}
        for name, shift in self._shifts.items():
            shards[name] = [dataclasses.replace(one, rows=one.rows + shift) for one in shards[name]]
        if self._features is not None:
            for name in self._features.entity_types:
                shards[name] = [self._projected(self._features, name, one) for one in shards[name]]
        triples = self._dataset.split(split)[: max_triples or None]
        protocol = dataclasses.replace(self._protocol, split=split)
        relations = self._dataset.relations.relations
        evaluator = RankingEvaluator(self._model, relations, protocol, self._kernels, self._device)
        with tqdm(total=2 * len(triples), desc=f"ranking {split}", unit="query", disable=not bar) as shown:

            def progress(num_queries: int) -> None:
                shown.update(num_queries)
                between()

            return evaluator.evaluate(
                triples, self._known_triples(), self, shards, self._cluster.sum, progress, turn
            )

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table, as they are scored."""
        rows, shift = self._tables.gather(table, ids), self._shifts.get(table)
        if self._features is not None and table in self._features.entity_types:
            return self._features.scored(table, ids).add_(rows)
        return rows if shift is None else rows + shift

    @staticmethod
    def _projected(features: ProjectedFeatures, name: str, shard: TableShard) -> TableShard:
        """Return a copy of a shard with the projected features added."""
        rows = features.scored(name, shard.original_ids).add_(shard.rows)
        return dataclasses.replace(shard, rows=rows)

    def _known_triples(self) -> KnownTriples | None:
        """Return the known answers that filtered ranking leaves out; built once."""
        if self._protocol.filtered and self._known is None:
            self._known = self._dataset.known_triples()
        return self._known
