"""Partitions of a data set: ranges of node ids, id maps, and the triples that each partition owns."""

from __future__ import annotations

import errno
import os
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from dglkge.data import dataset_files
from dglkge.data.dataset_files import Field, load_json
from dglkge.data.vocabulary import extended
from dglkge.errors import DglkgeError, InputError, os_errors
from dglkge.typing import RELATION

Rows = range | npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Rows of a partition's edge table, ascending; a range where they stand together."""


def map_npy(path: Path, kind: type[DglkgeError] = InputError, mode: Literal["r", "c"] = "r") -> np.ndarray:
    """Map an npy file of numbers; raises an error of a kind if it is missing, cut off or damaged."""
    # A damaged header fails wherever in Python's parser.
    faults = (ValueError, EOFError, SyntaxError, tokenize.TokenError)
    with os_errors(kind, f"cannot read {path} as an npy file of numbers", *faults):
        # Mapped: all processes of a machine share the pages of one file. No pickle: it could run code.
        return np.load(path, mmap_mode=mode, allow_pickle=False)


def load_array(path: Path, shape: tuple[int | None, ...], *dtypes: type[np.generic]) -> np.ndarray:
    """Map a ``.npy`` file of a data set into memory, read-only.

    Raises InputError if it is missing, cut off, or has another shape (None stands for any length) or type.
    """
    array = map_npy(path)
    fits = array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape))
    if not fits or array.dtype not in dtypes:
        expected = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        got = f"{array.shape} of {array.dtype}"
        raise InputError(f"{path} holds an array {got}, expected {shape} of {expected}")
    return array


def new_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """Create an array file of allocated blocks: a full disk is an error here, not SIGBUS at a write."""
    array: np.memmap = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except OSError as error:
            # Some network file systems cannot allocate.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    return array


@dataclass(frozen=True)
class EdgeTable:
    """The triples that one partition owns.

    Attributes
    ----------
    triple_ids : (m,) int64
        Their rows in ``train.npy``, ascending.
    edges : (m, 3) int32 or int64
        Head, relation and tail of each as node ids.
    weights : (m,) float32 or None
        Weight of each, where the dataset has weights.
    """

    triple_ids: np.ndarray
    edges: np.ndarray
    weights: np.ndarray | None


def load_edges(folder: Path, num: int | None, has_weights: bool) -> EdgeTable:
    """Map the files of a table of so many triples (None: any); raises InputError as :func:`load_array`."""
    triple_ids = load_array(folder / dataset_files.TRIPLE_IDS, (num,), np.int64)
    num = len(triple_ids)
    edges = load_array(folder / dataset_files.EDGES, (num, 3), np.int32, np.int64)
    weights = load_array(folder / dataset_files.WEIGHTS, (num,), np.float32) if has_weights else None
    return EdgeTable(triple_ids, edges, weights)


class PartitionLayout:
    """Ranges of node ids by type and partition. Build one with :meth:`PartitionLayout.open`.

    Parameters
    ----------
    path : Path
        The folder of the partitions.
    boundaries : dict of str to (num_parts + 1,) int64
        For each node type the first node id of each partition and, last, the number of nodes.
    num_times : int
        Times that a relation has; an edge has its relation as ``node id * num_times + time``.
    """

    def __init__(self, path: Path, boundaries: dict[str, np.ndarray], num_times: int = 1) -> None:
        self.path = path
        self.num_times = num_times
        self._boundaries = boundaries
        self._arrays: dict[str, np.ndarray] = {}
        self._edge_tables: dict[int, EdgeTable] = {}

    @classmethod
    def open(
        cls, path: str | Path, graph_name: str, num_times: int = 1, has_edges: bool = True
    ) -> PartitionLayout:
        """Read DGL's description of the partitions and check that the id maps and edge tables fit it.

        A machine needs the folder of its own partition only. Partitions without a folder here are skipped;
        their edge tables raise an error. A folder that is here must be complete, unless the edge tables are
        not written yet.

        Raises
        ------
        InputError
            If a file is missing or damaged, or no partition's folder is here.
        """
        path = Path(path)
        config_path = dataset_files.graph_config_path(path, graph_name)
        config = load_json(config_path)
        boundaries = {}
        try:
            num_parts = int(config[Field.NUM_PARTS])
            for ntype, ranges in config[Field.NODE_MAP].items():
                # DGL numbers the nodes of all types of partition 0, then those of partition 1, and so on. A
                # node id within its type therefore follows from the lengths of these ranges alone.
                lengths = [end - start for start, end in ranges]
                if len(lengths) != num_parts:
                    raise ValueError(f"{len(lengths)} ranges of {ntype} for {num_parts} partitions")
                boundaries[ntype] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{config_path} is no description of DGL partitions: {error!r}") from error
        layout = cls(path, boundaries, num_times)
        # Mapped now, so that a missing or damaged map is an error before training starts.
        for ntype in layout.ntypes:
            layout.original_ids(ntype)
            layout.node_ids(ntype)
        here = [part_id for part_id in range(layout.num_parts) if layout.part_path(part_id).is_dir()]
        if not here:
            raise InputError(f"{path} has no partition: {layout.part_path(0)} and the others are missing")
        for part_id in here if has_edges else ():
            layout.edge_table(part_id)
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
        """Return the partition that owns each node of a type, (n,) int64."""
        # side="right" skips partitions without a node of the type, which have two equal boundaries.
        return np.searchsorted(self._boundaries[ntype][1:], node_ids, side="right").astype(np.int64)

    def original_ids(self, ntype: str) -> np.ndarray:
        """Return the original id of each node id of a type, (n,) int64."""
        return self._id_map(dataset_files.original_ids_file(ntype), ntype)

    def node_ids(self, ntype: str) -> np.ndarray:
        """Return the node id of each original id of a type, (n,) int64; inverse of :meth:`original_ids`."""
        return self._id_map(dataset_files.node_ids_file(ntype), ntype)

    def edge_ids(self, ntype: str) -> np.ndarray:
        """Return what edges have for each original id of a type: its node id, and its time if it has one."""
        return self._at_times(ntype, self.node_ids(ntype))

    def original_edge_ids(self, ntype: str) -> np.ndarray:
        """Return the inverse of :meth:`edge_ids`."""
        return self._at_times(ntype, self.original_ids(ntype))

    def _at_times(self, ntype: str, ids: np.ndarray) -> np.ndarray:
        return extended(ids, self.num_times) if ntype == RELATION else ids

    def part_path(self, part_id: int) -> Path:
        """Return the folder of a partition, which need not be on this machine."""
        return self.path / dataset_files.part_folder(part_id)

    def edge_table(self, part_id: int) -> EdgeTable:
        """Return the triples that a partition owns: those whose tail it owns."""
        if part_id not in self._edge_tables:
            # A partition has weights if the data set has: the file decides, so the layout needs no
            # description of the data set.
            folder = self.part_path(part_id)
            has_weights = (folder / dataset_files.WEIGHTS).exists()
            self._edge_tables[part_id] = load_edges(folder, None, has_weights)
        return self._edge_tables[part_id]

    def _id_map(self, name: str, ntype: str) -> np.ndarray:
        """Return an id map; mapped into memory once."""
        if name not in self._arrays:
            self._arrays[name] = load_array(self.path / name, (self.num_nodes(ntype),), np.int64)
        return self._arrays[name]
