"""How a run computes: device, type of matmuls, and precision of the module of a score function."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, RUN_CONFIG_FILE
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.config import Config
from dglkge.config.schema import DenseConfig
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError, InputError, one_line
from dglkge.model import device as devices
from dglkge.model.device import HOST, ComputeDevice, LossScale, ModulePrecision, faster_type, problem_of
from dglkge.model.kge_model import KgeModel
from dglkge.training.building.checks import autocast_problems
from dglkge.training.building.components import REFERENCE
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE, Side

logger = logging.getLogger(__name__)


def choose_device(config: Config, cluster: Cluster) -> ComputeDevice:
    """Return this trainer's device; a collective.

    ``auto`` is a GPU only where every trainer has one: the others would wait for one that computes on a CPU.
    """
    name: str = config.training.device
    if name == AUTO_DEVICE:
        has_gpu = problem_of(CUDA_DEVICE) is None
        num_gpus = int(cluster.sum(np.array([has_gpu], np.int64))[0])
        name = CUDA_DEVICE if num_gpus == cluster.world.world_size else CPU_DEVICE
    # Our launcher shows each trainer one GPU; without it trainers of a machine see all, and share them out.
    count = torch.cuda.device_count() if name == CUDA_DEVICE else 0
    device = devices.open_device(name, "training.device", cluster.world.local_rank % max(1, count))
    if device.is_staged:
        logger.info("losses and rankings are computed on %s (%s)", device.name, device.device)
    return device


def with_matmul_dtype(config: Config, cluster: Cluster, device: ComputeDevice = HOST) -> Config:
    """Return the configuration with ``training.matmul_dtype`` decided; a collective.

    ``auto`` is the choice of an earlier start of the run, as recorded in its checkpoint, or in its
    ``config.json`` where it has none yet; else bfloat16 where it is clearly faster on rank 0's device, and
    float32 with ``training.kernels: reference``.
    """
    if config.training.matmul_dtype != "auto":
        return config
    may_be_narrow = cluster.world.rank == 0 and config.training.kernels != REFERENCE
    is_narrow = may_be_narrow and (_recorded(config) or _measured(config, device)) == devices.BFLOAT16
    # Machines may differ: all trainers take rank 0's choice.
    is_narrow = bool(cluster.sum(np.array([is_narrow], dtype=np.int64))[0])
    matmul_dtype = devices.BFLOAT16 if is_narrow else devices.FLOAT32
    return config.changed(training=config.training.changed(matmul_dtype=matmul_dtype))


def _recorded(config: Config) -> str | None:
    """Return the type of an earlier start of the run, None for a new run."""
    storage = CheckpointStorage(Path(config.output) / CHECKPOINT_FOLDER)
    recorded: Any = {}
    # A damaged or missing checkpoint is reported by the resume, not here.
    with contextlib.suppress(CheckpointError, ValueError):
        recorded = storage.stored(int(storage.version_text() or 0)).meta.config
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        if not recorded:
            recorded = json.loads((Path(config.output) / RUN_CONFIG_FILE).read_text(encoding="utf-8"))
        dtype = recorded["training"]["matmul_dtype"]
        return dtype if dtype in (devices.FLOAT32, devices.BFLOAT16) else None
    return None


def _measured(config: Config, device: ComputeDevice) -> str:
    """Measure matmuls of the shape of a chunk."""
    size, over_all = config.training.batch_size, config.training.objective.over_all
    num_queries = 2 * (size if over_all else min(config.negatives.chunk_size, size))
    candidates = max(config.negatives.per_side.values())
    if over_all or config.negatives.takes_all:
        # All entities are candidates: enough of them for the largest shape that is measured.
        candidates = devices.DEVICE_MAX_ROWS
    return faster_type((num_queries, candidates, config.model.dimension), device)


TRIED_ROWS = 2 * devices.LEAST_COMPILED
"""Queries of the first call of a module."""

TRIED_SCALE = 4.0
"""Loss scale by which gradients must grow: a power of 2, with which this is exact."""


def build_precision(
    config: Config, model: KgeModel, device: ComputeDevice, cluster: Cluster
) -> ModulePrecision | None:
    """Return how the module of a model computes in training; None if as it is written.

    A collective: every trainer tries the module, and compiles it, before the first batch.

    Parameters
    ----------
    model : KgeModel
        The one that computes batches.
    device : ComputeDevice
        Its device.
    """
    settings = config.dense
    if model.module is None or (settings.autocast == "none" and not settings.compile):
        return None
    device_type = device.device.type
    for problem in autocast_problems(settings.autocast, device_type):
        raise InputError(problem)
    dtype = devices.NARROW_TYPES.get(settings.autocast, torch.float32)
    made = ModulePrecision(device_type, dtype, settings.compile)
    # Tried now, so that what fails does so with one message and before anything is trained: a compiler, or an
    # operation that torch does not have in 16 bits.
    cluster.agree(lambda: _try_out(settings, model.in_precision(made), device.device))
    if made.loss_scale is not None:
        _require_scaled(config, model, device.device)
    return made


def _try_out(settings: DenseConfig, model: KgeModel, device: torch.device) -> None:
    """Compute queries and their gradients for both sides; raise InputError if torch fails to."""
    try:
        _gradients(model, device)
    except Exception as error:  # torch's own, and those of the compiler, have no common class
        cause, allowed = f"dense.autocast is {settings.autocast}", "none"
        if settings.compile:
            cause, allowed = f"{cause}, dense.compile is true", "dense.compile false"
        problem = f"{cause}, and torch fails to compute the module so: {one_line(error)}"
        raise InputError(f"{problem}; allowed here: {allowed}") from None


def _gradients(model: KgeModel, device: torch.device) -> list[list[Tensor]]:
    """Return the gradients of rows, and of parameters, of a function of the queries of both sides."""

    def numbers(*shape: int) -> Tensor:
        # Other numbers in each row: normalization of equal ones has no gradient.
        return torch.linspace(-1, 1, math.prod(shape), device=device).view(shape)

    entities = numbers(TRIED_ROWS, model.dim).requires_grad_()
    relations = numbers(TRIED_ROWS, model.relation_width).flip(0).requires_grad_()
    parameters = [values for values in model.score_function.module.parameters() if values.requires_grad]
    total: Any = 0
    for side in Side:
        query = model.query(entities, relations, side)
        total = total + (query * numbers(*query.shape)).sum()
    # Kept nowhere: the gradients of the first batch are added to none.
    gradients = torch.autograd.grad(total, [entities, relations, *parameters], allow_unused=True)
    parts = (gradients[:2], gradients[2:])
    return [[gradient for gradient in part if gradient is not None] for part in parts]


def _require_scaled(config: Config, model: KgeModel, device: torch.device) -> None:
    """Refuse a score function with parameters beside ``run_precisely``: their gradients are not scaled."""
    gradients = []
    for scale in (1.0, TRIED_SCALE):
        precision = ModulePrecision(device.type)
        precision.loss_scale = LossScale(scale)
        gradients.append(_gradients(model.in_precision(precision), device))
    for factor, once, scaled in zip((1.0, TRIED_SCALE), *gradients):
        for gradient, scaled_gradient in zip(once, scaled):
            limit = 1e-3 * float(gradient.abs().max()) * factor
            if float((scaled_gradient - factor * gradient).abs().max()) > limit:
                function = f"model.score_function {config.model.score_function}"
                uses = "parameters of its module beside run_module and run_precisely"
                problem = f"dense.autocast is float16 and {function} uses {uses}"
                raise InputError(f"{problem}, where gradients are not scaled; allowed: none or bfloat16")
