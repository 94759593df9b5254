"""In which type the matrix products of a run are taken: chosen once, at its first start, by a measurement."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.errors import CheckpointError

logger = logging.getLogger(__name__)

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"

WORTH_IT = 1.5
"""How many times as fast products in bfloat16 must be: rounding to it and back costs time too."""

SMALLEST_FLOPS = 10_000_000
"""Below this a product takes microseconds whatever its type."""

MOST_ROWS = 512
"""Larger shapes are measured by a part of them, so that slow products take milliseconds as well."""


def with_products_chosen(config: Config, cluster: Cluster) -> Config:
    """Return the configuration with ``training.products`` decided; a collective.

    ``auto`` is what an earlier start of the run chose, which its checkpoint says, or its ``config.json``
    where it has none yet; else bfloat16 where it is clearly faster on rank 0's machine.
    """
    if config.training.products != AUTO:
        return config
    is_narrow = cluster.world.rank == 0 and (_recorded(config) or _measured(config)) == BFLOAT16
    chosen = BFLOAT16 if cluster.sum(np.array([is_narrow], dtype=np.int64))[0] else FLOAT32
    return dataclasses.replace(config, training=dataclasses.replace(config.training, products=chosen))


def _recorded(config: Config) -> str | None:
    """Return what the run was started with before, None for a new run."""
    storage = CheckpointStorage(Path(config.output) / CHECKPOINT_FOLDER)
    try:
        recorded: Any = storage.manifest(int(storage.version_text() or 0)).meta.config
    except (CheckpointError, ValueError):
        recorded = {}
    if not recorded:
        try:
            recorded = json.loads((Path(config.output) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    try:
        found = recorded["training"]["products"]
    except (KeyError, TypeError):
        return None
    return found if found in (FLOAT32, BFLOAT16) else None


def _measured(config: Config) -> str:
    """Measure products of the shape of a chunk."""
    num_queries = 2 * min(config.negatives.chunk_size, config.training.batch_size)
    shape = (num_queries, config.negatives.num_uniform, config.model.dimension)
    return faster_type(shape)


def faster_type(shape: tuple[int, int, int]) -> str:
    """Return ``bfloat16`` where products of a shape are clearly faster in it, else ``float32``.

    Parameters
    ----------
    shape : (int, int, int)
        Queries, negatives and dimension.
    """
    queries, negatives, dim = (min(shape[0], MOST_ROWS), min(shape[1], MOST_ROWS), shape[2])
    flops = 2 * queries * negatives * dim
    if flops < SMALLEST_FLOPS:
        return FLOAT32
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(queries, dim, dtype=dtype), torch.ones(negatives, dim, dtype=dtype)
        rates[dtype] = flops / product_seconds(left, right) / 1e9
    chosen = BFLOAT16 if rates[torch.bfloat16] >= WORTH_IT * rates[torch.float32] else FLOAT32
    logger.info(
        "matrix products in %s: float32 takes them at %.0f GFLOP/s, bfloat16 at %.0f",
        *(chosen, rates[torch.float32], rates[torch.bfloat16]),
    )
    return chosen


def product_seconds(left: torch.Tensor, right: torch.Tensor, repetitions: int = 5) -> float:
    """Return the least time that one of several products of left and right's transpose took."""
    out = torch.mm(left, right.T)  # not counted: it sets the library up for the shape
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        torch.mm(left, right.T, out=out)
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)
