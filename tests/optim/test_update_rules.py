"""Each update rule on single rows, against torch's dense optimizers and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.kernels.rules import adagrad, adam, row_adagrad
from dglkge.kernels.updates import update_loop
from dglkge.optim.row_chains import GradientRows

#: Widths on both sides of vector lengths, and types with their tolerances.
ROWS = pytest.mark.parametrize(
    ("dim", "kind", "tolerance"), [(1, np.float32, 2e-5), (7, np.float64, 1e-12), (401, np.float32, 2e-5)]
)


def gradients(dim: int, num_steps: int) -> np.ndarray:
    """Gradients of very different sizes, "(num_steps, dim) float64"."""
    rng = np.random.default_rng(dim)
    return rng.normal(size=(num_steps, dim)) * 10.0 ** rng.integers(-3, 2, (num_steps, 1))


@ROWS
def test_adagrad(dim, kind, tolerance) -> None:
    """torch.optim.Adagrad on the row."""
    weight = torch.nn.Parameter(torch.ones(dim).double())
    dense = torch.optim.Adagrad([weight], lr=0.3, eps=1e-4)
    row, total = np.ones(dim, kind), np.zeros(dim, kind)
    for gradient in gradients(dim, 50):
        adagrad(row, gradient.astype(kind), (total,), (kind(0.3), kind(0), kind(1e-4)))
        weight.grad = torch.from_numpy(gradient)
        dense.step()
    np.testing.assert_allclose(row, weight.detach().numpy(), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(total, dense.state[weight]["sum"].numpy(), rtol=tolerance, atol=tolerance)


@ROWS
def test_row_adagrad(dim, kind, tolerance) -> None:
    """Written out; for one column it is Adagrad."""
    row, total = np.ones(dim, kind), np.zeros(1, kind)
    expected, mean_squares = np.ones(dim), 0.0
    other, other_total = np.ones(dim, kind), np.zeros(dim, kind)
    for gradient in gradients(dim, 50):
        row_adagrad(row, gradient.astype(kind), (total,), (kind(0.3), kind(0), kind(1e-4)))
        adagrad(other, gradient.astype(kind), (other_total,), (kind(0.3), kind(0), kind(1e-4)))
        mean_squares += (gradient**2).mean()
        expected -= 0.3 * gradient / (np.sqrt(mean_squares) + 1e-4)
    np.testing.assert_allclose(row, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(total, [mean_squares], rtol=tolerance)
    if dim == 1:
        np.testing.assert_allclose(row, other, rtol=tolerance)


@ROWS
def test_adam(dim, kind, tolerance) -> None:
    """torch.optim.Adam on the row."""
    weight = torch.nn.Parameter(torch.ones(dim).double())
    dense = torch.optim.Adam([weight], lr=0.1, betas=(0.7, 0.9), eps=1e-5)
    row, step, mem, power = np.ones(dim, kind), np.zeros(1, kind), np.zeros(dim, kind), np.zeros(dim, kind)
    for gradient in gradients(dim, 50):
        adam(row, gradient.astype(kind), (step, mem, power), (0.1, 1e-5, 0.7, 0.9, 0))
        weight.grad = torch.from_numpy(gradient)
        dense.step()
    np.testing.assert_allclose(row, weight.detach().numpy(), rtol=tolerance, atol=tolerance)
    state = dense.state[weight]
    np.testing.assert_allclose(mem, state["exp_avg"].numpy(), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(power, state["exp_avg_sq"].numpy(), rtol=tolerance, atol=tolerance)


def test_adam_with_one_second_moment() -> None:
    """It equals plain Adam where all columns have the same gradient."""
    rows = [np.ones(6), np.ones(6)]
    mems, powers, steps = [np.zeros(6), np.zeros(6)], [np.zeros(6), np.zeros(1)], [np.zeros(1), np.zeros(1)]
    for time in range(1, 30):
        for row, *state in zip(rows, steps, mems, powers):
            adam(row, np.full(6, np.cos(time)), tuple(state), (0.1, 0.0, 0.9, 0.99, 0))
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-12)
    np.testing.assert_allclose(powers[0], np.repeat(powers[1], 6), rtol=1e-12)


class Batch:
    """Chained gradients for the loops over rows."""

    def __init__(self, ids: list[int], rows: np.ndarray) -> None:
        self.chains = GradientRows(rows.shape[1], rows.dtype)
        self.chains.add(np.array(ids), rows)
        self.positions = np.arange(self.chains.num_keys)

    def update(
        self, table: np.ndarray, total: np.ndarray, mean=False, max_norm=np.inf, weight_decay=0.0, kept=1.0
    ) -> int:
        """One Adagrad step with learning rate 1 and epsilon 0; returns the number of bad rows."""
        kind = table.dtype.type
        links = (mean, kind(max_norm), kind(weight_decay), kind(kept), np.inf)
        return update_loop(adagrad)(
            table,
            (total,),
            self.chains.keys,
            self.positions,
            self.chains.chain,
            links,
            (kind(1), kind(0), kind(0)),
        )


def gradient_of(batch: Batch, num_rows: int, **options: float) -> np.ndarray:
    """Size of the gradient that reached each row: the root of Adagrad's state after one step."""
    table, total = np.ones((num_rows, 2), np.float32), np.zeros((num_rows, 2), np.float32)
    assert batch.update(table, total, **options) == 0
    return np.sqrt(total)


def test_sum_and_mean_of_duplicates() -> None:
    """Three gradients for row 1, one for row 0, none for row 2."""
    batch = Batch([1, 0, 1, 1], np.array([[1, 2], [5, 6], [3, 4], [8, 0]], np.float32))
    np.testing.assert_allclose(gradient_of(batch, 3), [[5, 6], [12, 6], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(gradient_of(batch, 3, mean=True), [[5, 6], [4, 2], [0, 0]], rtol=1e-6)


def test_clipping_then_decay() -> None:
    """Long rows are scaled to the limit, short ones are not; decay is added to the clipped gradient."""
    batch = Batch([0, 1], np.array([[3, 4], [0.3, 0.4]], np.float32))
    np.testing.assert_allclose(gradient_of(batch, 2, max_norm=1.0), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(
        gradient_of(batch, 2, max_norm=1.0, weight_decay=0.5), [[1.1, 1.3], [0.8, 0.9]], rtol=1e-6
    )


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_left_alone(poison: float) -> None:
    """Neither the row nor its state moves; the others do; the loop says how many it left."""
    rows = np.ones((5, 2), np.float32)
    rows[1, 1] = rows[3, 0] = poison
    batch = Batch([0, 1, 2, 3, 3], rows)
    table, total = np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)
    assert batch.update(table, total) == 2
    assert table.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert total.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]


def test_many_rows_in_any_order() -> None:
    """The loop that asks for rows ahead touches the right ones up to the last."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(500)[:333]
    table, total = np.zeros((500, 2), np.float32), np.zeros((500, 2), np.float32)
    Batch(ids.tolist(), np.ones((333, 2), np.float32)).update(table, total)
    touched = np.zeros(500, bool)
    touched[ids] = True
    assert (table[touched] == -1).all()
    assert (table[~touched] == 0).all()
