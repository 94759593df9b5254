"""Splitting by a hash: fractions, determinism, equal triples together."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.errors import InputError
from dglkge.partition.ingest import IdTriples
from dglkge.partition.options import parse_fractions
from dglkge.partition.splits import hash_triples, split_by_hash


def triples(num: int, seed: int = 0) -> IdTriples:
    rows = np.random.default_rng(seed).integers(0, 500, (num, 3)).astype(np.int32)
    return IdTriples([], [], {"train": rows}, {"train": np.arange(num, dtype=np.float32)})


def test_fractions():
    given = {
        "0.9,0.05,0.05": (0.9, 0.05, 0.05),
        "0.8": (0.8, 0.1, 0.1),
        "1": (1, 0, 0),
        "0.5, 0.5, 0": (0.5, 0.5, 0),
    }
    for text, fractions in given.items():
        assert parse_fractions(text) == pytest.approx(fractions)
    for text in ("", "a", "0.9,0.1", "0,0.5,0.5", "1.2,-0.1,-0.1", "nan,0,1", "2"):
        with pytest.raises(InputError, match="give one or three fractions"):
            parse_fractions(text)
    with pytest.raises(InputError, match="the fractions add up to 0.99, not 1"):
        parse_fractions("0.9,0.05,0.04")


def test_sizes_are_as_asked_for():
    split = split_by_hash(triples(20000), (0.8, 0.15, 0.05), seed=3)
    sizes = [len(split.splits[name]) for name in ("train", "valid", "test")]
    assert sum(sizes) == 20000
    # five standard deviations of a binomial
    assert sizes == pytest.approx([16000, 3000, 1000], abs=5 * (20000 * 0.8 * 0.2) ** 0.5)


def test_nothing_is_lost_and_weights_follow():
    before = triples(1000)
    after = split_by_hash(before, (0.6, 0.2, 0.2), seed=0)
    rows = {tuple(r): w for r, w in zip(before.splits["train"].tolist(), before.weights["train"].tolist())}
    found = 0
    for name, part in after.splits.items():
        for row, weight in zip(part.tolist(), after.weights[name].tolist()):
            assert rows[tuple(row)] == weight
            found += 1
    assert found == 1000


def test_split_depends_on_the_triple_and_the_seed_alone():
    rows = triples(400).splits["train"]
    where = {}
    for order in (np.arange(400), np.random.default_rng(1).permutation(400)):
        split = split_by_hash(IdTriples([], [], {"train": rows[order]}), (0.5, 0.25, 0.25), seed=7)
        for name, part in split.splits.items():
            for row in part.tolist():
                assert where.setdefault(tuple(row), name) == name
    other = split_by_hash(IdTriples([], [], {"train": rows}), (0.5, 0.25, 0.25), seed=8)
    assert {tuple(row) for row in other.splits["test"].tolist()} != {
        k for k, name in where.items() if name == "test"
    }


def test_nothing_left_to_train_on():
    with pytest.raises(InputError, match="no triple is left to train on out of 2"):
        split_by_hash(triples(2), (1e-9, 0.5, 0.5), seed=0)


def splitmix(state: int) -> int:
    """SplitMix64 in Python's own integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_hash_is_splitmix64():
    rows = triples(20).splits["train"]
    for row, value in zip(rows.tolist(), hash_triples(rows, seed=2**40).tolist()):
        state = 2**40
        for number in row:
            state = splitmix(state ^ number)
        assert value == state
