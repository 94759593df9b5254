"""Negatives of a chunk of positives: from the whole graph, from the own partition, from the batch itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dglkge.kernels.hashing import below, combine
from dglkge.sampling.draws import WeightedDraw, split_count
from dglkge.sampling.edge_batches import EdgeBatch

Ids = npt.NDArray[np.int64]

# Domain separation: the streams of the negatives and of the order share the seed, not the key.
_NEGATIVES_KEY, _LOCAL_KEY, _IN_BATCH_KEY = 0x4E6, 0x10CA1, 0xBA7C4


@dataclass
class UniformNegatives:
    """Uniform entities of one type, the same for every trainer that holds a part of the chunk.

    They are keyed by (seed, epoch, batch, chunk, entity type) and drawn from original ids, so that a
    result depends neither on the number of trainers nor on how the graph was partitioned. Heads and
    tails of one type are scored against the same entities: half as many rows to gather and to update.

    Attributes
    ----------
    num_negatives : int
        Negatives of a chunk.
    node_ids : mapping of str to (n,) int64
        For each entity type the node id of every original id, in the order of the data set's types.
    weights : mapping of str to (n,) int64, optional
        For each entity type the weight of every original id; without them all are drawn equally often, as
        are those of a type whose weights are all 0.
    """

    num_negatives: int
    node_ids: Mapping[str, Ids]
    seed: int
    weights: Mapping[str, Ids] | None = None

    def __post_init__(self) -> None:
        self._draws = _weighted_draws(self.weights)
        self._number_of_type = {name: number for number, name in enumerate(self.node_ids)}

    def key_before_chunk(self, epoch: int, batch: int) -> tuple[int, ...]:
        """Return what the key of a draw begins with, before chunk and number of the entity type."""
        return _NEGATIVES_KEY, self.seed, epoch, batch

    def number_of_type(self, entity_type: str) -> int:
        """Return the number of an entity type, the last part of the key of a draw."""
        return self._number_of_type[entity_type]

    def sample(self, entity_type: str, epoch: int, batch: int, chunk: int, number: int | None = None) -> Ids:
        """Return the node ids (N,) of a chunk's negatives of one entity type, or another number of them."""
        number = self.num_negatives if number is None else number
        key = combine(*self.key_before_chunk(epoch, batch), chunk, self.number_of_type(entity_type))
        table = self.node_ids[entity_type]
        if entity_type in self._draws:
            return table[self._draws[entity_type].draw(key, number)]
        return table[below(key, number, len(table))]


def _weighted_draws(weights: Mapping[str, Ids] | None) -> dict[str, WeightedDraw]:
    """Return the draws of the entity types that have weights above 0."""
    return {name: WeightedDraw(values) for name, values in (weights or {}).items() if values.any()}


def find_equal(ids: Ids, negative_ids: Ids) -> tuple[Ids, Ids]:
    """Return rows and columns (M,) of all places where ``ids[row] == negative_ids[column]``."""
    # Sort and search, O((B + N) log N), instead of a (B, N) comparison.
    order = np.argsort(negative_ids)
    ordered = negative_ids[order]
    first = np.searchsorted(ordered, ids, side="left")
    counts = np.searchsorted(ordered, ids, side="right") - first
    rows = np.repeat(np.arange(len(ids)), counts)
    turn = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, order[first[rows] + turn]


class NegativeSampler(Protocol):
    """Draws the negatives of a batch.

    The constructor has the parameters of :class:`MixedNegatives` without the last. A sampler whose settings
    have ``degree_power`` has the last too.
    """

    def sample(self, entity_type: str, batch: EdgeBatch, chunk: int) -> Ids:
        """Return the node ids (N,) of the negatives of one entity type for a chunk that the batch has."""


@dataclass
class MixedNegatives:
    """Negatives of three kinds; a share of 1 of the first is :class:`UniformNegatives`.

    * *global*: uniform entities of the type, the same for the chunk on every machine. On several machines
      most of their rows travel.
    * *local*: uniform entities of the type that live on this machine, the same for all of its trainers; no
      row travels. On one machine they are global ones. Where the type has none here, they are global too.
    * *in-batch*: entities of the type in the positives of the chunk that this trainer holds, drawn with
      replacement, in proportion to their occurrences; their rows are looked up anyway.

    Only global ones make a result independent of how the graph is partitioned; in-batch ones depend on how
    a batch is split between trainers too.

    Attributes
    ----------
    num_negatives : int
        Negatives of a chunk, of all kinds.
    shares : (float, float, float)
        Of global, local and in-batch negatives.
    node_ids : mapping of str to (n,) int64
        As of :class:`UniformNegatives`.
    local_ranges : mapping of str to (int, int)
        For each entity type the first node id on this machine and the one behind its last.
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    weights : mapping of str to (n,) int64, optional
        For each entity type the weight of every original id, in the global and the local share; a place
        without weights above 0 is drawn from uniformly.
    """

    num_negatives: int
    shares: tuple[float, float, float]
    node_ids: Mapping[str, Ids]
    local_ranges: Mapping[str, tuple[int, int]]
    pairs: Sequence[tuple[str, str]]
    seed: int
    weights: Mapping[str, Ids] | None = None

    def __post_init__(self) -> None:
        self._num_global, self._num_local, self._num_in_batch = split_count(self.num_negatives, self.shares)
        self._number_of_type = {name: number for number, name in enumerate(self.node_ids)}
        self._uniform = UniformNegatives(self._num_global, self.node_ids, self.seed, self.weights)
        local = self._local_weights(self.weights) if self.weights and self._num_local else None
        self._local = _weighted_draws(local)

    @property
    def all_uniform(self) -> UniformNegatives | None:
        """The sampler of all negatives, where all are uniform entities of the whole graph."""
        is_global = self.weights is None and self._num_global == self.num_negatives
        return self._uniform if is_global else None

    def sample(self, entity_type: str, batch: EdgeBatch, chunk: int) -> Ids:
        """Return the node ids (N,) of the negatives of one entity type for a chunk that the batch has."""
        first, end = self.local_ranges[entity_type]
        num_local = self._num_local
        # The type has no entity on this machine, or all of them: the local share is drawn globally.
        if end - first in (0, len(self.node_ids[entity_type])):
            num_local = 0
        num_uniform = self._num_global + self._num_local - num_local
        kinds = [self._uniform.sample(entity_type, batch.epoch, batch.index, chunk, num_uniform)]
        key = (self.seed, batch.epoch, batch.index, chunk, self._number_of_type[entity_type])
        if num_local:
            # The key holds the range's start: equal on a machine's trainers, different between machines.
            local_key = combine(_LOCAL_KEY, *key, first)
            if entity_type in self._local:
                kinds.append(first + self._local[entity_type].draw(local_key, num_local))
            else:
                kinds.append(first + below(local_key, num_local, end - first))
        if self._num_in_batch:
            # Never empty: negatives of a type are drawn only for a chunk with a group of that type.
            present = present_entities(entity_type, batch, chunk, self.pairs)
            kinds.append(present[below(combine(_IN_BATCH_KEY, *key), self._num_in_batch, len(present))])
        return np.concatenate(kinds) if len(kinds) > 1 else kinds[0]

    def _local_weights(self, weights: Mapping[str, Ids]) -> dict[str, Ids]:
        """Return the weights of this machine's entities, in the order of their node ids."""
        local = {}
        for name, (first, end) in self.local_ranges.items():
            nodes = self.node_ids[name]
            here = np.flatnonzero((nodes >= first) & (nodes < end))
            local[name] = weights[name][here[np.argsort(nodes[here])]]
        return local


def present_entities(entity_type: str, batch: EdgeBatch, chunk: int, pairs: Sequence[tuple[str, str]]) -> Ids:
    """Return the entities of a type in the positives of a chunk, once for each time that they occur."""
    found = []
    for group in batch.groups:
        if group.chunk == chunk:
            lhs, rhs = pairs[group.pair]
            found += [batch.heads[group.start : group.end]] if lhs == entity_type else []
            found += [batch.tails[group.start : group.end]] if rhs == entity_type else []
    return np.concatenate(found)


class AllNegatives(MixedNegatives):
    """Every entity of the type, in the order of original ids; PyTorch-BigGraph's ``all_negs``.

    Of the arguments of :class:`MixedNegatives` only ``node_ids`` matters.
    """

    def __post_init__(self) -> None:
        """Nothing is drawn."""

    def sample(self, entity_type: str, batch: EdgeBatch, chunk: int) -> Ids:
        """Return the node ids (N,) of all entities of a type."""
        return self.node_ids[entity_type]
