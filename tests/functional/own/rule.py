"""An update rule of a user, in a file of its own: stochastic gradient descent with a momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dglkge.kernels.jit import compiled_inline
from dglkge.model.choices import OPTIMIZERS
from dglkge.optim import UpdateRule


@compiled_inline
def momentum_row(row, gradient, state, numbers):
    """One row, its velocity, and the numbers (learning rate, momentum)."""
    (velocity,) = state
    lr, share = numbers
    for j in range(row.shape[0]):
        velocity[j] = share * velocity[j] + gradient[j]
        row[j] -= lr * velocity[j]


@OPTIMIZERS.register("heavy_ball")
@dataclass(frozen=True)
class HeavyBall(UpdateRule):
    """v <- mu v + g, w <- w - lr v."""

    help = "gradient descent with momentum"
    formula = staticmethod(momentum_row)

    momentum: float = 0.5

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the velocity's shape."""
        return {"velocity": (dim,)}

    def numbers(self, lr: float, num_steps: int, kind: Callable) -> tuple:
        """Return the scalars of the formula."""
        return kind(lr), kind(self.momentum)

    def update_rows(
        self,
        rows: torch.Tensor,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        lr: float,
        num_steps: int,
    ) -> None:
        """Update copies of the touched rows."""
        (velocity,) = state
        velocity.mul_(self.momentum).add_(gradient)
        rows -= lr * velocity
