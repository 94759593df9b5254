"""The stated model of an epoch's time, by hand."""

from __future__ import annotations

import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import DatasetSize, PartSize
from dglkge.planning.epoch import ROW_PASSES, Rates, epoch_seconds

PART = PartSize({"entity": 50, "relation": 2}, 500)


def config(*settings: str) -> Config:
    return load_config(None, ["dataset=x", "training.batch_size=100", "negatives.num_uniform=10",
                              "negatives.chunk_size=100", "model.dimension=20", *settings])  # fmt: skip


def size(num_parts: int = 1) -> DatasetSize:
    return DatasetSize((PART,) * num_parts, {"train": 1000})


def test_products_alone() -> None:
    """1,000 triples of 10 negatives of 20 numbers, 12 operations each."""
    fast_memory = Rates(1e6, 1e30)
    assert epoch_seconds(config(), size(), 1, fast_memory) == pytest.approx(1000 * 10 * 20 * 12 / 1e6)
    assert epoch_seconds(config(), size(2), 1, fast_memory) == pytest.approx(1000 * 10 * 20 * 12 / 2e6)


def test_one_side_is_half_of_the_products() -> None:
    fast_memory = Rates(1e6, 1e30)
    half = epoch_seconds(config("negatives.num_for_heads=0"), size(), 1, fast_memory)
    assert half == pytest.approx(1000 * 5 * 20 * 12 / 1e6)


def test_rows_alone() -> None:
    """10 batches of 2 x 100 entities, 10 negatives and 100 relations of two rows, of 80 bytes."""
    fast_products = Rates(1e30, 1e6)
    seconds = epoch_seconds(config(), size(), 1, fast_products)
    assert seconds == pytest.approx(ROW_PASSES * 10 * (210 + 200) * 80 / 1e6)
    shared = epoch_seconds(config(), size(), 2, fast_products)  # each trainer has the negatives
    assert shared == pytest.approx(ROW_PASSES * 10 * (220 + 200) * 80 / 1e6)


def test_distances_without_products_cost_memory() -> None:
    fast_products = Rates(1e30, 1e6)
    product_seconds = epoch_seconds(config(), size(), 1, fast_products)
    assert epoch_seconds(config("model.score_function=rotate"), size(), 1, fast_products) > product_seconds


def test_a_matrix_for_each_relation() -> None:
    """Each of 20 numbers of a score is 20 products and sums, and a third of the matmuls is done again."""
    fast_memory, transr = Rates(1e6, 1e30), config("model.score_function=transr")
    product_seconds = 1000 * 10 * 20 * 12 / 1e6
    assert epoch_seconds(transr, size(), 1, fast_memory) == pytest.approx(product_seconds * 20 * 4 / 3)
    # Rows of two relations of 400 numbers each, beside 210 entities of 20.
    seconds = epoch_seconds(config("model.score_function=rescal"), size(), 1, Rates(1e30, 1e6))
    assert seconds == pytest.approx(ROW_PASSES * 10 * (210 + 100 * 40) * 80 / 1e6)
