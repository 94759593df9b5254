"""Update rules: the state of a row, and the formula that changes row and state.

A rule is one class. Its fields are its hyper-parameters; ``state_shapes`` declares its state; ``formula`` is
the compiled update of one row, from which the loop over the touched rows is generated; ``update_rows`` is the
same in plain torch. :class:`SparseOptimizer` runs any rule, and the links around it: ``links``. Neither torch
nor numba is imported before a rule computes: planning reads the size of the state.
"""

from __future__ import annotations

import abc
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """Update rule of the touched rows of a table.

    Its fields are the hyper-parameters of a parameter group, checked when a rule is made; the values of a
    group replace those of the rule, so that schedulers and loaded states reach it.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    fixed : tuple of str
        Fields that no group can change, because the state or the formula depends on them.
    """

    help: ClassVar[str] = ""
    fixed: ClassVar[tuple[str, ...]] = ()

    @property
    def hyper(self) -> dict[str, Any]:
        """Hyper-parameters of a group with this rule by name, beside those of all rules."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in self.fixed}

    def of(self, group: Mapping[str, Any]) -> UpdateRule:
        """Return this rule with the hyper-parameters of a group; a ValueError if one is out of range."""
        changed = {name: group[name] for name, value in self.hyper.items() if group.get(name, value) != value}
        return replace(self, **changed) if changed else self

    @abc.abstractmethod
    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Name of each state tensor, and the shape of its entry for one row of width ``dim``.

        A single tensor named "sum" is Adagrad's sum of squares: checkpoints write it for PyTorch-BigGraph.
        """

    @property
    @abc.abstractmethod
    def formula(self) -> Callable[..., Any]:
        """Compiled update of one row, with the arguments of those in ``dglkge.kernels.rules``."""

    @abc.abstractmethod
    def numbers(self, lr: float, num_steps: int, kind: Callable[..., Any]) -> tuple[Any, ...]:
        """Scalars of the formula.

        ``num_steps`` are the steps of the table so far, this one included; ``kind`` converts a number to the
        type of the rows.
        """

    @abc.abstractmethod
    def update_rows(
        self, rows: Tensor, state: Sequence[Tensor], gradient: Tensor, lr: float, num_steps: int
    ) -> None:
        """Update copies of the touched rows in place: the plain twin of the formula, on any device.

        Rows "(n, D)", their gradients as the links left them, and "(n, ...)" for each state tensor.
        """


def not_negative(name: str, value: Any) -> float:
    """Return a hyper-parameter that must be finite and not negative."""
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")
    return float(value)


def _formula(name: str) -> Any:
    """Property: a formula of ``dglkge.kernels.rules``, imported when it is read.

    numba's import takes 0.5 s, and planning needs none of it.
    """
    rules, doc = "dglkge.kernels.rules", f"Compiled update of one row: ``kernels.rules.{name}``."
    return property(lambda rule: getattr(importlib.import_module(rules), name), doc=doc)


@dataclass(frozen=True)
class Adagrad(UpdateRule):
    """Adagrad: the sum of squared gradients of each number of a row. Formula: ``kernels.rules.adagrad``.

    Attributes
    ----------
    eps : float
        Added to the root, or to the sum.
    eps_inside_root : bool
        Add epsilon to the sum, as ``dgl.optim.SparseAdagrad`` does.
    """

    help: ClassVar[str] = "Adagrad, a sum of squares for each number (Duchi et al. 2011)"
    fixed: ClassVar[tuple[str, ...]] = ("eps_inside_root",)
    formula = _formula("adagrad")

    eps: float = 1e-10
    eps_inside_root: bool = False

    def __post_init__(self) -> None:
        not_negative("eps", self.eps)

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (dim,)}

    def numbers(self, lr: float, num_steps: int, kind: Callable[..., Any]) -> tuple[Any, ...]:
        return kind(lr), kind(self.eps), self.eps_inside_root

    def update_rows(
        self, rows: Tensor, state: Sequence[Tensor], gradient: Tensor, lr: float, num_steps: int
    ) -> None:
        (total,) = state
        is_row_wise = total.dim() < rows.dim()
        total += (gradient**2).mean(dim=1) if is_row_wise else gradient**2
        root = (total + self.eps).sqrt() if self.eps_inside_root else total.sqrt() + self.eps
        rows -= lr * gradient / (root[:, None] if is_row_wise else root)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one number of state a row: the sum of the mean squared gradients.

    Formula: ``kernels.rules.row_adagrad``.
    """

    help: ClassVar[str] = "Adagrad with one sum of squares for a row (as PyTorch-BigGraph's)"
    formula = _formula("row_adagrad")

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"sum": ()}


@dataclass(frozen=True)
class Adam(UpdateRule):
    """Adam on touched rows only: both moments, and the step of the row's last update.

    Formula: ``kernels.rules.adam``.

    Attributes
    ----------
    betas : (float, float)
        Decay of the first and second moment.
    eps : float
        Added to the root.
    bias_correction : {"row", "global"}
        Correct bias by the number of updates of the row, or of steps of the table.
    row_wise : bool
        One second moment a row, fed by the mean of the squares.
    """

    help: ClassVar[str] = "Adam on the rows of a batch, with a step count for each row (Kingma and Ba 2015)"
    fixed: ClassVar[tuple[str, ...]] = ("bias_correction", "row_wise")
    formula = _formula("adam")

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: str = "row"
    row_wise: bool = False

    def __post_init__(self) -> None:
        not_negative("eps", self.eps)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if self.bias_correction not in ("row", "global"):
            raise ValueError(f"bias_correction must be 'row' or 'global', got {self.bias_correction!r}")

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"step": (), "mem": (dim,), "power": () if self.row_wise else (dim,)}

    def numbers(self, lr: float, num_steps: int, kind: Callable[..., Any]) -> tuple[Any, ...]:
        beta1, beta2 = self.betas
        global_step = num_steps if self.bias_correction == "global" else 0
        return float(lr), float(self.eps), float(beta1), float(beta2), global_step

    def update_rows(
        self, rows: Tensor, state: Sequence[Tensor], gradient: Tensor, lr: float, num_steps: int
    ) -> None:
        step, mem, power = state
        beta1, beta2 = self.betas
        is_global = self.bias_correction == "global"
        if is_global:
            step.fill_(num_steps)
        else:
            step += 1
        # Powers of the betas are close to 1 for the first steps: differences from 1 need double precision.
        time = step.double()
        step_size = (lr / (1 - beta1**time)).to(rows.dtype)
        root_scale = (1 / (1 - beta2**time).sqrt()).to(rows.dtype)
        eps = self.eps * root_scale if is_global else root_scale.new_full(root_scale.shape, self.eps)
        square = (gradient**2).mean(dim=1) if self.row_wise else gradient**2
        # As in the compiled loop: in float32, 1 - 0.999 differs from 0.001 by 1e-5 of its value.
        narrow1, narrow2 = rows.new_tensor((beta1, beta2), device="cpu")
        mem.mul_(narrow1).add_((1 - narrow1) * gradient)
        power.mul_(narrow2).add_((1 - narrow2) * square)
        root = power.sqrt()[:, None] if self.row_wise else power.sqrt()
        rows -= step_size[:, None] * mem / (root * root_scale[:, None] + eps[:, None])
