"""Update rules of the optimizers, for one row and in place; the loops over all touched rows are in
``updates``.

Every function takes the parameters ``row`` "(D,)", its ``gradient`` "(D,)" and the state of the row, and
writes the new row and state over the old ones. Scalars have the dtype of the rows.
"""

from __future__ import annotations

import numpy as np

from dglkge.kernels.jit import compiled_inline


@compiled_inline
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


@compiled_inline
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
    # Typed zero: a Python float would make numba accumulate in float64 and convert every number.
    squares = row.dtype.type(0)
    for j in range(dim):
        squares += gradient[j] * gradient[j]
    total[0] += squares / row.dtype.type(dim)
    step_size = lr / (np.sqrt(total[0]) + eps)
    for j in range(dim):
        row[j] -= step_size * gradient[j]


@compiled_inline
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
    corrections are passed as ``step_size`` :math:`= \eta/(1-\beta_1^t)` and ``root_scale``
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
    # Typed ones, so that the arithmetic stays in the rows' dtype.
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
