"""How the module of a score function computes in training (``dense.autocast`` and ``dense.compile``)."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError
from dglkge.model.device import ComputeDevice, problem_of
from dglkge.model.kge_model import KgeModel
from dglkge.model.precision import (
    LEAST_COMPILED,
    NARROW_TYPES,
    ModulePrecision,
    autocast_problem,
    compiler_problem,
)
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE, Side

TRIED_ROWS = 2 * LEAST_COMPILED
"""Queries of the first call of a module."""

PROBLEM_CHARACTERS = 400
"""Longest part of an error of torch.compile in a message: a compiler's errors may fill pages."""


def check_precision(config: Config) -> None:
    """Refuse a type or a compilation that this process does not have.

    Raises
    ------
    InputError
        Naming the field, the problem and what is allowed.
    """
    name = config.training.device
    is_cuda = name in (AUTO_DEVICE, CUDA_DEVICE) and problem_of(CUDA_DEVICE) is None
    _check_autocast(config, CUDA_DEVICE if is_cuda else CPU_DEVICE)
    problem = compiler_problem() if config.dense.compile else None
    if problem:
        raise InputError(
            f"dense.compile is true, which takes a C++ compiler, and {problem}; allowed here: false"
        )


def _check_autocast(config: Config, device_type: str) -> None:
    """Refuse a type without autocast on a device."""
    name = config.dense.autocast
    problem = autocast_problem(device_type, NARROW_TYPES[name]) if name in NARROW_TYPES else None
    if problem:
        allowed = ["none"] + [
            other
            for other, dtype in NARROW_TYPES.items()
            if other != name and autocast_problem(device_type, dtype) is None
        ]
        raise InputError(f"dense.autocast is {name} and {problem}; allowed here: {' or '.join(allowed)}")


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
        If torch has no such type on the device, or cannot compile the module; on all trainers.
    """
    chosen = config.dense
    if model.module is None or (chosen.autocast == "none" and not chosen.compile):
        return None
    device_type = device.device.type
    _check_autocast(config, device_type)
    dtype = NARROW_TYPES.get(chosen.autocast, torch.float32)
    made = ModulePrecision(device_type, dtype, chosen.compile)
    # Tried now, so that what fails does so with one message and before anything is trained: a compiler, or an
    # operation that torch does not have in 16 bits.
    problems = cluster.gather_texts(_problem_of(model.in_precision(made), device.device))
    for rank, problem in enumerate(problems):
        if problem:
            what, allowed = f"dense.autocast is {chosen.autocast}", "none"
            if chosen.compile:
                what, allowed = f"{what}, dense.compile is true", "dense.compile false"
            raise InputError(
                f"{what}, and torch fails to compute the module so on trainer {rank}: {problem}; allowed "
                f"here: {allowed}"
            )
    return made


def _problem_of(model: KgeModel, device: torch.device) -> str:
    """Compute queries and their gradients for both sides; return the error, empty if there is none."""
    sizes: Any = {"device": device, "requires_grad": True}
    entities = torch.full((TRIED_ROWS, model.dim), 0.1, **sizes)
    relations = torch.full((TRIED_ROWS, model.relation_width), 0.1, **sizes)
    # The gradients of the parameters are computed too, and kept nowhere.
    leaves = list(itertools.chain([entities, relations], model.score_function.module.parameters()))
    leaves = [one for one in leaves if one.requires_grad]
    try:
        for side in Side:
            query = model.query(entities, relations, side)
            torch.autograd.grad(query.sum(), leaves, allow_unused=True)
    except Exception as error:  # torch's own, and those of the compiler, have no common class
        return " ".join(str(error).split())[:PROBLEM_CHARACTERS] or type(error).__name__
    return ""
