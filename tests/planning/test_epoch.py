"""An epoch by arithmetic: its time by the stated model; how many ranges of tables fit, and what is read."""

from __future__ import annotations

import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import DatasetSize, PartSize
from dglkge.planning.epoch import (
    ROW_PASSES,
    Rates,
    epoch_seconds,
    plan_ranges,
    propose_ranges,
    range_budget,
)
from dglkge.planning.memory import PlannedHost
from dglkge.typing import RELATION

PRODUCT_SECONDS = 1000 * 10 * 20 * 12 / 1e6
"""1,000 triples of 10 negatives of 20 numbers, 12 operations each."""

ROW_SECONDS = ROW_PASSES * 10 * 80 / 1e6
"""A row of 20 numbers in each of 10 batches."""

FAST_MEMORY, FAST_PRODUCTS = Rates(1e6, 1e30), Rates(1e30, 1e6)


def seconds(rates: Rates, *settings: str, num_parts: int = 1, num_trainers: int = 1) -> float:
    config = load_config(None, ["dataset=x", "training.batch_size=100", "negatives.num_uniform=10",
                                "negatives.chunk_size=100", "model.dimension=20", *settings])  # fmt: skip
    size = DatasetSize((PartSize({"entity": 50, "relation": 2}, 500),) * num_parts, {"train": 1000})
    return epoch_seconds(config, size, num_trainers, rates)


def test_products_alone() -> None:
    assert seconds(FAST_MEMORY) == pytest.approx(PRODUCT_SECONDS)
    assert seconds(FAST_MEMORY, num_parts=2) == pytest.approx(PRODUCT_SECONDS / 2)
    assert seconds(FAST_MEMORY, "negatives.num_for_heads=0") == pytest.approx(PRODUCT_SECONDS / 2)
    # Each of 20 numbers of a score is 20 products and sums, and a third of the matmuls is done again.
    projected = seconds(FAST_MEMORY, "model.score_function=transr")
    assert projected == pytest.approx(PRODUCT_SECONDS * 20 * 4 / 3)


def test_rows_alone() -> None:
    """2 x 100 entities, 10 negatives of each trainer, and 100 relations of two rows."""
    assert seconds(FAST_PRODUCTS) == pytest.approx(ROW_SECONDS * (210 + 200))
    assert seconds(FAST_PRODUCTS, num_trainers=2) == pytest.approx(ROW_SECONDS * (220 + 200))
    # Rows of two relations of 400 numbers each.
    matrices = seconds(FAST_PRODUCTS, "model.score_function=rescal")
    assert matrices == pytest.approx(ROW_SECONDS * (210 + 100 * 40))
    # Distances without products cost memory.
    assert seconds(FAST_PRODUCTS, "model.score_function=rotate") > seconds(FAST_PRODUCTS)


PART = PartSize({"person": 1000, "place": 100, RELATION: 5}, 10_000)
ONE_TYPE, TWO_TYPES = [("person", "person")], [("person", "person"), ("person", "place")]
ROW_BYTES = 4 * (8 + 8)
"""Eight numbers and Adagrad's sums."""


def config(*settings: str) -> Config:
    return load_config(None, ["dataset=x", "model.dimension=8", *settings])


def test_four_ranges_fit_at_once() -> None:
    """Those of the pair, the one that comes and the one that goes; one range fewer would not fit."""
    for budget_rows in (999, 400):
        number = propose_ranges(config(), PART, ONE_TYPE, budget_rows * ROW_BYTES)
        assert number is not None and 4 * -(-1000 // number) <= budget_rows < 4 * -(-1000 // (number - 1))
    for budget_rows in (15, 11):  # of at most 256 ranges
        assert propose_ranges(config(), PART, ONE_TYPE, budget_rows * ROW_BYTES) is None
    assert propose_ranges(config(), PART, ONE_TYPE, 1000 * ROW_BYTES) == 1  # everything fits
    assert propose_ranges(config(), PART, TWO_TYPES, 1000 * ROW_BYTES) != 1


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
    assert [range_budget(host, total) for total in (500, 50)] == [400, 0]
