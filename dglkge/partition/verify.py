"""Verifies a partitioned graph: id maps, edge tables and DGL's own files must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import dgl.distributed
import numpy as np

from dglkge.data.dataset_files import TRIPLE_ID, Field, graph_config_path, load_json
from dglkge.data.partition_layout import EdgeTable, PartitionLayout
from dglkge.typing import RELATION


class VerificationError(Exception):
    """The partitions do not match the triples: a defect of this program or of DGL, or a full disk."""


def verify_partitions(
    partitions: Path, graph_name: str, train: np.ndarray, edge_types: list[list[Any]]
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

    Raises
    ------
    VerificationError
        Unless the id maps are inverse to each other, every triple lies in exactly one partition, that of its
        tail, with the right ends, and DGL's files hold the same edges.
    """
    layout = PartitionLayout.open(partitions, graph_name)
    for ntype in layout.ntypes:
        verify_id_maps(layout, ntype)
    # int8: one byte for each triple; a count of 2 is an error already.
    seen = np.zeros(len(train), dtype=np.int8)
    for part_id in range(layout.num_parts):
        table = layout.edge_table(part_id)
        seen[table.triple_ids] += 1
        verify_edge_table(layout, part_id, table, train, edge_types)
        verify_dgl_partition(graph_config_path(partitions, graph_name), part_id, table, edge_types)
    _check(bool((seen == 1).all()), f"{(seen != 1).sum()} triples do not lie in exactly one partition")


def verify_id_maps(layout: PartitionLayout, ntype: str) -> None:
    """Check that original ids and node ids of a type are inverse to each other."""
    original_ids, node_ids = layout.original_ids(ntype), layout.node_ids(ntype)
    numbers = np.arange(layout.num_nodes(ntype))
    valid = bool(((original_ids >= 0) & (original_ids < len(numbers))).all())
    _check(
        valid and np.array_equal(node_ids[original_ids], numbers), f"the id maps of {ntype} are not inverse"
    )


def verify_edge_table(
    layout: PartitionLayout, part_id: int, table: EdgeTable, train: np.ndarray, edge_types: list[list[Any]]
) -> None:
    """Check that a partition's edges are its triples, and that it owns their tails."""
    _check(bool((np.diff(table.triple_ids) > 0).all()), f"partition {part_id}: triple ids do not ascend")
    for lhs, rhs, first, end in edge_types:
        rows = slice(*np.searchsorted(table.triple_ids, [first, end]))
        edges = table.edges[rows]
        triples = train[table.triple_ids[rows]]
        for column, ntype in enumerate((lhs, RELATION, rhs)):
            same = np.array_equal(layout.original_ids(ntype)[edges[:, column]], triples[:, column])
            _check(same, f"partition {part_id}: edges {lhs} to {rhs} are not those of the triples")
        start, stop = layout.node_range(rhs, part_id)
        inside = (edges[:, 2] >= start) & (edges[:, 2] < stop)
        _check(
            bool(inside.all()), f"partition {part_id}: it does not own the tail of every edge {lhs} to {rhs}"
        )


def verify_dgl_partition(
    config_path: Path, part_id: int, table: EdgeTable, edge_types: list[list[Any]]
) -> None:
    """Check that DGL's files of a partition hold the same edges as our table."""
    graph, _, features, book, _, _, _ = dgl.distributed.load_partition(str(config_path), part_id)
    heads, tails = (graph.ndata[dgl.NID][ends] for ends in graph.edges())
    # DGL also stores halo edges here, which other partitions own.
    inner = graph.edata["inner_edge"].bool()
    etype_ids = load_json(config_path)[Field.EDGE_TYPE_IDS]
    for lhs, rhs, first, end in edge_types:
        etype = f"{lhs}:{lhs}_{rhs}:{rhs}"
        mine = inner & (graph.edata[dgl.ETYPE] == etype_ids[etype])
        triple_ids = features[f"{etype}/{TRIPLE_ID}"].numpy()
        real = np.flatnonzero(triple_ids >= 0)  # padding edges have triple id -1
        # DGL reorders edges within a partition, so both sides are compared by triple id.
        order = real[np.argsort(triple_ids[real], kind="stable")]
        rows = slice(*np.searchsorted(table.triple_ids, [first, end]))
        same = np.array_equal(triple_ids[order], table.triple_ids[rows])
        for column, ends in ((0, heads), (2, tails)):
            node_ids = book.map_to_per_ntype(ends[mine])[1].numpy()
            same = same and np.array_equal(node_ids[order], table.edges[rows, column])
        _check(same, f"partition {part_id}: DGL's files hold other edges {lhs} to {rhs} than the edge table")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise VerificationError(message)
