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
from functools import cached_property, partial, reduce
from threading import Lock
from typing import Any

import numpy as np

from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.data.sorted_arrays import contains, find_sorted, sorted_distinct
from dglkge.kernels.hashing import split_mix
from dglkge.kernels.triple_rows import count_and_join, count_pairs, find_roots, occurs_again
from dglkge.typing import Ids, Mask

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
_NOTHING: Counted = (np.zeros(0, np.int64), np.zeros(0, np.int64))

Triples = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Heads, relations and tails: three integer arrays (n,)."""

LEAKS = ("in_train", "reverse_in_train", "other_relation_in_train", "implied")
"""How train gives away a triple of valid or test: it has the triple itself; (tail, any relation, head);
(head, another relation, tail); the reverse under a near-inverse or symmetric relation, or the same pair of
entities under a near-duplicate."""

Leaks = dict[str, np.ndarray]
"""For each of :data:`LEAKS` a bool (n,) for each triple of a split."""

_FIGURES = ("is_duplicate", "first", "second", "overlap", "num_first", "num_second")
_PAIR = np.dtype([(name, np.int64) for name in _FIGURES])
"""A pair of relations that hold (nearly) the same pairs of entities: whether they are near-duplicates, else
near-inverses; the relations, equal where one is symmetric; triples of the first whose counterpart the second
has; distinct triples of each (of inverses without those from an entity to itself)."""


@dataclass(frozen=True)
class NumberedTriples:
    """Triples of train, valid and test as numbers, entities counted without regard to type."""

    splits: Mapping[str, Triples]
    num_entities: int
    num_relations: int
    entity_name: Callable[[int], str]
    relation_name: Callable[[int], str]


class TripleIndex:
    """All splits, indexed by the pair of entities that a triple joins.

    A pair of entities has a rank among all pairs that occur. A triple is one 64-bit code: rank times the
    number of relations, plus the relation.
    """

    def __init__(self, triples: NumberedTriples) -> None:
        self._num_relations, self._num_entities = triples.num_relations, triples.num_entities
        splits = {split: triples.splits[split] for split in SPLITS}
        # Two 31-bit numbers fit into one key; with a relation they may not, therefore the ranks. Converted
        # first: a 32-bit array times a Python integer stays 32-bit.
        keys = [heads.astype(np.int64) * self._num_entities + tails for heads, _, tails in splits.values()]
        self._pairs, ranks = np.unique(np.concatenate(keys), return_inverse=True)
        del keys
        ends = np.cumsum([len(heads) for heads, _, _ in splits.values()])
        self.codes = {
            split: split_ranks * self._num_relations + relations
            for (split, (_, relations, _)), split_ranks in zip(splits.items(), np.split(ranks, ends[:-1]))
        }

    @cached_property
    def reverse(self) -> np.ndarray:
        """Rank of each pair's reverse (tail, head), -1 where it does not occur; (num_pairs,) int64."""
        heads, tails = np.divmod(self._pairs, self._num_entities)
        reverse = np.where(heads == tails, np.arange(len(heads)), -1)
        # Only the half with head < tail is searched, in ascending order: random access to the array is slow.
        lower = np.flatnonzero(heads < tails)
        reversed_keys = tails[lower] * self._num_entities + heads[lower]
        order = np.argsort(reversed_keys)
        lower, reversed_keys = lower[order], reversed_keys[order]
        places, exists = find_sorted(self._pairs, reversed_keys)
        reverse[lower[exists]] = places[exists]
        reverse[places[exists]] = lower[exists]
        return reverse

    @cached_property
    def train(self) -> np.ndarray:
        """Distinct codes of train, ascending."""
        return sorted_distinct(self.codes[TRAIN])

    @cached_property
    def num_in_train(self) -> np.ndarray:
        """Number of relations by which train joins each pair of entities, (num_pairs,) int64."""
        return np.bincount(self.train // self._num_relations, minlength=len(self._pairs))

    def overlaps(self) -> tuple[Counted, Counted, np.ndarray]:
        """Count the triples that each two relations share.

        Returns
        -------
        inverses, duplicates : two (keys, counts)
            As of :func:`_count_combinations`; of a symmetric relation a triple and its reverse count once.
        sizes : (2, num_relations) int64
            Distinct triples of each relation: without those from an entity to itself, and all.
        """
        # Triples of all splits: in train alone, an inverse loses the triples held out of either relation.
        codes = sorted_distinct(np.concatenate(list(self.codes.values())))
        num_relations = self._num_relations
        ranks, relations = np.divmod(codes, num_relations)
        counts = np.bincount(ranks, minlength=len(self._pairs))
        ends = np.cumsum(counts)
        reverse = self.reverse[ranks]
        # Near-duplicates: each code with the later ones of the same pair of entities.
        later = np.arange(1, len(codes) + 1)
        rows = np.flatnonzero(later < ends[ranks])
        later = later[rows]
        duplicates = _count_combinations(relations, rows, later, ends[ranks[rows]] - later, num_relations)
        # Near-inverses: each pair of entities with head < tail (its rank is the smaller) with its reverse.
        rows = np.flatnonzero(reverse > ranks)
        first, count = (ends - counts)[reverse[rows]], counts[reverse[rows]]
        inverses = _count_combinations(relations, rows, first, count, num_relations)
        both = relations[reverse != ranks], relations
        return inverses, duplicates, np.array([np.bincount(ids, minlength=num_relations) for ids in both])

    def leaks(self, split: str, pairs: np.ndarray) -> Leaks:
        """Return the triples of a split that train gives away, with the near relations (n,) of _PAIR."""
        codes = self.codes[split]
        in_train = contains(self.train, codes)
        ranks = codes // self._num_relations
        reverse = self.reverse[ranks]
        other = self.num_in_train[ranks] > in_train
        # The reverse of a triple from an entity to itself is the triple, which does not count.
        opposite = np.where(reverse == ranks, other, (reverse >= 0) & (self.num_in_train[reverse] > 0))
        return dict(zip(LEAKS, (in_train, opposite, other, self._implied(codes, ranks, reverse, pairs))))

    def _implied(self, codes: Ids, ranks: Ids, reverse: Ids, pairs: np.ndarray) -> Mask:
        """Return whether train has the counterpart of each triple by one of the pairs of relations."""
        turned = pairs[pairs["first"] != pairs["second"]]
        relation = np.concatenate([pairs["first"], turned["second"]])
        order = np.argsort(relation, kind="stable")
        partner = np.concatenate([pairs["second"], turned["first"]])[order]
        duplicate = np.concatenate([pairs["is_duplicate"], turned["is_duplicate"]])[order]
        counts = np.bincount(relation, minlength=self._num_relations)
        mine = codes % self._num_relations
        implied = np.zeros(len(codes), dtype=bool)
        first = (np.cumsum(counts) - counts)[mine]
        for rows, places in _combinations(np.arange(len(codes)), first, counts[mine]):
            rank = np.where(duplicate[places], ranks[rows], reverse[rows])
            counterpart = rank * self._num_relations + partner[places]
            hit = (rank >= 0) & (counterpart != codes[rows]) & contains(self.train, counterpart)
            implied[rows[hit]] = True
        return implied


def _near_pairs(overlaps: list[Counted], sizes: np.ndarray) -> np.ndarray:
    """Return the near-inverses and near-duplicates (n,) of _PAIR, largest overlap first."""
    blocks = []
    for is_duplicate, (keys, overlap) in enumerate(overlaps):
        size = sizes[is_duplicate]
        first, second = np.divmod(keys, len(size))
        # A symmetric relation was counted once for a triple and its reverse: both are its triples.
        overlap = np.where(first == second, 2 * overlap, overlap)
        columns = np.full(len(keys), is_duplicate), first, second, overlap, size[first], size[second]
        blocks.append(np.rec.fromarrays(columns, _PAIR))
    pairs = np.concatenate(blocks)
    share = pairs["overlap"] / np.maximum(pairs["num_first"], pairs["num_second"])
    near = pairs[(share >= NEAR_SHARE) & (pairs["overlap"] >= MIN_OVERLAP)]
    return near[np.argsort(-near["overlap"], kind="stable")]


def _sum_by_key(first: Counted, second: Counted) -> Counted:
    """Add counts of equal keys; keys ascend."""
    keys, inverse = np.unique(np.concatenate([first[0], second[0]]), return_inverse=True)
    # Sums of doubles, exact for counts.
    return keys, np.bincount(inverse, np.concatenate([first[1], second[1]])).astype(np.int64)


def _combinations(rows: Ids, first: Ids, num: Ids) -> Iterator[tuple[Ids, Ids]]:
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


def _count_combinations(relations: Ids, rows: Ids, first: Ids, num: Ids, num_relations: int) -> Counted:
    """Count pairs of relations over the combinations of rows and places.

    A key is the smaller relation times the number of relations, plus the larger one.
    """
    pairs = ((relations[mine], relations[places]) for mine, places in _combinations(rows, first, num))
    keys = (np.minimum(*pair) * num_relations + np.maximum(*pair) for pair in pairs)
    counted = (np.unique(key, return_counts=True) for key in keys)
    return reduce(_sum_by_key, counted, _NOTHING)


@dataclass(frozen=True)
class Quality:
    """The figures, as JSON has them (see docs/data-quality.md), and the leaks of valid and test."""

    report: dict[str, Any]
    leaks: dict[str, Leaks]


def measure_quality(
    triples: NumberedTriples, bucket_bytes: int = BUCKET_BYTES, num_workers: int = 1
) -> Quality:
    """Measure the quality of a data set, with so much memory for the triples that are sorted at a time."""
    splits, num_relations = triples.splits, triples.num_relations
    again, sizes, uses = _again(triples, bucket_bytes, num_workers)
    num_again = int(sum(mask.sum() for mask in again.values()))
    # The buckets of a round are measured side by side, in the memory of one.
    num_rounds = max(1, -(-INDEXED_BYTES * num_again // bucket_bytes))
    per_round = num_workers if num_again > _ROWS_AT_A_TIME else 1
    overlaps = [_NOTHING] * 2
    duplicates = dict.fromkeys(SPLITS, 0)
    num_triples = {split: len(heads) for split, (heads, _, _) in splits.items()}
    in_valid = np.zeros(num_triples[TEST], bool)
    with ThreadPoolExecutor(num_workers) as threads:
        connected = threads.submit(_degrees_and_components, triples)
        buckets = partial(_buckets, triples, again, num_rounds, per_round, threads)
        # Those of a single round are kept, and not indexed again.
        kept = list(buckets()) if num_rounds == 1 else None
        for rows, index, (*counted, sizes_of_bucket) in kept or buckets():
            overlaps = [_sum_by_key(*both) for both in zip(overlaps, counted)]
            sizes += sizes_of_bucket
            for split, codes in index.codes.items():
                duplicates[split] += len(codes) - len(sorted_distinct(codes))
            uses += np.bincount(index.train % num_relations, minlength=num_relations)
            in_valid[rows[TEST]] = contains(sorted_distinct(index.codes[VALID]), index.codes[TEST])
        pairs = _near_pairs(overlaps, sizes)
        nums = {split: num_triples[split] for split in (VALID, TEST)}
        leaks = {split: {name: np.zeros(num, bool) for name in LEAKS} for split, num in nums.items()}
        # Which relations are near is known after the first pass only.
        for rows, index, _ in kept or buckets():
            for split, masks in leaks.items():
                for name, mask in index.leaks(split, pairs).items():
                    masks[name][rows[split]] = mask
    shares = {split: {name: _share(mask) for name, mask in masks.items()} for split, masks in leaks.items()}
    shares[TEST]["in_valid"] = _share(in_valid)
    # Relations with one distinct triple in train.
    single = np.flatnonzero(uses == 1)
    degrees, figures = connected.result()
    report = {
        "triples": num_triples,
        "duplicates": duplicates,
        "leaks": shares,
        "relation_pairs": {
            "least_share": NEAR_SHARE,
            "count": len(pairs),
            "largest": [_named_pair(pair, triples.relation_name) for pair in pairs[:MAX_PAIRS]],
        },
        "unseen": _count_unseen(triples, degrees == 0, uses == 0),
        "single_triple_relations": {
            "count": len(single),
            "examples": [triples.relation_name(id_) for id_ in single[:MAX_EXAMPLES].tolist()],
        },
        **figures,
    }
    return Quality(report, leaks)


def _share(mask: np.ndarray) -> dict[str, Any]:
    return {"triples": int(mask.sum()), "share": float(mask.mean()) if len(mask) else 0.0}


def _named_pair(pair: np.void, name: Callable[[int], str]) -> dict[str, Any]:
    is_duplicate, first, second, overlap, num_first, num_second = pair.tolist()
    return {
        "kind": "duplicate" if is_duplicate else "symmetric" if first == second else "inverse",
        "relations": [name(first), name(second)],
        "triples": [num_first, num_second],
        "overlap": overlap,
        "share": overlap / max(num_first, num_second),
    }


def _count_unseen(
    triples: NumberedTriples, new_entity: Mask, new_relation: Mask
) -> dict[str, dict[str, int]]:
    """Count entities and relations of valid, test and both that train lacks, and triples that have one."""

    def count(*splits: str) -> dict[str, int]:
        heads, relations, tails = map(np.concatenate, zip(*(triples.splits[split] for split in splits)))
        ends = np.concatenate([heads, tails])
        return {
            "entities": len(np.unique(ends[new_entity[ends]])),
            "relations": len(np.unique(relations[new_relation[relations]])),
            "triples": int((new_entity[heads] | new_entity[tails] | new_relation[relations]).sum()),
        }

    return {VALID: count(VALID), TEST: count(TEST), "valid_and_test": count(VALID, TEST)}


def _again(triples: NumberedTriples, max_bytes: int, num_workers: int) -> tuple[dict[str, Mask], Ids, Ids]:
    """Return for each triple of each split whether its pair of entities may occur again, (n,) bool.

    And, by relation, the number of the others: (2, R) as :meth:`TripleIndex.overlaps`, and (R,) of train.
    """
    num_triples = sum(len(heads) for heads, _, _ in triples.splits.values())
    # Two to four bytes of four counters each: 6 to 12 % of the triples alone meet another's counter.
    num_bytes = 1 << max(6, min((2 * num_triples).bit_length(), max_bytes.bit_length() - 1))
    counters = np.zeros(num_bytes, np.uint8)
    bounds = np.linspace(0, num_bytes, num_workers + 1).astype(np.int64).tolist()
    num_relations, lock = triples.num_relations, Lock()
    sizes, uses = np.zeros((2, num_relations), np.int64), np.zeros(num_relations, np.int64)

    def count(first: int, end: int) -> None:
        for split in SPLITS:
            for _, (heads, _, tails) in _pieces(triples.splits[split]):
                count_pairs(heads.astype(np.int64), tails.astype(np.int64), first, end, counters)

    def look(split: str, piece: tuple[int, Triples]) -> Mask:
        heads, relations, tails = piece[1]
        again = occurs_again(heads.astype(np.int64), tails.astype(np.int64), counters)
        counts = np.bincount(relations[~again], minlength=num_relations)
        loops = np.bincount(relations[~again & (heads == tails)], minlength=num_relations)
        with lock:
            sizes[:] += [counts - loops, counts]
            uses[:] += counts * (split == TRAIN)
        return again

    with ThreadPoolExecutor(num_workers) as threads:
        # Each thread counts in a range of its own: two could not change one byte at a time.
        list(threads.map(count, bounds[:-1], bounds[1:]))
        masks = {split: threads.map(partial(look, split), _pieces(triples.splits[split])) for split in SPLITS}
        again = {split: np.concatenate([np.zeros(0, bool), *parts]) for split, parts in masks.items()}
    return again, sizes, uses


_Bucket = tuple[dict[str, np.ndarray], TripleIndex, tuple[Counted, Counted, np.ndarray]]
"""The rows of each split, their index and its overlaps."""


def _buckets(
    triples: NumberedTriples,
    again: Mapping[str, np.ndarray],
    num_rounds: int,
    per_round: int,
    threads: ThreadPoolExecutor,
) -> Iterator[_Bucket]:
    """Yield the triples whose pair of entities may occur again, in buckets of whole pairs.

    What is of one round is indexed at the same time.
    """
    num_buckets = num_rounds * per_round

    def indexed(bucket: int) -> _Bucket:
        rows: dict[str, np.ndarray] = {}
        splits: dict[str, Triples] = {}
        for split in SPLITS:
            places, columns = [np.zeros(0, np.int64)], [np.zeros((3, 0), np.int64)]
            for start, (heads, relations, tails) in _pieces(triples.splits[split]):
                mine = np.flatnonzero(again[split][start : start + len(heads)])
                if num_buckets > 1:
                    lower, upper = np.minimum(heads, tails)[mine], np.maximum(heads, tails)[mine]
                    # Not the bits that the counters are chosen by: those of a bucket would be few.
                    mixed = split_mix(upper.astype(np.uint64) << np.uint64(32) | lower.astype(np.uint64))
                    mine = mine[mixed % np.uint64(num_buckets) == bucket]
                places.append(mine + start)
                columns.append(np.stack([heads[mine], relations[mine], tails[mine]]))
            rows[split] = np.concatenate(places)
            heads, relations, tails = np.concatenate(columns, axis=1)
            splits[split] = heads, relations, tails
        index = TripleIndex(replace(triples, splits=splits))
        return rows, index, index.overlaps()

    for first in range(0, num_buckets, per_round):
        indexed_buckets = list(threads.map(indexed, range(first, first + per_round)))
        yield from indexed_buckets
        del indexed_buckets  # before the next round takes the same memory


def _pieces(columns: Triples) -> Iterator[tuple[int, Triples]]:
    """Yield the first row, and heads, relations and tails, a bounded number at a time."""
    heads, relations, tails = columns
    for start in range(0, len(heads), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        yield start, (heads[rows], relations[rows], tails[rows])


def _degrees_and_components(triples: NumberedTriples) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the number of training triples of each entity, and figures of these and of the components."""
    degrees = np.zeros(triples.num_entities, np.int64)
    parents = np.arange(triples.num_entities, dtype=np.int32)
    for _, (heads, _, tails) in _pieces(triples.splits[TRAIN]):
        count_and_join(heads.astype(np.int64), tails.astype(np.int64), degrees, parents)
    find_roots(parents)
    sizes = np.bincount(parents[degrees > 0])
    sizes = sizes[sizes > 0]
    most, num_joined = int(sizes.max(initial=0)), int(sizes.sum())
    largest = np.argsort(-degrees, kind="stable")[:NUM_HUBS].tolist()
    return degrees, {
        "degrees": {
            "min": int(degrees.min()),
            "median": float(np.median(degrees)),
            "mean": float(degrees.mean()),
            "max": int(degrees.max()),
            "entities_of_degree_0": int((degrees == 0).sum()),
            "entities_of_degree_1": int((degrees == 1).sum()),
        },
        "hubs": [{"entity": triples.entity_name(id_), "degree": int(degrees[id_])} for id_ in largest],
        "components": {"count": len(sizes), "largest": most, "largest_share": most / max(num_joined, 1)},
    }
