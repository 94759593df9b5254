"""How many trainers share the cores of a machine; the other cores are threads of the trainers."""

from __future__ import annotations

from dglkge.config import Config
from dglkge.data.dataset_files import DatasetSize
from dglkge.planning.memory import is_compiled, is_sampled
from dglkge.typing import RELATION, STAGED_CPU_DEVICE

MOST_DEFAULT_TRAINERS = 8
"""Most trainers on one machine without the user's choice: each needs a few hundred megabytes."""

POSITIVES_A_TRAINER = 500
"""Positives of a trainer, of a larger chunk, at least.

Each trainer reads all negatives of its chunk and sends their gradients to the owners of their rows, which
takes as long as to score some 230 queries. A positive has two queries.
"""


def most_trainers(config: Config, size: DatasetSize) -> int:
    """Return how many trainers a machine has at most without the user's choice.

    Where loops and matmuls have threads of their own, as many as share out a batch in whole chunks, or in
    parts that are worth it; two at least, as what is not in loops has one thread. A graph of several entity
    types has small matmuls, which have no threads.
    """
    num_types = len(size.num_rows.keys() - {RELATION})
    has_threads = is_sampled(config) and is_compiled(config) and config.training.device != STAGED_CPU_DEVICE
    if num_types > 1 or not has_threads:
        return MOST_DEFAULT_TRAINERS
    share = config.training.batch_size // len(size.parts)
    parts = max(-(-share // config.negatives.chunk_size), share // POSITIVES_A_TRAINER, 2)
    return min(MOST_DEFAULT_TRAINERS, parts)
