"""Device of a run's losses, gradients and rankings (``training.device``)."""

from __future__ import annotations

import logging

import numpy as np
import torch

from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.model.device import ComputeDevice, open_device, problem_of
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE

logger = logging.getLogger(__name__)

SETTING = "training.device"


def check_device(config: Config) -> None:
    """Refuse a device that this process does not have.

    Raises
    ------
    InputError
        Naming the device, the problem and what is allowed.
    """
    if problem_of(config.training.device):
        open_device(config.training.device, SETTING)


def choose_device(config: Config, cluster: Cluster) -> ComputeDevice:
    """Return this trainer's device; a collective.

    ``auto`` is a GPU only where every trainer has one: the others would wait for one that computes on a CPU.

    Raises
    ------
    InputError
        If the configured device is not there.
    """
    name: str = config.training.device
    if name == AUTO_DEVICE:
        has_gpu = problem_of(CUDA_DEVICE) is None
        num_gpus = int(cluster.sum(np.array([has_gpu], np.int64))[0])
        name = CUDA_DEVICE if num_gpus == cluster.world.world_size else CPU_DEVICE
    # Our launcher shows each trainer one GPU; without it trainers of a machine see all, and share them out.
    count = torch.cuda.device_count() if name == CUDA_DEVICE else 0
    device = open_device(name, SETTING, cluster.world.local_rank % max(1, count))
    if device.is_staged:
        logger.info("losses and rankings are computed on %s (%s)", device.name, device.device)
    return device
