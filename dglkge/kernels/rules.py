"""Formulas for one row, in place: update rules, and the links around them; a neutral link does nothing.

An update rule takes ``row`` "(D,)", its ``gradient`` "(D,)", ``state``, a tuple of the row's state "(W,)"
each, and ``numbers``, a tuple of scalars, and writes the new row and state over the old ones. Between the
merged gradient and the rule: :func:`average`, :func:`clip_row`, :func:`add_decay`. On the row, before and
after the rule: :func:`decay_row`, :func:`limit_row`. The plain twins of links are in ``dglkge.optim.links``.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from dglkge.kernels.jit import compiled, compiled_inline


@compiled_inline
def adagrad(row: ndarray, gradient: ndarray, state: tuple, numbers: tuple) -> None:
    r"""Adagrad:
    :math:`G \leftarrow G + g^2,\; w \leftarrow w - \eta\, g / (\sqrt{G} + \epsilon)`,
    or :math:`\sqrt{G + \epsilon}`.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", JMLR 12 (2011), diagonal form. ``torch.optim.Adagrad`` has epsilon outside the root,
    ``dgl.optim.SparseAdagrad`` inside. The numbers are lr, epsilon, and whether it is inside.

    Examples
    --------
    >>> row, total = np.zeros(1, np.float32), np.zeros(1, np.float32)
    >>> adagrad(row, np.full(1, 2, np.float32), (total,), (np.float32(0.5), np.float32(0), False))
    >>> row.tolist(), total.tolist()
    ([-0.5], [4.0])
    """
    (total,) = state
    lr, eps, is_inside = numbers
    if is_inside:
        for j in range(row.shape[0]):
            total[j] += gradient[j] * gradient[j]
            row[j] -= lr * gradient[j] / np.sqrt(total[j] + eps)
        return
    for j in range(row.shape[0]):
        total[j] += gradient[j] * gradient[j]
        row[j] -= lr * gradient[j] / (np.sqrt(total[j]) + eps)


@compiled_inline
def row_adagrad(row: ndarray, gradient: ndarray, state: tuple, numbers: tuple) -> None:
    r"""Adagrad with one accumulator a row:
    :math:`G \leftarrow G + \frac{1}{D}\sum_j g_j^2,\; w \leftarrow w - \eta\, g / (\sqrt{G} + \epsilon)`,
    or :math:`\sqrt{G + \epsilon}`.

    Source: PyTorch-BigGraph (Lerer et al., MLSys 2019, section 3.1) and DGL-KE (Zheng et al., SIGIR 2020).
    The numbers are those of :func:`adagrad`.

    Examples
    --------
    >>> row, total = np.zeros(2, np.float32), np.zeros(1, np.float32)
    >>> row_adagrad(row, np.array([1, 7], np.float32), (total,), (np.float32(0.5), np.float32(0), False))
    >>> row.round(3).tolist(), total.tolist()
    ([-0.10000000149011612, -0.699999988079071], [25.0])
    """
    (total,) = state
    lr, eps, is_inside = numbers
    dim = row.shape[0]
    # Typed zero: a Python float would make numba accumulate in float64 and convert every number.
    squares = row.dtype.type(0)
    for j in range(dim):
        squares += gradient[j] * gradient[j]
    total[0] += squares / row.dtype.type(dim)
    step_size = lr / (np.sqrt(total[0] + eps) if is_inside else np.sqrt(total[0]) + eps)
    for j in range(dim):
        row[j] -= step_size * gradient[j]


@compiled_inline
def adam(row: ndarray, gradient: ndarray, state: tuple, numbers: tuple) -> None:
    r"""Adam: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g,\; v \leftarrow \beta_2 v + (1-\beta_2) g^2,\;
    w \leftarrow w - \frac{\eta}{1-\beta_1^t}\, m / (\sqrt{v / (1-\beta_2^t)} + \epsilon)`.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1. The state is
    the count of the row's updates (1,), m (D,) and v (D,), or v (1,), fed by the mean of the squares. The
    numbers are lr, epsilon, both betas as float64, and t, or 0: then t is the count (DGL's rule). With a
    given t epsilon is scaled by the bias correction too, as in ``torch.optim.SparseAdam``.

    Examples
    --------
    >>> row, mem, power, step = *(np.zeros(2, np.float32) for _ in range(3)), np.zeros(1, np.float32)
    >>> adam(row, np.array([3, -5], np.float32), (step, mem, power), (0.5, 0.0, 0.0, 0.0, 0))
    >>> row.tolist(), mem.tolist(), power.tolist(), step.tolist()
    ([-0.5, 0.5], [3.0, -5.0], [9.0, 25.0], [1.0])
    """
    step, mem, power = state
    lr, eps, wide1, wide2, global_step = numbers
    dim, kind = row.shape[0], row.dtype.type
    # In float32, 1 - beta2**t loses half of its digits in the first steps: float64 until the division.
    time = float(global_step) if global_step > 0 else step[0] + 1.0
    step[0] = time
    step_size = kind(lr / (1.0 - wide1**time))
    root_scale = kind(1.0 / np.sqrt(1.0 - wide2**time))
    row_eps = kind(eps) * root_scale if global_step > 0 else kind(eps)
    # Typed ones, so that the arithmetic stays in the rows' dtype.
    beta1, beta2 = kind(wide1), kind(wide2)
    rest1, rest2 = kind(1) - beta1, kind(1) - beta2
    if power.shape[0] == dim:
        for j in range(dim):
            mem[j] = beta1 * mem[j] + rest1 * gradient[j]
            power[j] = beta2 * power[j] + rest2 * gradient[j] * gradient[j]
            row[j] -= step_size * mem[j] / (np.sqrt(power[j]) * root_scale + row_eps)
    else:
        squares = kind(0)
        for j in range(dim):
            squares += gradient[j] * gradient[j]
        power[0] = beta2 * power[0] + rest2 * squares / kind(dim)
        scale = step_size / (np.sqrt(power[0]) * root_scale + row_eps)
        for j in range(dim):
            mem[j] = beta1 * mem[j] + rest1 * gradient[j]
            row[j] -= scale * mem[j]


@compiled_inline
def is_finite(gradient: ndarray) -> bool:
    """Return whether a gradient "(D,)" has neither a NaN nor an infinity."""
    zero = gradient.dtype.type(0)
    # 0 times NaN or infinity is NaN, which stays in the sum: one vectorised pass without a branch a number.
    # It needs NaN to keep its meaning: see FAST_MATH in jit.
    poison = zero
    for j in range(gradient.shape[0]):
        poison += gradient[j] * zero
    return poison == zero


@compiled_inline
def average(gradient: ndarray, count: int) -> None:
    """Divide a sum of ``count`` gradients by their number."""
    if count > 1:
        share = gradient.dtype.type(1) / gradient.dtype.type(count)
        for j in range(gradient.shape[0]):
            gradient[j] *= share


@compiled_inline
def clip_row(gradient: ndarray, max_norm: float) -> None:
    """Scale a gradient that is longer than ``max_norm`` to that length; infinity: no limit."""
    if max_norm < np.inf:
        squares = gradient.dtype.type(0)
        for j in range(gradient.shape[0]):
            squares += gradient[j] * gradient[j]
        norm = np.sqrt(squares)
        if norm > max_norm:
            shrink = max_norm / norm
            for j in range(gradient.shape[0]):
                gradient[j] *= shrink


@compiled_inline
def add_decay(gradient: ndarray, row: ndarray, weight_decay: float) -> None:
    """Add a multiple of the row to its gradient (L2); 0: none."""
    if weight_decay != gradient.dtype.type(0):
        for j in range(gradient.shape[0]):
            gradient[j] += weight_decay * row[j]


@compiled_inline
def decay_row(row: ndarray, kept: float) -> None:
    """Multiply a row by what a decoupled weight decay keeps of it; 1: none."""
    if kept != row.dtype.type(1):
        for j in range(row.shape[0]):
            row[j] *= kept


@compiled_inline
def limit_row(row: ndarray, max_norm: float) -> None:
    """Scale a row that is longer than ``max_norm``, a float64, to that length; infinity: no limit."""
    if max_norm < np.inf:
        # In float64: a square of float32 may overflow.
        square = np.float64(0)
        for j in range(row.shape[0]):
            number = np.float64(row[j])
            square += number * number
        if square > max_norm * max_norm:
            scale = max_norm / np.sqrt(square)
            for j in range(row.shape[0]):
                row[j] = row[j] * scale


@compiled
def limit_norms(rows: ndarray, max_norm: float) -> None:
    """Scale the rows "(N, D)" that are longer than ``max_norm`` to that Euclidean length, in place."""
    for i in range(rows.shape[0]):
        limit_row(rows[i], max_norm)
