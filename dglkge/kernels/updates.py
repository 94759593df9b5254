"""Compiled loops over the touched rows: finish the gradient of each and apply the update rule in place.

All loops share these arguments: ``rows`` and state arrays "(N, D)" or "(N, 1)" in place, ``targets`` "(n,)
int64" row of each update in those arrays, ``selected`` "(n,) int64" its position among the chains, ``chain``
= (heads, links, addresses, counts) of :class:`RowChains`, ``options`` = (mean, max_norm, weight_decay) as in
:func:`dglkge.kernels.chains.prepare_gradient`. All return the number of rows that were skipped because
their gradient was not finite.

The plain twins are the methods ``update_rows`` of the rules in ``dglkge.optim.optimizers``. The loops are
written out for each rule, not handed the rule as an argument: numba caches no loop that takes a function.
"""

from __future__ import annotations

import numpy as np

from dglkge.kernels.chains import prepare_gradient
from dglkge.kernels.jit import compiled
from dglkge.kernels.rows import LOOKAHEAD, prefetch_bytes, prefetch_row
from dglkge.kernels.rules import adagrad, adam, row_adagrad


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
    """Apply :func:`rules.adagrad` to the target rows."""
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
            # A non-finite gradient leaves row and state as they are; one such update could not be undone.
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
    """Apply :func:`rules.row_adagrad` to the target rows."""
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
    """Apply :func:`rules.adam` to the target rows.

    ``step`` "(N,)" counts the updates of each row; bias is corrected by it (DGL's rule) or, where
    ``global_step`` is not 0, by that number; epsilon is then scaled by the correction too, as in
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
        # In float32, 1 - beta2**t loses half of its digits in the first steps: float64 until the division.
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


@compiled
def decay_rows(
    rows: np.ndarray,
    targets: np.ndarray,
    selected: np.ndarray,
    chain: tuple,
    options: tuple,
    factor: float,
) -> int:
    """Multiply the target rows by a factor, apart from those that an update would skip as not finite."""
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
            row[j] *= factor
    return num_bad


@compiled
def limit_norms(rows: np.ndarray, targets: np.ndarray, max_norm: float) -> None:
    """Scale the target rows that are longer than ``max_norm`` to that Euclidean length, in place.

    The plain twin is :func:`dglkge.optim.rules.limit_norms_plain`.
    """
    for i in range(targets.shape[0]):
        row = rows[targets[i]]
        # In float64: a square of float32 may overflow.
        square = np.float64(0)
        for j in range(row.shape[0]):
            number = np.float64(row[j])
            square += number * number
        if square > max_norm * max_norm:
            scale = max_norm / np.sqrt(square)
            for j in range(row.shape[0]):
                row[j] = row[j] * scale
