"""Bytes of ``/dev/shm`` that a machine's part of a job needs: DGL's servers keep tables and graph there.

Pure arithmetic on sizes. The figures were read off the segments of dgl 2.1.0; a test
compares them with the segments of a running job. On a machine with too little, processes end by SIGBUS
during the start, without a message.
"""

from __future__ import annotations

from typing import Any

from dglkge.config import Config
from dglkge.data.dataset_files import PartSize
from dglkge.model import choices
from dglkge.registry import registry_of
from dglkge.typing import RELATION

FLOAT_BYTES = 4
NARROW_BYTES = 2
"""Bytes of a number in bfloat16 and float16."""
SEGMENT_BYTES = 4096
"""Size of a page; a segment is a whole number of pages."""
# Each segment may end in the middle of a page; the sum assumes the worst, one page each.
GRAPH = (29, 17, 14)
"""Bytes per edge, of relations too (source 8, number 8, original id 8, type 4, ownership 1), bytes per node
(original id 8, start of its edges 8, ownership 1), and segments."""
STRUCTURE = (16, 8, 4)
"""Of these, source and number of an edge and start of a node's edges: what stays in ``/dev/shm`` where all
else is in files."""


def table_bytes(part: PartSize, config: Config) -> int:
    """Return the bytes of the rows of all tables."""
    return sum(in_pages(count * row_bytes(table, config)) for table, count in part.num_rows.items())


def state_bytes(part: PartSize, config: Config) -> int:
    """Return the bytes of the optimizer's state of all tables."""
    return sum(
        in_pages(count * width * FLOAT_BYTES)
        for table, count in part.num_rows.items()
        for width in state_widths(row_width(table, config), config, table)
    )


def graph_bytes(part: PartSize, sizes: tuple[int, int, int] = GRAPH) -> int:
    """Return the bytes of the graph's structure and of its edge data, or of its structure alone."""
    edge_bytes, node_bytes, num_segments = sizes
    # Relations are a node type with one self-loop edge each: hence num_rows[RELATION] more edges.
    num_edges = part.num_graph_edges + part.num_rows[RELATION]
    return num_edges * edge_bytes + sum(part.num_rows.values()) * node_bytes + num_segments * SEGMENT_BYTES


def row_width(table: str, config: Config) -> int:
    """Return the width of a table's rows; that of relations depends on the score function."""
    model = config.model
    if table != RELATION:
        return model.entity_dimensions.get(table, model.dimension)
    one_side = configured_score_function(config).relation_dim(model.dimension)
    return one_side * (2 if model.reciprocal_relations else 1)


def row_bytes(table: str, config: Config) -> int:
    """Return the bytes of a table's row; relations are float32 whatever ``tables.dtype`` is."""
    return row_width(table, config) * (FLOAT_BYTES if table == RELATION else number_bytes(config))


def number_bytes(config: Config) -> int:
    """Return the bytes of a number of an entity's row."""
    return FLOAT_BYTES if config.tables.dtype == "float32" else NARROW_BYTES


def query_dim(config: Config) -> int:
    """Return the width of queries, which depends on the score function."""
    return configured_score_function(config).query_dim(config.model.dimension)


def dense_numbers(config: Config) -> int:
    """Return the count of dense parameters of the score function."""
    return configured_score_function(config).module_numbers(config.model.dimension)


def query_numbers(config: Config) -> int:
    """Return the numbers that the score function's module keeps of a query."""
    return configured_score_function(config).query_numbers(config.model.dimension)


def configured_score_function(config: Config) -> Any:
    """Return the score function, which states its widths and its costs."""
    settings = config.model.score_function
    made = registry_of("score function").get(settings.name)(settings)
    return made if config.model.reciprocal_relations else made.static()


def state_widths(width: int, config: Config, table: str = "") -> tuple[int, ...]:
    """Return the width of a row in each tensor that is kept beside a table: optimizer state, and averages."""
    optimizer = config.optimizer
    name = optimizer.relations.name or optimizer.name if table == RELATION else optimizer.name
    averages = () if config.training.averaging is None else (width,)
    return (*choices.state_widths(name, width), *averages)


def in_pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
