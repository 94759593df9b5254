"""Settings of the section optimizer: which of them reach the optimizer, and which are refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.choices import OPTIMIZERS, OptimizerChoice
from dglkge.optim.optimizers import AdamRule
from dglkge.planning.shared_memory import state_widths
from dglkge.training import build
from dglkge.training.building.components import check_config
from dglkge.typing import RELATION


def options_of(monkeypatch: pytest.MonkeyPatch, *settings: str) -> dict[str, Any]:
    """Return the arguments that the optimizer of a configuration is constructed with."""
    made = SimpleNamespace(load=lambda: lambda embeddings, **options: options)
    monkeypatch.setattr(build, "OPTIMIZERS", SimpleNamespace(get=lambda name: made))
    return build.build_optimizer(load_config(None, ["dataset=toy", *settings]), [], num_machines=1)


def test_defaults_are_left_to_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of a user's own need not have the arguments."""
    assert set(options_of(monkeypatch)) == {"lr", "synchronous", "wire_dtype", "timeout_seconds", "kernels"}


def test_what_is_configured_reaches_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (
        "name=sparse_adam",
        "eps=1e-6",
        "beta1=0.8",
        "weight_decay=0.01",
        "decoupled_weight_decay=true",
    )
    options = options_of(monkeypatch, *(f"optimizer.{setting}" for setting in settings))
    assert (options["eps"], options["betas"], options["weight_decay"]) == (1e-6, (0.8, 0.999), 0.01)
    assert options["decoupled_weight_decay"] is True


def test_relations_of_their_own_are_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hyper-parameter of their rule; without a difference there is one group, as before."""
    groups: list[Any] = []

    def make(params: Any, **options: Any) -> None:
        groups.append(params)

    made = SimpleNamespace(load=lambda: make)
    monkeypatch.setattr(build, "OPTIMIZERS", SimpleNamespace(get=lambda name: made))
    for settings in (
        [],
        ["relation_name=sparse_adagrad", "relation_lr=0.1"],
        ["relation_lr=0.02"],
        ["name=row_adagrad", "relation_name=sparse_adam", "beta2=0.9", "weight_decay=0.1"],
    ):
        config = load_config(None, ["dataset=toy", *(f"optimizer.{setting}" for setting in settings)])
        build.build_optimizer(config, ["people", "films", "relations"], num_machines=1)
    assert groups[:2] == [["people", "films", "relations"]] * 2
    entities = {"params": ["people", "films"]}
    assert groups[2] == [entities, {"params": ["relations"], "lr": 0.02}]
    assert groups[3][0] == entities
    rule = groups[3][1].pop("rule")
    assert type(rule) is AdamRule
    assert groups[3][1] == {
        "params": ["relations"],
        "lr": 0.1,
        "eps": 1e-8,
        "betas": (0.9, 0.9),
        "weight_decay": 0.1,
        "decoupled_weight_decay": False,
    }


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_declared_hyper_parameters_are_those_of_the_class(name: str) -> None:
    """So that a group gets the defaults of the class of that name."""
    choice = OPTIMIZERS.get(name)
    parameters = inspect.signature(choice.load()).parameters
    assert {key: parameters[key].default for key in choice.hyper} == dict(choice.hyper)


def test_state_of_relations_counts_in_the_plan() -> None:
    config = load_config(None, ["dataset=toy", "optimizer.relation_name=row_adagrad"])
    assert (state_widths(8, config, RELATION), state_widths(8, config, "person")) == ((1,), (8,))


def test_an_optimizer_without_a_rule_is_one_for_all_tables() -> None:
    OPTIMIZERS.register("own_one")(OptimizerChoice("own", "nowhere:Own", lambda width: (1,)))
    try:
        config = load_config(None, ["dataset=toy", "optimizer.name=own_one"])
        check_config(config)
        config = load_config(None, ["dataset=toy", "optimizer.relation_name=own_one"])
        with pytest.raises(InputError, match="own_one is registered without its rule, so it updates all"):
            check_config(config)
    finally:
        OPTIMIZERS._members.pop("own_one")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.relation_name=adagrad"], "sparse_adagrad"),
        (["optimizer.relation_lr=-1"], "optimizer.relation_lr is -1.0; allowed: at least 0"),
        (
            ["optimizer.beta1=0.8"],
            "optimizer.beta1 is 0.8, which has no effect with optimizer.name sparse_adagrad; it takes "
            "sparse_adam",
        ),
        (
            ["optimizer.name=row_adagrad", "optimizer.decoupled_weight_decay=true"],
            "optimizer.decoupled_weight_decay is True, which has no effect with optimizer.name row_adagrad",
        ),
        (
            ["optimizer.name=sparse_adam", "optimizer.decoupled_weight_decay=true"],
            "optimizer.decoupled_weight_decay is true and optimizer.weight_decay is 0, so nothing decays",
        ),
        (["optimizer.name=adam"], "adam"),
        (["optimizer.beta2=1"], "optimizer.beta2 is 1.0; allowed: at least 0 and below 1"),
    ],
)
def test_settings_without_effect_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config(load_config(None, ["dataset=toy", *settings]))
    assert message in str(caught.value)
