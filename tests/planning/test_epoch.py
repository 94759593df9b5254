"""An epoch by arithmetic: its time, ranges of tables, and defaults that follow the size of the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset_files import DatasetSize, PartSize
from dglkge.planning import defaults
from dglkge.planning.defaults import adapted, most_trainers, num_epochs, regularizer_weight
from dglkge.planning.epoch import ROW_PASSES, Rates, epoch_seconds, plan_ranges, propose_ranges, range_budget
from dglkge.planning.memory import PlannedHost
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset

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


PART = PartSize({"person": 1000, "place": 100, RELATION: 5}, 0)
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


def test_an_epoch_reads_the_ranges_of_its_loads() -> None:
    """Memory for two ranges: 1 + P (P - 1) / 2 loads of a P-th of the table each."""
    for num_ranges in (2, 5, 10):
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
        # And the triples of two buckets, of 20 bytes each: all of the one mixed bucket, or of two in four.
        plan = plan_ranges(narrow, replace(PART, num_edges=1000), TWO_TYPES, 2, 10**9)
        num_triples = {"mixed": 2000, "directed": 500}[buckets]
        assert plan.pair_bytes == 4 * (8 + 1) * pair_rows + 20 * num_triples


def test_the_budget_is_what_other_items_leave() -> None:
    memory = (("tables", 1000), ("optimizer state", 1000), ("names", 30), ("interpreters and libraries", 70))
    host = PlannedHost(0, memory, 0, 70, 0, 0)
    assert [range_budget(host, total) for total in (500, 50)] == [400, 0]


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Path:
    describe(monkeypatch, num_triples=4_000_000)
    return toy_dataset()


def describe(monkeypatch: pytest.MonkeyPatch, num_triples: int) -> None:
    description = {"splits": {"train": num_triples}, "entity_types": {"person": 4_000, "place": 6_000}}
    monkeypatch.setattr(defaults, "read_description", lambda _: description)


DEFAULTS = {"training.num_epochs": "12", "training.averaging": "4.0", "training.batch_size": "500",
            "optimizer.lr": "0.2", "regularizer.weight": "0.04"}  # fmt: skip


def defaults_of(dataset: Path, *overrides: str) -> dict[str, str]:
    """Return the adapted settings by key; all of them can be loaded."""
    settings = adapted(None, overrides, dataset)
    load_config(None, [*overrides, f"dataset={dataset}", *settings])
    return dict(setting.split("=", 1) for setting in settings)


def test_what_is_not_given_follows_the_size(dataset: Path, tmp_path: Path, monkeypatch) -> None:
    assert defaults_of(dataset) == DEFAULTS
    assert defaults_of(dataset, "model.score_function=distmult", "model.dimension=8") == DEFAULTS
    some = defaults_of(dataset, "training.num_epochs=5", "training={batch_size: 100}", "optimizer.lr=0.1")
    assert some.keys() == {"training.num_epochs", "training.averaging", "regularizer.weight"}
    some = defaults_of(dataset, "training.num_epochs=5", "optimizer.lr=0.1", "regularizer.weight=0")
    assert some.keys() == {"training.batch_size", "training.averaging"}
    assert adapted(str(tmp_path / "my.yaml"), [], dataset) == []
    assert adapted(None, [], tmp_path / "elsewhere") == []
    # Nothing is chosen where the rule was not tried.
    others = "model.score_function=transe_l2 loss.name=bce training.objective=one_vs_all tables.storage=disk "
    others += "optimizer.name=sparse_adam regularizer.name=n3 regularizer=none model.global_vectors=true"
    assert [defaults_of(dataset, other) for other in others.split()] == [{}] * 8
    describe(monkeypatch, num_triples=10**7 + 1)  # large graphs
    assert defaults_of(dataset) == {}


def test_epochs_fall_with_the_fourth_root_of_triples_and_weights_grow_with_the_root_of_entities() -> None:
    assert [num_epochs(count) for count in (1600, 16 * 1600, 10**6, 10**7)] == [87, 43, 17, 10]
    weights = [regularizer_weight(count) for count in (14, 135, 2034, 14_541, 40_943, 10**7)]
    assert weights == [0.01, 0.01, 0.018, 0.0482, 0.05, 0.05]


def test_trainers_of_a_batch() -> None:
    for settings, expected in (
        (["training.batch_size=1000"], 2),
        (["training.batch_size=100"], 2),
        (["training.batch_size=1500", "negatives.chunk_size=1500"], 3),
        (["training.batch_size=1000", "negatives.chunk_size=150"], 7),
        (["training.batch_size=10000", "negatives.chunk_size=50"], 8),
        (["training.batch_size=1000", "model.score_function=transe_l1"], 8),
        (["training.batch_size=1000", "training.kernels=reference"], 8),
        (["training.batch_size=1000", "training.objective=one_vs_all"], 8),
    ):
        config = load_config(None, ["dataset=x", "negatives.chunk_size=1000", *settings])
        part = PartSize({"entity": 50, "relation": 2}, 500)
        assert most_trainers(config, DatasetSize((part,), {"train": 1000})) == expected


def test_a_batch_is_shared_by_the_machines_and_typed_graphs_have_a_trainer_a_core() -> None:
    config = load_config(None, ["dataset=x", "training.batch_size=6000", "negatives.chunk_size=1000"])
    for nodes, expected in (({"a": 50, "relation": 2}, 6), ({"a": 5, "b": 5, "relation": 2}, 8)):
        assert most_trainers(config, DatasetSize((PartSize(nodes, 500),) * 2, {"train": 1})) == expected
