"""Base class of update rules: state of a row, compiled loop over the touched rows, plain twin of that loop.

A rule is one class. It declares its state tensors and checks its hyper-parameters; ``update_compiled`` calls
its numba loop, ``update_rows`` is the same formula in plain torch. :class:`SparseOptimizer` runs any rule: to
add one, write a subclass of :class:`UpdateRule` (the three of ``optimizers`` are examples) and hand an
instance to :class:`SparseOptimizer`; no other file changes.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


class UpdateRule(abc.ABC):
    """Update rule of the touched rows of a table.

    Hyper-parameters are those of a parameter group. Every rule has ``lr``, ``weight_decay`` and
    ``max_row_norm``; :meth:`check` of a subclass checks its own ones too.
    """

    @abc.abstractmethod
    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Name of each state tensor, and the shape of its entry for one row of width ``dim``."""

    def check(self, hyper: Mapping[str, Any]) -> None:
        """Check the hyper-parameters of a parameter group.

        Raises
        ------
        ValueError
            With the name of the hyper-parameter, its value and the allowed values.
        """
        check_not_negative(hyper, "lr", "weight_decay")
        if hyper["max_row_norm"] is not None and not hyper["max_row_norm"] > 0:
            raise ValueError(f"max_row_norm must be positive or None, got {hyper['max_row_norm']}")

    def decays_alone(self, hyper: Mapping[str, Any]) -> bool:
        """Whether the rule applies the weight decay itself, so that it is not added to the gradient."""
        return False

    @abc.abstractmethod
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
        """Update rows in place with the compiled loop of the rule.

        Parameters
        ----------
        arrays : sequence of np.ndarray
            Rows "(N, D)" and the state tensors "(N, ...)".
        targets : np.ndarray
            "(n,) int64": rows of ``arrays`` to update.
        selected : np.ndarray
            "(n,) int64": position of each target among the chains.
        chain : tuple
            ``RowChains.chain``.
        options : tuple
            (mean, max_norm, weight_decay) of :func:`dglkge.kernels.chains.prepare_gradient`.
        hyper : mapping
            Hyper-parameters of the table's group.
        num_steps : int
            Steps of the table so far, this one included; at least 1.

        Returns
        -------
        int
            Number of rows that were skipped because their gradient was not finite.
        """

    @abc.abstractmethod
    def update_rows(
        self,
        rows: torch.Tensor,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> None:
        """Update copies of the touched rows in place: the plain twin of the compiled loop.

        Parameters
        ----------
        rows, gradient : Tensor
            "(n, D)": the rows, and their finite gradients, merged, clipped and with weight decay.
        state : sequence of Tensor
            "(n, ...)" for each state tensor.
        hyper, num_steps
            As in :meth:`update_compiled`.
        """


class RuleStep(NamedTuple):
    """Update of one table in one step: its rule and the numbers that the rule needs.

    Attributes
    ----------
    rule : UpdateRule
        The rule.
    hyper : mapping
        Hyper-parameters, as they were when the step was started.
    mean : bool
        Divide the sum of a row's gradients by their number.
    num_steps : int
        Steps of the table so far, this one included; at least 1.
    number : int
        Number of the step, on which random bits depend; the same on all trainers.
    """

    rule: UpdateRule
    hyper: Mapping[str, Any]
    mean: bool
    num_steps: int
    number: int = 0

    def options(self, dtype: np.dtype) -> tuple:
        """(mean, max_norm, weight_decay) as the compiled loops take them, scalars of the rows' type."""
        limit = self.hyper["max_row_norm"]
        kind = dtype.type
        return self.mean, kind(math.inf if limit is None else limit), kind(self.decay)

    @property
    def decay(self) -> float:
        """Multiple of the row that is added to its gradient; a decoupled decay is the rule's own work."""
        return 0.0 if self.rule.decays_alone(self.hyper) else float(self.hyper["weight_decay"])


def update_plain(
    step: RuleStep,
    arrays: Sequence[np.ndarray],
    targets: np.ndarray,
    gradient: torch.Tensor,
    counts: torch.Tensor,
) -> int:
    """Update rows of arrays in place; see :func:`update_tensors`."""
    tables = [torch.from_numpy(array) for array in arrays]
    return update_tensors(step, tables, torch.from_numpy(targets), gradient, counts)


def update_tensors(
    step: RuleStep,
    tables: Sequence[torch.Tensor],
    targets: torch.Tensor,
    gradient: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> int:
    """Update rows in place with plain torch: the twin of ``prepare_gradient`` and of every compiled loop.

    Parameters
    ----------
    step : RuleStep
        Rule and numbers.
    tables : sequence of Tensor
        Rows "(N, D)" and the state tensors "(N, ...)", on any device; the other tensors are on the same.
    targets : Tensor
        "(n,) int64": distinct rows of ``tables``.
    gradient : Tensor
        "(n, D)" sum of the gradients of each target.
    counts : Tensor, optional
        "(n,) int64" number of gradients in each sum; needed for the mean only.

    Returns
    -------
    int
        Number of rows that were skipped because their gradient was not finite.
    """
    finite = torch.isfinite(gradient).all(dim=1)
    chosen, gradient = targets[finite], gradient[finite]
    if step.mean:
        if counts is None:
            raise ValueError("update_tensors: the mean of gradients needs their numbers (counts)")
        gradient = gradient / counts[finite][:, None]
    limit, decay = step.hyper["max_row_norm"], step.decay
    if limit is not None:
        norms = gradient.norm(dim=1, keepdim=True)
        gradient = torch.where(norms > limit, gradient * (limit / norms), gradient)
    rows, *state = [table[chosen] for table in tables]
    if decay != 0:
        gradient = gradient + decay * rows
    step.rule.update_rows(rows, state, gradient, step.hyper, step.num_steps)
    for table, updated in zip(tables, [rows, *state]):
        table[chosen] = updated
    return int((~finite).sum())


def limit_norms_plain(rows: np.ndarray, targets: np.ndarray, max_norm: float) -> None:
    """Scale the target rows that are longer than ``max_norm`` to that Euclidean length, in place."""
    limit_norms_of_tensor(torch.from_numpy(rows), torch.from_numpy(targets), max_norm)


def limit_norms_of_tensor(rows: torch.Tensor, targets: torch.Tensor, max_norm: float) -> None:
    """Scale the target rows of a tensor on any device likewise."""
    chosen = rows[targets].double()
    lengths = (chosen**2).sum(dim=1).sqrt()
    is_long = lengths > max_norm
    rows[targets[is_long]] = (chosen[is_long] * (max_norm / lengths[is_long])[:, None]).to(rows.dtype)


def check_not_negative(hyper: Mapping[str, Any], *names: str) -> None:
    """Check that hyper-parameters are finite numbers >= 0.

    Raises
    ------
    ValueError
        With the name of the first that is not, and its value.
    """
    for name in names:
        if not 0 <= float(hyper[name]) < math.inf:
            raise ValueError(f"{name} must be a finite number >= 0, got {hyper[name]}")


#: Types in which gradient rows may be sent.
WIRE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)

#: Implementations of a step: compiled loops, or their plain twins.
KERNELS = ("auto", "reference")


def check_options(
    duplicates: str,
    wire_dtype: torch.dtype | None,
    nonfinite: str,
    timeout_seconds: float,
    kernels: str,
) -> None:
    """Check the options that hold for all tables of an optimizer.

    Raises
    ------
    ValueError
        With the name of the option, its value and the allowed values.
    """
    if duplicates not in ("sum", "mean"):
        raise ValueError(f"duplicates must be 'sum' or 'mean', got {duplicates!r}")
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"wire_dtype must be torch.float32, bfloat16 or float16, got {wire_dtype}")
    if nonfinite not in ("raise", "skip"):
        raise ValueError(f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be 'auto' or 'reference', got {kernels!r}")
