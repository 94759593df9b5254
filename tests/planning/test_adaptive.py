"""Settings that follow the size of the data: which, and where something else is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.config import load_config
from dglkge.planning import adaptive
from dglkge.planning.adaptive import adapted, num_epochs
from tests.toy_kg import toy_dataset


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(adaptive, "read_description", lambda _: {"splits": {"train": 4_000_000}})
    return toy_dataset()


def chosen(dataset: Path, *overrides: str) -> dict[str, str]:
    """Return what is chosen by key; all of it can be loaded."""
    found = adapted(None, overrides, dataset)
    load_config(None, [*overrides, f"dataset={dataset}", *found])
    return dict(setting.split("=", 1) for setting in found)


def test_all_of_them(dataset: Path) -> None:
    expected = {
        "training.num_epochs": "12",
        "training.averaging": "4.0",
        "training.batch_size": "500",
        "optimizer.lr": "0.2",
        "regularizer.weight": "0.02",
    }
    assert chosen(dataset) == expected
    assert chosen(dataset, "model.score_function=distmult", "model.dimension=8") == expected


def test_what_is_given_stays(dataset: Path) -> None:
    found = chosen(dataset, "training.num_epochs=5", "training={batch_size: 100}", "optimizer.lr=0.1")
    assert found.keys() == {"training.num_epochs", "training.averaging", "regularizer.weight"}
    found = chosen(dataset, "training.num_epochs=5", "optimizer.lr=0.1", "regularizer.weight=0")
    assert found.keys() == {"training.batch_size", "training.averaging"}


@pytest.mark.parametrize(
    "other",
    ["model.score_function=transe_l2", "loss.name=bce", "training.objective=one_vs_all",
     "optimizer.name=sparse_adam", "regularizer.name=n3", "regularizer=none", "tables.storage=disk",
     "model.global_vectors=true"],
)  # fmt: skip
def test_nothing_is_chosen_where_the_rule_was_not_tried(dataset: Path, other: str) -> None:
    assert chosen(dataset, other) == {}


def test_large_graphs_have_the_defaults(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "read_description", lambda _: {"splits": {"train": 10**7 + 1}})
    assert chosen(dataset) == {}


def test_nothing_is_chosen_beside_a_file_or_without_the_data(dataset: Path, tmp_path: Path) -> None:
    assert adapted(str(tmp_path / "my.yaml"), [], dataset) == []
    assert adapted(None, [], tmp_path / "elsewhere") == []


def test_epochs_fall_with_the_fourth_root_of_the_triples() -> None:
    assert [num_epochs(count) for count in (1600, 16 * 1600, 10**6, 10**7)] == [87, 43, 17, 10]
