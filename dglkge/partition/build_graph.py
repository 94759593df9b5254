"""Partitions the training triples with DGL, and verifies them. A process of run_build.py.

``run_build.py`` starts it as a child for three reasons: DGL prints a lot, METIS cannot be interrupted, and
DGL's memory is freed only when the process ends. The output of the child goes to a log file.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO
from unittest import mock

if __name__ == "__main__":
    # The child runs this file as a script. Python then puts the folder of the file first, and modules such as
    # "inputs" would hide others of that name.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from dglkge.distributed.preemption import end_with_parent

    end_with_parent(int(sys.argv[2]))  # before importing DGL, which takes seconds

import dgl
import dgl.distributed
import numpy as np
import torch

from dglkge.data import dataset_files
from dglkge.data.dataset_files import Field
from dglkge.data.partition_layout import PartitionLayout
from dglkge.data.sorted_arrays import sorted_distinct
from dglkge.kernels.triple_rows import count_values, mapped, neighbour_lists, place_greedily, spread
from dglkge.partition.rows import map_in_order, open_npy
from dglkge.partition.run_build import NO_ROOM, NO_ROOM_STATUS, GraphJob
from dglkge.typing import RELATION, Ids

LDG_PASSES = 5
"""Passes over the nodes: on a graph with 100 clusters the first cuts most, later ones ever less."""

PIECE_ROWS = 1 << 20
"""Triples that are read and written at a time."""


def build_partitions(dataset: Path, job: GraphJob) -> None:
    """Write partitions, id maps and edge tables into a data set folder with ``train.npy``, and verify them.

    Raises
    ------
    VerificationError
        If the files that DGL wrote do not match the triples.
    """
    train = np.load(dataset_files.split_path(dataset, dataset_files.TRAIN), mmap_mode="r")
    weights = np.load(dataset / dataset_files.TRAIN_WEIGHTS, mmap_mode="r") if job.has_weights else None
    parts = assign_nodes(dataset, job, train)
    graph = build_graph(job, parts)
    partitions = dataset / dataset_files.PARTITIONS
    # partition_graph has no argument for a given assignment. With part_method="random" it takes the parts
    # from its module's random_choice (dgl 2.1.0), which is replaced during the call. METIS runs
    # above and not in partition_graph, because its result must be repaired: DGL cannot store a partition that
    # lacks a node of some type.
    flat = torch.from_numpy(np.concatenate([parts[ntype] for ntype in graph.ntypes]))
    with mock.patch.object(dgl.distributed.partition, "random_choice", lambda num_parts, num_nodes: flat):
        original_ids, _ = dgl.distributed.partition_graph(
            graph, job.graph_name, job.num_parts, str(partitions), part_method="random", return_mapping=True
        )
    # DGL's graph is freed before the edge tables take memory.
    del graph
    # DGL noted "random", by which the assignment was handed over.
    config_path = dataset_files.graph_config_path(partitions, job.graph_name)
    config = {**dataset_files.load_json(config_path), Field.PART_METHOD: job.part_method}
    config_path.write_text(json.dumps(config, indent=4), encoding="utf-8")
    for ntype, ids in original_ids.items():
        # Inverse permutation by scattering.
        node_ids = np.empty(len(ids), np.int64)
        node_ids[ids.numpy()] = np.arange(len(ids))
        np.save(partitions / dataset_files.original_ids_file(ntype), ids.numpy().astype(np.int64))
        np.save(partitions / dataset_files.node_ids_file(ntype), node_ids)
    write_edge_tables(partitions, job, train, weights)
    verify_partitions(partitions, job, train)


def assign_nodes(dataset: Path, job: GraphJob, train: np.ndarray) -> dict[str, np.ndarray]:
    """Return the partition of each node of each type, by original id; removes the file of given ones."""
    counts, rng = {**job.entity_types, RELATION: job.num_relations}, np.random.default_rng(job.seed)
    # One id space for all nodes, type after type: METIS, which takes 64 bits, cuts one graph of the entities.
    starts = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist()))
    entities, relations = slice(starts[RELATION]), slice(starts[RELATION], None)
    flat = np.full(sum(counts.values()), 0 if job.num_parts == 1 else -1)
    if job.has_parts:
        path = dataset / dataset_files.GIVEN_PARTS
        flat = np.load(path, allow_pickle=False)
        path.unlink()
    if (flat[relations] < 0).any():
        num_ends = 0 if job.has_parts or job.part_method == "random" else len(train)
        dtype = np.int64 if job.part_method == "metis" else np.int32
        heads, tails = np.empty((2, num_ends), dtype)
        # DGL stores an edge in the partition of its tail, so in-degrees are the load of a partition.
        loads = np.zeros(len(flat), np.int64)
        for lhs, rhs, first, rows in _pieces(job, train):
            ends = rows[:, 2] + starts[rhs]
            count_values(ends, loads)
            count_values(rows[:, 1] // job.num_times + starts[RELATION], loads)
            if num_ends:
                heads[first : first + len(rows)] = rows[:, 0] + starts[lhs]
                tails[first : first + len(rows)] = ends
        if not job.has_parts:
            flat[entities] = assign_entities(job, (heads, tails), loads[entities], rng)
        # Trainers of all partitions update a relation's row, so no cut helps: balanced by use.
        uses = loads[relations]
        flat[relations] = random_parts(np.zeros_like(uses), uses, job.num_parts, rng)
    return dict(zip(counts, np.split(flat, list(starts.values())[1:])))


def assign_entities(job: GraphJob, edges: tuple[Ids, Ids], in_degrees: Ids, rng: np.random.Generator) -> Ids:
    """Return the partition of each entity (n,), type after type; ``random`` needs no edges (heads, tails)."""
    type_of = np.repeat(np.arange(len(job.entity_types)), list(job.entity_types.values()))
    if job.part_method == "random":
        return random_parts(type_of, in_degrees, job.num_parts, rng)
    if job.part_method == "metis":
        flat = metis_parts(*edges, len(type_of), job.num_parts)
    else:
        flat = ldg_parts(*edges, in_degrees, job.num_parts, rng)
    return fill_empty_parts(flat, type_of, in_degrees, job.num_parts)


def metis_parts(heads: np.ndarray, tails: np.ndarray, num_nodes: int, num_parts: int) -> np.ndarray:
    """Partition the edges between ``num_nodes`` entities with METIS; returns the partition of each entity.

    Two constraints, nodes and edges, are balanced. DGL would balance the nodes and edges of each type. With
    five types, that is ten constraints, the largest of four partitions had 2.8 times the edges of the
    smallest.
    """
    graph = dgl.graph((torch.from_numpy(heads), torch.from_numpy(tails)), num_nodes=num_nodes)
    simple = symmetric_graph(heads, tails, num_nodes)
    # One "type" for all nodes: METIS then balances nodes in total and edges, two constraints.
    one_type = torch.zeros(num_nodes, dtype=torch.int64)
    # DGL's C function that makes a graph symmetric writes past its memory where edges are parallel, that is
    # where two relations join the same two entities (dgl 2.1.0: "free(): invalid next size").
    with mock.patch.object(dgl.partition, "_CAPI_DGLMakeSymmetric_Hetero", lambda _: simple._graph):
        parts = dgl.metis_partition_assignment(graph, num_parts, balance_ntypes=one_type, balance_edges=True)
    return parts.numpy()


def symmetric_graph(heads: np.ndarray, tails: np.ndarray, num_nodes: int) -> dgl.DGLGraph:
    """Return the graph with every edge in both directions, without loops and parallel edges."""
    # METIS expects a simple graph. An edge is encoded as one int64, so parallel ones are equal.
    distinct = heads != tails
    heads, tails = heads[distinct], tails[distinct]
    keys = sorted_distinct(np.concatenate([heads * num_nodes + tails, tails * num_nodes + heads]))
    return dgl.graph(tuple(map(torch.from_numpy, np.divmod(keys, num_nodes))), num_nodes=num_nodes)


def ldg_parts(
    heads: np.ndarray, tails: np.ndarray, in_degrees: np.ndarray, num_parts: int, rng: np.random.Generator
) -> np.ndarray:
    """Assign nodes by linear deterministic greedy streaming, in :data:`LDG_PASSES` passes.

    A node goes to the partition with most of its neighbours, times the room that is left there (Stanton and
    Kliot 2012). Later passes place every node again, with all its neighbours placed (Nishimura and Ugander
    2013). Room is of nodes and of edges, each at most 5 % above the mean if no single node is larger.

    Memory: 24 bytes a triple (16 for the ends, 8 for the lists of neighbours) and 40 bytes a node. A time of
    O(passes (triples + nodes · partitions)).
    """
    num_nodes = len(in_degrees)
    degrees = in_degrees + np.bincount(heads, minlength=num_nodes)
    starts = np.concatenate([[0], np.cumsum(degrees)])
    neighbours = neighbour_lists(heads, tails, starts)
    order = rng.permutation(num_nodes)
    parts = np.full(num_nodes, -1, np.int64)
    loads = np.zeros((2, num_parts), np.int64)
    room = np.array([num_nodes, max(len(heads), 1)]) * (1.05 / num_parts)
    for _ in range(LDG_PASSES):
        place_greedily(order, starts, neighbours, in_degrees, room, loads, parts)
    return parts


def random_parts(type_of: Ids, in_degrees: Ids, num_parts: int, rng: np.random.Generator) -> Ids:
    """Assign nodes to partitions at random, with nodes of each type (numbers from 0) and edges balanced.

    The nodes are shuffled, then sorted by in-degree (an edge belongs to its tail's partition). Each goes to
    the partition with the fewest edges so far among those with room for its type. A partition with a node of
    very high in-degree therefore gets no other large ones.
    """
    order = rng.permutation(len(in_degrees))
    order = order[np.argsort(-in_degrees[order], kind="stable")]
    # Drawn at random: else the same partitions would take the extra node of every type.
    counts = np.bincount(type_of).tolist()
    room = [count // num_parts + (rng.permutation(num_parts) < count % num_parts) for count in counts]
    parts = np.empty(len(in_degrees), dtype=np.int64)
    # Largest first (longest processing time rule): small nodes later even out the loads.
    spread(order, type_of, in_degrees, np.array(room), parts)
    return parts


def fill_empty_parts(parts: Ids, type_of: Ids, in_degrees: Ids, num_parts: int) -> Ids:
    """Return a copy in which every partition has at least one node of every type.

    METIS may leave a partition without any node of a rare type, and DGL cannot store such a partition. It
    gets the one with the fewest edges in the partition that has most nodes of that type.
    """
    parts = parts.copy()
    for type_ in range(int(type_of.max()) + 1):
        nodes = np.flatnonzero(type_of == type_)
        counts = np.bincount(parts[nodes], minlength=num_parts)
        for part in np.flatnonzero(counts == 0):
            largest = int(counts.argmax())
            members = nodes[parts[nodes] == largest]
            # The node at which the fewest edges end: moving it changes cut and balance least.
            parts[members[in_degrees[members].argmin()]] = part
            counts[largest] -= 1
            counts[part] += 1
    return parts


def build_graph(job: GraphJob, parts: dict[str, np.ndarray]) -> dgl.DGLGraph:
    """Build the graph that DGL's servers load: all nodes, and as few edges as DGL can store.

    Trainers read triples from the edge tables, so the triples are no edges of this graph: a server would hold
    45 bytes of each in shared memory and 30 in its heap. DGL cannot store a partition without an edge of some
    type. Each partition therefore has one edge of each type, from its first node of one type to its first of
    the other, and each relation has a self-loop.
    """
    loops = torch.arange(job.num_relations)
    edges = {(RELATION, f"{RELATION}_{RELATION}", RELATION): (loops, loops)}
    # Every partition has a node of every type.
    first = {
        name: torch.tensor([int((parts[name] == part).argmax()) for part in range(job.num_parts)])
        for name in job.entity_types
    }
    for lhs, rhs, _, _ in job.edge_types:
        edges[lhs, f"{lhs}_{rhs}", rhs] = (first[lhs], first[rhs])
    return dgl.heterograph(edges, num_nodes_dict={**job.entity_types, RELATION: job.num_relations})


def write_edge_tables(partitions: Path, job: GraphJob, train: np.ndarray, weights: np.ndarray | None) -> None:
    """Write the triples that each partition owns: triple ids, and heads, relations and tails as node ids."""
    layout = PartitionLayout.open(partitions, job.graph_name, job.num_times, has_edges=False)
    # Copied into memory: the lookups below are random accesses, and slow on mapped pages.
    node_ids = {ntype: layout.edge_ids(ntype).astype(np.int32) for ntype in layout.ntypes}

    counts = np.zeros(job.num_parts, np.int64)
    if job.num_parts == 1:
        counts[0] = len(train)
    else:
        for _, rhs, _, rows in _pieces(job, train):
            owners = layout.part_of(rhs, node_ids[rhs][rows[:, 2]])
            counts += np.bincount(owners, minlength=job.num_parts)
    # All partitions are written in one pass over the triples, each file from its start to its end: no more
    # than a piece is in memory, and a full disk is an error and no SIGBUS, which a store to a map would be.
    with ExitStack() as stack:

        def create(name: str, dtype: str, *width: int) -> list[BinaryIO]:
            paths = [layout.part_path(part_id) / name for part_id in range(job.num_parts)]
            files = (open_npy(path, dtype, (num, *width)) for path, num in zip(paths, counts.tolist()))
            return [stack.enter_context(file) for file in files]

        id_files, edge_files = create(dataset_files.TRIPLE_IDS, "<i8"), create(dataset_files.EDGES, "<i4", 3)
        weight_files = [] if weights is None else create(dataset_files.WEIGHTS, "<f4")

        def owned(piece: tuple[str, str, int, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
            """Return the triple ids and edges of each partition."""
            lhs, rhs, start, rows = piece
            node_rows = np.empty((len(rows), 3), "<i4")
            mapped(rows, node_ids[lhs], node_ids[RELATION], node_ids[rhs], node_rows)
            if job.num_parts == 1:
                return [(np.arange(start, start + len(rows), dtype="<i8"), node_rows)]
            owner = layout.part_of(rhs, node_rows[:, 2])
            mine = [np.flatnonzero(owner == part_id) for part_id in range(job.num_parts)]
            return [((places + start).astype("<i8"), np.take(node_rows, places, axis=0)) for places in mine]

        for parts in map_in_order(owned, _pieces(job, train), job.num_workers):
            for part_id, (triple_ids, edges) in enumerate(parts):
                edge_files[part_id].write(edges.data)
                id_files[part_id].write(triple_ids.data)
                if weights is not None:
                    weight_files[part_id].write(weights[triple_ids].tobytes())


def _pieces(job: GraphJob, train: np.ndarray) -> Iterator[tuple[str, str, int, np.ndarray]]:
    """Yield types of heads and tails, first triple id and triples (n, 3), a bounded number at a time."""
    for lhs, rhs, first, end in job.edge_types:
        for start in range(first, end, PIECE_ROWS):
            yield lhs, rhs, start, np.asarray(train[start : min(start + PIECE_ROWS, end)])


class VerificationError(Exception):
    """The partitions do not match the triples: a defect of this program or of DGL, or a full disk."""


def verify_partitions(partitions: Path, job: GraphJob, train: np.ndarray) -> None:
    """Check the partitions against the triples (n, 3).

    Raises
    ------
    VerificationError
        Unless the id maps are inverse to each other, every triple lies in exactly one partition, that of its
        tail, with the right ends, and DGL's files have the nodes of the id maps.
    """
    layout = PartitionLayout.open(partitions, job.graph_name, job.num_times)
    for ntype in layout.ntypes:
        original_ids, node_ids = layout.original_ids(ntype), layout.node_ids(ntype)
        numbers = np.arange(layout.num_nodes(ntype))
        are_ids = ((original_ids >= 0) & (original_ids < len(numbers))).all()
        are_inverse = are_ids and np.array_equal(node_ids[original_ids], numbers)
        _check(are_inverse, f"the id maps of {ntype} are not inverse")
    num_owned = 0
    for part_id in range(layout.num_parts):
        num_owned += len(layout.edge_table(part_id).triple_ids)
        verify_edge_table(layout, part_id, job, train)
        verify_dgl_partition(dataset_files.graph_config_path(partitions, job.graph_name), part_id, layout)
    # A partition has no triple twice (its ids ascend), and no two own one tail: with as many as there are
    # triples, each is in exactly one.
    _check(num_owned == len(train), f"the partitions hold {num_owned} of {len(train)} triples")


def verify_edge_table(layout: PartitionLayout, part_id: int, job: GraphJob, train: np.ndarray) -> None:
    """Check that a partition's edges are its triples, and that it owns their tails."""
    table, place = layout.edge_table(part_id), f"partition {part_id}"
    # Copied into memory: random accesses to mapped pages are slow.
    node_ids = {ntype: np.array(layout.edge_ids(ntype)) for ntype in layout.ntypes}

    def verify_piece(first: int) -> None:
        triple_ids = table.triple_ids[first : first + PIECE_ROWS]
        last = table.triple_ids[first - 1] if first else -1
        _check((np.diff(triple_ids, prepend=last) > 0).all(), f"{place}: triple ids do not ascend")
        _check(triple_ids[-1] < len(train), f"{place}: triple id {triple_ids[-1]} is of no triple")
        edges, triples = table.edges[first : first + PIECE_ROWS], np.asarray(train[triple_ids])
        for lhs, rhs, start, end in job.edge_types:
            rows = slice(*np.searchsorted(triple_ids, [start, end]))
            expected = np.empty_like(triples[rows])
            mapped(triples[rows], node_ids[lhs], node_ids[RELATION], node_ids[rhs], expected)
            are_equal = np.array_equal(expected, edges[rows])
            _check(are_equal, f"{place}: edges {lhs} to {rhs} are not those of the triples")
            lower, upper = layout.node_range(rhs, part_id)
            owns_tails = ((edges[rows, 2] >= lower) & (edges[rows, 2] < upper)).all()
            _check(owns_tails, f"{place}: it does not own the tail of every edge {lhs} to {rhs}")

    for _ in map_in_order(verify_piece, range(0, len(table.triple_ids), PIECE_ROWS), job.num_workers):
        pass


def verify_dgl_partition(config_path: Path, part_id: int, layout: PartitionLayout) -> None:
    """Check that DGL's files of a partition have the nodes of the layout, and edges between them only."""
    graph, _, _, book, _, _, _ = dgl.distributed.load_partition(str(config_path), part_id)
    node_ids = graph.ndata[dgl.NID]
    are_inner = bool(graph.ndata["inner_node"].all()) and bool(graph.edata["inner_edge"].all())
    _check(are_inner, f"partition {part_id}: DGL's files hold nodes or edges of other partitions")
    type_ids, in_type = (tensor.numpy() for tensor in book.map_to_per_ntype(node_ids))
    for number, ntype in enumerate(book.ntypes):
        start, end = layout.node_range(ntype, part_id)
        same = np.array_equal(np.sort(in_type[type_ids == number]), np.arange(start, end))
        _check(same, f"partition {part_id}: DGL's files hold other nodes of type {ntype} than the id maps")
    types_here = set(graph.edata[dgl.ETYPE].tolist())
    expected_types = set(dataset_files.load_json(config_path)[Field.EDGE_TYPE_IDS].values())
    _check(types_here == expected_types, f"partition {part_id}: DGL's files have no edge of some type")


def _check(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise VerificationError(message)


if __name__ == "__main__":
    # At exit Python looks for garbage among all that was imported, which takes .4 s after torch and DGL.
    atexit.register(gc.freeze)
    try:
        build_partitions(Path(sys.argv[1]), GraphJob(**json.load(sys.stdin)))
    except OSError as error:
        if error.errno in NO_ROOM:
            sys.exit(NO_ROOM_STATUS)
        raise
