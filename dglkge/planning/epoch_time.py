"""Estimated time of an epoch: a simple model on measured rates, to tell minutes from days."""

from __future__ import annotations

from typing import NamedTuple

from dglkge.config import Config
from dglkge.data.dataset_files import TRAIN, DatasetSize
from dglkge.planning.memory import batch_rows, is_sampled, negatives_per_side
from dglkge.planning.shared_memory import FLOAT_BYTES, configured_score_function, row_width
from dglkge.typing import RELATION

MATMULS = 6
"""Matmuls of a training step: one forward and two backward, on each of two sides. A positive with K negatives
thus costs 12 K D floating-point operations: 2 for each number of a score in each matmul."""

DENSE_PASSES = 10
"""Passes of all rows through memory in a batch, if the candidates are all entities."""

ROW_PASSES = 25
"""Passes of the rows of a batch through memory: gather, score, gradient, merge, update and so on."""


class Rates(NamedTuple):
    """Rates of all cores: of matmuls in training's type, and of a copy, reads and writes counted."""

    flops_per_second: float
    bytes_per_second: float


def epoch_seconds(config: Config, size: DatasetSize, num_trainers: int, rates: Rates) -> float:
    """Return the time of an epoch: matmuls plus passes over rows, with so many trainers on each machine."""
    num_machines, num_triples = len(size.parts), size.splits[TRAIN]
    # Candidates of the largest type for every triple: an upper bound where types differ in size.
    largest_type = max(count for table, count in size.num_rows.items() if table != RELATION)
    # MATMULS counts both sides.
    num_candidates = sum(negatives_per_side(config, size)) / 2 if is_sampled(config) else largest_type
    num_numbers = num_triples * num_candidates * config.model.dimension
    score_function, dim = configured_score_function(config), config.model.dimension
    # Matmuls are bound by flops, distances (memory_passes > 0) by bandwidth. The score function declares both
    # costs; in each of ours one of them is 0.
    seconds = MATMULS * score_function.operations(dim) * num_numbers / rates.flops_per_second
    seconds += score_function.memory_passes * FLOAT_BYTES * num_numbers / rates.bytes_per_second
    num_batches = -(-num_triples // config.training.batch_size)
    num_entities, num_relations = batch_rows(config, num_trainers * num_machines, size)
    # In rows as wide as an entity's; two for a relation at least, one for each direction.
    relation_rows = max(2.0, row_width(RELATION, config) / dim)
    rows = num_trainers * num_machines * (num_entities + relation_rows * num_relations)
    # Objectives over all candidates also read and update every row of every table in each batch.
    passes = ROW_PASSES * rows + (0 if is_sampled(config) else DENSE_PASSES * sum(size.num_rows.values()))
    row_bytes = num_batches * passes * config.model.dimension * FLOAT_BYTES
    return (seconds + row_bytes / rates.bytes_per_second) / num_machines
