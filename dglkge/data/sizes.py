"""How much each partition of a data set holds, read off its two descriptions: no array is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.data.json_file import load_json
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
        Edges of other partitions whose heads it owns; DGL stores them here too.
    most_halo_nodes : int
        At most so many nodes of other partitions appear in all these edges.
    has_weights : bool
        Whether its triples have weights.
    """

    num_rows: Mapping[str, int]
    num_edges: int
    num_halo_edges: int = 0
    most_halo_nodes: int = 0
    has_weights: bool = False


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
    name_bytes : int
        Bytes of the files of entity names.
    """

    parts: tuple[PartSize, ...]
    num_relations: int
    splits: Mapping[str, int]
    name_bytes: int

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
    folder = Path(dataset)
    description = load_json(folder / "dataset.json")
    try:
        partitions = load_json(folder / "partitions" / f"{description['graph_name']}.json")
        report = load_json(folder / "partitions" / "report.json")
        cut_edges = [int(part["cut_edges"]) for part in report["parts"]]
        sizes = DatasetSize(
            _part_sizes(partitions, cut_edges, bool(description["has_weights"])),
            int(description["num_relations"]),
            {name: int(count) for name, count in description["splits"].items()},
            sum(path.stat().st_size for path in (folder / "entities").glob("*.txt")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder} is no dataset folder of this dglkge: {error!r}") from error
    return sizes


def _part_sizes(
    partitions: Mapping[str, Any], cut_edges: Sequence[int], has_weights: bool
) -> tuple[PartSize, ...]:
    """Read DGL's description of the partitions; its ranges count nodes and edges of all types.

    How many edges lead from one partition into another is known of the edges' owners only: what the others
    own is taken to come from all partitions alike, which is exact for two.
    """
    rows = {ntype: [end - start for start, end in ranges] for ntype, ranges in partitions["node_map"].items()}
    loops = f"{RELATION}:"  # of the relations' own edges, which stand for no triple
    edges = [
        [end - start for start, end in ranges]
        for etype, ranges in partitions["edge_map"].items()
        if not etype.startswith(loops)
    ]
    num_parts = int(partitions["num_parts"])
    sizes = []
    for part in range(num_parts):
        num_rows = {ntype: counts[part] for ntype, counts in rows.items()}
        num_halo_edges = -(-(sum(cut_edges) - cut_edges[part]) // max(num_parts - 1, 1))
        num_others = sum(map(sum, rows.values())) - sum(num_rows.values())
        most_halo_nodes = min(cut_edges[part] + num_halo_edges, num_others)
        num_edges = sum(counts[part] for counts in edges)
        sizes.append(PartSize(num_rows, num_edges, num_halo_edges, most_halo_nodes, has_weights))
    return tuple(sizes)
