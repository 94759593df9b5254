"""Verifies a partitioned graph: id maps, edge tables and DGL's own files must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import dgl.distributed
import numpy as np

from dglkge.data.dataset_files import Field, graph_config_path, load_json
from dglkge.data.partition_layout import EdgeTable, PartitionLayout
from dglkge.kernels.triple_rows import mapped
from dglkge.partition.rows import map_in_order
from dglkge.typing import RELATION

_ROWS_AT_A_TIME = 1 << 20


class VerificationError(Exception):
    """The partitions do not match the triples: a defect of this program or of DGL, or a full disk."""


def verify_partitions(
    partitions: Path, graph_name: str, train: np.ndarray, edge_types: list[list[Any]], num_workers: int = 1
) -> None:
    """Check the partitions against the triples.

    Parameters
    ----------
    partitions : Path
        The folder of the partitions.
    graph_name : str
        Name of the graph.
    train : (n, 3) int64
        The triples.
    edge_types : list of [lhs, rhs, first_triple_id, end_triple_id]
        The range of triples of each pair of types.
    num_workers : int
        Number of threads.

    Raises
    ------
    VerificationError
        Unless the id maps are inverse to each other, every triple lies in exactly one partition, that of its
        tail, with the right ends, and DGL's files have the nodes of the id maps.
    """
    layout = PartitionLayout.open(partitions, graph_name)
    for ntype in layout.ntypes:
        verify_id_maps(layout, ntype)
    num_owned = 0
    for part_id in range(layout.num_parts):
        table = layout.edge_table(part_id)
        num_owned += len(table.triple_ids)
        verify_edge_table(layout, part_id, table, train, edge_types, num_workers)
        verify_dgl_partition(graph_config_path(partitions, graph_name), part_id, layout)
    # A partition has no triple twice (its ids ascend), and no two own one tail: with as many as there are
    # triples, each is in exactly one.
    _check(num_owned == len(train), f"the partitions hold {num_owned} of {len(train)} triples")


def verify_id_maps(layout: PartitionLayout, ntype: str) -> None:
    """Check that original ids and node ids of a type are inverse to each other."""
    original_ids, node_ids = layout.original_ids(ntype), layout.node_ids(ntype)
    numbers = np.arange(layout.num_nodes(ntype))
    valid = bool(((original_ids >= 0) & (original_ids < len(numbers))).all())
    _check(
        valid and np.array_equal(node_ids[original_ids], numbers), f"the id maps of {ntype} are not inverse"
    )


def verify_edge_table(
    layout: PartitionLayout,
    part_id: int,
    table: EdgeTable,
    train: np.ndarray,
    edge_types: list[list[Any]],
    num_workers: int = 1,
) -> None:
    """Check that a partition's edges are its triples, and that it owns their tails."""
    # Copied into memory: random accesses to mapped pages are slow.
    node_ids = {ntype: np.array(layout.node_ids(ntype)) for ntype in layout.ntypes}

    def verify_piece(first: int) -> None:
        triple_ids = table.triple_ids[first : first + _ROWS_AT_A_TIME]
        last = table.triple_ids[first - 1] if first else -1
        ascend = triple_ids[0] > last and bool((np.diff(triple_ids) > 0).all())
        _check(ascend, f"partition {part_id}: triple ids do not ascend")
        _check(
            triple_ids[-1] < len(train), f"partition {part_id}: triple id {triple_ids[-1]} is of no triple"
        )
        edges = table.edges[first : first + _ROWS_AT_A_TIME]
        triples = np.asarray(train[triple_ids])
        for lhs, rhs, start, end in edge_types:
            rows = slice(*np.searchsorted(triple_ids, [start, end]))
            expected = np.empty_like(triples[rows])
            mapped(triples[rows], node_ids[lhs], node_ids[RELATION], node_ids[rhs], expected)
            _check(
                np.array_equal(expected, edges[rows]),
                f"partition {part_id}: edges {lhs} to {rhs} are not those of the triples",
            )
            lower, upper = layout.node_range(rhs, part_id)
            inside = bool(((edges[rows, 2] >= lower) & (edges[rows, 2] < upper)).all())
            _check(inside, f"partition {part_id}: it does not own the tail of every edge {lhs} to {rhs}")

    for _ in map_in_order(verify_piece, range(0, len(table.triple_ids), _ROWS_AT_A_TIME), num_workers):
        pass


def verify_dgl_partition(config_path: Path, part_id: int, layout: PartitionLayout) -> None:
    """Check that DGL's files of a partition have the nodes of the layout, and edges between them only."""
    graph, _, _, book, _, _, _ = dgl.distributed.load_partition(str(config_path), part_id)
    node_ids = graph.ndata[dgl.NID]
    _check(
        bool(graph.ndata["inner_node"].bool().all()) and bool(graph.edata["inner_edge"].bool().all()),
        f"partition {part_id}: DGL's files hold nodes or edges of other partitions",
    )
    type_ids, in_type = (found.numpy() for found in book.map_to_per_ntype(node_ids))
    for number, ntype in enumerate(book.ntypes):
        start, end = layout.node_range(ntype, part_id)
        same = np.array_equal(np.sort(in_type[type_ids == number]), np.arange(start, end))
        _check(same, f"partition {part_id}: DGL's files hold other nodes of type {ntype} than the id maps")
    types_here = set(graph.edata[dgl.ETYPE].tolist())
    every = set(load_json(config_path)[Field.EDGE_TYPE_IDS].values())
    _check(types_here == every, f"partition {part_id}: DGL's files have no edge of some type")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise VerificationError(message)
