"""Cost of an epoch: its estimated time, and the bytes that it reads and writes if tables are files on a disk.

Arithmetic on measured rates, to tell minutes from days; nothing is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dglkge.config import Config
from dglkge.config.schema import MIXED
from dglkge.data.dataset_files import EDGE_ROW_BYTES, ID_BYTES, TRAIN, WEIGHT_BYTES, DatasetSize, PartSize
from dglkge.planning import shared_memory as shared
from dglkge.planning.memory import PlannedHost, batch_rows, is_sampled, negatives_per_side
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


MOST_RANGES = 256
"""Ranges that a plan proposes at most: an epoch has their square of buckets."""

TABLE_ITEMS = ("tables", "optimizer state", "edges and ids, mapped files", "checkpoint's background copy")
"""Items of a plan that a run with tables on a disk does not hold in memory."""


@dataclass(frozen=True)
class RangePlan:
    """The walk of one machine over its ranges in one epoch, from empty memory.

    Attributes
    ----------
    table_bytes, budget_bytes : int
        Rows and optimizer state of all entity types, and memory for them.
    pair_bytes : int
        Ranges of a pair, of the one that is read ahead, and of the one that is still being written back;
        triples of a bucket and of the next one.
    loads : int
        Ranges that are read; each is trained, and written back.
    """

    num_ranges: int
    order: str
    table_bytes: int
    budget_bytes: int
    pair_bytes: int
    loads: int
    read_bytes: int
    written_bytes: int


def range_budget(host: PlannedHost, memory_bytes: int) -> int:
    """Return what is left for rows and state of a machine's memory; 0 if nothing."""
    return max(0, memory_bytes - sum(count for item, count in host.memory if item not in TABLE_ITEMS))


def propose_ranges(
    config: Config, part: PartSize, types: Sequence[tuple[str, str]], budget_bytes: int
) -> int | None:
    """Return the smallest number of ranges that fit; None if :data:`MOST_RANGES` are too few.

    Types are those of the heads and tails of each edge type; the budget is for rows and optimizer state.
    """
    if _table_bytes(config, part, types) <= budget_bytes:
        return 1
    numbers = range(2, MOST_RANGES + 1)
    return next((n for n in numbers if _pair_bytes(config, part, types, n) <= budget_bytes), None)


def plan_ranges(
    config: Config, part: PartSize, types: Sequence[tuple[str, str]], num_ranges: int, budget_bytes: int
) -> RangePlan:
    """Predict the reads and writes of an epoch; all buckets are assumed to have triples.

    The page cache is taken to drop the least recently used range first.
    """
    # Here: the time of an epoch is planned without numba.
    from dglkge.data.range_walk import count_loads, range_bounds, unordered, walk_pairs

    order = config.sampling.bucket_order
    sizes, names = {}, _names(types)
    for name in names:
        bounds = range_bounds(np.array([0, part.num_rows[name]]), num_ranges)
        for turn, length in enumerate(np.diff(bounds)):
            sizes[name, turn] = int(length) * _row_bytes(config)
    walk = walk_pairs(order, num_ranges, config.seed, 0)
    if config.sampling.buckets == MIXED:
        steps = [{(name, range_) for name in names for range_ in pair} for pair in unordered(walk).tolist()]
    else:
        steps = [
            {range_ for lhs, rhs in types for range_ in ((lhs, head), (rhs, tail))}
            for head, tail in walk.tolist()
        ]
    loads = count_loads(steps, sizes, budget_bytes)
    needs = _table_bytes(config, part, types), budget_bytes, _pair_bytes(config, part, types, num_ranges)
    return RangePlan(num_ranges, order, *needs, loads.count, loads.num_bytes, loads.num_bytes)


def _names(types: Sequence[tuple[str, str]]) -> set[str]:
    """Return the entity types with triples."""
    return {name for pair in types for name in pair}


def _row_bytes(config: Config) -> int:
    """Return the bytes of a row of an entity and of its optimizer state."""
    width = config.model.dimension
    return shared.number_bytes(config) * width + shared.FLOAT_BYTES * sum(shared.state_widths(width, config))


def _table_bytes(config: Config, part: PartSize, types: Sequence[tuple[str, str]]) -> int:
    return _row_bytes(config) * sum(part.num_rows[name] for name in _names(types))


def _pair_bytes(config: Config, part: PartSize, types: Sequence[tuple[str, str]], num_ranges: int) -> int:
    """Return the bytes of a range of the heads, one of the tails, and twice the larger of them; and triples.

    One is read ahead, and one is still being written back. Without room for it the kernel looks for memory,
    and writes pages that are trained: measured, 2.7 times the bytes of a walk. Triples are those of the
    bucket and of the next one, which is read ahead.
    """
    is_mixed = config.sampling.buckets == MIXED
    sides = [_names(types)] * 2 if is_mixed else [{pair[side] for pair in types} for side in (0, 1)]
    heads, tails = (sum(-(-part.num_rows[name] // num_ranges) for name in names) for names in sides)
    num_buckets = num_ranges * (num_ranges - 1) // 2 if is_mixed and num_ranges > 1 else num_ranges**2
    triple_bytes = EDGE_ROW_BYTES + ID_BYTES + WEIGHT_BYTES * part.has_weights
    triples = 2 * -(-part.num_edges // num_buckets) * triple_bytes
    return _row_bytes(config) * (heads + tails + 2 * max(heads, tails)) + triples
