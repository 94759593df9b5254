"""One embedding under an optimizer: recorded reads, gradients of the step, rows and state in memory.

DGL appends (ids, rows) to a list of the embedding whenever rows are read while gradients are recorded. Here
these rules hold: a step takes every pair that has its gradient and forgets it; a pair whose backward has not
run yet is remembered as long as its rows live (and not a moment longer), so that rows read ahead of a step
still count; ``zero_grad`` forgets the gradients that have arrived, and keeps the pairs that still wait for
theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable
from weakref import WeakMethod

import numpy as np
import torch
from dgl.distributed import DistTensor
from dgl.distributed.standalone_kvstore import KVClient as StandaloneClient
from torch.utils.weak import TensorWeakRef

from dglkge.kernels import chains as kernels
from dglkge.optim.network_exchange import range_starts
from dglkge.optim.row_chains import Buffer, RowChains


class Trace:
    """The recorded reads of one embedding.

    Parameters
    ----------
    embedding : dgl.distributed.DistEmbedding
        The embedding.
    """

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._waiting: list[tuple[torch.Tensor, TensorWeakRef]] = []

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All pairs (ids, rows) that may have or get a gradient."""
        alive = [(ids, reference()) for ids, reference in self._waiting]
        return [(ids, rows) for ids, rows in alive if rows is not None] + list(self._embedding._trace)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pairs (ids "(n,)", gradients "(n, D)") that arrived since the last call; they are forgotten."""
        pairs = self._pairs()
        self._waiting = [(ids, TensorWeakRef(rows)) for ids, rows in pairs if rows.grad is None]
        self._embedding.reset_trace()
        return [(ids, rows.grad) for ids, rows in pairs if rows.grad is not None]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients "(n, D)" that have arrived and that no step has taken yet."""
        return [rows.grad for _, rows in self._pairs() if rows.grad is not None]

    def drop_gradients(self) -> None:
        """Forget the gradients that have arrived."""
        pairs = [(ids, rows) for ids, rows in self._pairs() if rows.grad is None]
        self._waiting = []
        self._embedding.reset_trace()
        self._embedding._trace.extend(pairs)


class Background:
    """Runs one piece of work at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-optim")
        self._work: Future | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start some work; the work before it must have been finished."""
        self._work = self._thread.submit(work)

    def finish(self) -> None:
        """Wait for the work, if any, and raise what it raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()


class FencedTensor(DistTensor):
    """A distributed tensor that lets a background step end before its rows are read or written.

    Parameters
    ----------
    tensor : dgl.distributed.DistTensor
        The tensor; it goes on owning the data.
    finish : weakref.WeakMethod
        Waits for the step, as long as the optimizer lives.
    """

    def __init__(self, tensor: DistTensor, finish: WeakMethod) -> None:
        self.__dict__.update(tensor.__dict__)
        self._owner = False
        self._fenced = tensor
        self._fence = finish

    def _finish(self) -> None:
        finish = self._fence()
        if finish is not None:
            finish()

    def __getitem__(self, ids: Any) -> Any:
        self._finish()
        return self._fenced[ids]

    def __setitem__(self, ids: Any, rows: Any) -> None:
        self._finish()
        self._fenced[ids] = rows


#: Types in which rows are updated in place; others are fetched, updated in float32 and written back.
IN_PLACE_DTYPES = (torch.float32, torch.float64)


def local_array(tensor: Any) -> np.ndarray | None:
    """This machine's rows of a ``DistTensor`` as an array that can be written in place.

    Parameters
    ----------
    tensor : dgl.distributed.DistTensor
        A distributed tensor.

    Returns
    -------
    np.ndarray or None
        "(n, ...)", or None where the servers share no memory with this process or the type is no float of 32
        or 64 bits.
    """
    rows = tensor.kvstore.data_store.get(tensor.kvstore_key)
    if rows is None or rows.dtype not in IN_PLACE_DTYPES:
        return None
    return rows.numpy()


def state_array(tensor: Any) -> np.ndarray:
    """This machine's rows of a state tensor, which DGL always keeps in shared memory.

    Raises
    ------
    RuntimeError
        They are not there.
    """
    array = local_array(tensor)
    if array is None:
        raise RuntimeError(f"the rows of {tensor.name!r} are not in this machine's shared memory")
    return array


def fetch(tensors: Sequence[Any], ids: np.ndarray) -> list[np.ndarray]:
    """Copies of the given rows of some distributed tensors, float32 where they are narrower."""
    wanted = torch.from_numpy(ids)
    fetched = [tensor[wanted] for tensor in tensors]
    return [(rows if rows.dtype in IN_PLACE_DTYPES else rows.float()).numpy().copy() for rows in fetched]


def write_back(
    tensors: Sequence[Any], ids: np.ndarray, rows: Sequence[np.ndarray], timeout_seconds: float | None
) -> None:
    """Write rows through the kvstore and wait until they can be read again.

    DGL acknowledges no push, and of several servers on a machine any may answer the next pull; as each row
    has one owner, reading back what was written shows that the servers are done. Where rows have several
    writers (Hogwild), what is read back may be another's: there nobody waits.

    Parameters
    ----------
    tensors : sequence of DistTensor
        Where to write.
    ids : np.ndarray
        "(n,) int64" ids of the rows.
    rows : sequence of np.ndarray
        "(n, ...)" for each tensor.
    timeout_seconds : float, optional
        Limit of waiting; None: do not wait.

    Raises
    ------
    TimeoutError
        The rows cannot be read back in time.
    """
    wanted = torch.from_numpy(ids)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for tensor, new_rows in zip(tensors, rows):
        value = torch.from_numpy(new_rows).to(tensor.dtype)
        tensor[wanted] = value
        while deadline is not None and not torch.allclose(
            tensor[wanted], value, rtol=0, atol=0, equal_nan=True
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"optimizer step: the servers did not take {len(ids)} rows of {tensor.name!r} "
                    f"within {timeout_seconds:g} s"
                )


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
        found = [local_array(tensor) for tensor in tensors]
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
        copies = fetch(tensors, ids[away])
        num_bad += rule(copies, np.arange(len(copies[0])), selected[away], chain)
        write_back(tensors, ids[away], copies, timeout_seconds)
        return num_bad
