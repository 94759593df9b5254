"""One embedding under an optimizer: its rows, its state, its recorded reads and the gradients of the current
step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable
from weakref import WeakMethod

import numpy as np
import torch
from dgl.distributed import DistTensor
from dgl.distributed.standalone_kvstore import KVClient as StandaloneClient

from dglkge.kernels import chains as kernels
from dglkge.optim import row_storage
from dglkge.optim.background import FencedTensor
from dglkge.optim.buffers import Buffer
from dglkge.optim.ownership import range_starts
from dglkge.optim.row_chains import RowChains
from dglkge.optim.trace import Trace

#: (arrays [rows, *state], target rows, positions of their keys, chain) -> number of rows left alone
Rule = Callable[[Sequence[np.ndarray], np.ndarray, np.ndarray, tuple], int]


def key_of(embedding: Any) -> str:
    """Name of an embedding's rows in the kvstore, such as "node~user~name"."""
    return str(embedding.weight.name)


class Table:
    """An embedding and what its optimizer keeps for it.

    Parameters
    ----------
    embedding : dgl.distributed.DistEmbedding
        The embedding.
    state_shapes : mapping of str to tuple of int
        Name of each state tensor and the shape of one row of it.

    Attributes
    ----------
    name : str
        Name of the embedding; embeddings of several node types may share it.
    key : str
        Name of the embedding's rows in the kvstore, which contains the node type.
    label : str
        Name in files and messages: ``name``, or ``key`` where other tables of the optimizer have that name.
    state : dict of str to dgl.distributed.DistTensor
        Optimizer state; the tensors are named ``<name>_<key>``.
    num_steps : int
        Steps in which any trainer had a gradient for this table.
    """

    def __init__(self, embedding: Any, state_shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.embedding = embedding
        self.name = self.label = embedding.name
        self.key = key_of(embedding)
        self.policy = embedding.part_policy or embedding.weight.part_policy
        self.starts = range_starts(self.policy)
        self.part_id = self.policy.part_id
        self._weight = embedding.weight
        self.num_rows, self.dim = self._weight.shape
        wide = self._weight.dtype == torch.float64
        self.compute_dtype = torch.float64 if wide else torch.float32
        # No data of the graph; but DGL's standalone store, when it deletes a tensor, fails for all others.
        is_gdata = isinstance(self._weight.kvstore, StandaloneClient)
        self.state: dict[str, Any] = {
            key: DistTensor(
                (self.num_rows, *shape),
                self.compute_dtype,
                f"{self.name}_{key}",
                part_policy=self.policy,
                is_gdata=is_gdata,
            )
            for key, shape in state_shapes.items()
        }
        self._tensors = [self._weight, *self.state.values()]
        self.chains = RowChains(self.dim, np.dtype(np.float64 if wide else np.float32))
        self.trace = Trace(embedding)
        self.num_steps = 0

    def fence(self, finish: WeakMethod) -> None:
        """Make readers and writers of the rows and the state wait for a background step first."""
        self.embedding._tensor = FencedTensor(self._weight, finish)
        self.state = {key: FencedTensor(tensor, finish) for key, tensor in self.state.items()}

    def wire_dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        """Type in which rows travel; rows computed in float64 are never narrowed."""
        return self.compute_dtype if wanted is None or self.compute_dtype == torch.float64 else wanted

    def collect(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Chain the gradients of a step.

        Parameters
        ----------
        pairs : sequence of (Tensor, Tensor)
            Row ids "(n,)" of an integer type and gradients "(n, D)" of a float type, on any device.

        Raises
        ------
        ValueError
            Shapes that do not fit, or an id that the table does not have.
        """
        self.chains.clear()
        for ids, rows in pairs:
            if ids.dim() != 1 or rows.shape != (len(ids), self.dim):
                raise ValueError(
                    f"gradient of {self.label!r}: expected ids (n,) and rows (n, {self.dim}), got "
                    f"{tuple(ids.shape)} and {tuple(rows.shape)}"
                )
            if len(ids) == 0:
                continue
            id_array = ids.detach().to("cpu", torch.int64).contiguous().numpy()
            lowest, highest = int(id_array.min()), int(id_array.max())
            if lowest < 0 or highest >= self.num_rows:
                raise ValueError(
                    f"gradient of {self.label!r}: id {lowest if lowest < 0 else highest} is not in "
                    f"[0, {self.num_rows})"
                )
            self.chains.add(id_array, rows.detach().to("cpu", self.compute_dtype).contiguous().numpy())

    def warm_up(self, rule: Rule) -> None:
        """Compile the loops for the types of this table now, not in the first step."""
        chains = RowChains(self.dim, self.chains.dtype)
        first = np.zeros(1, np.int64)
        chains.add(np.zeros(2, np.int64), np.zeros((2, self.dim), chains.dtype))
        kernels.choose_owners(chains.find(first), first, 0, 1, first.copy())
        chains.merge_into(first, torch.empty(1, self.dim, dtype=self.compute_dtype), first.copy(), Buffer())
        arrays = [np.zeros((1, *tensor.shape[1:]), chains.dtype) for tensor in self._tensors]
        rule(arrays, first, first, chains.chain)

    def update(self, selected: np.ndarray, rule: Rule, timeout_seconds: float | None) -> int:
        """Apply the rule to the rows of the selected keys; returns how many were left alone as not finite.

        Parameters
        ----------
        selected : np.ndarray
            "(n,) int64" positions in ``chains.keys``.
        rule : callable
            The update.
        timeout_seconds : float, optional
            Limit for rows that must be written through the kvstore; None: do not wait until they can be read.
        """
        if len(selected) == 0:
            return 0
        ids = self.chains.keys[selected]
        chain, tensors = self.chains.chain, self._tensors
        found = [row_storage.local_array(tensor) for tensor in tensors]
        arrays = [array for array in found if array is not None]
        start, end = self.starts[self.part_id], self.starts[self.part_id + 1]
        here = np.ones(len(ids), bool) if len(self.starts) == 2 else (ids >= start) & (ids < end)
        if len(arrays) < len(tensors):
            here[:] = False
        num_bad = 0
        if here.all():
            return rule(arrays, ids - start, selected, chain)
        if here.any():
            num_bad += rule(arrays, ids[here] - start, selected[here], chain)
        away = ~here
        copies = row_storage.fetch(tensors, ids[away])
        num_bad += rule(copies, np.arange(len(copies[0])), selected[away], chain)
        row_storage.write_back(tensors, ids[away], copies, timeout_seconds)
        return num_bad
