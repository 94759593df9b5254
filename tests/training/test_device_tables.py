"""Tables on devices (``tables.storage: device``), the CPU in the place of GPUs, against those in memory."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dglkge.errors import InputError
from dglkge.model.choices import OPTIMIZERS
from dglkge.step.train_step import TrainStep
from dglkge.training.building import tables
from tests.toy_kg import temporal_dataset
from tests.training.live import assert_same, assert_same_tables, trained
from tests.training.test_device import OBJECTIVES

ON_DEVICE = ("training.device=cpu_staged", "tables.storage=device")

CASES = [f"optimizer.name={name}" for name in OPTIMIZERS] + [
    "optimizer.name=sparse_adam optimizer.weight_decay=0.01 optimizer.decoupled_weight_decay=true",
    "negatives.mask_known=true loss.name=self_adversarial model.score_function=rotate",
    "model.reciprocal_relations=false regularizer.name=n3 regularizer.weight=0.1",
    "model.score_function=tucker optimizer.clip_norm=0.5",
    "optimizer.clip_norm=0.01 optimizer.clip_value=0.001 model.max_norm=0.4",
    *OBJECTIVES[1::2],
]


def break_off(folder: Path, num_batches: int, *settings: str) -> None:
    """Train some batches of an epoch with a commit after each third, and fail in the next."""
    step, numbers = TrainStep.__call__, itertools.count()

    def failing(self: TrainStep, batch: Any, flags: int) -> Any:
        if next(numbers) == num_batches:
            raise InterruptedError
        return step(self, batch, flags)

    with mock.patch.object(TrainStep, "__call__", failing), contextlib.suppress(InterruptedError):
        trained(folder, "reference", "checkpoint.every_batches=3", *settings)
    assert next(numbers) == num_batches + 1


@pytest.mark.parametrize("case", CASES)
def test_trains_the_tables_of_the_host_bit_by_bit(case: str, tmp_path: Path) -> None:
    expected = trained(tmp_path, "reference", *case.split())
    assert_same(trained(tmp_path / "device", "reference", *ON_DEVICE, *case.split()), expected)


@pytest.mark.parametrize("objective", ["negative_sampling", "one_vs_all"])
def test_masks_are_those_of_rows_that_are_copied(objective: str, tmp_path: Path) -> None:
    """As tables in memory with the same device: there too a mask multiplies the sum of a row's gradients."""
    more = ("model.entity_dropout=0.2", "model.relation_dropout=0.1", "training.relation_prediction=0.5")
    more += (f"training.objective={objective}",)
    expected = trained(tmp_path, "reference", ON_DEVICE[0], *more)
    assert_same(trained(tmp_path / "device", "reference", *ON_DEVICE, *more), expected)


@pytest.mark.parametrize("name", ["tntcomplex", "complex"])
def test_relations_at_several_times_have_one_row(name: str, tmp_path: Path) -> None:
    """Masks are of relations at a time; with and without rows of times."""
    more = (
        f"dataset={temporal_dataset()}",
        f"model.score_function.name={name}",
        "model.relation_dropout=0.1",
    )
    expected = trained(tmp_path, "reference", ON_DEVICE[0], *more)
    assert_same(trained(tmp_path / "device", "reference", *ON_DEVICE, *more), expected, 1e-5, 1e-6, 1e-6)


def test_compiled_loops_of_the_host_are_near(tmp_path: Path) -> None:
    """With ``training.kernels: auto`` the host updates by compiled loops, devices always by torch."""
    got = trained(tmp_path / "device", "auto", *ON_DEVICE)
    assert_same(got, trained(tmp_path, "auto"), 1e-3, 1e-4, loss_rtol=1e-4)


def test_a_gradient_that_is_not_finite_is_an_error_as_on_the_host(tmp_path: Path) -> None:
    """The second batch has rows that the first one made infinite."""
    words = []
    for more in ((), ON_DEVICE):
        with pytest.raises(FloatingPointError, match=r"the gradient is not finite for \d+ rows") as error:
            trained(tmp_path / str(len(words)), "reference", "optimizer.lr=1e38", *more)
        words.append(str(error.value))
    assert words[0] == words[1]


def test_a_device_that_is_too_small_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore words.")

    monkeypatch.setattr(tables, "DeviceTables", full)
    words = (
        r"trainer 0 does not fit its GPU \(CUDA out of memory. Tried to allocate 9 GiB.\); dglkge plan shows"
    )
    with pytest.raises(InputError, match=words):
        trained(tmp_path, "reference", *ON_DEVICE)


def test_a_run_moves_between_device_and_host(tmp_path: Path) -> None:
    """Some batches on the device, committed; the rest on the host from the checkpoint; and the reverse."""
    expected_losses, expected, _ = trained(tmp_path / "whole", "reference")
    for first, second in ((ON_DEVICE, ()), ((), ON_DEVICE)):
        folder = tmp_path / ("device_first" if first else "host_first")
        folder.mkdir()
        break_off(folder, 4, *first)
        losses, got, _ = trained(folder, "reference", *second)
        assert losses[:-1] == expected_losses[3:-1]
        assert_same_tables(got, expected)
