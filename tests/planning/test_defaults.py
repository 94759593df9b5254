"""Defaults that follow the size of the data: trainers and settings, and where something else is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.config import load_config
from dglkge.data.dataset_files import DatasetSize, PartSize
from dglkge.planning import defaults
from dglkge.planning.defaults import adapted, most_trainers, num_epochs, regularizer_weight
from tests.toy_kg import toy_dataset


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Path:
    describe(monkeypatch, num_triples=4_000_000)
    return toy_dataset()


def describe(monkeypatch: pytest.MonkeyPatch, num_triples: int) -> None:
    """Give the data set another size."""
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
    describe(monkeypatch, num_triples=10**7 + 1)  # large graphs
    assert defaults_of(dataset) == {}


@pytest.mark.parametrize(
    "other",
    ["model.score_function=transe_l2", "loss.name=bce", "training.objective=one_vs_all",
     "optimizer.name=sparse_adam", "regularizer.name=n3", "regularizer=none", "tables.storage=disk",
     "model.global_vectors=true"],
)  # fmt: skip
def test_nothing_is_chosen_where_the_rule_was_not_tried(dataset: Path, other: str) -> None:
    assert defaults_of(dataset, other) == {}


def test_epochs_fall_with_the_fourth_root_of_triples_and_weights_grow_with_the_root_of_entities() -> None:
    assert [num_epochs(count) for count in (1600, 16 * 1600, 10**6, 10**7)] == [87, 43, 17, 10]
    weights = [regularizer_weight(count) for count in (14, 135, 2034, 14_541, 40_943, 10**7)]
    assert weights == [0.01, 0.01, 0.018, 0.0482, 0.05, 0.05]


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
    part = PartSize({"entity": 50, "relation": 2}, 500)
    assert most_trainers(config, DatasetSize((part,), {"train": 1000})) == expected


def test_a_batch_is_shared_by_the_machines_and_typed_graphs_have_a_trainer_a_core() -> None:
    config = load_config(None, ["dataset=x", "training.batch_size=6000", "negatives.chunk_size=1000"])
    for nodes, expected in (({"a": 50, "relation": 2}, 6), ({"a": 5, "b": 5, "relation": 2}, 8)):
        assert most_trainers(config, DatasetSize((PartSize(nodes, 500),) * 2, {"train": 1})) == expected
