"""Ranking of triples that are held out of training, against batch and uniform negatives.

The numbers are PyTorch-BigGraph's. Trainers take turns with batches; sums over the trainers give the means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.data.dataset_files import TRAIN
from dglkge.data.range_walk import range_bounds, ranges_of
from dglkge.kernels.hashing import column_bits, in_range, stream_key
from dglkge.model.kge_model import KgeModel
from dglkge.sampling.bucket_batches import BucketOrder
from dglkge.sampling.triple_order import TripleOrder
from dglkge.training.building.components import configured_loss
from dglkge.training.job import Job
from dglkge.typing import RELATION, Doubles, Ids, Side

METRICS = ("loss", "pos_rank", "mrr", "r1", "r10", "r50", "auc")
"""PyTorch-BigGraph's names; means over both sides."""
VIOLATORS = {Side.HEAD: "violators_lhs", Side.TAIL: "violators_rhs"}
"""Mean number of negatives of a side that score above the true answer."""
SUMMED = (*METRICS, *VIOLATORS.values())
"""All of them: a vector of sums over triples has their number, and then these."""

BLOCK_NUMBERS = 1 << 22
"""Queries times candidates times dimension that are compared at a time; ``planning/memory.py`` plans it."""


@dataclass
class HeldOutEvaluator:
    """Ranks the held-out triples of a pass.

    Its uniform negatives are the same in every evaluation, so that numbers before and after compare.

    Attributes
    ----------
    job : Job
        Its trainers take turns with batches.
    order : TripleOrder
        It names the triples.
    gather : callable
        Returns the rows (n, D) of the original ids (n,) of a table.
    """

    job: Job
    order: TripleOrder
    gather: Callable[[str, Tensor], Tensor]

    def __post_init__(self) -> None:
        pairs = [(relation.lhs, relation.rhs) for relation in self.job.dataset.relations.relations]
        self._pairs = list(dict.fromkeys(pairs))
        self._pair_of_relation = np.array([self._pairs.index(pair) for pair in pairs], np.int64)
        self._loss = configured_loss(self.job.config)
        self._settings: Any = self.job.config.evaluation.held_out

    def evaluate(self, edge_set: int, chunk: int) -> dict[str, Any]:
        """Rank the held-out triples of a chunk of an edge set; a collective.

        Returns
        -------
        dict
            ``count`` triples, and ``metrics`` of PyTorch-BigGraph's names.
        """
        job, world = self.job, self.job.cluster.world
        ids = np.sort(self.order.held_out(edge_set, chunk, job.config.training.edge_chunks))
        triples = np.asarray(job.dataset.split(TRAIN)[ids])
        turn = (world.rank, world.world_size)
        with job.ranking():
            sums = self.sums(triples, (edge_set, chunk), turn)
        return described(job.cluster.sum(sums))

    @torch.no_grad()
    def sums(self, triples: np.ndarray, key: tuple[int, ...], turn: tuple[int, int]) -> np.ndarray:
        """Return this trainer's part of the sums over some triples: their number, and :data:`SUMMED`.

        Parameters
        ----------
        triples : (n, 3) int64 array
            Original ids.
        key : tuple of int
            Of the uniform negatives.
        turn : (int, int)
            (i, k): this trainer is number i of the k that take turns.
        """
        # Batches hold triples of one pair of types, and are the same for any number of trainers.
        size, batches = self._settings.batch_negatives, []
        for number in range(len(self._pairs)):
            rows = triples[self._pair_of_relation[triples[:, 1]] == number]
            batches += [(number, rows[start : start + size]) for start in range(0, len(rows), size)]
        # Rows are in the host's memory, and a module perhaps on a device.
        model = self.job.model.on_device(torch.device("cpu"))
        sums = np.zeros(1 + len(SUMMED))
        for place in range(turn[0], len(batches), turn[1]):
            number, batch = batches[place]
            sums[0] += len(batch)
            sums[1:] += self._sums(model, self._pairs[number], batch, (*key, place))
        return sums

    def _sums(self, model: KgeModel, pair: tuple[str, str], batch: Ids, key: tuple[int, ...]) -> Doubles:
        """Return the sums of the metrics over a batch of triples of one pair of entity types."""
        heads, relations, tails = (torch.from_numpy(np.ascontiguousarray(column)) for column in batch.T)
        rows = {Side.HEAD: self.gather(pair[0], heads), Side.TAIL: self.gather(pair[1], tails)}
        relation_rows = self.gather(RELATION, relations)
        sums = dict.fromkeys(SUMMED, 0.0)
        for side, anchor_side, answers in ((Side.TAIL, Side.HEAD, tails), (Side.HEAD, Side.TAIL, heads)):
            entity_type = pair[side is Side.TAIL]
            drawn = self.uniform(entity_type, side, key)
            candidates = torch.cat([rows[side], self.gather(entity_type, drawn)])
            query = model.query(rows[anchor_side], relation_rows, side, relations)
            block = max(1, BLOCK_NUMBERS // max(1, len(candidates) * query.shape[1]))
            scores = torch.cat([model.compare_plainly(part, candidates) for part in query.split(block)])
            positive = model.compare_pairs(query, rows[side])
            # A candidate that is the true answer is none of its negatives.
            ignored = answers[:, None] == torch.cat([answers, drawn])[None, :]
            counts = (~ignored).sum(1)
            above = ((scores > positive[:, None]) & ~ignored).sum(1)
            equal = ((scores == positive[:, None]) & ~ignored).sum(1)
            # Pessimistic among equal scores, as PyTorch-BigGraph.
            rank = (above + equal + 1).double()
            below = (counts - above).double() - equal / 2
            values = {
                "loss": self._loss(positive, scores, ignored).double(),
                "pos_rank": rank / 2,
                "mrr": 1 / rank / 2,
                **{f"r{k}": (rank <= k).double() / 2 for k in (1, 10, 50)},
                # The share of negatives below the true answer, one half without any.
                "auc": torch.where(counts > 0, below / counts.clamp(min=1), 0.5) / 2,
                VIOLATORS[side]: above.double(),
            }
            for name, value in values.items():
                sums[name] += float(value.sum())
        return np.array([sums[name] for name in SUMMED])

    def uniform(self, entity_type: str, side: Side, key: tuple[int, ...]) -> Tensor:
        """Draw original ids (``uniform_negatives``,) of a type for a side, uniformly with replacement."""
        return torch.from_numpy(self.draw(self.job.dataset.num_entities(entity_type), entity_type, side, key))

    def draw(self, count: int, entity_type: str, side: Side, key: tuple[int, ...]) -> np.ndarray:
        """Draw numbers below a count, uniformly with replacement; the same for the same key."""
        stream = stream_key(self.job.config.seed, "held out", entity_type, side.name, *key)
        return in_range(column_bits(stream, self._settings.uniform_negatives)[0], count)


def described(sums: np.ndarray) -> dict[str, Any]:
    """Return the number of triples, and the means of their metrics, as PyTorch-BigGraph writes them."""
    count = int(sums[0])
    return {"count": count, "metrics": dict(zip(SUMMED, (sums[1:] / max(count, 1)).tolist()))}


class HeldOutBuckets(HeldOutEvaluator):
    """The held-out triples of this machine by bucket, ranked against each other and rows of its ranges.

    A triple is of the machine that has its tail. Buckets have shares of them as of the trained triples, so
    that each is of one bucket of an epoch.

    Parameters
    ----------
    walk : BucketOrder
        That of the trained triples.
    """

    def __init__(self, evaluator: HeldOutEvaluator, walk: BucketOrder) -> None:
        super().__init__(evaluator.job, evaluator.order, evaluator.gather)
        self._walk, job, num_ranges = walk, self.job, walk.num_ranges
        starts = {name: job.layout.range_starts(name) for name in job.dataset.entity_types}
        self._bounds = {name: range_bounds(first, num_ranges) for name, first in starts.items()}
        sets = self.order.sets
        kept, cells = [], []
        for number in range(len(sets)):
            triples = np.asarray(job.dataset.split(TRAIN)[np.sort(self.order.held_out(number))])
            is_here, buckets = self._places(triples)
            kept.append(triples[is_here])
            cells.append(number * num_ranges**2 + buckets[is_here])
        triples, triple_cells = np.concatenate(kept), np.concatenate(cells)
        self._triples = triples[np.argsort(triple_cells, kind="stable")]
        counts = np.bincount(triple_cells, minlength=len(sets) * num_ranges**2)
        self._starts = np.append(0, np.cumsum(counts))
        self._order = replace(walk, counts=counts.reshape(len(sets), 1, num_ranges, num_ranges))

    def _places(self, triples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each triple is of this machine, and its bucket."""
        is_here, buckets = np.zeros(len(triples), bool), np.zeros(len(triples), np.int64)
        num_ranges, layout = self._walk.num_ranges, self.job.layout
        for side, name, here in self.job.entities_by_type(triples):
            nodes = np.asarray(layout.node_ids(name))[triples[here, side.column]]
            ranges = ranges_of(nodes, self._bounds[name], num_ranges)
            buckets[here] += ranges * num_ranges if side is Side.HEAD else ranges
            first, end = layout.node_range(name, self.job.world.machine)
            is_here[here] = (first <= nodes) & (nodes < end)  # the tail's, which comes last
        return is_here, buckets

    def triples(self, epoch: int, turn: int) -> np.ndarray:
        """Return the held-out triples (n, 3) of a bucket by its turn."""
        edge_set, ranges = self._walk.bucket(epoch, turn)
        segments = self._order.segments(epoch, edge_set, ranges)
        runs = [self._starts[segment.cell] + np.arange(segment.first, segment.end) for segment in segments]
        return self._triples[np.concatenate(runs)]

    def bucket_sums(self, epoch: int, turn: int) -> np.ndarray:
        """Return this trainer's part of the sums over a bucket; the machine's trainers take turns."""
        (edge_set, ranges), world = self._walk.bucket(epoch, turn), self.job.world
        share = (world.local_rank, world.trainers_per_machine)
        return self.sums(self.triples(epoch, turn), (edge_set, *ranges), share)

    def uniform(self, entity_type: str, side: Side, key: tuple[int, ...]) -> Tensor:
        """Draw original ids from this machine's ranges of the bucket; of the whole type if these are empty.

        The key is (edge set, range of heads, range of tails, batch).
        """
        _, *ranges, _ = key
        side_ranges = sorted(set(ranges)) if self._walk.is_mixed else [ranges[side is Side.TAIL]]
        bounds, layout = self._bounds[entity_type], self.job.layout
        numbers = self.job.world.machine * self._walk.num_ranges + np.array(side_ranges, np.int64)
        firsts, ends = bounds[numbers], bounds[numbers + 1]
        starts = np.append(0, np.cumsum(ends - firsts))
        if not starts[-1]:
            return super().uniform(entity_type, side, key)
        drawn = self.draw(int(starts[-1]), entity_type, side, key)
        run = np.searchsorted(starts, drawn, side="right") - 1
        places = firsts[run] + drawn - starts[run]
        return torch.from_numpy(np.asarray(layout.original_ids(entity_type))[places].astype(np.int64))
