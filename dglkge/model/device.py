"""Device on which scores, losses and gradients are computed: the CPU, a GPU, or a stand-in for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dglkge.errors import InputError
from dglkge.model.functions.autograd import without_loops
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE, STAGED_CPU_DEVICE


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

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute by torch's operations inside the block where the device has no compiled loops.

        Loops are chosen by the device of a tensor. The stand-in's tensors are on the CPU, and it must take
        the operations that a GPU takes.
        """
        with without_loops() if self.is_staged else contextlib.nullcontext():
            yield

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
    problem = problem_of(name)
    if problem:
        raise InputError(
            f"{setting} is {name} and {problem}; allowed here: {CPU_DEVICE}, {AUTO_DEVICE} or "
            f"{STAGED_CPU_DEVICE}"
        )
    if name != CUDA_DEVICE:
        return ComputeDevice(name)
    device = torch.device(CUDA_DEVICE, index)
    torch.cuda.set_device(device)
    return ComputeDevice(name, device)
