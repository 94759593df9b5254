"""Learning rates that change, and options of the optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.optim import Adagrad, Adam, RowWiseAdagrad
from dglkge.training import job
from dglkge.training.building.checks import check_config
from dglkge.training.learning_rates import LearningRates, Schedule, known_schedules
from dglkge.training.state import TrainingState

FIELD = "optimizer.schedule"

OPTIONS = {
    "StepLR": "step_size: 3, gamma: 0.5",
    "MultiStepLR": "milestones: [2, 5, 5], gamma: 0.5",
    "ConstantLR": "factor: 0.25, total_iters: 4",
    "LinearLR": "total_iters: 5",
    "ExponentialLR": "gamma: 0.9",
    "CosineAnnealingLR": "T_max: 7, eta_min: 1e-3",
    "CosineAnnealingWarmRestarts": "T_0: 4, T_mult: 2",
    "PolynomialLR": "total_iters: 9, power: 2",
    "CyclicLR": "base_lr: 0.01, max_lr: 0.1, step_size_up: 4",
    "OneCycleLR": "max_lr: 0.1, total_steps: 40",
    "ReduceLROnPlateau": "patience: 1, factor: 0.5",
}
"""Options of every scheduler of torch."""
RATE_OF_EACH_GROUP = ("OneCycleLR", "max_lr: [0.1, 0.07], total_steps: 40, pct_start: 0.25")


def config(*settings: str) -> Any:
    return load_config(None, ["dataset=toy", *settings])


@pytest.mark.parametrize(
    ("name", "options"), [*((name, OPTIONS[name]) for name in known_schedules()), RATE_OF_EACH_GROUP]
)
def test_learning_rates_are_torchs_and_go_on_after_a_resume(name: str, options: str) -> None:
    """A rate in the options is that of the first group; the other's is as much smaller as its own."""
    settings = config(f"optimizer.schedule={{name: {name}, {options}}}").optimizer.schedule
    torch_options = dict(settings.options)
    for key in ("base_lr", "max_lr"):
        if isinstance(torch_options.get(key), float):
            torch_options[key] = [torch_options[key], torch_options[key] * (0.03 / 0.1)]
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.03)]
    driver = torch.optim.SGD(groups, lr=1.0)
    extra = {"cycle_momentum": False} if name in ("CyclicLR", "OneCycleLR") else {}
    extra |= {"mode": "max"} if name == "ReduceLROnPlateau" else {}
    reference = known_schedules()[name](driver, **torch_options, **extra)
    schedule = Schedule(FIELD, settings, [0.1, 0.03])
    mrr = [0.1, 0.2, 0.2, 0.19, 0.3, 0.3, 0.3, 0.3, 0.31, 0.2] * 3
    seen: set[tuple[float, ...]] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's of a wrong order of calls
        for step in range(25):
            assert schedule.lrs == [group["lr"] for group in driver.param_groups], step
            seen.add(tuple(schedule.lrs))
            again = Schedule(FIELD, settings, [0.1, 0.03])
            again.load_state_dict(schedule.state_dict())
            schedule = again
            schedule.step(mrr[step])
            driver.step()
            reference.step(*([mrr[step]] if schedule.follows_ranking else []))
    assert len(seen) > 1


def lrs_of(settings: list[str], resume_at: int = -1) -> list[list[float]]:
    """Return the learning rates of two epochs of 5 batches, of which one is preceded by a resume."""
    groups = [{"lr": 0.4}, {"lr": 0.1}]
    configured = config("training.num_epochs=2", *settings)
    rates, lrs = LearningRates(configured, groups, 5), []
    for epoch in range(2):
        for _ in range(5):
            if len(lrs) == resume_at:
                content = TrainingState({"rates": rates}).to_bytes()
                groups = [{"lr": 0.4}, {"lr": 0.1}]
                rates = LearningRates(configured, groups, 5)
                TrainingState({"rates": rates}).load(content, "here")
            rates.before_batch()
            lrs.append([group["lr"] for group in groups])
            rates.after_batch()
        rates.after_epochs(epoch + 1)
        rates.after_epochs(epoch + 1)  # a repeated call changes nothing
    return lrs


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("unit", ["epoch", "batch"])
def test_warm_up_times_schedule_over_batches_and_epochs(unit: str, warmup: int) -> None:
    settings = ["optimizer.schedule={name: StepLR, step_size: 1, gamma: 0.5}"]
    settings += [f"optimizer.schedule.every={unit}", f"optimizer.warmup_batches={warmup}"]
    expected = []
    for batch in range(10):
        factor = min(1.0, (batch + 1) / max(warmup, 1)) * 0.5 ** (batch if unit == "batch" else batch // 5)
        expected.append([0.4 * factor, 0.1 * factor])
    lrs = lrs_of(settings)
    np.testing.assert_allclose(lrs, expected, rtol=1e-12)
    for place in range(10):
        assert lrs_of(settings, resume_at=place) == lrs


def test_without_schedule_and_warm_up_learning_rates_are_the_scripts() -> None:
    groups = [{"lr": 0.4, "betas": (0.9, 0.99), "params": [object()]}]
    rates = LearningRates(config(), groups, 5)
    state = TrainingState({"rates": rates})
    assert state.to_bytes() == b""
    groups[0]["lr"] = 0.05
    rates.before_batch()
    again = [{"lr": 0.4, "betas": (0.9, 0.99), "params": [object()]}]
    TrainingState({"rates": LearningRates(config(), again, 5)}).load(state.to_bytes(), "here")
    assert again[0]["lr"] == groups[0]["lr"] == 0.05 and again[0]["betas"] == (0.9, 0.99)


def test_a_schedule_that_is_shorter_than_the_run_is_refused() -> None:
    options = ["optimizer.schedule={name: OneCycleLR, max_lr: 1, total_steps: 99}"]
    configured = config(*options, "optimizer.schedule.every=batch", "training.num_epochs=10")
    check_config(configured)
    with pytest.raises(InputError, match="OneCycleLR has 99 steps and the run 100; allowed: total_steps"):
        LearningRates(configured, [{"lr": 0.1}], 10)
    LearningRates(configured, [{"lr": 0.1}], 9)


ENTITIES = {"params": ["people", "films"]}
ALL = ["people", "films", "r"]
DECOUPLED = ("weight_decay=0.01", "decoupled_weight_decay=true")


@pytest.mark.parametrize(("settings", "groups", "rule", "options"), [
    ([], ALL, Adagrad(), {}),
    (["name=sparse_adam"], ALL, Adam(), {}),
    (["name=sparse_adam", "eps=1e-6", "betas=[0.8, 0.999]", *DECOUPLED], ALL,
     Adam(betas=(0.8, 0.999), eps=1e-6), {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    # Relations are a group of their own where rule or learning rate differ.
    (["relations.name=sparse_adagrad", "relations.lr=0.1"], ALL, Adagrad(), {}),
    (["relations.lr=0.02"], [ENTITIES, {"params": ["r"], "lr": 0.02}], Adagrad(), {}),
    (["name=row_adagrad", "relations={name: sparse_adam, betas: [0.9, 0.9]}", "weight_decay=0.1"],
     [ENTITIES, {"params": ["r"], "rule": Adam(betas=(0.9, 0.9))}], RowWiseAdagrad(),
     {"weight_decay": 0.1}),
])  # fmt: skip
def test_the_optimizer_is_made_as_configured(settings, groups, rule, options, monkeypatch) -> None:
    monkeypatch.setattr(job, "SparseOptimizer", lambda params, rule, lr, **options: (params, rule, options))
    monkeypatch.setattr(job, "request_timeout_seconds", lambda: 7.5)
    configured = config(*(f"optimizer.{setting}" for setting in settings))
    made: Any = job.build_optimizer(configured, ALL, 1)
    assert made[:2] == (groups, rule)
    assert {"timeout_seconds": 7.5, **options}.items() <= made[2].items()
