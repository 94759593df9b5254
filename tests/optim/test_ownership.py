"""Ranges of ids, machines and owners."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.optim.dgl_tables import range_starts
from dglkge.optim.network_exchange import owner_ranks, ranks_by_machine


class Policy:
    """A partition policy of given ranges that answers only what DGL's public interface answers."""

    def __init__(self, sizes: list[int]) -> None:
        self.ends = torch.tensor(sizes).cumsum(0)
        self.num_calls = 0
        self.partition_book = self

    def num_partitions(self) -> int:
        return len(self.ends)

    def get_size(self) -> int:
        return int(self.ends[-1])

    def to_partid(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return torch.searchsorted(self.ends, ids, right=True)


@pytest.mark.parametrize("sizes", [[7], [1, 1], [5, 0, 3], [0, 4], [4, 0], [1_000_000, 3, 2_000_000, 0]])
def test_ranges_are_found_by_asking(sizes: list[int]) -> None:
    """Also empty ranges, with few questions."""
    policy = Policy(sizes)
    assert range_starts(policy).tolist() == [0, *np.cumsum(sizes)]
    assert policy.num_calls <= 23


def test_owners_are_on_the_rows_machine() -> None:
    """Whatever the order of ranks, every row goes to a trainer of its machine, evenly."""
    machines = ranks_by_machine([1, 0, 2, 1, 1], 3)
    starts = np.array([0, 30, 90, 93])
    owners = owner_ranks(np.arange(93), starts, machines)
    for part, ranks in enumerate(machines):
        counts = np.bincount(owners[starts[part] : starts[part + 1]], minlength=5)
        assert np.flatnonzero(counts).tolist() == ranks.tolist()
        assert np.ptp(counts[ranks]) <= 1


def test_a_machine_without_a_trainer_is_refused() -> None:
    """DGL could not place tensors there."""
    with pytest.raises(ValueError, match=r"no trainer runs on the machines of partitions \[1\]"):
        ranks_by_machine([0, 0], 2)
