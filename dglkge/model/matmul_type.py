"""The type of matrix products: bfloat16 where a processor or device is clearly faster in it."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from dglkge.model.device import HOST, ComputeDevice
from dglkge.typing import CUDA_DEVICE

logger = logging.getLogger(__name__)

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
    is_gpu = device.device.type == CUDA_DEVICE
    num_chunks = max(1, DEVICE_FLOPS // flops) if is_gpu else 1
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (
            torch.ones(num_chunks, rows, dim, dtype=dtype, device=device.device).squeeze(0)
            for rows in (queries, negatives)
        )
        rates[dtype] = num_chunks * flops / matmul_seconds(left, right) / 1e9
    chosen = BFLOAT16 if rates[torch.bfloat16] >= MIN_SPEED_UP * rates[torch.float32] else FLOAT32
    logger.info(
        "matmuls in %s: float32 reaches %.0f GFLOP/s, bfloat16 %.0f",
        *(chosen, rates[torch.float32], rates[torch.bfloat16]),
    )
    return chosen


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
