"""Triples are found where a plain search of the whole partition finds them."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.sampling.edge_batches import TripleIndex


def owned(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return a partition's triple ids out of 20,000."""
    everything = np.arange(20_000)
    return {
        "scattered": np.sort(rng.choice(everything, 5_000, replace=False)),
        "few": np.array([3, 19_999]),
        "one": np.array([0]),
        "none": np.empty(0, np.int64),
        "all": everything,
        "a run": everything[7_000:9_001],
        "two runs": np.concatenate([everything[:50], everything[19_000:]]),
    }[kind]


@pytest.mark.parametrize("kind", ["scattered", "few", "one", "none", "all", "a run", "two runs"])
@pytest.mark.parametrize("seed", range(3))
def test_finds_what_a_set_finds(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = owned(kind, rng)
    wanted = np.concatenate([rng.integers(0, 20_000, 4_096), [0, 1, 19_998, 19_999], ids[:5], ids[-5:]])
    places, rows = TripleIndex(ids).find(wanted)
    row_of = {int(triple_id): row for row, triple_id in enumerate(ids)}
    expected = [(place, row_of[int(one)]) for place, one in enumerate(wanted) if int(one) in row_of]
    assert list(zip(places.tolist(), rows.tolist())) == expected


def test_ids_beyond_the_last_owned_one_are_not_there() -> None:
    places, rows = TripleIndex(np.array([4, 5])).find(np.array([6, 7, 8, 1_000_000_000_000]))
    assert len(places) == len(rows) == 0
