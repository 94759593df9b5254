"""Update rules of the optimizers, for one row and in place, and the loops over all touched rows.

Every function takes the parameters ``row`` "(D,)", its ``gradient`` "(D,)" and the state of the row, and
writes the new row and state over the old ones. Scalars have the dtype of the rows.

All loops share these arguments: ``rows`` and state arrays "(N, D)" or "(N, 1)" in place, ``targets`` "(n,)
int64" row of each update in those arrays, ``selected`` "(n,) int64" its position among the chains, ``chain``
= (heads, links, addresses, counts) of :class:`RowChains`, ``options`` = (mean, max_norm, weight_decay) as in
:func:`kernels.prepare_gradient`. All return the number of rows left alone because their gradient was not
finite.
"""

from __future__ import annotations

import numpy as np

from dglkge.kernels.chains import LOOKAHEAD, prefetch_bytes, prefetch_row, prepare_gradient
from dglkge.kernels.jit import compiled


@compiled
def adagrad(row: np.ndarray, gradient: np.ndarray, total: np.ndarray, lr: float, eps: float) -> None:
    r"""Adagrad: :math:`G \leftarrow G + g^2,\; w \leftarrow w - \eta\, g / (\sqrt{G} + \epsilon)`.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", JMLR 12 (2011), diagonal form; epsilon outside the root, as ``torch.optim.Adagrad`` has it.

    Examples
    --------
    >>> row, total = np.zeros(1, np.float32), np.zeros(1, np.float32)
    >>> adagrad(row, np.full(1, 2, np.float32), total, np.float32(0.5), np.float32(0))
    >>> row.tolist(), total.tolist()
    ([-0.5], [4.0])
    """
    for j in range(row.shape[0]):
        total[j] += gradient[j] * gradient[j]
        row[j] -= lr * gradient[j] / (np.sqrt(total[j]) + eps)


@compiled
def row_adagrad(row: np.ndarray, gradient: np.ndarray, total: np.ndarray, lr: float, eps: float) -> None:
    r"""Adagrad with one accumulator a row:
    :math:`G \leftarrow G + \frac{1}{D}\sum_j g_j^2,\; w \leftarrow w - \eta\, g / (\sqrt{G} + \epsilon)`.

    Source: PyTorch-BigGraph (Lerer et al., MLSys 2019, section 3.1) and DGL-KE (Zheng et al., SIGIR 2020).
    ``total`` has shape "(1,)".

    Examples
    --------
    >>> row, total = np.zeros(2, np.float32), np.zeros(1, np.float32)
    >>> row_adagrad(row, np.array([1, 7], np.float32), total, np.float32(0.5), np.float32(0))
    >>> row.round(3).tolist(), total.tolist()
    ([-0.10000000149011612, -0.699999988079071], [25.0])
    """
    dim = row.shape[0]
    squares = row.dtype.type(0)
    for j in range(dim):
        squares += gradient[j] * gradient[j]
    total[0] += squares / row.dtype.type(dim)
    step_size = lr / (np.sqrt(total[0]) + eps)
    for j in range(dim):
        row[j] -= step_size * gradient[j]


@compiled
def adam(
    row: np.ndarray,
    gradient: np.ndarray,
    mem: np.ndarray,
    power: np.ndarray,
    beta1: float,
    beta2: float,
    step_size: float,
    root_scale: float,
    eps: float,
) -> None:
    r"""Adam: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g,\; v \leftarrow \beta_2 v + (1-\beta_2) g^2,\;
    w \leftarrow w - \frac{\eta}{1-\beta_1^t}\, m / (\sqrt{v / (1-\beta_2^t)} + \epsilon)`.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1. The bias
    corrections come in as ``step_size`` :math:`= \eta/(1-\beta_1^t)` and ``root_scale``
    :math:`= 1/\sqrt{1-\beta_2^t}`. With ``power`` of shape "(1,)" the row has one second moment, fed by the
    mean of the squares.

    Examples
    --------
    >>> row, mem, power = (np.zeros(2, np.float32) for _ in range(3))
    >>> zero, half, one = (np.float32(number) for number in (0, 0.5, 1))
    >>> adam(row, np.array([3, -5], np.float32), mem, power, zero, zero, half, one, zero)
    >>> row.tolist(), mem.tolist(), power.tolist()
    ([-0.5, 0.5], [3.0, -5.0], [9.0, 25.0])
    """
    dim = row.shape[0]
    rest1, rest2 = row.dtype.type(1) - beta1, row.dtype.type(1) - beta2
    if power.shape[0] == dim:
        for j in range(dim):
            mem[j] = beta1 * mem[j] + rest1 * gradient[j]
            power[j] = beta2 * power[j] + rest2 * gradient[j] * gradient[j]
            row[j] -= step_size * mem[j] / (np.sqrt(power[j]) * root_scale + eps)
    else:
        squares = row.dtype.type(0)
        for j in range(dim):
            squares += gradient[j] * gradient[j]
        power[0] = beta2 * power[0] + rest2 * squares / row.dtype.type(dim)
        scale = step_size / (np.sqrt(power[0]) * root_scale + eps)
        for j in range(dim):
            mem[j] = beta1 * mem[j] + rest1 * gradient[j]
            row[j] -= scale * mem[j]


@compiled
def update_adagrad(
    rows: np.ndarray,
    total: np.ndarray,
    targets: np.ndarray,
    selected: np.ndarray,
    chain: tuple,
    options: tuple,
    lr: float,
    eps: float,
) -> int:
    """Apply :func:`update_rules.adagrad` to the target rows."""
    heads, links, addresses, counts = chain
    mean, max_norm, weight_decay = options
    gradient = np.empty(rows.shape[1], rows.dtype)
    num_bad = 0
    for i in range(targets.shape[0]):
        ahead = i + LOOKAHEAD
        if ahead < targets.shape[0]:
            prefetch_bytes(addresses[heads[selected[ahead]]], rows.strides[0])
            prefetch_row(rows, targets[ahead])
            prefetch_row(total, targets[ahead])
        target = targets[i]
        if not prepare_gradient(
            heads[selected[i]], links, addresses, counts, mean, max_norm, weight_decay, rows[target], gradient
        ):
            num_bad += 1
            continue
        adagrad(rows[target], gradient, total[target], lr, eps)
    return num_bad


@compiled
def update_row_adagrad(
    rows: np.ndarray,
    total: np.ndarray,
    targets: np.ndarray,
    selected: np.ndarray,
    chain: tuple,
    options: tuple,
    lr: float,
    eps: float,
) -> int:
    """Apply :func:`update_rules.row_adagrad` to the target rows."""
    heads, links, addresses, counts = chain
    mean, max_norm, weight_decay = options
    gradient = np.empty(rows.shape[1], rows.dtype)
    num_bad = 0
    for i in range(targets.shape[0]):
        ahead = i + LOOKAHEAD
        if ahead < targets.shape[0]:
            prefetch_bytes(addresses[heads[selected[ahead]]], rows.strides[0])
            prefetch_row(rows, targets[ahead])
            prefetch_row(total, targets[ahead])
        target = targets[i]
        if not prepare_gradient(
            heads[selected[i]], links, addresses, counts, mean, max_norm, weight_decay, rows[target], gradient
        ):
            num_bad += 1
            continue
        row_adagrad(rows[target], gradient, total[target], lr, eps)
    return num_bad


@compiled
def update_adam(
    rows: np.ndarray,
    step: np.ndarray,
    mem: np.ndarray,
    power: np.ndarray,
    targets: np.ndarray,
    selected: np.ndarray,
    chain: tuple,
    options: tuple,
    lr: float,
    eps: float,
    betas: tuple,
    global_step: int,
) -> int:
    """Apply :func:`update_rules.adam` to the target rows.

    ``step`` "(N,)" counts the updates of each row; bias is corrected by it (DGL's rule) or, where
    ``global_step`` is not 0, by that number, epsilon then standing inside the correction as in
    ``torch.optim.SparseAdam``. ``betas`` are float64: their powers are taken in double precision.
    """
    heads, links, addresses, counts = chain
    mean, max_norm, weight_decay = options
    beta1, beta2 = betas
    kind = rows.dtype.type
    gradient = np.empty(rows.shape[1], rows.dtype)
    num_bad = 0
    for i in range(targets.shape[0]):
        ahead = i + LOOKAHEAD
        if ahead < targets.shape[0]:
            prefetch_bytes(addresses[heads[selected[ahead]]], rows.strides[0])
            prefetch_row(rows, targets[ahead])
            prefetch_row(mem, targets[ahead])
            prefetch_row(power, targets[ahead])
        target = targets[i]
        if not prepare_gradient(
            heads[selected[i]], links, addresses, counts, mean, max_norm, weight_decay, rows[target], gradient
        ):
            num_bad += 1
            continue
        time = float(global_step) if global_step > 0 else step[target] + 1.0
        step[target] = time
        step_size = kind(lr / (1.0 - beta1**time))
        root_scale = kind(1.0 / np.sqrt(1.0 - beta2**time))
        row_eps = kind(eps) * root_scale if global_step > 0 else kind(eps)
        adam(
            rows[target],
            gradient,
            mem[target],
            power[target],
            kind(beta1),
            kind(beta2),
            step_size,
            root_scale,
            row_eps,
        )
    return num_bad
