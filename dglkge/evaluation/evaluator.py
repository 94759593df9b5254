"""Exact ranking of true triples against rows that are distributed over processes.

Every process scores queries against the rows that it can read and counts greater and equal scores. One sum
of the counts over all processes gives the ranks. Processes that read the same rows (those of one machine)
share the batches of queries; every machine ranks all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dglkge.data.known_triples import KnownTriples
from dglkge.data.vocabulary import RelationVocabulary
from dglkge.errors import InputError
from dglkge.evaluation import ranking
from dglkge.evaluation.metrics import Protocol, RankingResult
from dglkge.evaluation.queries import (
    Bonus,
    QueryBatch,
    ScoredQueries,
    full_float32_matmuls,
    plan_queries,
    score_queries,
)
from dglkge.model.device import HOST, ComputeDevice
from dglkge.model.kge_model import KgeModel
from dglkge.typing import Relation, RowShard, RowSource, Side

Reduce = Callable[[np.ndarray], np.ndarray]
Shards = Mapping[str, Sequence[RowShard]]
SIDES = tuple(Side)

RANKED_ROW_BYTES = 4 * 2**30
"""Limit of the rows that are on a device during a ranking; planning counts with the same."""


@dataclass
class RankingEvaluator:
    """Ranks the true answers of triples among entities of the right type.

    Ranks are those of float64 arithmetic on the float32 rows, for any shards, batches and processes.

    Attributes
    ----------
    relations : sequence of Relation
        By relation id.
    kernels : {"auto", "reference"}
        Count by compiled loops, or by torch's operations; the ranks are the same.
    device : ComputeDevice
        Where scores are computed and counted.
    kept_bytes : int
        Limit of the rows that are on the device during a ranking; others are copied there for each batch of
        queries, tile by tile.
    bonus : Bonus, optional
        What is added to scores of the model.
    """

    model: KgeModel
    relations: Sequence[Relation]
    protocol: Protocol
    kernels: str = "auto"
    device: ComputeDevice = HOST
    kept_bytes: int = RANKED_ROW_BYTES
    bonus: Bonus | None = None

    def __post_init__(self) -> None:
        has_loops = self.kernels == "auto" and not self.device.is_staged
        self._count = ranking.count_greater if has_loops else ranking.count_greater_plainly

    def evaluate(
        self,
        triples: np.ndarray,
        known: KnownTriples | None,
        rows: RowSource,
        shards: Shards,
        reduce: Reduce = lambda array: array,
        progress: Callable[[int], object] | None = None,
        turn: tuple[int, int] = (0, 1),
        candidates: np.ndarray | None = None,
    ) -> RankingResult:
        """Rank both sides of every triple.

        Parameters
        ----------
        triples : (n, 3) int64 array
            Head, relation and tail, original ids; the same on every process.
        known : KnownTriples, optional
            Known answers to exclude; required for filtered ranking, ignored for raw.
        rows : RowSource
            Looks up the rows of heads, relations and tails.
        shards : mapping of str to sequence of RowShard
            By entity type, the rows that this process scores against. Processes with the same shards form a
            group; over all groups each row occurs once.
        reduce : callable
            Sums an int64 array over all processes. Called twice, with equal shapes on all of them.
        progress : callable, optional
            Called with the number of queries just ranked; there are 2 n of them. Called equally often on
            every process, so it may contain a collective.
        turn : (int, int)
            (i, k): this process is number i of the k in its group; k is the same in all groups.
        candidates : (2, n, K) int array, optional
            Entities that the head and the tail of each triple are ranked among, for a protocol with given
            ones.

        Returns
        -------
        RankingResult
            The same on every process.
        """
        if not len(triples):
            raise InputError(f"the {self.protocol.split} split has no triples to rank")
        if self.protocol.filtered and known is None:
            raise InputError("filtered ranking needs the known triples; rank raw without them")
        if self.protocol.given != (candidates is not None):
            raise InputError("a protocol with given candidates needs those of each triple, and no other does")
        triples = np.ascontiguousarray(triples, dtype=np.int64)
        used = np.unique(triples[:, 1]).tolist()
        types = sorted({self.relations[id_].candidate_type(side) for id_ in used for side in Side})
        num_entities, num_groups = _count_entities(types, shards, reduce, turn)
        counts = np.zeros((3, len(SIDES), len(triples)), np.int64)
        ranked = self._ranked(shards)
        # A module computes where the rows are.
        device = self.device.device
        model, known = self.model.on_device(device), known if self.protocol.filtered else None
        batches = list(plan_queries(triples, self.relations, self.protocol.batch_size))
        with torch.no_grad(), full_float32_matmuls(), self.device.computing():
            # Batches go to the k processes of a group in turn. A process leaves zeros for the batches of the
            # others, so one sum over all processes adds up both the shards and the turns.
            for first in range(0, len(batches), turn[1]):
                together = batches[first : first + turn[1]]
                for batch in together[turn[0] : turn[0] + 1]:
                    kind = batch.candidate_type
                    drawn = self._candidates(batch, num_entities[kind], candidates)
                    queries = score_queries(model, batch, rows, known, device, self.bonus)
                    batch_counts = self._rank(model, queries, ranked.get(kind, ()), num_entities[kind], drawn)
                    counts[:, SIDES.index(batch.side), batch.places] = batch_counts
                if progress is not None:
                    progress(sum(len(batch.places) for batch in together))
        # Every group has counted all negatives of a query, but only its own rows among greater and equal.
        negatives, greater, equal = reduce(counts)
        by_side: list[Any] = [dict(zip(SIDES, array)) for array in (negatives // num_groups, greater, equal)]
        labels = RelationVocabulary(self.relations).labels.names
        return RankingResult(self.protocol, labels, triples[:, 1], *by_side)

    def _rank(
        self,
        model: KgeModel,
        queries: ScoredQueries,
        shards: Iterable[ranking.RankedShard],
        num_entities: int,
        candidates: torch.Tensor | None,
    ) -> np.ndarray:
        """Return the numbers of negatives, and of greater and equal rows of these shards, (3, K)."""
        if candidates is None:
            excluded = queries.added.query[queries.added.values == -torch.inf]
            num_known = torch.bincount(excluded, minlength=len(queries.query))[queries.query_of]
            true_is_known = queries.known_among(queries.query_of, queries.true_ids)
            negatives = num_entities - num_known - (~true_is_known).long()
            how = (self._count, self.device.is_staged)
            counted = [ranking.rank_against_shard(model, queries, shard, *how) for shard in shards]
        else:
            candidates = candidates.to(self.device.device)
            competes = ranking.competing(queries, candidates)
            negatives = competes.sum(1)
            operands = (candidates, competes)
            counted = [ranking.rank_against_candidates(model, queries, shard, *operands) for shard in shards]
        none = negatives.new_zeros(2, len(negatives))
        return torch.cat([negatives[None], sum(map(torch.stack, counted), none)]).cpu().numpy()

    def _candidates(
        self, batch: QueryBatch, num_entities: int, candidates: np.ndarray | None
    ) -> torch.Tensor | None:
        """Return the candidates (K, N) of each true answer, None for all entities."""
        if candidates is not None:
            ids = np.asarray(candidates[SIDES.index(batch.side), batch.places], np.int64)
            if len(wrong := ids[(ids < 0) | (ids >= num_entities)]):
                raise InputError(f"a given candidate is {wrong[0]}; allowed is 0 to {num_entities - 1}")
            return torch.from_numpy(ids)
        num_candidates = self.protocol.num_candidates
        # Sampling with replacement from fewer entities than samples would be a worse full ranking.
        if num_candidates is None or num_candidates >= num_entities:
            return None
        return ranking.draw_candidates(batch, num_candidates, num_entities, self.protocol.seed)

    def _ranked(self, shards: Shards) -> dict[str, list[ranking.RankedShard]]:
        """Return the shards, on a device as far as they fit."""
        free_bytes = self.kept_bytes if self.device.is_staged else 0
        ranked: dict[str, list[ranking.RankedShard]] = {}
        for name, type_shards in shards.items():
            ranked[name] = []
            for shard in type_shards:
                free_bytes -= shard.rows.numel() * shard.rows.element_size()
                device = self.device.device if free_bytes >= 0 else None
                ranked[name].append(ranking.RankedShard(shard, device))
        return ranked


def _count_entities(
    types: Sequence[str], shards: Shards, reduce: Reduce, turn: tuple[int, int]
) -> tuple[dict[str, int], int]:
    """Count the rows of each type over all processes, and the groups that share batches out.

    Compares number and sum of the ids with those of 0, 1, 2, ...: two integers a type in one reduction.
    """
    sums = np.zeros((len(types) + 1, 2), np.int64)
    if turn[0] == 0:  # one process of each group counts: the others have the same rows
        sums[-1] = 1
        for place, entity_type in enumerate(types):
            for shard in shards.get(entity_type, ()):
                sums[place] += len(shard.original_ids), int(shard.original_ids.sum())
    sums = reduce(sums)
    for entity_type, (count, sum_of_ids) in zip(types, sums[:-1]):
        if count == 0 or sum_of_ids != count * (count - 1) // 2:
            raise InputError(
                f"the rows of type {entity_type!r} are not complete: {count} rows were given, and their ids "
                "are not 0, 1, 2, ... once each"
            )
    return {entity_type: int(count) for entity_type, (count, _) in zip(types, sums)}, int(sums[-1, 0])
