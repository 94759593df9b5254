"""How scores, losses and gradients are computed: device, type of matrix products, precision of a module.

The device is the CPU, a GPU, or a stand-in for a GPU. Products are in bfloat16 where a processor or device is
clearly faster in it.

Rows, scores against candidates, losses and parameters are float32 in any case. In float16 the gradient of a
query is multiplied by the loss scale where it enters the module, and that of a row is divided by it where it
leaves. Gradients are linear, so this is loss scaling (Micikevicius et al. 2018, section 3.2). Code outside of
the module is not concerned: only the gradients of the module's parameters are left scaled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dglkge.errors import InputError
from dglkge.model.functions.autograd import without_loops
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE, STAGED_CPU_DEVICE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComputeDevice:
    """A device by its name in the configuration.

    ``cpu``, ``cuda``, or ``cpu_staged``: the code of ``cuda`` on the CPU, with every copy between host and
    device, for tests on machines without a GPU.
    """

    name: str = CPU_DEVICE
    device: torch.device = torch.device("cpu")

    @property
    def is_staged(self) -> bool:
        """Whether rows are copied to the device and gradients back; the CPU computes on them in place."""
        return self.name != CPU_DEVICE

    @property
    def pins_memory(self) -> bool:
        """Whether copies are asynchronous from page-locked memory only."""
        return self.device.type == CUDA_DEVICE

    @property
    def backend(self) -> Any:
        """Streams and synchronization: ``torch.cuda``, or ``torch.cpu``, whose streams do nothing."""
        return getattr(torch, self.device.type)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Compute by torch's operations inside the block where the device has no compiled loops.

        Loops are chosen by the device of a tensor. The stand-in's tensors are on the CPU, and it must take
        the operations that a GPU takes.
        """
        return without_loops() if self.is_staged else contextlib.nullcontext()

    def autocast(self, dtype: torch.dtype) -> torch.autocast:
        """Return a context in which matmuls are in a type; float32 changes nothing."""
        is_narrow = dtype != torch.float32
        return torch.autocast(self.device.type, dtype if is_narrow else torch.bfloat16, enabled=is_narrow)


HOST = ComputeDevice()
"""The CPU, with its compiled loops."""


def problem_of(name: str) -> str | None:
    """Return why a device cannot be used in this process; None if it can."""
    if name != CUDA_DEVICE or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} finds no GPU here"


def open_device(name: str, setting: str, index: int = 0) -> ComputeDevice:
    """Return a device by name; ``auto``: the GPU if there is one, else the CPU.

    ``setting`` is the field or option for the InputError that there is no such device; ``index`` is the
    number of the GPU among those that this process sees.
    """
    if name == AUTO_DEVICE:
        name = CPU_DEVICE if problem_of(CUDA_DEVICE) else CUDA_DEVICE
    if problem := problem_of(name):
        allowed = f"{CPU_DEVICE}, {AUTO_DEVICE} or {STAGED_CPU_DEVICE}"
        raise InputError(f"{setting} is {name} and {problem}; allowed here: {allowed}")
    if name != CUDA_DEVICE:
        return ComputeDevice(name)
    device = torch.device(CUDA_DEVICE, index)
    torch.cuda.set_device(device)
    return ComputeDevice(name, device)


FLOAT32, BFLOAT16 = "float32", "bfloat16"

MIN_SPEED_UP = 1.5
"""Least speed-up of bfloat16 matmuls over float32: rounding to bfloat16 and back costs time too."""

MIN_FLOPS = 10_000_000
"""Below this a matmul takes microseconds whatever its type."""

MAX_ROWS = 512
"""Larger shapes are measured by a part of them, so that slow matmuls take milliseconds as well."""

DEVICE_MAX_ROWS = 4096
"""The same on a device, where smaller matmuls would measure their start."""


DEVICE_FLOPS = 20_000_000_000
"""Operations that are measured on a GPU."""


def faster_type(shape: tuple[int, int, int], device: ComputeDevice = HOST) -> str:
    """Return ``bfloat16`` where matmuls of a shape (queries, negatives, dimension) are clearly faster in
    it.
    """
    most = DEVICE_MAX_ROWS if device.is_staged else MAX_ROWS
    queries, negatives, dim = (min(shape[0], most), min(shape[1], most), shape[2])
    flops = 2 * queries * negatives * dim
    if flops < MIN_FLOPS:
        return FLOAT32
    # A device computes the chunks of a batch together; one of them would measure its start.
    num_chunks = max(1, DEVICE_FLOPS // flops) if device.device.type == CUDA_DEVICE else 1
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (
            torch.ones(num_chunks, rows, dim, dtype=dtype, device=device.device).squeeze(0)
            for rows in (queries, negatives)
        )
        rates[dtype] = num_chunks * flops / matmul_seconds(left, right) / 1e9
    faster = BFLOAT16 if rates[torch.bfloat16] >= MIN_SPEED_UP * rates[torch.float32] else FLOAT32
    logger.info("matmuls in %s: float32 reaches %.0f GFLOP/s, bfloat16 %.0f", faster, *rates.values())
    return faster


def matmul_seconds(left: Tensor, right: Tensor, repetitions: int = 5) -> float:
    """Return the shortest time of several matmuls of left and right's transpose."""
    # Not counted: oneDNN compiles the matmul for the shape.
    out = left @ right.mT
    synchronize = getattr(torch, left.device.type).synchronize
    synchronize()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        torch.matmul(left, right.mT, out=out)
        synchronize()
        seconds.append(time.perf_counter() - started)
    # The shortest time: other processes and clock frequency only make a matmul slower.
    return max(min(seconds), 1e-9)


NARROW_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of ``dense.autocast`` beside ``none``."""

LEAST_SCALE = 2.0**-14
"""Training ends when the loss scale falls below: then the gradient is not finite for another reason."""

LEAST_COMPILED = 16
"""Queries from which the compiled module is used. torch.compile makes code of its own for 0, for 1, and where
there is a convolution for fewer than 16."""


@dataclass
class LossScale:
    """Factor on gradients in float16, by the rule of ``torch.amp.GradScaler``; equal on all trainers.

    It is doubled after ``growth_interval`` steps in succession that were made, and halved after one that was
    skipped.

    Examples
    --------
    >>> loss_scale = LossScale(growth_interval=2)
    >>> for overflows in (True, False, False):
    ...     loss_scale.update(overflows)
    >>> loss_scale.scale == 2.0**16, loss_scale.num_skipped
    (True, 1)
    """

    scale: float = 2.0**16
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        self.num_good = self.num_skipped = 0

    def update(self, overflows: bool) -> None:
        """Count a step; it was skipped if it ``overflows``. A FloatingPointError below
        :data:`LEAST_SCALE`.
        """
        if overflows:
            self.scale /= 2
            self.num_good = 0
            self.num_skipped += 1
            if self.scale < LEAST_SCALE:
                raise FloatingPointError(
                    f"the gradient is not finite even with a loss scale of {self.scale:g} ("
                    f"{self.num_skipped} batches were skipped); resume with dense.autocast bfloat16 or none, "
                    "or train anew with a smaller dense.lr"
                )
            return
        self.num_good += 1
        if self.num_good == self.growth_interval:
            # torch keeps the scale in float32, and does not let it become infinite.
            if 2 * self.scale <= torch.finfo(torch.float32).max:
                self.scale *= 2
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
        self._compiled = functools.cache(compiled_forward)
        self.loss_scale = LossScale() if self.dtype == torch.float16 else None

    def forward_of(self, module: torch.nn.Module) -> Callable[..., Tensor]:
        """Return what computes a module's forward."""
        return self._compiled(module) if self.is_compiled else module

    def run(self, compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return a function of rows, computed under autocast, in the type of the rows.

        Every use of the module's parameters in training must go through here: with float16 their gradients
        are those of the loss times the loss scale.
        """
        dtype = rows[0].dtype
        factor = 1.0 if self.loss_scale is None else self.loss_scale.scale
        if self.loss_scale is not None:
            rows = tuple(_GradientTimes.apply(row, 1 / factor) for row in rows)
        narrow: Any = contextlib.nullcontext()
        if self.dtype != torch.float32:
            narrow = torch.autocast(self.device_type, self.dtype)
        with narrow:
            made = compute(*rows).to(dtype)
        if self.loss_scale is not None:
            made = _GradientTimes.apply(made, factor)
        return made


def autocast_problem(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why torch has no autocast to a type on a device; None if it has."""
    # Tried: torch switches an autocast that it does not have off, and only warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = str(dtype).rpartition(".")[2]
        problem = f"torch {torch.__version__} has no {kind} autocast on {device_type}"
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
