"""Sizes of a data set and of its partitions, from its descriptions alone: no array is opened. No numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.data import dataset_files
from dglkge.data.dataset_files import Field, load_json
from dglkge.errors import InputError
from dglkge.typing import RELATION


@dataclass(frozen=True)
class PartSize:
    """The size of one partition.

    Attributes
    ----------
    num_rows : mapping of str to int
        Nodes of each node type, relations included, that the partition owns: the rows of each table.
    num_edges : int
        Training triples that it owns.
    num_halo_edges : int
        Edges of other partitions whose heads it owns, where DGL's graph has the triples: they are stored here
        too.
    most_halo_nodes : int
        Upper bound of the number of nodes of other partitions in all these edges.
    has_weights : bool
        Whether its triples have weights.
    num_graph_edges : int
        Edges of its triples in DGL's graph, halo edges apart: one of each type, since triples are in the edge
        tables. In data sets of older versions every triple is an edge.
    """

    num_rows: Mapping[str, int]
    num_edges: int
    num_halo_edges: int = 0
    most_halo_nodes: int = 0
    has_weights: bool = False
    num_graph_edges: int = 1

    @property
    def graph_has_triples(self) -> bool:
        """Whether the triples are edges of DGL's graph."""
        return self.num_graph_edges >= self.num_edges


@dataclass(frozen=True)
class DatasetSize:
    """The size of a data set.

    Attributes
    ----------
    parts : tuple of PartSize
        Part k lies on machine k.
    num_relations : int
    splits : mapping of str to int
        Number of triples of ``train``, ``valid`` and ``test``.
    """

    parts: tuple[PartSize, ...]
    num_relations: int
    splits: Mapping[str, int]

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table over all partitions."""
        return {table: sum(part.num_rows[table] for part in self.parts) for table in self.parts[0].num_rows}


def read_dataset_size(dataset: str | Path) -> DatasetSize:
    """Read the sizes of a data set and of its partitions.

    Parameters
    ----------
    dataset : str or Path
        A folder that ``partition_tools/partition.py`` wrote.

    Raises
    ------
    InputError
        If a description is missing or damaged.
    """
    # Not Dataset.open: that maps every array, and a launcher may have none of them on its machine.
    description, partition_file = locate_partitions(dataset)
    return dataset_size(Path(dataset), description, load_json(partition_file))


def locate_partitions(dataset: str | Path) -> tuple[dict[str, Any], Path]:
    """Return the content of ``dataset.json`` and the path of DGL's description of the partitions.

    Raises
    ------
    InputError
        If the description is missing or damaged.
    """
    folder = Path(dataset)
    description = load_json(folder / dataset_files.DESCRIPTION)
    graph_name = description.get(Field.GRAPH_NAME)
    if not isinstance(graph_name, str):
        raise _foreign(folder, KeyError(Field.GRAPH_NAME))
    return description, dataset_files.graph_path(folder, graph_name)


def dataset_size(folder: Path, description: Mapping[str, Any], graph: Mapping[str, Any]) -> DatasetSize:
    """Return the sizes that the descriptions of a data set give.

    Parameters
    ----------
    folder : Path
        The data set; its ``report.json`` is read.
    description : mapping
        Content of ``dataset.json``.
    graph : mapping
        Content of DGL's description of the partitions.

    Raises
    ------
    InputError
        If a description is missing or damaged.
    """
    report = load_json(folder / dataset_files.PARTITIONS / dataset_files.REPORT)
    try:
        cut_edges = [int(part[Field.CUT_EDGES]) for part in report[Field.PARTS]]
        num_edges = [int(part["num_edges"]) for part in report[Field.PARTS]]
        return DatasetSize(
            _part_sizes(graph, num_edges, cut_edges, bool(description[Field.HAS_WEIGHTS])),
            int(description[Field.NUM_RELATIONS]),
            {name: int(count) for name, count in description[Field.SPLITS].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _foreign(folder, error) from error


def _foreign(folder: Path, error: Exception) -> InputError:
    return InputError(f"{folder} is no dataset folder of this dglkge: {error!r}")


def _part_sizes(
    partitions: Mapping[str, Any], num_edges: Sequence[int], cut_edges: Sequence[int], has_weights: bool
) -> tuple[PartSize, ...]:
    """Read DGL's description of the partitions; its ranges count nodes and edges of all types.

    The report counts cut edges at the partition of their tail, which owns them. The halo edges of a partition
    are the cut edges of the others: these are assumed to come from all partitions alike, which is exact for
    two partitions.
    """
    rows = {
        ntype: [end - start for start, end in ranges] for ntype, ranges in partitions[Field.NODE_MAP].items()
    }
    loops = f"{RELATION}:"  # prefix of the relations' self-loops, which stand for no triple
    edges = [
        [end - start for start, end in ranges]
        for etype, ranges in partitions[Field.EDGE_MAP].items()
        if not etype.startswith(loops)
    ]
    num_parts = int(partitions[Field.NUM_PARTS])
    sizes = []
    for part in range(num_parts):
        num_rows = {ntype: counts[part] for ntype, counts in rows.items()}
        # Each partition's cut edges come from the others in equal shares (rounded up).
        num_halo_edges = -(-(sum(cut_edges) - cut_edges[part]) // max(num_parts - 1, 1))
        num_others = sum(map(sum, rows.values())) - sum(num_rows.values())
        # Each cut edge brings at most one node of another partition, and there are no more such nodes than
        # others own.
        most_halo_nodes = min(cut_edges[part] + num_halo_edges, num_others)
        in_graph = sum(counts[part] for counts in edges)
        found = PartSize(num_rows, num_edges[part], num_halo_edges, most_halo_nodes, has_weights, in_graph)
        if not found.graph_has_triples:
            found = dataclasses.replace(found, num_halo_edges=0, most_halo_nodes=0)
        sizes.append(found)
    return tuple(sizes)
