"""Scores and losses compiled by torch (``training.compile``): refusals, and the first call."""

from __future__ import annotations

import logging
import time

from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError
from dglkge.model.device import ComputeDevice, problem_of
from dglkge.model.precision import compiler_problem, one_line
from dglkge.step.objectives.scored_losses import ScoredLosses
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE, STAGED_CPU_DEVICE

logger = logging.getLogger(__name__)


def check_compiled_loss(config: Config) -> None:
    """Refuse to compile what is not compiled, or where there is no compiler.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    chosen = config.training
    if not chosen.compile:
        return
    what = "training.compile is true, which compiles the loss of sampled negatives on a device"
    is_cpu = chosen.device == CPU_DEVICE
    if is_cpu or (chosen.device == AUTO_DEVICE and problem_of(CUDA_DEVICE) is not None):
        found = "cpu" if is_cpu else f"auto, and {problem_of(CUDA_DEVICE)}"
        raise InputError(
            f"{what}, and training.device is {found}; allowed: {CUDA_DEVICE} or {STAGED_CPU_DEVICE}; the CPU "
            "has compiled loops"
        )
    problem = compiler_problem() if chosen.device == STAGED_CPU_DEVICE else None
    if problem:
        raise InputError(f"{what} by a C++ compiler, and {problem}; allowed here: false")


def compile_loss(
    scored: ScoredLosses, dim: int, own_entity: bool, device: ComputeDevice, cluster: Cluster
) -> None:
    """Call a compiled function for the first time, so that it is compiled before the first batch.

    A collective.

    Parameters
    ----------
    scored : ScoredLosses
    dim : int
        Width of an entity's row.
    own_entity : bool
        Whether the query's own entity is one negative more.
    device : ComputeDevice
    cluster : Cluster

    Raises
    ------
    InputError
        If torch cannot compile it on one of the trainers; on all of them.
    """
    begin = time.monotonic()

    def try_out() -> None:
        """Compile the loss."""
        try:
            with device.computing():
                scored.try_out(dim, own_entity)
        except Exception as error:  # torch's own, and those of the compiler, have no common class
            raise InputError(
                f"training.compile is true, and torch fails to compile the loss: {one_line(error)}; allowed "
                "here: false"
            ) from None

    cluster.agree(try_out)
    logger.info("scores and losses are compiled by torch (%.0f s)", time.monotonic() - begin)
