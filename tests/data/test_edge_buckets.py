"""Buckets of a partition: triples grouped by ranges; walks over pairs of ranges, and what these load."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dglkge.config.schema import BUCKET_ORDERS
from dglkge.data import dataset_files, edge_buckets
from dglkge.data.edge_buckets import BucketFiles, EdgeBuckets, TrainedSets
from dglkge.data.partition_layout import EdgeTable, PartitionLayout
from dglkge.data.range_walk import WALKS, Loads, count_loads, range_bounds, ranges_of, walk_pairs
from dglkge.errors import CheckpointError, InputError, StorageError

PAIRS = [("person", "person"), ("person", "place")]
STARTS = {"person": np.array([0, 10, 25]), "place": np.array([0, 2, 5])}
PAIR_OF_RELATION = np.array([0, 1, 0])
NUM_TRIPLES = 500


def toy_layout(folder: Path, weighted: bool = True, seed: int = 0) -> PartitionLayout:
    """Write the edge table of part 1 of two, of random triples."""
    random = np.random.default_rng(seed)
    part = folder / "part1"
    part.mkdir(parents=True, exist_ok=True)
    relations = random.integers(0, 3, NUM_TRIPLES)
    tails = np.where(relations == 1, random.integers(2, 5, NUM_TRIPLES), random.integers(10, 25, NUM_TRIPLES))
    edges = np.stack([random.integers(0, 25, NUM_TRIPLES), relations, tails], axis=1)
    np.save(part / "triple_ids.npy", np.sort(random.permutation(2000)[:NUM_TRIPLES]))
    np.save(part / "edges.npy", edges)
    if weighted:
        np.save(part / "weights.npy", random.random(NUM_TRIPLES).astype(np.float32))
    return PartitionLayout(folder, dict(STARTS))


def make(layout: PartitionLayout, num_ranges: int, spare: Path) -> EdgeBuckets:
    return BucketFiles(layout, 1, num_ranges, PAIRS, spare).make(PAIR_OF_RELATION)


def folder_of(buckets: EdgeBuckets) -> Path:
    return Path(buckets.table.edges.filename).parent


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def range_by_hand(kind: str, node: int, num_ranges: int) -> int:
    part = int(node >= STARTS[kind][1])
    first, end = STARTS[kind][part : part + 2].tolist()
    begins = [first + (end - first) * turn // num_ranges for turn in range(num_ranges + 1)]
    return max(turn for turn in range(num_ranges) if begins[turn] <= node < begins[turn + 1])


@pytest.mark.parametrize("num_ranges, block", [(1, 64), (2, 1 << 20), (4, 7)])
def test_each_triple_lies_in_its_bucket(tmp_path, monkeypatch, num_ranges, block):
    monkeypatch.setattr(edge_buckets, "TRIPLES_A_BLOCK", block)
    layout = toy_layout(tmp_path)
    buckets = make(layout, num_ranges, tmp_path / "spare")
    table = layout.edge_table(1)
    rows = dict(zip(table.triple_ids.tolist(), zip(table.edges.tolist(), table.weights.tolist())))
    assert sorted(buckets.table.triple_ids.tolist()) == table.triple_ids.tolist()
    counts = np.zeros((2, num_ranges, num_ranges), np.int64)
    for bucket, (start, end) in enumerate(zip(buckets.starts[:-1], buckets.starts[1:])):
        assert (np.diff(buckets.table.triple_ids[start:end]) > 0).all()
        for row in range(start, end):
            edge, weight = rows[int(buckets.table.triple_ids[row])]
            assert buckets.table.edges[row].tolist() == edge and buckets.table.weights[row] == weight
            pair = PAIR_OF_RELATION[edge[1]]
            ranges = [range_by_hand(PAIRS[pair][side], edge[2 * side], num_ranges) for side in (0, 1)]
            assert ranges[0] * num_ranges + ranges[1] == bucket
            counts[(pair, *ranges)] += 1
    assert (buckets.counts == counts[None]).all()


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_some_triples_in_sets_have_files_of_their_own(tmp_path, monkeypatch, block):
    monkeypatch.setattr(edge_buckets, "TRIPLES_A_BLOCK", block)
    layout = toy_layout(tmp_path)
    whole = make(layout, 3, tmp_path / "spare")
    rows = [range(100, 300), np.arange(301, NUM_TRIPLES, 3, dtype=np.int32)]
    sets = TrainedSets(("some", ["of", 2]), lambda ids: rows, 2)
    files = BucketFiles(layout, 1, 3, PAIRS, tmp_path / "spare", sets)
    with pytest.raises(InputError, match="buckets3-"):
        files.open()
    buckets = files.make(PAIR_OF_RELATION)
    folder = folder_of(buckets)
    assert folder != folder_of(whole) and folder.name.startswith("buckets3-")
    assert folder_of(files.make(PAIR_OF_RELATION)) == folder
    assert buckets.triples_of_sets.tolist() == list(map(len, rows)) and len(buckets.starts) == 2 * 9 + 1
    table = layout.edge_table(1)
    # The triples of each set by bucket, found among those of all triples.
    for number, set_rows in enumerate(rows):
        triple_ids = set(table.triple_ids[set_rows].tolist())
        for bucket in range(9):
            run = range(*whole.starts[bucket : bucket + 2])
            expected = [row for row in run if whole.table.triple_ids[row] in triple_ids]
            stored = slice(*buckets.starts[9 * number + bucket :][:2])
            for field in ("triple_ids", "edges", "weights"):
                made, of_all = getattr(buckets.table, field), getattr(whole.table, field)
                assert made[stored].tolist() == of_all[expected].tolist()
            assert buckets.counts[number].sum(axis=0).ravel()[bucket] == len(expected)


def test_files_are_made_once_and_again_when_the_edges_change(tmp_path: Path) -> None:
    layout = toy_layout(tmp_path, weighted=False)
    buckets = make(layout, 3, tmp_path / "spare")
    path = tmp_path / "part1" / "buckets3" / "edges.npy"
    inode = path.stat().st_ino
    assert folder_of(buckets) == path.parent and buckets.table.weights is None
    assert folder_of(make(layout, 3, tmp_path / "spare")) == path.parent and path.stat().st_ino == inode
    old = np.array(buckets.table.triple_ids)
    toy_layout(tmp_path, weighted=False, seed=1)
    # The clock of a file system may be too coarse to tell two writes apart.
    os.utime(tmp_path / "part1" / "edges.npy", ns=(1, 1))
    changed = PartitionLayout(tmp_path, dict(STARTS))
    with pytest.raises(InputError, match="buckets3 was made of other files"):
        BucketFiles(changed, 1, 3, PAIRS, tmp_path / "spare").open()
    again = make(changed, 3, tmp_path / "spare")
    assert sorted(again.table.triple_ids) == changed.edge_table(1).triple_ids.tolist()
    assert again.checksum() != buckets.checksum()
    assert (buckets.table.triple_ids == old).all()  # whoever has mapped the old ones keeps them
    assert names_in(tmp_path / "part1") == ["buckets3", "edges.npy", "triple_ids.npy"]


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    """A read-only data set has its buckets in the spare folder; a full disk leaves nothing."""
    layout = toy_layout(tmp_path / "data")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(edge_buckets.os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="cannot write the buckets of part 1 to .*: No space left"):
            make(layout, 2, tmp_path)
    assert names_in(tmp_path / "data" / "part1") == ["edges.npy", "triple_ids.npy", "weights.npy"]
    monkeypatch.setattr(edge_buckets.os, "access", lambda path, mode: False)  # root may write anywhere
    buckets = make(layout, 2, tmp_path / "run")
    assert folder_of(buckets) == tmp_path / "run" / dataset_files.buckets_folder(2)
    assert folder_of(BucketFiles(layout, 1, 2, PAIRS, tmp_path / "run").open()) == folder_of(buckets)
    (tmp_path / "file").write_text("")
    with pytest.raises((CheckpointError, StorageError), match="cannot write .* part 1 to .*file/buckets4"):
        make(layout, 4, tmp_path / "file")


def test_a_part_without_triples(tmp_path: Path) -> None:
    layout = toy_layout(tmp_path)
    for path in (tmp_path / "part1").iterdir():
        np.save(path, np.load(path)[:0])
    buckets = make(layout, 2, tmp_path)
    assert isinstance(buckets.table, EdgeTable) and len(buckets.table.triple_ids) == 0
    assert buckets.starts.tolist() == [0] * 5


SIZES = (1, 2, 3, 5, 8, 13)


def brute_force_loads(steps, capacity: int) -> int:
    """Count by a list of ranges, the oldest first: what is missing is loaded, then the oldest go."""
    held: list = []
    loads = 0
    for needed in steps:
        loads += len(needed - {*held})
        held = [range_ for range_ in held if range_ not in needed] + sorted(needed)
        held = held[max(0, len(held) - max(capacity, len(needed))) :]
    return loads


def loads_of(order: str, num_ranges: int, capacity: int, epoch: int = 0) -> int:
    """Return loads with memory for a number of ranges of one entity type."""
    steps = [{head, tail} for head, tail in walk_pairs(order, num_ranges, 5, epoch).tolist()]
    loads = count_loads(steps, dict.fromkeys(range(num_ranges), 10), 10 * capacity)
    assert loads == Loads(brute_force_loads(steps, capacity), 10 * loads.count)
    return loads.count


@pytest.mark.parametrize("order", BUCKET_ORDERS)
def test_every_pair_occurs_once_in_each_epoch(order: str) -> None:
    assert tuple(WALKS) == BUCKET_ORDERS
    for num_ranges in SIZES:
        everything = [(head, tail) for head in range(num_ranges) for tail in range(num_ranges)]
        walks = [walk_pairs(order, num_ranges, seed=3, epoch=epoch).tolist() for epoch in range(3)]
        assert [sorted(map(tuple, walk)) for walk in walks] == [everything] * 3
        assert walks[0] == walk_pairs(order, num_ranges, seed=3, epoch=0).tolist()
        assert num_ranges <= 3 or walks[0] != walks[1] != walks[2]
    with pytest.raises(InputError, match="unknown sampling.bucket_order 'inside'; did you mean 'inside_out'"):
        walk_pairs("inside", 2, 0, 0)


def test_loads_are_those_of_a_brute_force_simulation_and_of_each_order() -> None:
    """Two ranges in memory: the first pair costs two loads, and each load brings one new pair together."""
    for num_ranges in SIZES:
        for order, capacity in itertools.product(BUCKET_ORDERS, (1, 2, 3, 8)):
            count = loads_of(order, num_ranges, capacity)
            assert num_ranges <= count <= loads_of(order, num_ranges, 1)
            assert capacity < num_ranges or count == num_ranges
        fewest = 1 + num_ranges * (num_ranges - 1) // 2
        assert loads_of("inside_out", num_ranges, 2) == fewest
        assert loads_of("outside_in", num_ranges, 2, epoch=1) == fewest
    counts = {order: loads_of(order, 16, 2) for order in BUCKET_ORDERS}
    assert counts["inside_out"] < counts["affinity"] < counts["hilbert"] < counts["random"]
    # The Hilbert curve passes from a cell to a neighbour on a power of two, under renamed ranges.
    walk = walk_pairs("hilbert", 8, 0, 0)
    assert ((walk[1:] != walk[:-1]).sum(axis=1) == 1).all()


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4), num_ranges=st.integers(1, 7))
def test_ranges_are_contiguous_even_and_on_their_machine(lengths: list[int], num_ranges: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bounds = range_bounds(starts, num_ranges)
    assert len(bounds) == len(lengths) * num_ranges + 1
    expected = []
    for length in lengths:
        ends = [length * turn // num_ranges for turn in range(num_ranges + 1)]
        sizes = np.diff(ends).tolist()
        assert max(sizes) - min(sizes) <= 1
        expected += [turn for turn, size in enumerate(sizes) for _ in range(size)]
    assert ranges_of(np.arange(starts[-1]), bounds, num_ranges).tolist() == expected
