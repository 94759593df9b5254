"""How many trainers share the cores of a machine, and the stated model of an epoch's time, by hand."""

from __future__ import annotations

import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import DatasetSize, PartSize
from dglkge.planning.epoch_time import ROW_PASSES, Rates, epoch_seconds
from dglkge.planning.trainers import most_trainers

PART = PartSize({"entity": 50, "relation": 2}, 500)


def config(*settings: str) -> Config:
    return load_config(None, ["dataset=x", "training.batch_size=100", "negatives.num_uniform=10",
                              "negatives.chunk_size=100", "model.dimension=20", *settings])  # fmt: skip


def size(num_parts: int = 1) -> DatasetSize:
    return DatasetSize((PART,) * num_parts, 2, {"train": 1000})


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
    of_products = epoch_seconds(config(), size(), 1, fast_products)
    assert epoch_seconds(config("model.score_function=rotate"), size(), 1, fast_products) > of_products


def test_a_matrix_for_each_relation() -> None:
    """Each of 20 numbers of a score is 20 products and sums, and a third of the matmuls is done again."""
    fast_memory, transr = Rates(1e6, 1e30), config("model.score_function=transr")
    of_products = 1000 * 10 * 20 * 12 / 1e6
    assert epoch_seconds(transr, size(), 1, fast_memory) == pytest.approx(of_products * 20 * 4 / 3)
    # Rows of two relations of 400 numbers each, beside 210 entities of 20.
    seconds = epoch_seconds(config("model.score_function=rescal"), size(), 1, Rates(1e30, 1e6))
    assert seconds == pytest.approx(ROW_PASSES * 10 * (210 + 100 * 40) * 80 / 1e6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["training.batch_size=1000"], 2),
        (["training.batch_size=100"], 2),
        (["training.batch_size=1500", "negatives.chunk_size=1500"], 3),
        (["training.batch_size=1000", "negatives.chunk_size=150"], 7),
        (["training.batch_size=10000", "negatives.chunk_size=50"], 8),
        (["training.batch_size=1000", "model.score_function=transe_l1"], 8),
        (["training.batch_size=1000", "training.kernels=reference"], 8),
        (["training.batch_size=1000", "training.objective=one_vs_all"], 8),
    ],
    ids=str,
)
def test_trainers_of_a_batch(settings: list[str], expected: int) -> None:
    config = load_config(None, ["dataset=x", "negatives.chunk_size=1000", *settings])
    one = PartSize({"entity": 50, "relation": 2}, 500)
    assert most_trainers(config, DatasetSize((one,), 2, {"train": 1000})) == expected


def test_a_batch_is_shared_by_the_machines_and_typed_graphs_have_a_trainer_a_core() -> None:
    config = load_config(None, ["dataset=x", "training.batch_size=6000", "negatives.chunk_size=1000"])
    one, typed = PartSize({"a": 50, "relation": 2}, 500), PartSize({"a": 5, "b": 5, "relation": 2}, 500)
    numbers = [most_trainers(config, DatasetSize((part,) * 2, 2, {"train": 1})) for part in (one, typed)]
    assert numbers == [6, 8]
