"""Ranks a split with the live tables: a machine's trainers take turns to score against all its rows."""

from __future__ import annotations

import dataclasses
from typing import Callable

import torch
from tqdm import tqdm

from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.distributed.runtime import Cluster
from dglkge.embeddings.embedding_table import TableShard
from dglkge.embeddings.table_set import TableSet
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import RankingResult
from dglkge.evaluation.protocol import Protocol
from dglkge.model.device import HOST, ComputeDevice
from dglkge.model.kge_model import KgeModel
from dglkge.model.projections import ProjectedFeatures
from dglkge.step.transforms.global_vectors import GlobalVectors


class LiveEvaluator:
    """The ranking of a running job.

    Parameters
    ----------
    dataset : Dataset
    model : KgeModel
    tables : TableSet
    cluster : Cluster
    protocol : Protocol
        Its split is replaced by that of each ranking.
    kernels : {"auto", "reference"}
        As of :class:`RankingEvaluator`.
    global_vectors : GlobalVectors, optional
        Vectors that are added to rows; each trainer then ranks against a copy of its machine's tables.
    features : ProjectedFeatures, optional
        Added to rows, likewise.
    device : ComputeDevice
        As of :class:`RankingEvaluator`.
    """

    def __init__(
        self,
        dataset: Dataset,
        model: KgeModel,
        tables: TableSet,
        cluster: Cluster,
        protocol: Protocol,
        kernels: str = "auto",
        global_vectors: GlobalVectors | None = None,
        features: ProjectedFeatures | None = None,
        device: ComputeDevice = HOST,
    ) -> None:
        self._device = device
        self._features = features
        self._shifts = {} if global_vectors is None else global_vectors.vectors
        self._kernels = kernels
        self._dataset = dataset
        self._model = model
        self._tables = tables
        self._cluster = cluster
        self._protocol = protocol
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
