"""Partitions the training triples with DGL. A process of its own: ``python build_graph.py DATASET``.

DGL prints a great deal, cannot be interrupted while METIS runs and needs memory that should be given back, so
``run_build.py`` starts this file as a child whose output goes to a log file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from dglkge.partition.run_build import end_with_parent

    end_with_parent(int(sys.argv[2]))  # first of all: importing DGL takes seconds

import dgl
import dgl.distributed
import numpy as np
import torch

from dglkge.data import dataset_files
from dglkge.data.partition_layout import PartitionLayout
from dglkge.partition.assignment import fill_empty_parts, random_parts
from dglkge.partition.dataset_writer import NO_ROOM
from dglkge.partition.run_build import NO_ROOM_STATUS, GraphJob
from dglkge.partition.verify import verify_partitions
from dglkge.typing import RELATION

PADDING = -1
"""triple_id and relation_id of an edge that stands for no triple."""


def build_partitions(dataset: Path, job: GraphJob) -> None:
    """Write the partitions, the id maps and the edge tables, and verify them.

    Parameters
    ----------
    dataset : Path
        A dataset folder with ``train.npy`` and an empty folder ``partitions``.
    job : GraphJob
        What to do.

    Raises
    ------
    VerificationError
        If what DGL wrote is not what was asked for.
    """
    train = np.load(dataset / "train.npy", mmap_mode="r")
    weights = np.load(dataset / dataset_files.TRAIN_WEIGHTS, mmap_mode="r") if job.has_weights else None
    parts = assign_nodes(job, train)
    graph = build_graph(job, train, weights, parts)
    partitions = dataset / dataset_files.PARTITIONS
    # Asked for "random", partition_graph takes the parts from random_choice. So the assignment is ours, that
    # of METIS too, but repaired: DGL cannot store a partition that lacks a node of some type.
    flat = torch.from_numpy(np.concatenate([parts[ntype] for ntype in graph.ntypes]))
    with mock.patch.object(dgl.distributed.partition, "random_choice", lambda num_parts, num_nodes: flat):
        original_ids, _ = dgl.distributed.partition_graph(
            graph, job.graph_name, job.num_parts, str(partitions), part_method="random", return_mapping=True
        )
    del graph
    _write_method(partitions / f"{job.graph_name}.json", job.method)
    for ntype, ids in original_ids.items():
        _write_id_maps(partitions, ntype, ids.numpy())
    write_edge_tables(partitions, job, train, weights)
    verify_partitions(partitions, job.graph_name, train, job.edge_types)


def assign_nodes(job: GraphJob, train: np.ndarray) -> dict[str, np.ndarray]:
    """Return the partition of each node of each type, by original id."""
    rng = np.random.default_rng(job.seed)
    counts = list(job.entity_types.values())
    starts = dict(zip(job.entity_types, np.cumsum([0, *counts]).tolist()))
    type_of = np.repeat(np.arange(len(counts)), counts)
    # all entities in one row, type after type
    heads, tails = (np.empty(len(train), dtype=np.int64) for _ in range(2))
    for lhs, rhs, first, end in job.edge_types:
        heads[first:end] = train[first:end, 0] + starts[lhs]
        tails[first:end] = train[first:end, 2] + starts[rhs]
    in_degrees = np.bincount(tails, minlength=len(type_of))
    if job.num_parts == 1:
        flat = np.zeros(len(type_of), dtype=np.int64)
    elif job.method == "metis":
        flat = metis_parts(heads, tails, len(type_of), job.num_parts)
        flat = fill_empty_parts(flat, type_of, in_degrees, job.num_parts)
    else:
        flat = random_parts(type_of, in_degrees, job.num_parts, rng)
    parts = {ntype: flat[start : start + job.entity_types[ntype]] for ntype, start in starts.items()}
    # A relation's row is updated by all who use it, so its owner is chosen by use alone, whatever the method.
    uses = np.bincount(train[:, 1], minlength=job.num_relations)
    parts[RELATION] = random_parts(np.zeros(job.num_relations, dtype=np.int64), uses, job.num_parts, rng)
    return parts


def metis_parts(heads: np.ndarray, tails: np.ndarray, num_nodes: int, num_parts: int) -> np.ndarray:
    """Let METIS cut the graph of the entities with two balances: all nodes, and all edges.

    Not those of each type, as DGL would: with five types and ten balances the largest of four partitions had
    2.8 times the edges of the smallest.

    Parameters
    ----------
    heads, tails : (m,) int64
        The ends of each edge.
    num_nodes, num_parts : int
        How many there are, and how many partitions to make.

    Returns
    -------
    (num_nodes,) int64
    """
    graph = dgl.graph((torch.from_numpy(heads), torch.from_numpy(tails)), num_nodes=num_nodes)
    simple = symmetric_graph(heads, tails, num_nodes)
    one_type = torch.zeros(num_nodes, dtype=torch.int64)
    # DGL's own way to make a graph symmetric writes past its memory where edges are parallel, that is where
    # two relations join the same two entities (dgl 1.1.3 and 2.1.0: "free(): invalid next size").
    with mock.patch.object(dgl.partition, "_CAPI_DGLMakeSymmetric_Hetero", lambda _: simple._graph):
        parts: torch.Tensor = dgl.metis_partition_assignment(
            graph, num_parts, balance_ntypes=one_type, balance_edges=True
        )
    return parts.numpy()


def symmetric_graph(heads: np.ndarray, tails: np.ndarray, num_nodes: int) -> dgl.DGLGraph:
    """Return the graph with every edge in both directions, without loops and parallel edges."""
    distinct = heads != tails
    keys = np.concatenate(
        [heads[distinct] * num_nodes + tails[distinct], tails[distinct] * num_nodes + heads[distinct]]
    )
    keys = np.unique(keys)
    return dgl.graph(
        (torch.from_numpy(keys // num_nodes), torch.from_numpy(keys % num_nodes)), num_nodes=num_nodes
    )


def build_graph(
    job: GraphJob, train: np.ndarray, weights: np.ndarray | None, parts: dict[str, np.ndarray]
) -> dgl.DGLGraph:
    """Build the graph: one edge type per pair of entity types, one node with a self-loop per relation.

    DGL cannot store a partition without an edge of some type, so a partition that owns no triple of a pair
    gets one edge of triple id and relation id -1 there.
    """
    loops = torch.arange(job.num_relations)
    edges = {(RELATION, f"{RELATION}_{RELATION}", RELATION): (loops, loops)}
    data = {}
    for lhs, rhs, first, end in job.edge_types:
        triples = np.ascontiguousarray(train[first:end])
        owned = np.bincount(parts[rhs][triples[:, 2]], minlength=job.num_parts)
        padding = np.array(
            [int((parts[rhs] == part).argmax()) for part in np.flatnonzero(owned == 0)], dtype=np.int64
        )
        nothing = np.full(len(padding), PADDING)
        etype = (lhs, f"{lhs}_{rhs}", rhs)
        edges[etype] = (
            torch.from_numpy(np.concatenate([triples[:, 0], np.zeros_like(padding)])),
            torch.from_numpy(np.concatenate([triples[:, 2], padding])),
        )
        data[etype] = {
            "relation_id": torch.from_numpy(np.concatenate([triples[:, 1], nothing])),
            "triple_id": torch.from_numpy(np.concatenate([np.arange(first, end), nothing])),
        }
        if weights is not None:
            padded = np.concatenate([weights[first:end], np.zeros(len(padding), dtype=np.float32)])
            data[etype]["weight"] = torch.from_numpy(padded)
    graph = dgl.heterograph(edges, num_nodes_dict={**job.entity_types, RELATION: job.num_relations})
    for etype, tensors in data.items():
        graph.edges[etype].data.update(tensors)
    return graph


def write_edge_tables(partitions: Path, job: GraphJob, train: np.ndarray, weights: np.ndarray | None) -> None:
    """Write which triples each partition owns, and their ends as node ids."""
    layout = PartitionLayout.open_maps(partitions, job.graph_name)
    node_ids = {ntype: np.array(layout.node_ids(ntype)) for ntype in layout.ntypes}
    owner = np.empty(len(train), dtype=np.int32)
    for _, rhs, first, end in job.edge_types:
        owner[first:end] = layout.part_of(rhs, node_ids[rhs][train[first:end, 2]])
    for part_id in range(job.num_parts):
        triple_ids = np.flatnonzero(owner == part_id).astype(np.int64)
        edges = np.empty((len(triple_ids), 3), dtype=np.int64)
        for lhs, rhs, first, end in job.edge_types:
            rows = slice(*np.searchsorted(triple_ids, [first, end]))
            triples = train[triple_ids[rows]]
            for column, ntype in enumerate((lhs, RELATION, rhs)):
                edges[rows, column] = node_ids[ntype][triples[:, column]]
        folder = partitions / f"part{part_id}"
        np.save(folder / "triple_ids.npy", triple_ids)
        np.save(folder / "edges.npy", edges)
        if weights is not None:
            np.save(folder / "weights.npy", weights[triple_ids])


def _write_id_maps(partitions: Path, ntype: str, original_ids: np.ndarray) -> None:
    node_ids = np.empty(len(original_ids), dtype=np.int64)
    node_ids[original_ids] = np.arange(len(original_ids))
    np.save(partitions / f"original_ids_{ntype}.npy", original_ids.astype(np.int64))
    np.save(partitions / f"node_ids_{ntype}.npy", node_ids)


def _write_method(config_path: Path, method: str) -> None:
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["part_method"] = method
    config_path.write_text(json.dumps(config, indent=4), encoding="utf-8")


if __name__ == "__main__":
    try:
        build_partitions(Path(sys.argv[1]), GraphJob.take(Path(sys.argv[1])))
    except OSError as error:
        if error.errno in NO_ROOM:
            sys.exit(NO_ROOM_STATUS)
        raise
