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


PRODUCT_SECONDS = 1000 * 10 * 20 * 12 / 1e6
"""1,000 triples of 10 negatives of 20 numbers, 12 operations each."""

PASS_SECONDS = ROW_PASSES * 10 * 80 / 1e6
"""A row of 20 numbers in each of 10 batches."""

FAST_MEMORY, FAST_PRODUCTS = Rates(1e6, 1e30), Rates(1e30, 1e6)


@pytest.mark.parametrize(
    ("settings", "num_parts", "num_trainers", "rates", "expected"),
    [
        ([], 1, 1, FAST_MEMORY, PRODUCT_SECONDS),
        ([], 2, 1, FAST_MEMORY, PRODUCT_SECONDS / 2),
        (["negatives.num_for_heads=0"], 1, 1, FAST_MEMORY, PRODUCT_SECONDS / 2),
        # Each of 20 numbers of a score is 20 products and sums, and a third of the matmuls is done again.
        (["model.score_function=transr"], 1, 1, FAST_MEMORY, PRODUCT_SECONDS * 20 * 4 / 3),
        # 2 x 100 entities, 10 negatives and 100 relations of two rows; each trainer has the negatives.
        ([], 1, 1, FAST_PRODUCTS, PASS_SECONDS * (210 + 200)),
        ([], 1, 2, FAST_PRODUCTS, PASS_SECONDS * (220 + 200)),
        # Rows of two relations of 400 numbers each, beside 210 entities of 20.
        (["model.score_function=rescal"], 1, 1, FAST_PRODUCTS, PASS_SECONDS * (210 + 100 * 40)),
    ],
)
def test_seconds_of_products_and_of_rows(settings, num_parts, num_trainers, rates, expected) -> None:
    seconds = epoch_seconds(config(*settings), size(num_parts), num_trainers, rates)
    assert seconds == pytest.approx(expected)


def test_distances_without_products_cost_memory() -> None:
    rotate = epoch_seconds(config("model.score_function=rotate"), size(), 1, FAST_PRODUCTS)
    assert rotate > epoch_seconds(config(), size(), 1, FAST_PRODUCTS)
