"""A rule of a user's own: all of it is in this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.kernels.chains import prepare_gradient
from dglkge.kernels.jit import compiled
from dglkge.optim.rules import UpdateRule
from dglkge.optim.sparse_optimizer import SparseOptimizer
from tests.optim.oracle import batch, start_rows

EVERYTHING = torch.arange(50)


@compiled
def update_momentum(rows, velocity, targets, selected, chain, options, lr, momentum):
    """SGD with heavy-ball momentum on touched rows."""
    heads, links, addresses, counts = chain
    mean, max_norm, weight_decay = options
    gradient = np.empty(rows.shape[1], rows.dtype)
    num_bad = 0
    for i in range(targets.shape[0]):
        row = rows[targets[i]]
        if not prepare_gradient(
            heads[selected[i]], links, addresses, counts, mean, max_norm, weight_decay, row, gradient
        ):
            num_bad += 1
            continue
        for j in range(row.shape[0]):
            velocity[targets[i], j] = momentum * velocity[targets[i], j] + gradient[j]
            row[j] -= lr * velocity[targets[i], j]
    return num_bad


@dataclass(frozen=True)
class MomentumRule(UpdateRule):
    """v <- mu v + g, w <- w - lr v, on touched rows."""

    momentum: float = 0.5

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"velocity": (dim,)}

    def update_compiled(
        self,
        arrays: Sequence[np.ndarray],
        targets: np.ndarray,
        selected: np.ndarray,
        chain: tuple,
        options: tuple,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> int:
        rows, velocity = arrays
        kind = rows.dtype.type
        return update_momentum(
            rows, velocity, targets, selected, chain, options, kind(hyper["lr"]), kind(self.momentum)
        )

    def update_rows(
        self,
        rows: torch.Tensor,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> None:
        (velocity,) = state
        velocity.mul_(self.momentum).add_(gradient)
        rows -= hyper["lr"] * velocity


def optimizer_of(table: Any, kernels: str = "auto", lr: float = 0.1) -> SparseOptimizer:
    defaults = {"lr": lr, "weight_decay": 0.0, "max_row_norm": None}
    return SparseOptimizer([table], MomentumRule(), defaults, kernels=kernels)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_it_is_torch_sgd_where_every_row_is_touched(make_table, kernels: str) -> None:
    """Momentum decays in touched rows only, so all rows are touched here."""
    table = make_table()
    optimizer = optimizer_of(table, kernels)
    weight = torch.nn.Parameter(start_rows(50, 4).double())
    dense = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    for step in range(20):
        gradients = torch.randn(50, 4, generator=torch.Generator().manual_seed(step))
        optimizer.step_rows([(table, EVERYTHING, gradients)])
        weight.grad = gradients.double()
        dense.step()
    torch.testing.assert_close(table.weight[EVERYTHING].double(), weight.detach(), rtol=1e-5, atol=1e-5)


def test_its_state_is_saved_and_loaded(make_table, tmp_path) -> None:
    """A rule whose only state tensor has another name than Adagrad's."""
    table, twin = make_table(name="momentum_table"), make_table()
    first = optimizer_of(table)
    for step in range(3):
        ids, gradients = batch(step, 50, 4)
        first.step_rows([(table, ids, gradients)])
    first.save(tmp_path / "state")
    velocity = first.state_tensors(table)["velocity"][EVERYTHING].clone()
    first.state_tensors(table)["velocity"][EVERYTHING] = torch.zeros(50, 4)
    first.load(tmp_path / "state")
    assert torch.equal(first.state_tensors(table)["velocity"][EVERYTHING], velocity)
    assert first._state["momentum_table"].name == "node~thing~momentum_table_velocity"
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got -1"):
        optimizer_of(twin, lr=-1)
