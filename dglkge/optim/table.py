"""One embedding under an optimizer: gradients of the step, rows and state in memory, and their update.

:class:`DeviceRows` are the rows and state of a table on a device, copied from the kvstore's memory and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from dglkge.optim import dgl_tables
from dglkge.optim.links import RuleStep
from dglkge.optim.narrow_rows import NarrowEmbedding, NarrowUpdate
from dglkge.optim.row_chains import GradientRows, PlainRows
from dglkge.optim.rules import UpdateRule
from dglkge.optim.workspace import Scratch

#: Class of a table's gradients for each value of the option ``kernels``.
GRADIENTS = {"auto": GradientRows, "reference": PlainRows}


class Table:
    """An embedding with the state that its optimizer keeps for it.

    Attributes
    ----------
    name, key : str
        Name of the embedding, which several node types may share, and of its rows in the kvstore.
    label : str
        Name in files and messages: ``name``, or ``key`` where other tables of the optimizer have that name.
    state : dict of str to dgl.distributed.DistTensor
        Optimizer state; the tensors are named ``<name>_<key>``.
    tensors : list of dgl.distributed.DistTensor
        Rows and state in the kvstore.
    chains : GradientRows
        Gradients of the current step.
    num_steps : int
        Steps in which any trainer had a gradient for this table.
    max_norm : float
        Euclidean length to which updated rows are scaled if they are longer.
    """

    def __init__(self, embedding: Any, rule: UpdateRule, kernels: str = "auto") -> None:
        self.embedding = embedding
        self.name = self.label = embedding.name
        self.key = dgl_tables.key_of(embedding)
        self.rule = rule
        policy = dgl_tables.policy_of(embedding)
        self.starts = dgl_tables.range_starts(policy)
        self.part_id = policy.part_id
        self.num_rows, self.dim = embedding.weight.shape
        wide = embedding.weight.dtype == torch.float64
        self.compute_dtype = torch.float64 if wide else torch.float32
        self.state: dict[str, Any] = dict(
            dgl_tables.make_state(embedding, rule.state_shapes(embedding.embedding_dim), self.compute_dtype)
        )
        self.tensors = [embedding.weight, *self.state.values()]
        self.chains: GradientRows = GRADIENTS[kernels](self.dim, np.dtype(np.float64 if wide else np.float32))
        self.trace = dgl_tables.Trace(embedding)
        self.num_steps = 0
        self.max_norm = math.inf
        self._narrow = NarrowUpdate(embedding, kernels) if isinstance(embedding, NarrowEmbedding) else None

    @property
    def own_range(self) -> tuple[int, int]:
        """First id of this machine's rows, and the id after the last."""
        start, stop = self.starts[self.part_id : self.part_id + 2].tolist()
        return start, stop

    def fence(self, finish: WeakMethod[Any]) -> None:
        """Let readers and writers of the rows and the state wait for a background step first."""
        dgl_tables.fence_rows(self.embedding, finish)
        self.state = {key: dgl_tables.FencedTensor(tensor, finish) for key, tensor in self.state.items()}

    def wire_dtype(self, row_dtype: torch.dtype | None) -> torch.dtype:
        """Type in which gradient rows are sent; rows computed in float64 are never narrowed."""
        return self.compute_dtype if row_dtype is None or self.compute_dtype == torch.float64 else row_dtype

    def collect(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Group the gradients of a step, pairs of ids "(n,)" and gradients "(n, D)" on any device, by row.

        Raises
        ------
        ValueError
            The shapes do not fit, or the table has no row of an id.
        """
        self.chains.clear()
        for ids, rows in pairs:
            if ids.dim() != 1 or rows.shape != (ids.shape[0], self.dim):
                raise ValueError(
                    f"gradient of {self.label!r}: expected ids (n,) and rows (n, {self.dim}), got "
                    f"{tuple(ids.shape)} and {tuple(rows.shape)}"
                )
            if ids.shape[0] == 0:
                continue
            id_array = ids.detach().to("cpu", torch.int64).contiguous().numpy()
            # The compiled loops write at these ids without a check of bounds.
            lowest, highest = int(id_array.min()), int(id_array.max())
            if lowest < 0 or highest >= self.num_rows:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(f"gradient of {self.label!r}: id {wrong} is not in [0, {self.num_rows})")
            self.chains.add(id_array, rows.detach().to("cpu", self.compute_dtype).contiguous().numpy())

    def warm_up(self, step: RuleStep) -> None:
        """Compile the loops for the types of this table now, not in the first step."""
        chains = type(self.chains)(self.dim, self.chains.dtype)
        first = np.zeros(1, np.int64)
        chains.add(np.zeros(2, np.int64), np.zeros((2, self.dim), chains.dtype))
        positions = chains.match(first, 0, 1, first.copy(), np.zeros(1, bool))
        delivered = np.zeros(1, np.int32), np.ones(1, np.int32)
        for numbers in delivered:
            numbers.setflags(write=False)  # as they are in another trainer's memory
        chains.add_delivered(positions, first, 0, delivered, np.zeros((1, self.dim), chains.dtype))
        chains.merge_into(first, torch.empty(1, self.dim, dtype=self.compute_dtype), first.copy(), Scratch())
        arrays = [np.zeros((1, *tensor.shape[1:]), chains.dtype) for tensor in self.tensors]
        if self._narrow is not None:
            arrays[0] = arrays[0].astype(np.uint16)
        self._apply(chains, step, arrays, first, first, first)

    def update(
        self, step: RuleStep, gradients: GradientRows, selected: ndarray, timeout_seconds: float | None
    ) -> int:
        """Apply the rule to the rows of the selected keys; returns how many were skipped as not finite.

        The timeout is that of rows that must be written through the kvstore; None: do not wait until they can
        be read.
        """
        if len(selected) == 0:
            return 0
        ids = gradients.keys[selected]
        tensors = self.tensors
        views = [dgl_tables.local_array(tensor) for tensor in tensors]
        arrays = [array for array in views if array is not None]
        is_mapped = len(arrays) == len(tensors)
        if is_mapped and len(self.starts) == 2:
            return self._apply(gradients, step, arrays, ids, selected, ids)
        start, stop = self.own_range
        here = (ids >= start) & (ids < stop) & is_mapped
        num_bad = 0
        if here.all():
            return self._apply(gradients, step, arrays, ids - start, selected, ids)
        if here.any():
            num_bad += self._apply(gradients, step, arrays, ids[here] - start, selected[here], ids[here])
        away = ~here
        copies = dgl_tables.fetch(tensors, ids[away])
        num_bad += self._apply(gradients, step, copies, np.arange(len(copies[0])), selected[away], ids[away])
        dgl_tables.write_back(tensors, ids[away], copies, timeout_seconds)
        return num_bad

    def _apply(
        self, gradients: GradientRows, step: RuleStep, arrays: Sequence[ndarray], *rows: ndarray
    ) -> int:
        """Update rows, as of :meth:`NarrowUpdate.apply`; returns how many were skipped as not finite."""
        if self._narrow is None:
            return gradients.update(step, arrays, *rows[:2])
        return self._narrow.apply(gradients, step, arrays, rows)


NUMBERS_A_BLOCK = 1 << 26
"""Numbers of rows that are updated at a time: the update works on copies of rows and state."""


class DeviceRows:
    """A run of this machine's rows of one table, with their optimizer state, on a device.

    The kvstore's memory keeps what :meth:`load` read, or the last :meth:`store` wrote. A ValueError if the
    machine's servers share no memory with this process, or the rows have 16 bits.
    """

    def __init__(self, table: Table, run: slice, device: torch.device) -> None:
        arrays = [dgl_tables.local_array(tensor) for tensor in table.tensors]
        parts = [torch.from_numpy(array[run]) for array in arrays if array is not None]
        if len(parts) < len(arrays) or any(not part.is_floating_point() for part in parts):
            raise ValueError(f"{table.label}: rows and state must be float32 or float64 in shared memory")
        self.table = table
        self._host = parts
        self._there = [torch.empty_like(part, device=device) for part in parts]

    @property
    def rows(self) -> Tensor:
        """The rows, "(n, D)", on the device."""
        return self._there[0]

    def load(self) -> None:
        """Read rows and state from the kvstore's memory."""
        for there, host in zip(self._there, self._host):
            there.copy_(host)

    def store(self) -> None:
        """Write rows and state to the kvstore's memory; returns once they are there."""
        for there, host in zip(self._there, self._host):
            host.copy_(there)

    def update(self, step: RuleStep, targets: Tensor, gradient: Tensor, is_compiled: bool) -> Tensor:
        """Apply an update rule; returns how many rows were skipped as not finite, both on the device.

        Parameters
        ----------
        step : RuleStep
        targets : Tensor
            "(n,) int64": distinct places in :attr:`rows`.
        gradient : Tensor
            "(n, D)" sums of their gradients.
        is_compiled : bool
            By torch.compile, in one pass.
        """
        rows_a_block = max(1, NUMBERS_A_BLOCK // gradient.shape[1])
        num_bad = torch.zeros((), dtype=torch.int64, device=gradient.device)
        for some, sums in zip(targets.split(rows_a_block), gradient.split(rows_a_block)):
            num_bad += step.update_there(self._there, some, sums, is_compiled)
        return num_bad
