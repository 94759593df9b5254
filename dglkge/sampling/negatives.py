"""Negatives of a chunk of positives: from the whole graph, from the own partition, from the batch itself.

Entities are drawn uniformly or in proportion to a power of their degrees (Mikolov et al. 2013 take 3/4).
Known answers among them (``negatives.mask_known``) do not count as negatives: those of the training triples
only, as a true triple of another split is not known while a model is trained. They are found by original ids,
so nothing depends on how the graph was partitioned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dglkge.data.known_triples import KnownTriples
from dglkge.data.sorted_arrays import equal_pairs
from dglkge.errors import InputError
from dglkge.kernels.hashing import below, combine
from dglkge.kernels.losses import ignore_known
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.typing import RELATION, Ids, Mask, Side


def split_count(num_negatives: int, shares: Sequence[float]) -> list[int]:
    """Split a number of negatives by shares that sum to 1, by largest remainders (Hamilton's method).

    Examples
    --------
    >>> split_count(10, (0.25, 0.5, 0.25))
    [3, 5, 2]
    """
    if min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        allowed = "global_share, local_share and in_batch_share are at least 0 and sum to 1"
        raise InputError(f"the shares of negatives {tuple(shares)} are not allowed: {allowed}")
    exact = [num_negatives * share for share in shares]
    # Rounding errors: 100 * 0.29 is 28.999999999999996, which means 29.
    counts = [math.floor(value + 1e-6) for value in exact]
    # Largest remainder first; sorted() is stable, so ties go to the earlier kind on every process.
    by_remainder = sorted(range(len(shares)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: num_negatives - sum(counts)]:
        counts[place] += 1
    return counts


TOTAL_BITS = 52
"""The weights of an entity type sum to about 2**52: their sums fit into int64."""

TRIPLES_A_BLOCK = 1 << 20
"""Triples that are counted at a time, or as many as there are entities."""


def count_degrees(
    triples: npt.NDArray[np.integer], types: Sequence[tuple[str, str]], num_entities: Mapping[str, int]
) -> dict[str, Ids]:
    """Count the triples (T, 3) of each entity, as head and as tail; by original ids (n,) of each type.

    ``types`` are those of the heads and tails of each relation.

    Examples
    --------
    >>> count_degrees(np.array([[0, 0, 1], [2, 0, 1]]), [("word", "word")], {"word": 4})
    {'word': array([1, 2, 1, 0])}
    """
    degrees = {name: np.zeros(num, np.int64) for name, num in num_entities.items()}
    number = {name: i for i, name in enumerate(num_entities)}
    type_of = np.array([[number[lhs], number[rhs]] for lhs, rhs in types], np.int64).reshape(-1, 2)
    # Each count makes an array of all entities: blocks of fewer triples would take longer.
    block = max(TRIPLES_A_BLOCK, *num_entities.values())
    for start in range(0, len(triples), block):
        heads, relations, tails = np.asarray(triples[start : start + block]).T
        for side, entities in enumerate((heads, tails)):
            types_here = type_of[relations, side]
            for name, i in number.items():
                members = entities if len(number) == 1 else entities[types_here == i]
                degrees[name] += np.bincount(members, minlength=num_entities[name])
    return degrees


def degree_weights(degrees: Ids, power: float) -> Ids:
    """Return whole numbers (n,) in proportion to degree ** power; 0 for entities without triples.

    Real numbers with a mean of about 2**52 / n, rounded, at least 1. Whole numbers make sums exact, so all
    machines draw the same.
    """
    powers = np.zeros(len(degrees))
    drawn = degrees > 0
    if not drawn.any():
        return powers.astype(np.int64)
    # Relative to the greatest degree: the power of a degree alone may overflow.
    powers[drawn] = (degrees[drawn] / degrees.max()) ** power
    # A power of two: the last bits of the sum, which machines may add in another order, do not reach weights.
    scale = 2.0 ** math.floor(TOTAL_BITS - math.log2(powers.sum()))
    return np.where(drawn, np.maximum(np.rint(powers * scale), 1), 0).astype(np.int64)


def draw(key: int, count: int, end: int, sums: Ids | None = None) -> Ids:
    """Return numbers (count,) in [0, end) under a key; see :func:`dglkge.kernels.hashing.below`.

    With the cumulative sums (end,) int64 of weights of at least 0, with a positive sum below 2**63, they are
    drawn in proportion to these, exactly: the inverse of their cumulative distribution.

    Examples
    --------
    >>> set(draw(7, 100, 4, np.cumsum([0, 3, 0, 1])).tolist())
    {1, 3}
    """
    if sums is None:
        return below(key, count, end)
    # Number i owns the places [sums[i - 1], sums[i]); numbers of weight 0 own none.
    return np.searchsorted(sums, below(key, count, int(sums[-1])), side="right").astype(np.int64)


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
        self._sums = _sums_of(self.weights)

    def key_before_chunk(self, epoch: int, batch: int) -> tuple[int, ...]:
        """Return what the key of a draw begins with, before chunk and number of the entity type."""
        return _NEGATIVES_KEY, self.seed, epoch, batch

    def number_of_type(self, entity_type: str) -> int:
        """Return the number of an entity type, the last part of the key of a draw."""
        return list(self.node_ids).index(entity_type)

    def sample(self, entity_type: str, epoch: int, batch: int, chunk: int, number: int | None = None) -> Ids:
        """Return the node ids (N,) of a chunk's negatives of one entity type, or another number of them."""
        number = self.num_negatives if number is None else number
        key = combine(*self.key_before_chunk(epoch, batch), chunk, self.number_of_type(entity_type))
        table = self.node_ids[entity_type]
        return table[draw(key, number, len(table), self._sums.get(entity_type))]


def _sums_of(weights: Mapping[str, Ids] | None) -> dict[str, Ids]:
    """Return the cumulative weights of the entity types that have weights above 0."""
    return {name: np.cumsum(values) for name, values in (weights or {}).items() if values.any()}


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
        self._uniform = UniformNegatives(self._num_global, self.node_ids, self.seed, self.weights)
        # Weights of this machine's entities, in the order of their node ids.
        weights = (self.weights or {}) if self._num_local else {}
        here = {}
        for name, values in weights.items():
            nodes, (first, end) = self.node_ids[name], self.local_ranges[name]
            places = np.flatnonzero((nodes >= first) & (nodes < end))
            here[name] = values[places[np.argsort(nodes[places])]]
        self._local_sums = _sums_of(here)

    @property
    def all_uniform(self) -> UniformNegatives | None:
        """The sampler of all negatives, where all are uniform entities of the whole graph."""
        is_global = self.weights is None and self._num_global == self.num_negatives
        return self._uniform if is_global else None

    def sample(self, entity_type: str, batch: EdgeBatch, chunk: int) -> Ids:
        """Return the node ids (N,) of the negatives of one entity type for a chunk that the batch has."""
        first, end = self.local_ranges[entity_type]
        # The type has no entity on this machine, or all of them: the local share is drawn globally.
        num_local = 0 if end - first in (0, len(self.node_ids[entity_type])) else self._num_local
        num_uniform = self._num_global + self._num_local - num_local
        kinds = [self._uniform.sample(entity_type, batch.epoch, batch.index, chunk, num_uniform)]
        key = (self.seed, batch.epoch, batch.index, chunk, self._uniform.number_of_type(entity_type))
        if num_local:
            # The key holds the range's start: equal on a machine's trainers, different between machines.
            local_key, sums = combine(_LOCAL_KEY, *key, first), self._local_sums.get(entity_type)
            kinds.append(first + draw(local_key, num_local, end - first, sums))
        if self._num_in_batch:
            # Never empty: negatives of a type are drawn only for a chunk with a group of that type.
            present = present_entities(entity_type, batch, chunk, self.pairs)
            kinds.append(present[below(combine(_IN_BATCH_KEY, *key), self._num_in_batch, len(present))])
        return np.concatenate(kinds) if len(kinds) > 1 else kinds[0]


def present_entities(entity_type: str, batch: EdgeBatch, chunk: int, pairs: Sequence[tuple[str, str]]) -> Ids:
    """Return the entities of a type in the positives of a chunk, once for each time that they occur."""
    occurrences = []
    for group in batch.groups:
        if group.chunk == chunk:
            lhs, rhs = pairs[group.pair]
            occurrences += [batch.heads[group.start : group.end]] if lhs == entity_type else []
            occurrences += [batch.tails[group.start : group.end]] if rhs == entity_type else []
    return np.concatenate(occurrences)


class AllNegatives(MixedNegatives):
    """Every entity of the type, in the order of original ids; PyTorch-BigGraph's ``all_negs``.

    Of the arguments of :class:`MixedNegatives` only ``node_ids`` matters.
    """

    def __post_init__(self) -> None:
        """Nothing is drawn."""

    def sample(self, entity_type: str, batch: EdgeBatch, chunk: int) -> Ids:
        """Return the node ids (N,) of all entities of a type."""
        return self.node_ids[entity_type]


@dataclass(frozen=True)
class KnownNegatives:
    """Known answers to queries (B,), and negatives (N,) that they are looked up among.

    Attributes
    ----------
    first, count : (B,) int64
        The answers to query i are ``answers[first[i] : first[i] + count[i]]``.
    answers, negative_ids : (A,) uint32 or int64, and (N,) int64
        Original ids.
    is_own_known : (B,) bool
        Whether the query's own entity is a known answer, if it has the type of the answers.
    """

    first: Ids
    count: Ids
    answers: npt.NDArray[np.integer]
    negative_ids: Ids
    is_own_known: Mask

    def overwrite(self, scores: np.ndarray, ignored: Any, slots: npt.NDArray[np.int32] | None = None) -> None:
        """Write a value in place of the scores, or a mask, (B, N) of known answers.

        ``slots`` (H + N,) is room as in :func:`dglkge.kernels.losses.ignore_known`.
        """
        num = len(self.negative_ids)
        if slots is None:
            slots = np.empty((2 << num.bit_length()) + num, np.int32)
        ignore_known((self.first, self.count, self.answers), self.negative_ids, ignored, slots, scores)

    def ignore(self, mask: Mask, plainly: bool) -> None:
        """Set the places (B, N) of known answers to True; ``plainly`` without compiled loops."""
        if not plainly:
            self.overwrite(mask, True)
            return
        for row, (first, count) in enumerate(zip(self.first, self.count)):
            _, columns = equal_pairs(self.answers[first : first + count].astype(np.int64), self.negative_ids)
            mask[row, columns] = True


@dataclass
class KnownAnswers:
    """Finds the known answers among the training triples to the queries of batches.

    ``original_ids`` has that of every node id, of each entity type and of the relations.
    """

    known: KnownTriples
    original_ids: Mapping[str, Ids]

    def among(
        self, side: Side, anchor_type: str, anchors: Ids, relations: Ids, answer_type: str, negative_ids: Ids
    ) -> KnownNegatives:
        """Return the known answers to queries (B,) for a missing side, to be looked up among negatives (N,).

        All by node ids.
        """
        entities = self.original_ids[anchor_type][anchors]
        relation_ids = self.original_ids[RELATION][relations]
        first, count, answers = self.known.runs(side, entities, relation_ids)
        # Entities are numbered by type: between two types an equal number is another entity, and such queries
        # have no entity of their own to score.
        is_own_known = self.known.contain(side, entities, relation_ids, entities)
        negative_ids = self.original_ids[answer_type][negative_ids]
        return KnownNegatives(first, count, answers, negative_ids, is_own_known)
