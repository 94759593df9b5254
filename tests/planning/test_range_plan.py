"""Ranges of tables on a disk: how many fit, and the bytes of an epoch."""

from __future__ import annotations

import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import PartSize
from dglkge.planning.epoch import plan_ranges, propose_ranges, range_budget
from dglkge.planning.memory import PlannedHost
from dglkge.typing import RELATION

PART = PartSize({"person": 1000, "place": 100, RELATION: 5}, 10_000)
ONE_TYPE, TWO_TYPES = [("person", "person")], [("person", "person"), ("person", "place")]
ROW_BYTES = 4 * (8 + 8)
"""Eight numbers and Adagrad's sums."""


def config(*settings: str) -> Config:
    return load_config(None, ["dataset=x", "model.dimension=8", *settings])


def test_one_range_where_everything_fits_and_no_number_for_too_little_memory() -> None:
    assert propose_ranges(config(), PART, ONE_TYPE, 1000 * ROW_BYTES) == 1
    assert propose_ranges(config(), PART, TWO_TYPES, 1000 * ROW_BYTES) != 1
    assert propose_ranges(config(), PART, ONE_TYPE, 15 * ROW_BYTES) is None
    assert propose_ranges(config(), PART, ONE_TYPE, 11 * ROW_BYTES) is None


@pytest.mark.parametrize("budget_rows", [999, 400])
def test_four_ranges_fit_at_once(budget_rows: int) -> None:
    """Those of the pair, the one that comes and the one that goes; one range fewer would not fit."""
    number = propose_ranges(config(), PART, ONE_TYPE, budget_rows * ROW_BYTES)
    assert 4 * -(-1000 // number) <= budget_rows < 4 * -(-1000 // (number - 1))


@pytest.mark.parametrize("num_ranges", [2, 5, 10])
def test_an_epoch_reads_the_ranges_of_its_loads(num_ranges: int) -> None:
    """Memory for two ranges: 1 + P (P - 1) / 2 loads of a P-th of the table each."""
    budget = 2 * 1000 // num_ranges * ROW_BYTES
    plan = plan_ranges(config(), PART, ONE_TYPE, num_ranges, budget)
    loads = 1 + num_ranges * (num_ranges - 1) // 2
    assert plan.loads == loads
    assert plan.read_bytes == plan.written_bytes == loads * 1000 // num_ranges * ROW_BYTES
    assert plan.table_bytes == 1000 * ROW_BYTES
    everything = plan_ranges(config(), PART, ONE_TYPE, num_ranges, 1000 * ROW_BYTES)
    assert (everything.loads, everything.read_bytes) == (num_ranges, 1000 * ROW_BYTES)
    walk = config("sampling.bucket_order=random")
    assert plan_ranges(walk, PART, ONE_TYPE, num_ranges, budget).loads >= loads


def test_types_are_counted_apart() -> None:
    """Two ranges of each type, one more of each that comes, and one that goes."""
    for buckets, pair_rows in (("mixed", 4 * 550), ("directed", 500 + 550 + 2 * 550)):
        narrow = config("optimizer.name=row_adagrad", f"sampling.buckets={buckets}")
        plan = plan_ranges(narrow, PART, TWO_TYPES, 2, 10**9)
        assert plan.read_bytes == 1100 * 4 * (8 + 1) and plan.loads == 4
        assert plan.pair_bytes == 4 * (8 + 1) * pair_rows


def test_the_budget_is_what_other_items_leave() -> None:
    memory = (("tables", 1000), ("optimizer state", 1000), ("names", 30), ("interpreters and libraries", 70))
    host = PlannedHost(0, memory, 0, 70, 0, 0)
    assert range_budget(host, 500) == 400
    assert range_budget(host, 50) == 0
