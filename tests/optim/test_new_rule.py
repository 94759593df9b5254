"""A rule of a user's own: all of it is in this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dglkge.kernels.jit import compiled_inline
from dglkge.optim import SparseOptimizer, UpdateRule
from tests.optim.oracle import EVERYTHING, start_rows


@compiled_inline
def momentum(row, gradient, state, numbers):
    """SGD with heavy-ball momentum."""
    (velocity,) = state
    lr, share = numbers
    for j in range(row.shape[0]):
        velocity[j] = share * velocity[j] + gradient[j]
        row[j] -= lr * velocity[j]


@dataclass(frozen=True)
class MomentumRule(UpdateRule):
    """v <- mu v + g, w <- w - lr v, on touched rows."""

    help = "SGD with momentum"
    formula = staticmethod(momentum)

    momentum: float = 0.5

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"velocity": (dim,)}

    def numbers(self, lr: float, num_steps: int, kind: Callable) -> tuple:
        return kind(lr), kind(self.momentum)

    def update_rows(self, rows: Any, state: Any, gradient: Any, lr: float, num_steps: int) -> None:
        (velocity,) = state
        velocity.mul_(self.momentum).add_(gradient)
        rows -= lr * velocity


@compiled_inline
def descent(row, gradient, state, numbers):
    for j in range(row.shape[0]):
        row[j] -= numbers[0] * gradient[j]


class DescentRule(MomentumRule):
    """w <- w - lr g: a rule without state."""

    formula = staticmethod(descent)

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {}

    def update_rows(self, rows: Any, state: Any, gradient: Any, lr: float, num_steps: int) -> None:
        rows -= lr * gradient


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("rule, share", [(MomentumRule(), 0.5), (MomentumRule(0.9), 0.9), (DescentRule(), 0)])
def test_it_is_torch_sgd_where_every_row_is_touched(make_table, rule, share, kernels):
    """Momentum decays in touched rows only, so all rows are touched here. Links work around any rule."""
    table = make_table()
    optimizer = SparseOptimizer([table], rule, 0.1, weight_decay=0.01, kernels=kernels)
    weight = torch.nn.Parameter(start_rows(50, 4).double())
    dense = torch.optim.SGD([weight], lr=0.1, momentum=share, weight_decay=0.01)
    for step in range(20):
        gradients = torch.randn(50, 4, generator=torch.Generator().manual_seed(step))
        optimizer.step_rows([(table, EVERYTHING, gradients)])
        weight.grad = gradients.double()
        dense.step()
    torch.testing.assert_close(table.weight[EVERYTHING].double(), weight.detach(), rtol=1e-5, atol=1e-5)


def test_a_schedule_reaches_every_hyper_parameter_of_a_group(make_table) -> None:
    table = make_table()
    optimizer = SparseOptimizer([table], MomentumRule(0.5), 0.1)
    assert optimizer.param_groups[0]["momentum"] == 0.5
    gradients = torch.ones(50, 4)
    optimizer.step_rows([(table, EVERYTHING, gradients)])
    optimizer.param_groups[0].update(momentum=0.25, lr=1.0)
    optimizer.step_rows([(table, EVERYTHING, gradients)])
    torch.testing.assert_close(table.weight[EVERYTHING], start_rows(50, 4) - 0.1 - 1.25)
