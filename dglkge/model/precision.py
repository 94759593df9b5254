"""How a module computes in training: type of its matrix products, loss scale, compiled or not.

Rows, scores against candidates, losses and parameters are float32 in any case. In float16 the gradient of a
query is multiplied by the loss scale where it enters the module, and that of a row is divided by it where it
leaves. Gradients are linear, so this is loss scaling (Micikevicius et al. 2018, section 3.2). Code outside of
the module is not concerned: only the gradients of the module's parameters are left scaled.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

NARROW_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of ``dense.autocast`` beside ``none``."""

LEAST_SCALE = 2.0**-14
"""Training ends when the loss scale falls below: then the gradient is not finite for another reason."""

LEAST_COMPILED = 16
"""Queries from which the compiled module is used. torch.compile makes code of its own for 0, for 1, and where
there is a convolution for fewer than 16."""

_GREATEST_SCALE = float(np.finfo(np.float32).max)


@dataclass
class LossScale:
    """Factor on gradients in float16, by the rule of ``torch.amp.GradScaler``; equal on all trainers.

    It is multiplied by a factor after ``growth_interval`` steps in succession that were made, and by another
    one after a step that was skipped.

    Examples
    --------
    >>> loss_scale = LossScale(growth_interval=2)
    >>> for overflows in (True, False, False):
    ...     loss_scale.update(overflows)
    >>> loss_scale.scale == 2.0**16, loss_scale.num_skipped
    (True, 1)
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        self.num_good = self.num_skipped = 0

    def update(self, overflows: bool) -> None:
        """Count a step; it was skipped if it ``overflows``. A FloatingPointError below
        :data:`LEAST_SCALE`.
        """
        if overflows:
            self.scale *= self.backoff_factor
            self.num_good = 0
            self.num_skipped += 1
            if self.scale < LEAST_SCALE:
                raise FloatingPointError(
                    f"dense.autocast is float16 and the gradient is not finite even with a loss scale of "
                    f"{self.scale:g} ({self.num_skipped} batches were skipped, none was trained with numbers "
                    "that are not finite); resume with dense.autocast bfloat16 or none, or train anew with a "
                    "smaller dense.lr"
                )
            return
        self.num_good += 1
        if self.num_good == self.growth_interval:
            grown = self.scale * self.growth_factor
            # torch keeps the scale in float32, and does not let it become infinite.
            if grown <= _GREATEST_SCALE:
                self.scale = grown
            self.num_good = 0

    def state(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"scale": self.scale, "num_good": self.num_good, "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Take what :meth:`state` returned."""
        self.scale = float(state["scale"])
        self.num_good, self.num_skipped = int(state["num_good"]), int(state["num_skipped"])


class _GradientTimes(torch.autograd.Function):
    """The numbers themselves; their gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0] * ctx.factor, None


def compiled_forward(module: torch.nn.Module) -> Callable[..., Tensor]:
    """Return a module's forward by ``torch.compile``, for any number of rows without compiling again."""
    from torch._inductor import config

    # Otherwise each trainer starts a process for each core to compile one small graph.
    config.compile_threads = 1
    compiled: Any = torch.compile(module, dynamic=True)
    return lambda *rows: (module if len(rows[0]) < LEAST_COMPILED else compiled)(*rows)


@dataclass
class ModulePrecision:
    """How a score function's module computes in training on the device type ``"cpu"`` or ``"cuda"``.

    ``dtype`` is that of matrix products and convolutions in the module; torch.float32: no autocast. There is
    a ``loss_scale`` with float16 only.
    """

    device_type: str
    dtype: torch.dtype = torch.float32
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self._compiled: dict[int, Callable[..., Tensor]] = {}
        self.loss_scale = LossScale() if self.dtype == torch.float16 else None

    def forward_of(self, module: torch.nn.Module) -> Callable[..., Tensor]:
        """Return what computes a module's forward."""
        if not self.is_compiled:
            return module
        if id(module) not in self._compiled:
            self._compiled[id(module)] = compiled_forward(module)
        return self._compiled[id(module)]

    def run(self, compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return a function of rows, computed under autocast, in the type of the rows.

        Every use of the module's parameters in training must go through here: with float16 their gradients
        are those of the loss times the loss scale.
        """
        dtype = rows[0].dtype
        factor = 1.0 if self.loss_scale is None else self.loss_scale.scale
        if self.loss_scale is not None:
            rows = tuple(_GradientTimes.apply(one, 1 / factor) for one in rows)
        narrow: Any = contextlib.nullcontext()
        if self.dtype != torch.float32:
            narrow = torch.autocast(self.device_type, self.dtype)
        with narrow:
            made = compute(*rows)
        made = made.to(dtype)
        if self.loss_scale is not None:
            made = _GradientTimes.apply(made, factor)
        return made


def autocast_problem(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why torch has no autocast to a type on a device; None if it has."""
    # Tried: torch switches an autocast that it does not have off, and only warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = (
            f"torch {torch.__version__} has no {str(dtype).rpartition('.')[2]} autocast on {device_type}"
        )
        try:
            image = torch.ones(1, 1, 2, 2, device=device_type, requires_grad=True)
            with torch.autocast(device_type, dtype):
                made = functional.conv2d(image, torch.ones(1, 1, 1, 1, device=device_type)).flatten(1)
                # Not under autocast's own list: computed in the type of its argument.
                normalized = functional.layer_norm(made @ torch.ones(4, 4, device=device_type), (4,))
            normalized.sum().backward()
        except RuntimeError as error:
            return f"{problem}: {' '.join(str(error).split())}"
    return None if normalized.dtype == dtype else problem


def compiler_problem() -> str | None:
    """Return why torch.compile finds no C++ compiler; None if it finds one."""
    from torch._inductor import config  # takes long to import

    # torch's own list: what CXX names, or its default; None stands for a compiler that it would download.
    names = [words[0] for words in map(shlex.split, filter(None, config.cpp.cxx)) if words]
    if any(map(shutil.which, names)):
        return None
    return f"{' or '.join(names)} is not in PATH (the environment variable CXX names another one)"


def is_finite(rows: Tensor) -> bool:
    """Return whether all numbers are finite, without a temporary copy."""
    if not rows.numel():
        return True
    # Both are NaN where a number is.
    least, greatest = torch.aminmax(rows)
    return bool(torch.isfinite(least) & torch.isfinite(greatest))
