"""Negatives in bucket order: from the ranges of the pair that a chunk of positives belongs to.

Why answers in the range of the query's own entity are lowered in mixed buckets: a mixed bucket {i, j} has all
triples between its two ranges, and of those inside one a (P - 1)th, so that an epoch has each once. A query's
true answers in the range of its own entity are therefore P - 1 times as rare there, beside those in the other
range, as they are in the graph, while negatives come from both alike. A model that fits such batches ranks
them too low, by log(P - 1) in log-odds.

So the loss gets s - log(P - 1) in place of the score s of an answer, true or not, in the range of the query's
own entity: the known difference of the frequencies is in the batch's scores, and not in the model. This is
the logit adjustment of Menon et al. 2021 (Long-tail learning via logit adjustment, eq. 10) with the
frequencies of the two kinds of answers. It needs a loss that takes scores for log-odds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dglkge.data.range_walk import ranges_of
from dglkge.kernels.hashing import below, combine
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.negatives import present_entities, split_count
from dglkge.typing import Ids, Side


def range_offset(num_ranges: int) -> float:
    """Return what the scores of answers in the range of the query's own entity are lowered by.

    Examples
    --------
    >>> range_offset(2), round(range_offset(4), 3)
    (0.0, 1.099)
    """
    return math.log(num_ranges - 1)


# Domain separation: the kinds of negatives share the seed, not the key.
_GLOBAL_KEY, _LOCAL_KEY, _IN_BATCH_KEY = 0x6A4E, 0x10CA2, 0xBA7C5


@dataclass(frozen=True)
class NodeRanges:
    """Ranges of the nodes of each entity type.

    Attributes
    ----------
    bounds : mapping of str to (num_parts * P + 1,) int64
        Bounds of the ranges of each entity type, in the order of the data set's types; see
        :func:`dglkge.data.range_walk.range_bounds`.
    is_mixed : bool
        Whether buckets are mixed, see :mod:`dglkge.sampling.bucket_batches`.
    """

    bounds: Mapping[str, Ids]
    num_ranges: int
    is_mixed: bool = False

    def __call__(self, entity_type: str, node_ids: Ids) -> Ids:
        """Return the range (n,) of each node on its own machine."""
        return ranges_of(node_ids, self.bounds[entity_type], self.num_ranges)


@dataclass
class RangeNegatives:
    """Negatives of one side: heads come from the range of the heads of a chunk, tails from that of its tails.

    Those of a mixed bucket come from both of its ranges, and are the same for heads and tails. All are keyed
    by (seed, epoch, batch, machine, chunk, entity type, ranges), so all trainers of a machine draw the same
    ones. The kinds are those of :class:`dglkge.sampling.negatives.MixedNegatives`:

    * *global*: entities of the range with this number on every machine;
    * *local*: entities of the range on this machine; where it has none, global ones;
    * *in-batch*: entities of the type in the positives of the chunk that this trainer holds.

    Attributes
    ----------
    side : Side
        The side of the missing entity.
    num_negatives, shares, pairs
        As of :class:`dglkge.sampling.negatives.MixedNegatives`.
    part : int
        The partition of this machine.
    weights : mapping of str to (n,) int64, optional
        For each entity type the weight of every node id, in the global and the local share; a range without
        weights above 0 is drawn from uniformly.
    """

    side: Side
    num_negatives: int
    shares: tuple[float, float, float]
    ranges: NodeRanges
    part: int
    pairs: Sequence[tuple[str, str]]
    seed: int
    weights: Mapping[str, Ids] | None = None

    def __post_init__(self) -> None:
        bounds, num_ranges = self.ranges.bounds, self.ranges.num_ranges
        self._num_global, self._num_local, self._num_in_batch = split_count(self.num_negatives, self.shares)
        # Entry [part, range] of each type: first node id, and the one behind the last.
        self._firsts = {name: runs[:-1].reshape(-1, num_ranges) for name, runs in bounds.items()}
        self._ends = {name: runs[1:].reshape(-1, num_ranges) for name, runs in bounds.items()}
        # Sums of the weights of all nodes before each: a range of them is a range of weights.
        weights = (self.weights or {}).items()
        self._sums = {name: np.append(0, np.cumsum(values)).astype(np.int64) for name, values in weights}

    def sample(self, entity_type: str, batch: EdgeBatch, chunk: int) -> Ids:
        """Return the node ids (N,) of the negatives of one entity type for a chunk that the batch has."""
        ranges = batch.ranges[chunk]
        numbers = sorted(set(ranges)) if self.ranges.is_mixed else [ranges[self.side is Side.TAIL]]
        # Run [part, range]: the entities of a range on a machine.
        firsts, ends = (runs[entity_type][:, numbers].ravel() for runs in (self._firsts, self._ends))
        own_runs = slice(self.part * len(numbers), (self.part + 1) * len(numbers))
        # The type has no entity of these ranges here, or all of them: the local share is drawn globally.
        own_size = int((ends[own_runs] - firsts[own_runs]).sum())
        num_local = 0 if own_size in (0, int((ends - firsts).sum())) else self._num_local
        num_global = self._num_global + self._num_local - num_local
        # Of a single range its number.
        of_ranges = numbers[0] + sum((number + 1) * self.ranges.num_ranges for number in numbers[1:])
        of_type = list(self.ranges.bounds).index(entity_type)
        key = (self.seed, batch.epoch, batch.index, self.part, chunk, of_type, of_ranges)
        kinds = [self._draw(entity_type, combine(_GLOBAL_KEY, *key), num_global, firsts, ends)]
        if num_local:
            local_key = combine(_LOCAL_KEY, *key)
            kinds.append(self._draw(entity_type, local_key, num_local, firsts[own_runs], ends[own_runs]))
        if self._num_in_batch:
            present = present_entities(entity_type, batch, chunk, self.pairs)
            kinds.append(present[below(combine(_IN_BATCH_KEY, *key), self._num_in_batch, len(present))])
        return np.concatenate(kinds)

    def _draw(self, entity_type: str, key: int, count: int, firsts: Ids, ends: Ids) -> Ids:
        """Draw node ids (count,) from the union of runs [firsts[i], ends[i])."""
        sums = self._sums.get(entity_type)
        # Runs of weights take the place of runs of nodes, where there are any.
        if sums is not None and not (sums[ends] > sums[firsts]).any():
            sums = None
        low, high = (firsts, ends) if sums is None else (sums[firsts], sums[ends])
        passed = np.cumsum(high - low)
        drawn = below(key, count, int(passed[-1]))
        run = np.searchsorted(passed, drawn, side="right").astype(np.int64)
        places: Ids = (high[run] - (passed[run] - drawn)).astype(np.int64)
        # Node i owns the places [sums[i], sums[i + 1]); nodes of weight 0 own none.
        return places if sums is None else np.searchsorted(sums[1:], places, side="right").astype(np.int64)
