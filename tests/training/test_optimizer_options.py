"""Settings of the section optimizer: which of them reach the optimizer, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.optim import Adagrad, Adam, RowWiseAdagrad, UpdateRule
from dglkge.planning.shared_memory import state_widths
from dglkge.training.building import tables
from dglkge.training.building.checks import check_config
from dglkge.typing import RELATION


def made_with(monkeypatch: pytest.MonkeyPatch, *settings: str) -> tuple[Any, UpdateRule, dict[str, Any]]:
    """Return the arguments that the optimizer of a configuration is constructed with."""
    monkeypatch.setattr(
        tables, "SparseOptimizer", lambda params, rule, lr, **options: (params, rule, options)
    )
    config = load_config(None, ["dataset=toy", *(f"optimizer.{setting}" for setting in settings)])
    made: tuple[Any, UpdateRule, dict[str, Any]] = tables.build_optimizer(config, ["people", "films", "r"], 1)
    return made


def test_defaults_are_left_to_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_with(monkeypatch)[1] == Adagrad()
    assert made_with(monkeypatch, "name=sparse_adam")[1] == Adam()


def test_what_is_configured_reaches_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("name=sparse_adam", "eps=1e-6", "betas=[0.8, 0.999]", "weight_decay=0.01")
    _, rule, options = made_with(monkeypatch, *settings, "decoupled_weight_decay=true")
    assert rule == Adam(betas=(0.8, 0.999), eps=1e-6)
    assert (options["weight_decay"], options["decoupled_weight_decay"]) == (0.01, True)


def test_relations_of_their_own_are_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their rule and learning rate where these differ; without a difference there is one group."""
    for settings in ([], ["relations.name=sparse_adagrad", "relations.lr=0.1"]):
        assert made_with(monkeypatch, *settings)[0] == ["people", "films", "r"]
    entities = {"params": ["people", "films"]}
    assert made_with(monkeypatch, "relations.lr=0.02")[0] == [entities, {"params": ["r"], "lr": 0.02}]
    groups, rule, options = made_with(
        monkeypatch,
        "name=row_adagrad",
        "relations={name: sparse_adam, betas: [0.9, 0.9]}",
        "weight_decay=0.1",
    )
    assert groups == [entities, {"params": ["r"], "rule": Adam(betas=(0.9, 0.9))}]
    assert (rule, options["weight_decay"]) == (RowWiseAdagrad(), 0.1)


def test_state_of_relations_counts_in_the_plan() -> None:
    config = load_config(None, ["dataset=toy", "optimizer.relations.name=row_adagrad"])
    assert (state_widths(8, config, RELATION), state_widths(8, config, "person")) == ((1,), (8,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.relations.name=adagrad"], "sparse_adagrad"),
        (["optimizer.relations.lr=-1"], "optimizer.relations.lr is -1.0; allowed: at least 0"),
        (
            ["optimizer.betas=[0.8, 0.9]"],
            "optimizer.betas has no effect here; it is an option of sparse_adam",
        ),
        (
            ["optimizer.name=sparse_adam", "optimizer.decoupled_weight_decay=true"],
            "optimizer.decoupled_weight_decay is true and optimizer.weight_decay is 0, so nothing decays",
        ),
        (["optimizer.name=adam"], "adam"),
        (
            ["optimizer={name: sparse_adam, betas: [0.9, 1]}"],
            "betas must be two numbers in [0, 1), got ",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config(load_config(None, ["dataset=toy", *settings]))
    assert message in str(caught.value)
