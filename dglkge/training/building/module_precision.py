"""How the module of a score function computes in training (``dense.autocast`` and ``dense.compile``)."""

from __future__ import annotations

import math
from typing import Any

import torch

from dglkge.config import Config
from dglkge.config.schema import DenseConfig
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError
from dglkge.model.device import ComputeDevice
from dglkge.model.kge_model import KgeModel
from dglkge.model.precision import (
    LEAST_COMPILED,
    NARROW_TYPES,
    LossScale,
    ModulePrecision,
    one_line,
)
from dglkge.training.building.checks import autocast_problems
from dglkge.typing import Side

TRIED_ROWS = 2 * LEAST_COMPILED
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
    config : Config
    model : KgeModel
        The one that computes batches.
    device : ComputeDevice
        Its device.
    cluster : Cluster

    Raises
    ------
    InputError
        If torch has no such type on the device or cannot compile the module, or the score function does not
        take a loss scale; on all trainers.
    """
    chosen = config.dense
    if model.module is None or (chosen.autocast == "none" and not chosen.compile):
        return None
    device_type = device.device.type
    for problem in autocast_problems(chosen.autocast, device_type):
        raise InputError(problem)
    dtype = NARROW_TYPES.get(chosen.autocast, torch.float32)
    made = ModulePrecision(device_type, dtype, chosen.compile)
    # Tried now, so that what fails does so with one message and before anything is trained: a compiler, or an
    # operation that torch does not have in 16 bits.
    cluster.agree(lambda: _try_out(chosen, model.in_precision(made), device.device))
    if made.loss_scale is not None:
        _require_scaled(config, model, device.device)
    return made


def _try_out(chosen: DenseConfig, model: KgeModel, device: torch.device) -> None:
    """Compute queries and their gradients for both sides; raise InputError if torch fails to."""
    try:
        _gradients(model, device)
    except Exception as error:  # torch's own, and those of the compiler, have no common class
        what, allowed = f"dense.autocast is {chosen.autocast}", "none"
        if chosen.compile:
            what, allowed = f"{what}, dense.compile is true", "dense.compile false"
        raise InputError(
            f"{what}, and torch fails to compute the module so: {one_line(error)}; allowed here: {allowed}"
        ) from None


def _gradients(model: KgeModel, device: torch.device) -> list[list[torch.Tensor]]:
    """Return the gradients of rows, and of parameters, of a function of the queries of both sides."""

    def numbers(*shape: int) -> torch.Tensor:
        # Other numbers in each row: normalization of equal ones has no gradient.
        return torch.linspace(-1, 1, math.prod(shape), device=device).view(shape)

    entities = numbers(TRIED_ROWS, model.dim).requires_grad_()
    relations = numbers(TRIED_ROWS, model.relation_width).flip(0).requires_grad_()
    parameters = [one for one in model.score_function.module.parameters() if one.requires_grad]
    total: Any = 0
    for side in Side:
        query = model.query(entities, relations, side)
        total = total + (query * numbers(*query.shape)).sum()
    # Kept nowhere: the gradients of the first batch are added to none.
    found = torch.autograd.grad(total, [entities, relations, *parameters], allow_unused=True)
    return [[one for one in part if one is not None] for part in (found[:2], found[2:])]


def _require_scaled(config: Config, model: KgeModel, device: torch.device) -> None:
    """Refuse a score function that uses parameters beside ``run_precisely``: their gradients are not scaled.

    Raises
    ------
    InputError
        If the gradients of parameters are not proportional to the loss scale, or those of rows depend on it.
    """
    found = []
    for scale in (1.0, TRIED_SCALE):
        precision = ModulePrecision(device.type)
        precision.loss_scale = LossScale(scale)
        found.append(_gradients(model.in_precision(precision), device))
    for factor, once, scaled in zip((1.0, TRIED_SCALE), *found):
        for one, other in zip(once, scaled):
            limit = 1e-3 * float(one.abs().max()) * factor
            if float((other - factor * one).abs().max()) > limit:
                raise InputError(
                    f"dense.autocast is float16 and model.score_function {config.model.score_function} uses "
                    "parameters of its module beside run_module and run_precisely, where gradients are not "
                    "scaled; allowed: none or bfloat16"
                )
