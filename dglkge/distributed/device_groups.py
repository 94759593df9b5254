"""Process groups for tensors of each device: gloo on the host, NCCL on GPUs."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist


class DeviceGroups:
    """The process groups of a job's trainers, by device; the same calls in the same order on every trainer.

    Parameters
    ----------
    timeout_seconds : float
        Limit of every wait on a GPU; NCCL's watchdog ends the process then.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._groups: dict[torch.device, Any] = {}

    def group(self, device: torch.device) -> Any:
        """Return the group whose collectives take tensors on a device; a collective at its first call."""
        if device not in self._groups:
            is_gpu = device.type == "cuda"
            made = dist.new_group(timeout=self._timeout, backend="nccl") if is_gpu else dist.group.WORLD
            self._groups[device] = made
        return self._groups[device]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all trainers, in place and on its device, and return it; a collective."""
        if dist.is_initialized():
            dist.all_reduce(values, group=self.group(values.device))
        return values
