"""Quality of a data set: repeated triples, leaks from train into valid and test, unseen names, degrees.

A triple is alone if its pair of entities occurs once, in either direction: it shares nothing with others.
Counters by a hash of the pair find most of these triples. What joins the other pairs is found by sorts and
binary searches of 64-bit keys, about 100 bytes for each triple. Triples of one pair, in either direction, are
of one bucket by another hash; as many buckets as there are threads are measured at a time. Memory is that of
these buckets, of the counters (up to 4 bytes a triple) and of 12 to 24 bytes for each entity. The figures
depend neither on the counters nor on the number of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.kernels.hashing import split_mix
from dglkge.kernels.triple_rows import count_and_join, count_pairs, find_roots, occurs_again

NEAR_SHARE = 0.8
"""Two relations are near-inverses or near-duplicates from this share of their triples on."""

MIN_OVERLAP = 2
"""Triples that two relations must share: one triple each says nothing about the relations."""

MAX_PAIRS = 100
"""Pairs of relations that the report names."""

NUM_HUBS = 10
MAX_EXAMPLES = 10

_COMBINATIONS_AT_A_TIME = 1 << 22
_ROWS_AT_A_TIME = 1 << 20

INDEXED_BYTES = 110
"""Memory of a bucket for each of its triples."""

BUCKET_BYTES = 1 << 29
"""Memory of a bucket by default."""

Counted = tuple[np.ndarray, np.ndarray]
"""Keys (n,), ascending, and the count (n,) of each."""

Overlaps = tuple[Counted, Counted, np.ndarray, np.ndarray]
"""Inverses and duplicates of relations, and their sizes: see :meth:`TripleIndex.overlaps`."""


@dataclass(frozen=True)
class NumberedTriples:
    """Triples as numbers, entities counted without regard to type.

    Attributes
    ----------
    splits : mapping of str to (heads, relations, tails)
        Three integer arrays (n,) for each split; train, valid and test are all there.
    num_entities, num_relations : int
        The number of entities and of relations.
    entity_name, relation_name : callable
        Name of an entity and of a relation by number.
    """

    splits: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    num_entities: int
    num_relations: int
    entity_name: Callable[[int], str]
    relation_name: Callable[[int], str]


@dataclass(frozen=True)
class RelationPairs:
    """Pairs of relations that hold (nearly) the same pairs of entities.

    Attributes
    ----------
    first, second : (n,) int64
        The relations; equal where a relation is symmetric.
    inverse : (n,) bool
        Whether one relation is the reverse of the other; else they are near-duplicates.
    overlap : (n,) int64
        Number of triples of the first whose counterpart the second has.
    num_first, num_second : (n,) int64
        Number of distinct triples of each; of an inverse those from an entity to itself are left out.
    """

    first: np.ndarray
    second: np.ndarray
    inverse: np.ndarray
    overlap: np.ndarray
    num_first: np.ndarray
    num_second: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """The overlap as a share of the larger relation, (n,) float64."""
        return self.overlap / np.maximum(self.num_first, self.num_second)


@dataclass(frozen=True)
class Leaks:
    """Triples of valid or test that train gives away: a bool for each triple.

    Attributes
    ----------
    in_train : (n,) bool
        The triple itself stands in train.
    reverse_in_train : (n,) bool
        Train has (tail, any relation, head).
    other_relation_in_train : (n,) bool
        Train has (head, another relation, tail).
    implied : (n,) bool
        Train has the reverse under a near-inverse or symmetric relation, or the same pair of entities under a
        near-duplicate.
    """

    in_train: np.ndarray
    reverse_in_train: np.ndarray
    other_relation_in_train: np.ndarray
    implied: np.ndarray


class TripleIndex:
    """All splits, indexed by the pair of entities that a triple joins.

    A pair of entities has a rank among all pairs that occur. A triple is one 64-bit code: rank times the
    number of relations, plus the relation.

    Parameters
    ----------
    triples : NumberedTriples
        All splits.
    """

    def __init__(self, triples: NumberedTriples) -> None:
        self.triples = triples
        # Two 31-bit numbers fit into one key; with a relation they may not, therefore the ranks. Converted
        # first: numpy 1 multiplies 32-bit arrays and a scalar in 32 bits.
        keys = np.concatenate(
            [heads.astype(np.int64) * triples.num_entities + tails for heads, _, tails in self._splits()]
        )
        self._pairs, ranks = np.unique(keys, return_inverse=True)
        del keys
        self.codes: dict[str, np.ndarray] = {}
        start = 0
        for split, (_, relations, _) in zip(SPLITS, self._splits()):
            end = start + len(relations)
            self.codes[split] = ranks[start:end] * triples.num_relations + relations
            start = end

    def _splits(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return [self.triples.splits[split] for split in SPLITS]

    def ranks(self, codes: np.ndarray) -> np.ndarray:
        """Return the rank of the pair of entities of each code."""
        return codes // self.triples.num_relations

    def relations(self, codes: np.ndarray) -> np.ndarray:
        """Return the relation of each code."""
        return codes % self.triples.num_relations

    @cached_property
    def reverse(self) -> np.ndarray:
        """Rank of each pair's reverse (tail, head), -1 where it does not occur; (num_pairs,) int64."""
        heads, tails = np.divmod(self._pairs, self.triples.num_entities)
        reverse = np.where(heads == tails, np.arange(len(heads)), -1)
        # Only the half with head < tail is searched, in ascending order: random access to the array is slow.
        lower = np.flatnonzero(heads < tails)
        wanted = tails[lower] * self.triples.num_entities + heads[lower]
        order = np.argsort(wanted)
        lower, wanted = lower[order], wanted[order]
        places, found = find_sorted(self._pairs, wanted)
        reverse[lower[found]] = places[found]
        reverse[places[found]] = lower[found]
        return reverse

    @cached_property
    def train(self) -> np.ndarray:
        """Distinct codes of train, ascending."""
        return sorted_distinct(self.codes[TRAIN])

    @cached_property
    def num_in_train(self) -> np.ndarray:
        """Number of relations by which train joins each pair of entities, (num_pairs,) int64."""
        return np.bincount(self.ranks(self.train), minlength=len(self._pairs))

    def overlaps(self) -> Overlaps:
        """Count the triples that each two relations share.

        Returns
        -------
        inverses, duplicates : two (keys, counts)
            As of :func:`_count_combinations`; of a symmetric relation a triple and its reverse count once.
        sizes_without_loops, sizes : two (num_relations,) int64
            Distinct triples of each relation.
        """
        # Triples of all splits: in train alone, an inverse loses the triples held out of either relation.
        codes = sorted_distinct(np.concatenate([self.codes[split] for split in SPLITS]))
        num_relations = self.triples.num_relations
        ranks, relations = self.ranks(codes), self.relations(codes)
        counts = np.bincount(ranks, minlength=len(self._pairs))
        ends = np.cumsum(counts)
        reverse = self.reverse[ranks]
        loops = reverse == ranks
        # Near-duplicates: each code with the later ones of the same pair of entities.
        later = np.arange(1, len(codes) + 1)
        rows = np.flatnonzero(later < ends[ranks])
        duplicates = _count_combinations(
            relations, rows, later[rows], ends[ranks[rows]] - later[rows], num_relations
        )
        # Near-inverses: each pair of entities with head < tail (its rank is the smaller) with its reverse.
        rows = np.flatnonzero(reverse > ranks)
        opposite = reverse[rows]
        inverses = _count_combinations(
            relations, rows, (ends - counts)[opposite], counts[opposite], num_relations
        )
        sizes = np.bincount(relations, minlength=num_relations)
        sizes_without_loops = np.bincount(relations[~loops], minlength=num_relations)
        return inverses, duplicates, sizes_without_loops, sizes

    def leaks(self, split: str, pairs: RelationPairs) -> Leaks:
        """Return the triples of a split that train gives away.

        Parameters
        ----------
        split : str
            ``"valid"`` or ``"test"``.
        pairs : RelationPairs
            Near-inverses and near-duplicates.
        """
        codes = self.codes[split]
        in_train = contains(self.train, codes)
        ranks = self.ranks(codes)
        reverse = self.reverse[ranks]
        other = self.num_in_train[ranks] > in_train
        # The reverse of a triple from an entity to itself is the triple, which does not count.
        opposite = np.where(reverse == ranks, other, (reverse >= 0) & (self.num_in_train[reverse] > 0))
        return Leaks(in_train, opposite, other, self._implied(codes, ranks, reverse, pairs))

    def _implied(
        self, codes: np.ndarray, ranks: np.ndarray, reverse: np.ndarray, pairs: RelationPairs
    ) -> np.ndarray:
        """Return whether train has the counterpart of each triple by one of the pairs of relations."""
        distinct = pairs.first != pairs.second
        relation = np.concatenate([pairs.first, pairs.second[distinct]])
        order = np.argsort(relation, kind="stable")
        partner = np.concatenate([pairs.second, pairs.first[distinct]])[order]
        inverse = np.concatenate([pairs.inverse, pairs.inverse[distinct]])[order]
        counts = np.bincount(relation, minlength=self.triples.num_relations)
        mine = self.relations(codes)
        implied = np.zeros(len(codes), dtype=bool)
        for rows, places in _combinations(
            np.arange(len(codes)), (np.cumsum(counts) - counts)[mine], counts[mine]
        ):
            rank = np.where(inverse[places], reverse[rows], ranks[rows])
            counterpart = rank * self.triples.num_relations + partner[places]
            hit = (rank >= 0) & (counterpart != codes[rows]) & contains(self.train, counterpart)
            implied[rows[hit]] = True
        return implied


class _PairTotals:
    """Triples that relations share, summed over buckets."""

    def __init__(self, num_relations: int) -> None:
        self._num_relations = num_relations
        nothing = np.zeros(0, np.int64)
        self._overlaps = [(nothing, nothing), (nothing, nothing)]
        self._sizes = np.zeros((2, num_relations), np.int64)

    def add(self, overlaps: Overlaps) -> None:
        """Add the triples of a bucket: what :meth:`TripleIndex.overlaps` has found."""
        inverses, duplicates, without_loops, sizes = overlaps
        for kind, found in enumerate((inverses, duplicates)):
            self._overlaps[kind] = _sum_by_key(self._overlaps[kind], found)
        self._sizes += [without_loops, sizes]

    def add_alone(self, triples: NumberedTriples, again: Mapping[str, np.ndarray]) -> np.ndarray:
        """Add the triples that share their pair of entities with none.

        Returns
        -------
        (num_relations,) int64
            Number of them in train, of each relation.
        """
        uses = np.zeros(self._num_relations, np.int64)
        for split in SPLITS:
            for start, (heads, relations, tails) in _pieces(triples.splits[split]):
                alone = ~again[split][start : start + len(heads)]
                found = np.bincount(relations[alone], minlength=self._num_relations)
                loops = np.bincount(relations[alone & (heads == tails)], minlength=self._num_relations)
                self._sizes += [found - loops, found]
                if split == TRAIN:
                    uses += found
        return uses

    def near_pairs(self) -> RelationPairs:
        """Find relations that are near-inverses or near-duplicates of each other, largest overlap first."""
        found = []
        for is_inverse, (keys, overlap), size in zip((True, False), self._overlaps, self._sizes):
            first, second = np.divmod(keys, self._num_relations)
            # A symmetric relation was counted once for a triple and its reverse: both are its triples.
            overlap = np.where(first == second, 2 * overlap, overlap)
            found.append(
                RelationPairs(
                    first, second, np.full(len(keys), is_inverse), overlap, size[first], size[second]
                )
            )
        columns = [np.concatenate(parts) for parts in zip(*(vars(pairs).values() for pairs in found))]
        pairs = RelationPairs(*columns)
        near = np.flatnonzero((pairs.share >= NEAR_SHARE) & (pairs.overlap >= MIN_OVERLAP))
        order = near[np.argsort(-pairs.overlap[near], kind="stable")]
        return RelationPairs(*(column[order] for column in columns))


def _sum_by_key(one: Counted, other: Counted) -> Counted:
    """Add counts of equal keys; keys ascend."""
    keys, inverse = np.unique(np.concatenate([one[0], other[0]]), return_inverse=True)
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, inverse, np.concatenate([one[1], other[1]]))
    return keys, total


def sorted_distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct numbers of an array in ascending order."""
    # numpy.unique without its further results hashes since numpy 2.3: 20 times as slow on random 64-bit keys.
    values = np.sort(values)
    new = np.ones(len(values), dtype=bool)
    new[1:] = values[1:] != values[:-1]
    return values[new]


def find_sorted(values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Look up numbers in an ascending array.

    Returns
    -------
    places : (n,) int64
        Place of each wanted number; of one that is absent, any place.
    found : (n,) bool
    """
    if len(values) == 0:
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=bool)
    places = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return places, values[places] == wanted


def contains(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return whether each wanted number is in an ascending array, (n,) bool."""
    return find_sorted(values, wanted)[1]


def _combinations(
    rows: np.ndarray, first: np.ndarray, num: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each row with each of its places first, first + 1, ..., first + num - 1, in bounded pieces."""
    ends = np.cumsum(num)
    begin = 0
    while begin < len(rows):
        done = ends[begin - 1] if begin else 0
        # At least one row: a row has no more places than there are relations.
        end = max(int(np.searchsorted(ends, done + _COMBINATIONS_AT_A_TIME, side="right")), begin + 1)
        piece = slice(begin, end)
        place = np.arange(ends[end - 1] - done) - np.repeat(ends[piece] - num[piece] - done, num[piece])
        yield np.repeat(rows[piece], num[piece]), place + np.repeat(first[piece], num[piece])
        begin = end


def _count_combinations(
    relations: np.ndarray, rows: np.ndarray, first: np.ndarray, num: np.ndarray, num_relations: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count pairs of relations over the combinations of rows and places.

    Returns
    -------
    keys : (n,) int64
        The smaller relation times the number of relations, plus the larger one; ascending.
    counts : (n,) int64
    """
    keys, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for mine, places in _combinations(rows, first, num):
        one, other = relations[mine], relations[places]
        key = np.minimum(one, other) * num_relations + np.maximum(one, other)
        piece, count = np.unique(key, return_counts=True)
        keys, counts = _sum_by_key((keys, counts), (piece, count))
    return keys, counts


@dataclass(frozen=True)
class Quality:
    """What was measured.

    Attributes
    ----------
    report : dict
        The figures, as JSON has them; docs/data-quality.md explains each.
    leaks : dict of str to Leaks
        Of valid and test, triple by triple.
    """

    report: dict[str, Any]
    leaks: dict[str, Leaks]


def measure_quality(
    triples: NumberedTriples, bucket_bytes: int = BUCKET_BYTES, num_workers: int = 1
) -> Quality:
    """Measure the quality of a data set.

    Parameters
    ----------
    triples : NumberedTriples
        All splits.
    bucket_bytes : int
        Memory for the triples that are sorted at a time.
    num_workers : int
        Number of threads.
    """
    counts = {split: len(triples.splits[split][0]) for split in SPLITS}
    again = _again(triples, bucket_bytes, num_workers)
    num_again = sum(int(mask.sum()) for mask in again.values())
    # The buckets of a round are measured side by side, in the memory of one.
    num_rounds = max(1, -(-INDEXED_BYTES * num_again // bucket_bytes))
    per_round = num_workers if num_again > _ROWS_AT_A_TIME else 1
    totals = _PairTotals(triples.num_relations)
    duplicates = dict.fromkeys(SPLITS, 0)
    in_valid = np.zeros(counts[TEST], bool)
    with ThreadPoolExecutor(num_workers) as threads:
        unseen = threads.submit(count_unseen, triples.splits, triples.num_entities, triples.num_relations)
        degrees = threads.submit(_degrees_and_components, triples)
        buckets = _Buckets(triples, again, num_rounds, per_round, threads)
        uses = totals.add_alone(triples, again)
        for rows, index, overlaps in buckets:
            totals.add(overlaps)
            for split, codes in index.codes.items():
                duplicates[split] += len(codes) - len(sorted_distinct(codes))
            uses += np.bincount(index.relations(index.train), minlength=len(uses))
            in_valid[rows[TEST]] = contains(sorted_distinct(index.codes[VALID]), index.codes[TEST])
        pairs = totals.near_pairs()
        leaks = {split: Leaks(*np.zeros((4, counts[split]), bool)) for split in (VALID, TEST)}
        # Which relations are near is known after the first pass only.
        for rows, index, _ in buckets:
            for split, found in leaks.items():
                for name, mask in vars(index.leaks(split, pairs)).items():
                    getattr(found, name)[rows[split]] = mask
    shared = {
        split: {name: _share(mask) for name, mask in vars(found).items()} for split, found in leaks.items()
    }
    shared[TEST]["in_valid"] = _share(in_valid)
    report = {
        "triples": counts,
        "duplicates": duplicates,
        "leaks": shared,
        "relation_pairs": _named_pairs(pairs, triples.relation_name),
        "unseen": unseen.result(),
        "single_triple_relations": _single_triples(triples, uses),
        **degrees.result(),
    }
    return Quality(report, leaks)


def _share(mask: np.ndarray) -> dict[str, Any]:
    return {"triples": int(mask.sum()), "share": float(mask.mean()) if len(mask) else 0.0}


def _named_pairs(pairs: RelationPairs, name: Callable[[int], str]) -> dict[str, Any]:
    kinds = np.where(
        pairs.inverse, np.where(pairs.first == pairs.second, "symmetric", "inverse"), "duplicate"
    )
    figures = (pairs.first, pairs.second, pairs.num_first, pairs.num_second, pairs.overlap, pairs.share)
    columns = (kinds, *figures)
    rows = zip(*(column[:MAX_PAIRS].tolist() for column in columns))
    return {
        "least_share": NEAR_SHARE,
        "count": len(pairs.first),
        "largest": [
            {
                "kind": kind,
                "relations": [name(first), name(second)],
                "triples": [num_first, num_second],
                "overlap": overlap,
                "share": share,
            }
            for kind, first, second, num_first, num_second, overlap, share in rows
        ],
    }


def count_unseen(
    splits: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]], num_entities: int, num_relations: int
) -> dict[str, dict[str, int]]:
    """Count entities and relations that occur in valid or test but not in train.

    Parameters
    ----------
    splits : mapping of str to (heads, relations, tails)
        As in :class:`NumberedTriples`.
    num_entities, num_relations : int
        Number of entities and of relations.

    Returns
    -------
    dict of str to dict
        For each split but train, and for both together as ``valid_and_test``: ``entities`` and ``relations``
        (distinct ones), ``triples`` (those with at least one).
    """
    new_entity = np.ones(num_entities, dtype=bool)
    new_relation = np.ones(num_relations, dtype=bool)
    for _, (heads, relations, tails) in _pieces(splits[TRAIN]):
        new_entity[heads] = new_entity[tails] = False
        new_relation[relations] = False
    counts = {}
    both = np.zeros(num_entities, dtype=bool), np.zeros(num_relations, dtype=bool)
    num_triples = 0
    for split in (VALID, TEST):
        heads, relations, tails = splits[split]
        in_entities = np.zeros(num_entities, dtype=bool)
        in_entities[heads] = in_entities[tails] = True
        in_relations = np.zeros(num_relations, dtype=bool)
        in_relations[relations] = True
        in_entities &= new_entity
        in_relations &= new_relation
        touched = int((new_entity[heads] | new_entity[tails] | new_relation[relations]).sum())
        counts[split] = _count(in_entities, in_relations, touched)
        both = both[0] | in_entities, both[1] | in_relations
        num_triples += touched
    counts["valid_and_test"] = _count(*both, num_triples)
    return counts


def _count(entities: np.ndarray, relations: np.ndarray, num_triples: int) -> dict[str, int]:
    return {"entities": int(entities.sum()), "relations": int(relations.sum()), "triples": num_triples}


Triples = tuple[np.ndarray, np.ndarray, np.ndarray]


def _again(triples: NumberedTriples, max_bytes: int, num_workers: int) -> dict[str, np.ndarray]:
    """Return for each triple of each split whether its pair of entities may occur again, (n,) bool."""
    num_triples = sum(len(heads) for heads, _, _ in triples.splits.values())
    # Two to four bytes of four counters each: 6 to 12 % of the triples alone meet another's counter.
    num_bytes = 1 << max(6, (2 * num_triples).bit_length())
    while num_bytes > max(max_bytes, 64):
        num_bytes //= 2
    counters = np.zeros(num_bytes, np.uint8)
    bounds = np.linspace(0, num_bytes, num_workers + 1).astype(np.int64).tolist()

    def count(part: int) -> None:
        for split in SPLITS:
            for _, (heads, _, tails) in _pieces(triples.splits[split]):
                ends = heads.astype(np.int64), tails.astype(np.int64)
                count_pairs(*ends, bounds[part], bounds[part + 1], counters)

    def look(piece: tuple[int, Triples]) -> np.ndarray:
        heads, _, tails = piece[1]
        again: np.ndarray = occurs_again(heads.astype(np.int64), tails.astype(np.int64), counters)
        return again

    again = {}
    with ThreadPoolExecutor(num_workers) as threads:
        # Each thread counts in a range of its own: two could not change one byte at a time.
        list(threads.map(count, range(num_workers)))
        for split in SPLITS:
            masks = threads.map(look, _pieces(triples.splits[split]))
            again[split] = np.concatenate([np.zeros(0, bool), *masks])
    return again


class _Buckets:
    """The triples whose pair of entities may occur again, in buckets of whole pairs.

    Iterating yields, for each bucket, the rows of each split, their index and its overlaps. What is of one
    round is indexed at the same time; a single round is kept, and not indexed again.
    """

    def __init__(
        self,
        triples: NumberedTriples,
        again: Mapping[str, np.ndarray],
        num_rounds: int,
        per_round: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._triples, self._again = triples, again
        self._num_buckets, self._per_round = num_rounds * per_round, per_round
        self._threads = threads
        self._kept: list[tuple[dict[str, np.ndarray], TripleIndex, Overlaps]] = []

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], TripleIndex, Overlaps]]:
        if self._kept:
            yield from self._kept
            return
        for first in range(0, self._num_buckets, self._per_round):
            found = list(self._threads.map(self._index, range(first, first + self._per_round)))
            if self._num_buckets == self._per_round:
                self._kept = found
            yield from found
            del found  # before the next round takes the same memory

    def _index(self, bucket: int) -> tuple[dict[str, np.ndarray], TripleIndex, Overlaps]:
        rows: dict[str, np.ndarray] = {}
        splits: dict[str, Triples] = {}
        for split in SPLITS:
            places, columns = [np.zeros(0, np.int64)], [np.zeros((3, 0), np.int64)]
            for start, (heads, relations, tails) in _pieces(self._triples.splits[split]):
                mine = np.flatnonzero(self._again[split][start : start + len(heads)])
                if self._num_buckets > 1:
                    lower, upper = np.minimum(heads, tails)[mine], np.maximum(heads, tails)[mine]
                    # Not the bits that the counters are chosen by: those of a bucket would be few.
                    mixed = split_mix(upper.astype(np.uint64) << np.uint64(32) | lower.astype(np.uint64))
                    mine = mine[mixed % np.uint64(self._num_buckets) == bucket]
                places.append(mine + start)
                columns.append(np.stack([heads[mine], relations[mine], tails[mine]]))
            rows[split] = np.concatenate(places)
            heads, relations, tails = np.concatenate(columns, axis=1)
            splits[split] = (heads, relations, tails)
        index = TripleIndex(replace(self._triples, splits=splits))
        return rows, index, index.overlaps()


def _pieces(columns: Triples) -> Iterator[tuple[int, Triples]]:
    """Yield the first row, and heads, relations and tails, a bounded number at a time."""
    heads, relations, tails = columns
    for start in range(0, len(heads), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        yield start, (heads[rows], relations[rows], tails[rows])


def _single_triples(triples: NumberedTriples, uses: np.ndarray) -> dict[str, Any]:
    """Return the relations with one distinct triple in train, of which ``uses`` has the numbers."""
    single = np.flatnonzero(uses == 1)
    return {
        "count": len(single),
        "examples": [triples.relation_name(id_) for id_ in single[:MAX_EXAMPLES].tolist()],
    }


def _degrees_and_components(triples: NumberedTriples) -> dict[str, Any]:
    """Return figures of the number of training triples of each entity, and of the connected components.

    An entity without a training triple is in no component.
    """
    degrees = np.zeros(triples.num_entities, np.int64)
    parents = np.arange(triples.num_entities, dtype=np.int32)
    for _, (heads, _, tails) in _pieces(triples.splits[TRAIN]):
        count_and_join(heads.astype(np.int64), tails.astype(np.int64), degrees, parents)
    find_roots(parents)
    sizes = np.bincount(parents[degrees > 0])
    sizes = sizes[sizes > 0]
    most = int(sizes.max(initial=0))
    largest = np.argsort(-degrees, kind="stable")[:NUM_HUBS].tolist()
    return {
        "degrees": {
            "min": int(degrees.min()),
            "median": float(np.median(degrees)),
            "mean": float(degrees.mean()),
            "max": int(degrees.max()),
            "entities_of_degree_0": int((degrees == 0).sum()),
            "entities_of_degree_1": int((degrees == 1).sum()),
        },
        "hubs": [{"entity": triples.entity_name(id_), "degree": int(degrees[id_])} for id_ in largest],
        "components": {
            "count": len(sizes),
            "largest": most,
            "largest_share": most / max(int((degrees > 0).sum()), 1),
        },
    }
