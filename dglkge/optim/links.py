"""Links around an update rule, as in optax: they change a merged gradient, and the row.

=============================== ============================================================================
link                            hyper-parameter of a group
=============================== ============================================================================
mean of duplicates              ``duplicates="mean"`` of the optimizer
limit of a gradient's length    ``max_row_norm``
weight decay, L2                ``weight_decay``: its multiple of the row is added to the gradient
weight decay, decoupled         with ``decoupled_weight_decay`` the row is multiplied by 1 - lr·weight_decay
limit of a row's length         :meth:`SparseOptimizer.limit_norms`, of a table
=============================== ============================================================================

Compiled, they are ``dglkge.kernels.rules``, inlined into the loop of each rule; here is the plain twin.
Limits of the gradient of all tables are :class:`dglkge.optim.row_chains.Clipping`, the scale of
``torch.amp.GradScaler`` is :class:`dglkge.optim.dgl_tables.ScaledGradients`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy import ndarray
from torch import Tensor

from dglkge.kernels.chains import update_loop
from dglkge.optim.rules import UpdateRule, not_negative

#: Hyper-parameters of the links in a parameter group, and their defaults, which do nothing.
NEUTRAL: dict[str, Any] = {"weight_decay": 0.0, "decoupled_weight_decay": False, "max_row_norm": None}


class UpdateResult(NamedTuple):
    """What all trainers learn from a step.

    Attributes
    ----------
    extra_sum : int
        Sum over all trainers of the numbers ``extra`` given to the step: equal on each; with
        ``synchronous=False`` the trainer's own number.
    clip_factor : float
        Factor by which clipping by norm changed the gradient; 1 without clipping.
    """

    extra_sum: int
    clip_factor: float = 1.0


class RuleStep(NamedTuple):
    """Update of one table in one step: its rule, and the numbers of rule and links.

    Attributes
    ----------
    rule : UpdateRule
        With the hyper-parameters that it had when the step was started.
    mean : bool
        Divide the sum of a row's gradients by their number.
    max_row_norm, max_norm : float
        Limits of the 2-norms of a row's gradient and of an updated row; may be infinite.
    weight_decay : float
        Multiple of the row that is added to its gradient.
    kept : float
        Factor on the row before its update.
    num_steps : int
        Steps of the table so far, this one included; at least 1.
    number : int
        Number of the step, on which random bits depend; the same on all trainers.
    """

    rule: UpdateRule
    lr: float
    mean: bool
    max_row_norm: float
    weight_decay: float
    kept: float
    max_norm: float
    num_steps: int
    number: int

    @classmethod
    def of(
        cls,
        rule: UpdateRule,
        group: Mapping[str, Any],
        mean: bool = False,
        max_norm: float = math.inf,
        num_steps: int = 1,
        number: int = 0,
    ) -> RuleStep:
        """Make the update of a table in a parameter group; a ValueError names a hyper-parameter that is
        out of range.
        """
        lr, limit = not_negative("lr", group["lr"]), group["max_row_norm"]
        added, kept = not_negative("weight_decay", group["weight_decay"]), 1.0
        if limit is not None and not limit > 0:
            raise ValueError(f"max_row_norm must be positive or None, got {limit}")
        if group["decoupled_weight_decay"]:
            added, kept = 0.0, 1.0 - lr * added
        limit = math.inf if limit is None else float(limit)
        return cls(rule.of(group), lr, mean, limit, added, kept, max_norm, num_steps, number)

    def update(
        self, arrays: Sequence[ndarray], targets: ndarray, selected: ndarray, chain: tuple[Any, ...]
    ) -> int:
        """Update rows in place by the compiled loop of the rule; returns how many were skipped as not finite.

        Parameters
        ----------
        arrays : sequence of ndarray
            Rows "(N, D)" and the state tensors "(N, ...)".
        targets, selected : ndarray
            "(n,) int64": rows of ``arrays`` to update, and the position of each among the chains.
        chain : tuple
            ``GradientRows.chain``.
        """
        rows, *state = arrays
        kind = rows.dtype.type
        links = self.mean, kind(self.max_row_norm), kind(self.weight_decay), kind(self.kept), self.max_norm
        flat = tuple(array.reshape(len(array), math.prod(array.shape[1:])) for array in state)
        numbers = self.rule.numbers(self.lr, self.num_steps, kind)
        return update_loop(self.rule.formula)(rows, flat, targets, selected, chain, links, numbers)

    def update_there(
        self, tables: Sequence[Tensor], targets: Tensor, gradient: Tensor, is_compiled: bool = False
    ) -> Tensor:
        """Update rows in place with plain torch: the twin of the links and of every rule's loop.

        Returns how many were skipped, a tensor on the device of the rows, which is not waited for.

        Parameters
        ----------
        tables : sequence of Tensor
            Rows "(N, D)" and the state tensors "(N, ...)", on any device; the other tensors are on the same.
        targets : Tensor
            "(n,) int64": distinct rows of ``tables``.
        gradient : Tensor
            "(n, D)" gradient of each target: the sum, or the mean where that is the rule for duplicates.
        is_compiled : bool
            In one pass, compiled by torch for any number of rows.
        """
        update = _compiled_update() if is_compiled else update_rows
        # A tensor: of a number torch would compile every value.
        lr: Any = torch.tensor(self.lr, dtype=torch.float64) if is_compiled else self.lr
        limits = self.max_row_norm, self.weight_decay, self.kept, self.max_norm
        return update(self.rule, tables, targets, gradient, limits, lr, self.num_steps)


def update_rows(
    rule: UpdateRule,
    tables: Sequence[Tensor],
    targets: Tensor,
    gradient: Tensor,
    limits: tuple[float, float, float, float],
    lr: float,
    num_steps: int,
) -> Tensor:
    """Update rows in place, without a branch on a number of a row; see :meth:`RuleStep.update_there`.

    Limits are ``max_row_norm``, ``weight_decay``, ``kept`` and ``max_norm`` of a :class:`RuleStep`.
    """
    max_row_norm, weight_decay, kept, max_norm = limits
    finite = torch.isfinite(gradient).all(dim=1)
    before = [table[targets] for table in tables]
    rows, *state = [rows_before.clone() for rows_before in before]
    gradient = torch.where(finite[:, None], gradient, 0)
    if max_row_norm < math.inf:
        norms = gradient.norm(dim=1, keepdim=True)
        gradient = torch.where(norms > max_row_norm, gradient * (max_row_norm / norms), gradient)
    if weight_decay:
        gradient = gradient + weight_decay * rows
    if kept != 1:
        rows *= kept
    rule.update_rows(rows, state, gradient, lr, num_steps)
    limit_norms_plain(rows, max_norm)
    for table, updated, old in zip(tables, [rows, *state], before):
        is_updated = finite.view(-1, *[1] * (updated.dim() - 1))
        table[targets] = torch.where(is_updated, updated, old)
    return (~finite).sum()


@functools.cache
def _compiled_update() -> Callable[..., Tensor]:
    """Return :func:`update_rows`, to be compiled for all numbers of rows together."""
    return torch.compile(update_rows, dynamic=True)


def limit_norms_plain(rows: Tensor, max_norm: float) -> None:
    """Scale the rows "(n, D)" that are longer than ``max_norm`` to that Euclidean length, in place."""
    if max_norm < math.inf:
        wide = rows.double()
        lengths = (wide**2).sum(dim=1, keepdim=True).sqrt()
        rows.copy_(torch.where(lengths > max_norm, wide * (max_norm / lengths), wide))


@dataclass(frozen=True)
class Options:
    """How gradients of a row are merged, sent and applied.

    Attributes
    ----------
    duplicates : {"sum", "mean"}
        Merging of several gradients for one row in a step, those of other trainers included. "sum" is torch's
        rule: a hub that is read often moves as far as its gradients say. Divide the loss by the size of the
        global batch, and the result depends on that batch alone, not on how it was split between trainers. If
        instead each trainer takes the mean over its own share, which ``DistributedDataParallel`` would
        average, the sum over n trainers is n times the gradient of one process, and a triple of a small share
        weighs more. "mean" is DGL's rule: every touched row gets one average gradient, so hubs learn more
        slowly, and adding trainers (a larger global batch) does not make a step longer.
    wire_dtype : torch.dtype, optional
        Type in which gradient rows are sent between trainers: ``torch.bfloat16`` or ``torch.float16`` (which
        overflows beyond 65504). Default: the type in which they are computed. Rows and state keep their type.
    overlap : bool
        Run exchange and update in the background; they are finished before rows are read or written through
        the embedding, or by :meth:`finish`. Code that reads the kvstore's memory directly must call
        :meth:`finish` first.
    nonfinite : {"raise", "skip"}
        A row whose gradient has a NaN or an infinity is never updated. "raise": every trainer then raises
        ``FloatingPointError`` at the end of the step; "skip": it is counted in ``num_skipped_rows``.
    timeout_seconds : float
        Limit of each wait for the other trainers in a step.
    synchronous : bool
        False: asynchronous updates as in Hogwild (Niu et al. 2011): a trainer applies its own gradients to
        the shared rows at once and waits for no other trainer; simultaneous updates of a row may be lost,
        and runs are not reproducible. A thread sends the gradients for rows of other machines, where they
        are applied on arrival; call ``drain()`` before rows are saved or compared. ``extra_sum`` of a step is
        the trainer's own number; on several machines 0, and at one later step, the same on all trainers, the
        sum.
    max_lag : int
        With ``synchronous=False`` on several machines: steps that a trainer may be ahead of the slowest one.
    kernels : {"auto", "reference"}
        "auto": merge and update rows with compiled loops; "reference": with their plain numpy and torch
        twins, slower and easier to read: the same results but for rounding.

    Raises
    ------
    ValueError
        With the name of the option, its value and the allowed values.
    """

    duplicates: str = "sum"
    wire_dtype: torch.dtype | None = None
    overlap: bool = False
    nonfinite: str = "raise"
    timeout_seconds: float = 1800.0
    synchronous: bool = True
    max_lag: int = 100
    kernels: str = "auto"

    def __post_init__(self) -> None:
        words = {
            "duplicates": ("sum", "mean"),
            "nonfinite": ("raise", "skip"),
            "kernels": ("auto", "reference"),
        }
        for name, (first, second) in words.items():
            if (value := getattr(self, name)) not in (first, second):
                raise ValueError(f"{name} must be {first!r} or {second!r}, got {value!r}")
        if self.wire_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"wire_dtype must be torch.float32, bfloat16 or float16, got {self.wire_dtype}")
        if self.max_lag < 1:
            raise ValueError(f"max_lag must be at least 1, got {self.max_lag}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {self.timeout_seconds}")
