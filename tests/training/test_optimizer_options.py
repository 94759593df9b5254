"""Settings of the section optimizer: which of them reach the optimizer, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.training import build
from dglkge.training.components import check_config


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
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
