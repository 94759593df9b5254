"""Device of a run, and the type of its matmuls, chosen once, at its first start, by a measurement."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, RUN_CONFIG_FILE
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError
from dglkge.model.device import HOST, ComputeDevice, open_device, problem_of
from dglkge.training.building.components import REFERENCE
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE

logger = logging.getLogger(__name__)

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"

MIN_SPEED_UP = 1.5
"""Least speed-up of bfloat16 matmuls over float32: rounding to bfloat16 and back costs time too."""

MIN_FLOPS = 10_000_000
"""Below this a matmul takes microseconds whatever its type."""

MAX_ROWS = 512
"""Larger shapes are measured by a part of them, so that slow matmuls take milliseconds as well."""

DEVICE_MAX_ROWS = 4096
"""The same on a device, where smaller matmuls would measure their start."""


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
    device = open_device(name, "training.device", cluster.world.local_rank % max(1, count))
    if device.is_staged:
        logger.info("losses and rankings are computed on %s (%s)", device.name, device.device)
    return device


def with_matmul_dtype(config: Config, cluster: Cluster, device: ComputeDevice = HOST) -> Config:
    """Return the configuration with ``training.matmul_dtype`` decided; a collective.

    ``auto`` is the choice of an earlier start of the run, as recorded in its checkpoint, or in its
    ``config.json`` where it has none yet; else bfloat16 where it is clearly faster on rank 0's device, and
    float32 with ``training.kernels: reference``.
    """
    if config.training.matmul_dtype != AUTO:
        return config
    may_be_narrow = cluster.world.rank == 0 and config.training.kernels != REFERENCE
    is_narrow = may_be_narrow and (_recorded(config) or _measured(config, device)) == BFLOAT16
    # Machines may differ: all trainers take rank 0's choice.
    chosen = BFLOAT16 if cluster.sum(np.array([is_narrow], dtype=np.int64))[0] else FLOAT32
    return config.changed(training=config.training.changed(matmul_dtype=chosen))


def _recorded(config: Config) -> str | None:
    """Return the type of an earlier start of the run, None for a new run."""
    storage = CheckpointStorage(Path(config.output) / CHECKPOINT_FOLDER)
    # A damaged or missing checkpoint is reported by the resume, not here.
    try:
        recorded: Any = storage.manifest(int(storage.version_text() or 0)).meta.config
    except (CheckpointError, ValueError):
        recorded = {}
    if not recorded:
        try:
            recorded = json.loads((Path(config.output) / RUN_CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    try:
        found = recorded["training"]["matmul_dtype"]
    except (AttributeError, KeyError, TypeError):
        return None
    return found if found in (FLOAT32, BFLOAT16) else None


def _measured(config: Config, device: ComputeDevice) -> str:
    """Measure matmuls of the shape of a chunk."""
    num_queries = 2 * min(config.negatives.chunk_size, config.training.batch_size)
    candidates = config.negatives.num_uniform
    if config.training.objective.over_all:
        # All entities are candidates: enough of them for the largest shape that is measured.
        num_queries, candidates = 2 * config.training.batch_size, DEVICE_MAX_ROWS
    shape = (num_queries, candidates, config.model.dimension)
    return faster_type(shape, device)


def faster_type(shape: tuple[int, int, int], device: ComputeDevice = HOST) -> str:
    """Return ``bfloat16`` where matmuls of a shape are clearly faster in it, else ``float32``.

    Parameters
    ----------
    shape : (int, int, int)
        Queries, negatives and dimension.
    device : ComputeDevice
    """
    most = DEVICE_MAX_ROWS if device.is_staged else MAX_ROWS
    queries, negatives, dim = (min(shape[0], most), min(shape[1], most), shape[2])
    flops = 2 * queries * negatives * dim
    if flops < MIN_FLOPS:
        return FLOAT32
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (
            torch.ones(rows, dim, dtype=dtype, device=device.device) for rows in (queries, negatives)
        )
        rates[dtype] = flops / matmul_seconds(left, right) / 1e9
    chosen = BFLOAT16 if rates[torch.bfloat16] >= MIN_SPEED_UP * rates[torch.float32] else FLOAT32
    logger.info(
        "matmuls in %s: float32 reaches %.0f GFLOP/s, bfloat16 %.0f",
        *(chosen, rates[torch.float32], rates[torch.bfloat16]),
    )
    return chosen


def matmul_seconds(left: torch.Tensor, right: torch.Tensor, repetitions: int = 5) -> float:
    """Return the shortest time of several matmuls of left and right's transpose."""
    # Not counted: oneDNN compiles the matmul for the shape.
    out = torch.mm(left, right.T)
    synchronize = getattr(torch, left.device.type).synchronize
    synchronize()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        torch.mm(left, right.T, out=out)
        synchronize()
        seconds.append(time.perf_counter() - started)
    # The shortest time: other processes and clock frequency only make a matmul slower.
    return max(min(seconds), 1e-9)
