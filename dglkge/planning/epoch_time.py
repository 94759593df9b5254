"""How long an epoch should take: a stated model on measured rates, to tell minutes from days."""

from __future__ import annotations

from dataclasses import dataclass

from dglkge.config import Config
from dglkge.data.sizes import DatasetSize
from dglkge.planning.memory import batch_rows, is_compiled
from dglkge.planning.shared_memory import FLOAT_BYTES

FLOPS_PER_SCORE_NUMBER = 12
"""A positive with K negatives on both sides costs 12 K D floating-point operations: 2 for each number of a
score, forward and twice backward, on each of two sides."""

ROW_PASSES = 25
"""How often the rows of a batch go through memory: gather, score, gradient, merge, update and so on."""

AUTOGRAD_PASSES = 12
"""How often, in float32, the numbers that are compared do where no product of matrices scores them."""


@dataclass(frozen=True)
class Rates:
    """What the machine does, all cores together.

    Attributes
    ----------
    flops_per_second : float
        Of the products of matrices in the type that training takes them in.
    bytes_per_second : float
        Of a copy, read and written bytes both counted.
    """

    flops_per_second: float
    bytes_per_second: float


def epoch_seconds(config: Config, size: DatasetSize, num_trainers: int, rates: Rates) -> float:
    """Return the time of an epoch: products plus passes over rows, all machines at once.

    Parameters
    ----------
    config : Config
    size : DatasetSize
    num_trainers : int
        On each machine.
    rates : Rates
        Of one machine.
    """
    num_machines, num_triples = len(size.parts), size.splits["train"]
    num_numbers = num_triples * config.negatives.num_uniform * config.model.dimension
    seconds = FLOPS_PER_SCORE_NUMBER * num_numbers / rates.flops_per_second
    if not is_compiled(config) and config.model.score_function in ("transe_l1", "rotate"):
        seconds = AUTOGRAD_PASSES * FLOAT_BYTES * num_numbers / rates.bytes_per_second
    num_batches = -(-num_triples // config.training.batch_size)
    num_entities, num_relations = batch_rows(config, num_trainers * num_machines)
    rows = num_trainers * num_machines * (num_entities + 2 * num_relations)
    row_bytes = num_batches * rows * config.model.dimension * FLOAT_BYTES
    return (seconds + ROW_PASSES * row_bytes / rates.bytes_per_second) / num_machines
