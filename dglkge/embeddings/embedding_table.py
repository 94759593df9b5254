"""One embedding table: a ``DistEmbedding`` and the machine's own rows of it in shared memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.dgl_compat import dgl, request_timeout
from dglkge.optim.narrow_rows import NarrowEmbedding, widen
from dglkge.typing import TablePart


@dataclass(frozen=True)
class RowStorage:
    """Type in which the rows of a table are stored.

    Attributes
    ----------
    dtype : torch.dtype
        float32, bfloat16 or float16.
    rounding : {"stochastic", "nearest"}
        Rounding of updated rows, see :class:`dglkge.optim.narrow_rows.NarrowEmbedding`.
    seed : int
        Of the random bits.
    kernels : {"auto", "reference"}
        Widen rows by compiled loops, or by torch.
    """

    dtype: torch.dtype = torch.float32
    rounding: str = "stochastic"
    seed: int = 0
    kernels: str = "auto"


FLOAT32_ROWS = RowStorage()


@dataclass(frozen=True)
class TableShard:
    """A contiguous range of node ids of one live table, from the first one on.

    Attributes
    ----------
    rows : (n, D) tensor
        A view on the machine's shared memory, of the type in which rows are stored.
    original_ids : (n,) int64 tensor
        Of the rows.
    node_ids : (N,) int64 tensor
        Of every original id of the table.
    """

    first_node_id: int
    rows: Tensor
    original_ids: Tensor
    node_ids: Tensor

    def locate(self, ids: Tensor) -> Tensor:
        """Return the row of each original id (m,), -1 where another shard holds it."""
        # Node ids of a part are contiguous (DGL renumbers nodes by part), so a range check replaces a search.
        place = self.node_ids[ids] - self.first_node_id
        place[(place < 0) | (place >= self.rows.shape[0])] = -1
        return place


class EmbeddingTable:
    """The rows of one node type.

    Parameters
    ----------
    graph : dgl.distributed.DistGraph
        It must have a node type of the table's name.
    layout : PartitionLayout
    name : str
        An entity type, or ``"relation"``.
    dim : int
        Width of a row.
    part : int
        The partition on this machine.
    storage : RowStorage
        How rows are stored; whatever it is, they are read as float32.

    Attributes
    ----------
    local_rows : (n, D) tensor
        This machine's rows in shared memory, of the type in which they are stored.
    range_starts : (num_parts + 1,) int64
        First node id on each machine and, last, the number of rows.
    pulled_bytes : int
        Bytes of ids and rows that were pulled through the kvstore.
    """

    def __init__(
        self,
        graph: Any,
        layout: PartitionLayout,
        name: str,
        dim: int,
        part: int,
        storage: RowStorage = FLOAT32_ROWS,
    ) -> None:
        self.name = name
        self.dim = dim
        self.part = part
        self.original_ids = _mapped(layout.original_ids(name))
        self.node_ids = _mapped(layout.node_ids(name))
        self.range_starts = layout.range_starts(name)
        self.pulled_bytes = 0
        self.first_node_id, self.end_node_id = layout.node_range(name, part)
        policy = graph.get_node_partition_policy(name)
        # Rows start as zeros, so that nothing of ours has to be importable by the servers.
        self._kernels = storage.kernels
        count, label = len(self.original_ids), f"{name}_rows"
        if storage.dtype == torch.float32:
            self.embedding = dgl.distributed.DistEmbedding(count, dim, name=label, part_policy=policy)
        else:
            # Not node ids: a row is rounded the same however the graph is partitioned.
            row_ids = self.original_ids.numpy()
            rows: dict[str, Any] = {"dtype": storage.dtype, "rounding": storage.rounding, "row_ids": row_ids}
            self.embedding = NarrowEmbedding(count, dim, label, policy, seed=storage.seed, **rows)
        # Shared memory of the machine's servers, not a copy: all its trainers read and update the same rows.
        self.local_rows: Tensor = self.typed(self.embedding._tensor.local_partition)

    def __len__(self) -> int:
        return self.original_ids.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether this machine holds every row."""
        return self.end_node_id - self.first_node_id == len(self)

    def typed(self, rows: Tensor) -> Tensor:
        """View rows of the kvstore as numbers."""
        return self.embedding.typed(rows) if isinstance(self.embedding, NarrowEmbedding) else rows

    def widened(self, places: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy this machine's rows at some places (n,) as float32."""
        return widen(self.local_rows, places, out, self._kernels)

    def gather(self, node_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy rows (n, D) of node ids (n,) as float32, those of other machines through the kvstore."""
        if self.is_whole:
            return self.widened(node_ids.numpy(), out)
        here = (node_ids >= self.first_node_id) & (node_ids < self.end_node_id)
        rows = torch.empty(len(node_ids), self.dim) if out is None else out
        rows[here] = self.local_rows[node_ids[here] - self.first_node_id].float()
        if not bool(here.all()):
            away = node_ids[~here]
            with request_timeout():
                rows[~here] = self._pulled(away)
            self.pulled_bytes += away.nbytes + len(away) * self.dim * self.local_rows.element_size()
        return rows

    def _pulled(self, node_ids: Tensor) -> Tensor:
        """Pull rows through the kvstore, as float32."""
        return self.typed(self.embedding._tensor[node_ids]).float()

    def shard(self, index: int, count: int) -> TableShard:
        """Return one of ``count`` nearly equal ranges of this machine's rows."""
        num_rows = self.local_rows.shape[0]
        # Both bounds by the same formula: the ranges are disjoint and cover all rows for any count.
        start, end = num_rows * index // count, num_rows * (index + 1) // count
        first = self.first_node_id + start
        ids = self.original_ids[first : self.first_node_id + end]
        return TableShard(first, self.local_rows[start:end], ids, self.node_ids)

    def own_part(self, state: dict[str, Any] | None = None) -> TablePart:
        """Return this machine's rows as they are stored, with those of the optimizer's tensors."""
        ids = self.original_ids[self.first_node_id : self.end_node_id]
        local = {name: tensor.local_partition for name, tensor in (state or {}).items()}
        return TablePart(self.name, self.part, ids, self.local_rows, local)

    def whole(self, state: dict[str, Any] | None = None) -> TablePart:
        """Return every row, as float32, in the order of original ids; for tables that fit one machine."""
        rows = self.gather(self.node_ids)
        copied = {name: tensor[self.node_ids] for name, tensor in (state or {}).items()}
        return TablePart(self.name, 0, torch.arange(len(self)), rows, copied)


def _mapped(array: np.ndarray) -> Tensor:
    """View an array that is mapped read-only as a tensor, which torch warns about; it is never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
