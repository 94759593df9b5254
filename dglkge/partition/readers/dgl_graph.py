"""Reads graphs of DGL: an object, a file of ``dgl.save_graphs``, a folder of ``partition_graph``.

A partitioned graph keeps its partitions. ``dgl.distributed.partition_graph`` numbers the nodes anew and does
not store their original ids. DGL's own ``tools`` store them in ``orig_nids.dgl`` beside each partition, and a
user may have them as node data ``orig_id``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.data.dataset_files import TRAIN, TRIPLE_IDS, Field, load_json, part_folder
from dglkge.errors import InputError
from dglkge.partition.ingest import Arrays, Reading, Watch
from dglkge.partition.options import FORMATS, Files, Options, format_by_content, format_by_name
from dglkge.partition.readers.graphml import NO_RELATION
from dglkge.partition.readers.id_folders import IdFolder
from dglkge.partition.readers.numbered import Numbered, as_array, joined, numbered_edges, numbers

RELATION_FIELDS = ("etype", "rel_type", "_TYPE")
"""Edge data of a graph with one edge type that may hold the relation of each edge."""

ORIGINAL_IDS = "orig_nids.dgl"
ORIGINAL_ID_FIELD = "orig_id"
_NODE_TYPE = "_N"
"""DGL's node type of a graph without types."""

Edges = Mapping[tuple[str, str, str], np.ndarray]
"""Heads and tails (2, n) of each edge type (type, relation, type), numbered in their type."""


def numbered_graph(graph: Any, options: Options, place: str) -> Numbered:
    """Return the edges of a ``DGLGraph``; ``place`` is its name in messages."""
    counts = {node_type: graph.num_nodes(node_type) for node_type in graph.ntypes}
    kinds = graph.canonical_etypes
    edges = {kind: np.stack([*map(as_array, graph.edges(etype=kind, order="eid"))]) for kind in kinds}
    return _numbered(edges, counts, graph.edata if len(edges) == 1 else {}, options, place)


def _numbered(
    edges: Edges, counts: Mapping[str, int], edge_data: Mapping[str, Any], options: Options, place: str
) -> Numbered:
    """Return edges as triples; relations of one edge type may stand in its data."""
    attribute = options.reading.relation_attribute
    fields = RELATION_FIELDS if attribute is None else (attribute,)
    field = next((name for name in fields if name in edge_data), None)
    if attribute is not None and field is None:
        known = ", ".join(edge_data) or "none (where there are several edge types, these are the relations)"
        raise InputError(f"{place}: the graph's edges have no data {attribute!r}; they have {known}")
    if len(edges) > 1 or len(counts) > 1 or (field is None and _NODE_TYPE not in counts):
        return numbered_edges(edges, counts)
    ((heads, tails),) = edges.values()
    if field is None:
        relations, names = np.zeros(len(heads), np.int64), [NO_RELATION]
    else:
        relations, names = as_array(edge_data[field]), None
        if relations.ndim != 1 or relations.dtype.kind not in "iu":
            form = f"{relations.dtype} of shape {relations.shape}"
            raise InputError(f"{place}: the edge data {field!r} is {form}, expected an integer for each edge")
    return Numbered(np.stack([heads, relations, tails], axis=1), numbers(next(iter(counts.values()))), names)


def read_graphs(files: Files, options: Options, watch: Watch) -> Reading:
    """Read files that ``dgl.save_graphs`` wrote, each with one graph."""
    import dgl  # takes seconds

    splits = {}
    for split, paths in files.items():
        path, _ = paths[0]
        if len(paths) > 1:
            raise InputError(f"{len(paths)} graphs of DGL are not one set of triples; give one file")
        with _dgl_errors(path, "cannot be read as a graph of DGL"):
            graphs = dgl.load_graphs(str(path))[0]
        if len(graphs) != 1:
            raise InputError(f"{path} has {len(graphs)} graphs, expected one")
        splits[split] = numbered_graph(graphs[0], options, str(path))
        watch(path, path.stat().st_size)
    return joined(splits)


@contextlib.contextmanager
def _dgl_errors(path: Path, action: str) -> Iterator[None]:
    """Raise InputError with the file's name at any error, of DGL's without its stack trace."""
    try:
        yield
    except Exception as error:
        # "[12:00:00] /opt/dgl/src/file.cc:43: Check failed: ...: Stack trace: ..."
        reason = re.sub(r"^\[[\d:]+\] \S+ ", "", str(error).partition("Stack trace")[0]).strip(": \n")
        raise InputError(f"{path}: {action}: {reason or repr(error)}") from error


def is_graph(path: Path) -> bool:
    """Return whether a path is a file of ``dgl.save_graphs`` or a folder of ``partition_graph``."""
    if path.is_file():
        return format_by_name(path) == FORMATS["dgl"] or format_by_content(path) == FORMATS["dgl"]
    return path.is_dir() and find_dgl(path) is not None


def find_dgl(folder: Path) -> IdFolder | None:
    """Return the partitions that ``dgl.distributed.partition_graph`` wrote into a folder, or None.

    Several graphs, or those of a data set, are an InputError.
    """
    paths = [path for path in sorted(folder.glob("*.json")) if _is_description(path)]
    if not paths:
        return None
    if len(paths) > 1:
        raise InputError(f"{folder} has several graphs of DGL: {', '.join(path.name for path in paths)}")
    if (folder / part_folder(0) / TRIPLE_IDS).is_file():
        raise InputError(f"{folder} has the partitions of the data set {folder.parent}: give that")
    layout, files = "a partitioned graph of DGL", {TRAIN: paths[0]}
    return IdFolder(layout, files, lambda watch, options: _read(paths[0], watch, options))


def _is_description(path: Path) -> bool:
    try:
        return {Field.NODE_MAP, Field.EDGE_MAP, Field.part_files(0)} <= load_json(path).keys()
    except InputError:
        return False


def _read(config: Path, watch: Watch, options: Options) -> Reading:
    """Read a partitioned graph, one partition after the other."""
    description = load_json(config)
    with _dgl_errors(config, "is no description of DGL partitions"):
        lengths = {name: np.diff(ranges)[:, 0] for name, ranges in description[Field.NODE_MAP].items()}
        fields = [description[Field.part_files(part)] for part in range(description[Field.NUM_PARTS])]
        graphs = [config.parent / files["part_graph"] for files in fields]
    for node_type, counts in lengths.items():
        if (counts < 1).any():
            fault = f"partition {int(counts.argmin())} has no node of the type {node_type!r}"
            raise InputError(f"{config}: {fault}; every partition of a data set needs one of each type")
    known = _original_ids(config, graphs, lengths)
    original = known or {name: np.arange(counts.sum()) for name, counts in lengths.items()}
    edges, edge_data = _edges(config, graphs, original)
    num_nodes = {name: len(ids) for name, ids in original.items()}
    reading = joined({TRAIN: _numbered(edges, num_nodes, edge_data, options, str(config))})
    # Entities are counted type after type, as by type_ranges.
    owners = {name: np.repeat(np.arange(len(graphs)), counts) for name, counts in lengths.items()}
    reading.parts = np.concatenate([owners[name][np.argsort(original[name])] for name in sorted(owners)])
    reading.part_method = str(description[Field.PART_METHOD])
    ids = "their original ids, as {} or the node data {} has them"
    if known is None:
        ids = "the ids that DGL gave them: neither {} nor node data {} has the original ones"
    called = ids.format(ORIGINAL_IDS, ORIGINAL_ID_FIELD)
    reading.notes = [f"its {len(graphs)} partitions are kept", f"entities are called by {called}"]
    watch(config, config.stat().st_size)
    return reading


def _original_ids(config: Path, graphs: Sequence[Path], lengths: Arrays) -> Arrays | None:
    """Return the original id of each node of each type, by DGL's id in the type; None if they are unknown."""
    import dgl.data.utils
    import dgl.distributed.partition

    blocks: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in lengths}
    for part, graph in enumerate(graphs):
        path = graph.with_name(ORIGINAL_IDS)
        with _dgl_errors(path if path.exists() else config, "cannot be read"):
            if path.exists():
                ids = dgl.data.utils.load_tensors(str(path))
            else:
                data, _ = dgl.distributed.partition.load_partition_feats(str(config), part, load_edges=False)
                ids = {name: data.get(f"{name}/{ORIGINAL_ID_FIELD}") for name in lengths}
        for name, type_blocks in blocks.items():
            type_blocks += [] if ids.get(name) is None else [as_array(ids[name])]
    original = {name: np.concatenate(type_blocks) for name, type_blocks in blocks.items()}
    if not any(map(len, original.values())):
        return None
    for name, ids in original.items():
        num = lengths[name].sum()
        if not np.array_equal(np.sort(ids), np.arange(num)):
            expected = f"expected each of 0 to {num - 1} once"
            raise InputError(f"{config}: the original ids of {name!r} are {len(ids)} numbers, {expected}")
    return original


def _edges(config: Path, graphs: Sequence[Path], original: Arrays) -> tuple[Edges, Arrays]:
    """Return the edges of each type as original ids, and the data of a graph's only edge type."""
    import dgl
    import dgl.distributed.partition

    edges: dict[tuple[str, str, str], list[np.ndarray]] = {}
    edge_data: dict[str, list[np.ndarray]] = {}
    for part, path in enumerate(graphs):
        with _dgl_errors(path, "cannot be read as a partition of DGL"):
            graph, _, _, book, *_ = dgl.distributed.load_partition(str(config), part, load_feats=False)
            # Edges of other partitions are copies. In the order of DGL's ids, which edge data have.
            inner = graph.edata["inner_edge"].nonzero()[:, 0]
            inner = inner[graph.edata[dgl.EID][inner].argsort()]
            nodes = graph.ndata[dgl.NID]
            # The numbers in their type of heads and tails.
            ends = [nodes[some[inner]] for some in graph.edges(order="eid")]
            heads, tails = (as_array(book.map_to_per_ntype(some)[1]) for some in ends)
            type_of = as_array(book.map_to_per_etype(graph.edata[dgl.EID][inner])[0])
            for number, edge_type in enumerate(book.canonical_etypes):
                mine = type_of == number
                pair = original[edge_type[0]][heads[mine]], original[edge_type[2]][tails[mine]]
                edges.setdefault(edge_type, []).append(np.stack(pair))
            if len(book.canonical_etypes) == 1:
                _, data = dgl.distributed.partition.load_partition_feats(str(config), part, load_nodes=False)
                for name, values in data.items():
                    edge_data.setdefault(name.rpartition("/")[2], []).append(as_array(values))
    merged = {edge_type: np.concatenate(blocks, axis=1) for edge_type, blocks in edges.items()}
    return merged, {name: np.concatenate(blocks) for name, blocks in edge_data.items()}
