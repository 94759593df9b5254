"""How a partitioned graph numbers its nodes and which triples each partition owns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dglkge.data.dataset_files import load_array
from dglkge.data.json_file import load_json
from dglkge.errors import InputError


@dataclass(frozen=True)
class EdgeTable:
    """The triples that one partition owns.

    Attributes
    ----------
    triple_ids : (m,) int64
        Their rows in ``train.npy``, ascending.
    edges : (m, 3) int64
        Head, relation and tail of each as node ids.
    weights : (m,) float32 or None
        Weight of each, where the dataset has weights.
    """

    triple_ids: np.ndarray
    edges: np.ndarray
    weights: np.ndarray | None


class PartitionLayout:
    """Ranges of node ids by type and partition. Build one with :meth:`PartitionLayout.open`.

    Parameters
    ----------
    path : Path
        The folder of the partitions.
    boundaries : dict of str to (num_parts + 1,) int64
        For each node type the first node id of each partition and, last, the number of nodes.
    """

    def __init__(self, path: Path, boundaries: dict[str, np.ndarray]) -> None:
        self.path = path
        self._boundaries = boundaries

    @classmethod
    def open(cls, path: str | Path, graph_name: str) -> PartitionLayout:
        """Read DGL's description of the partitions and check that the id maps and edge tables fit it.

        A machine needs the folder of its own partition only: partitions whose folder is not here are
        passed over, and asking for the edges of one is an error. A folder that is here must be whole.

        Parameters
        ----------
        path : str or Path
            The folder of the partitions.
        graph_name : str
            Name of the graph: ``<graph_name>.json`` describes it.

        Raises
        ------
        InputError
            If a file is missing or damaged, or no partition's folder is here.
        """
        layout = cls.open_maps(path, graph_name)
        here = [part_id for part_id in range(layout.num_parts) if layout.part_path(part_id).is_dir()]
        if not here:
            raise InputError(f"{path} has no partition: {layout.part_path(0)} and the others are missing")
        for part_id in here:
            layout.edge_table(part_id)
        return layout

    @classmethod
    def open_maps(cls, path: str | Path, graph_name: str) -> PartitionLayout:
        """Do what :meth:`open` does, but do not look for edge tables: partitioning writes them last.

        Raises
        ------
        InputError
            If a file is missing or damaged.
        """
        path = Path(path)
        config_path = path / f"{graph_name}.json"
        config = load_json(config_path)
        boundaries = {}
        try:
            num_parts = int(config["num_parts"])
            for ntype, ranges in config["node_map"].items():
                # DGL's ranges count nodes of all types; only their lengths matter here.
                lengths = [end - start for start, end in ranges]
                if len(lengths) != num_parts:
                    raise ValueError(f"{len(lengths)} ranges of {ntype} for {num_parts} partitions")
                boundaries[ntype] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{config_path} is no description of DGL partitions: {error!r}") from error
        layout = cls(path, boundaries)
        for ntype in layout.ntypes:
            layout.original_ids(ntype)
            layout.node_ids(ntype)
        return layout

    @property
    def ntypes(self) -> list[str]:
        """All node types: the entity types and ``"relation"``."""
        return list(self._boundaries)

    @property
    def num_parts(self) -> int:
        """Number of partitions."""
        return len(next(iter(self._boundaries.values()))) - 1

    def num_nodes(self, ntype: str) -> int:
        """Return the number of nodes of a type in all partitions."""
        return int(self._boundaries[ntype][-1])

    def node_range(self, ntype: str, part_id: int) -> tuple[int, int]:
        """Return the first node id of a type that a partition owns, and the one behind its last."""
        boundaries = self._boundaries[ntype]
        return int(boundaries[part_id]), int(boundaries[part_id + 1])

    def range_starts(self, ntype: str) -> np.ndarray:
        """Return the first node id of a type in each partition and, last, their number: (num_parts + 1,)."""
        return self._boundaries[ntype]

    def part_of(self, ntype: str, node_ids: np.ndarray) -> np.ndarray:
        """Return which partition owns each node.

        Parameters
        ----------
        ntype : str
            A node type.
        node_ids : (n,) int64
            Node ids of that type.

        Returns
        -------
        (n,) int64
        """
        return np.searchsorted(self._boundaries[ntype][1:], node_ids, side="right").astype(np.int64)

    def original_ids(self, ntype: str) -> np.ndarray:
        """Return the original id of each node id of a type, (n,) int64."""
        return load_array(self.path / f"original_ids_{ntype}.npy", (self.num_nodes(ntype),), np.int64)

    def node_ids(self, ntype: str) -> np.ndarray:
        """Return the node id of each original id of a type, (n,) int64; inverse of :meth:`original_ids`."""
        return load_array(self.path / f"node_ids_{ntype}.npy", (self.num_nodes(ntype),), np.int64)

    def part_path(self, part_id: int) -> Path:
        """Return the folder of a partition, which need not be on this machine."""
        return self.path / f"part{part_id}"

    def edge_table(self, part_id: int) -> EdgeTable:
        """Return the triples that a partition owns: those whose tail it owns.

        Raises
        ------
        InputError
            If the partition is not on this machine, or damaged.
        """
        folder = self.part_path(part_id)
        triple_ids = load_array(folder / "triple_ids.npy", (None,), np.int64)
        edges = load_array(folder / "edges.npy", (len(triple_ids), 3), np.int64)
        weights_path = folder / "weights.npy"
        weights = load_array(weights_path, (len(triple_ids),), np.float32) if weights_path.exists() else None
        return EdgeTable(triple_ids, edges, weights)
