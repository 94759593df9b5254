"""Dropout of rows: masks by SplitMix64 in Python's integers, and training against masked float64 tables."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.step.row_transforms import RowDropout
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset
from tests.training import test_k_vs_all, test_one_vs_all, test_train_step
from tests.training.live import Rows, asked, assert_epochs_equal

ENTITY_RATE, RELATION_RATE, WEIGHT = 0.25, 0.125, 0.02
DROPOUT = (f"model.entity_dropout={ENTITY_RATE}", f"model.relation_dropout={RELATION_RATE}")
MORE = ("regularizer.name=n3", f"regularizer.weight={WEIGHT}", "training.matmul_dtype=float32")

_MASK, _GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15


def mixed(state: int) -> int:
    """Return SplitMix64's output."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


def mask(table: str, batch: int, num: int, dim: int, rate: float, seed: int = 0) -> torch.Tensor:
    """Return the factors (num, dim) of all rows by original id."""
    digest = hashlib.blake2b(f"{seed}/dropout/{table}/{batch}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    factors = torch.zeros(num, dim, dtype=torch.float64)
    for row in range(num):
        of_row = mixed((key + row * _GAMMA) & _MASK)
        for column in range(dim):
            word = mixed((of_row + (column // 4 + 1) * _GAMMA) & _MASK)
            bits = word >> 16 * (column % 4) & 0xFFFF
            factors[row, column] = 1 / (1 - rate) if bits >= rate * 65536 else 0
    return factors


def dropped(rows: dict[str, torch.Tensor], epoch: int, batch: int) -> dict[str, torch.Tensor]:
    """Return the tables as a batch sees them."""
    return {
        name: some
        * mask(name, (epoch << 32) + batch, *some.shape, RELATION_RATE if name == RELATION else ENTITY_RATE)
        for name, some in rows.items()
    }


def test_masks_are_those_of_the_formula_and_do_not_depend_on_the_place() -> None:
    ids = torch.tensor([2, 0, 1, 3])
    dropout = RowDropout({"person": 0.5, "town": 0.0}, {"person": ids, "town": ids}, seed=7)
    dropout.start_batch(9)
    expected = mask("person", 9, 4, 6, 0.5, seed=7)[ids]
    rows = torch.ones(4, 6)
    dropout.forward("person", torch.arange(4), rows)
    torch.testing.assert_close(rows.double(), expected)
    some = torch.ones(3, 6)
    dropout.backward("person", torch.tensor([3, 1, 3]), some)
    torch.testing.assert_close(some, rows[[3, 1, 3]])
    assert dropout.tables == ["person"]
    dropout.start_batch(10)
    other = torch.ones(4, 6)
    dropout.forward("person", torch.arange(4), other)
    assert not torch.equal(other, rows)


@pytest.mark.parametrize("dim", [1, 4, 7, 100])
@pytest.mark.parametrize("rate", [0.3, 1.0 - 2**-17])
def test_the_loop_and_its_plain_twin_are_equal_bit_for_bit(dim: int, rate: float) -> None:
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    places = torch.from_numpy(np.random.default_rng(4).integers(0, 500, 900))
    rows = torch.randn(900, dim + 3, generator=torch.Generator().manual_seed(3))
    rows[5, :] = torch.nan
    rows[6:9, 0], rows[9, 0] = torch.inf, -0.0
    found = []
    for kernels in ("auto", "reference"):
        dropout = RowDropout({"person": rate}, {"person": ids}, seed=1, kernels=kernels)
        dropout.start_batch(3)
        of_all, of_part = rows[:, :dim].clone(), rows.clone()
        dropout.forward("person", places, of_all)
        dropout.forward("person", places, of_part[:, :dim])  # columns of wider rows
        assert torch.equal(of_part[:, dim:].nan_to_num(7), rows[:, dim:].nan_to_num(7))
        assert of_part[:, :dim].numpy().tobytes() == of_all.numpy().tobytes()
        found.append(of_all.numpy().tobytes())
    assert found[0] == found[1] != rows[:, :dim].numpy().tobytes()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_mean_stays_and_the_share_is_dropped(rate: float) -> None:
    """Of 2,000,000 numbers the share is within 5 standard deviations, in all columns of a word."""
    dropout = RowDropout({"person": rate}, {"person": torch.arange(20_000)}, seed=1)
    dropout.start_batch(3)
    rows = torch.ones(20_000, 100)
    dropout.forward("person", torch.arange(20_000), rows)
    is_dropped = (rows == 0).double()
    assert float(is_dropped.mean()) == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 2e6) ** 0.5)
    for column in range(4):
        share = float(is_dropped[:, column::4].mean())
        assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 5e5) ** 0.5)
    assert float(rows.double().mean()) == pytest.approx(1, abs=0.02)
    assert float(rows.max()) == pytest.approx(1 / (1 - rate), rel=1e-3)


def queries_of(trainer: Any, batch: Any, known: Any) -> list[Any]:
    """Return the queries of a batch of ``k_vs_all`` with their answers."""
    original = {name: np.asarray(table.original_ids) for name, table in trainer.tables.items()}
    keys = [
        (run.side, int(original[RELATION][r]), int(original[run.anchor_type][anchor]))
        for run in batch.runs
        for r, anchor in zip(batch.relations[run.start : run.end], batch.anchors[run.start : run.end])
    ]
    return [(key, known[key]) for key in keys]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("objective", ["negative_sampling", "one_vs_all", "k_vs_all"])
def test_two_epochs_equal_masked_tables_in_float64(tmp_path: Path, objective: str, kernels: str) -> None:
    dataset = toy_dataset(typed=True)
    base = {
        "negative_sampling": test_train_step.settings,
        "one_vs_all": test_one_vs_all.settings,
        "k_vs_all": test_k_vs_all.settings,
    }[objective]
    more = [*DROPOUT, *MORE, f"training.kernels={kernels}"]
    if objective == "one_vs_all":
        more.append(f"training.relation_prediction={test_one_vs_all.RELATION_WEIGHT}")
    if objective == "negative_sampling":
        more[3] = f"regularizer.weight={test_train_step.WEIGHT}"
    config = load_config(None, base(dataset, tmp_path / "run", *more))
    known = test_k_vs_all.known_answers(Dataset.open(dataset))

    def loss_of(data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
        masked = dropped(rows, batch.epoch, batch.index)
        if objective == "one_vs_all":
            return test_one_vs_all.oracle(data, masked, batch, config)
        if objective == "k_vs_all":
            queries = [(query, known[query]) for query in asked(trainer, batch)]
            return test_k_vs_all.oracle(data, masked, queries, config)
        return test_train_step.oracle_batch(data, masked, batch)

    assert_epochs_equal(config, loss_of)
