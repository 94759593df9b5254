"""Everything of this package that depends on DGL's internals; the other files use DGL's public names only.

Checked against dgl 2.1.0:

=============================== ===================================================================
internal                        use
=============================== ===================================================================
``DistEmbedding._trace``        list of (ids, rows) of each read with gradients: :class:`Trace`
``DistEmbedding._tensor``       replaced while steps run in the background: :func:`fence_rows`
``DistEmbedding.__init__``      sets these attributes and makes float32 rows: :func:`adopt_tensor`
``DistTensor.__dict__, _owner`` a second view of a tensor that does not delete it: :class:`FencedTensor`
``DistTensor.kvstore_key``      key of the rows in ``KVClient.data_store``: :func:`local_array`
``KVClient.data_store``         this machine's rows in shared memory: :func:`local_array`
=============================== ===================================================================
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

import numpy as np
import torch
from dgl.distributed import DistTensor
from numpy import ndarray
from torch import Tensor
from torch.utils.weak import TensorWeakRef


def key_of(embedding: Any) -> str:
    """Name of an embedding's rows in the kvstore, such as "node~user~name"."""
    return str(embedding.weight.name)


def identity_of(embedding: Any) -> tuple[int, str]:
    """Key that no two live embeddings of this process share: kvstore and name of the rows there.

    A process that trains twice has two kvstores, whose tensors may have the same names.
    """
    return id(embedding.kvstore), embedding.data_name


def range_starts(policy: Any) -> ndarray:
    """First id of each partition of a policy, then the number of ids: "(num_parts + 1,) int64".

    Found by bisection on ``policy.to_partid``: the only public way that does not list all ids. Every
    partition book that DGL makes is a range book, so ids of a partition are consecutive.
    """
    num_parts = policy.partition_book.num_partitions()
    num_ids = policy.get_size()
    parts = torch.arange(1, num_parts)
    low = torch.zeros(num_parts - 1, dtype=torch.int64)
    high = torch.full((num_parts - 1,), num_ids, dtype=torch.int64)
    while bool((low < high).any()):
        middle = (low + high) // 2
        reached = torch.as_tensor(policy.to_partid(middle.clamp(max=num_ids - 1))) >= parts
        open_ = low < high
        high = torch.where(open_ & reached, middle, high)
        low = torch.where(open_ & ~reached, middle + 1, low)
    return np.concatenate([[0], low.numpy(), [num_ids]]).astype(np.int64)


#: State tensors of this process by :func:`identity_of` their embedding and key. DGL deletes the rows of a
#: tensor with the object that created them, so all optimizers of an embedding share that object.
_STATE: WeakValueDictionary[tuple[Any, ...], DistTensor] = WeakValueDictionary()


def make_state(
    embedding: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, DistTensor]:
    """Create the state tensors of an embedding, filled with zeros; a collective.

    They are named ``<name>_<key>``, have an entry of the given shape for each row, and are partitioned as the
    embedding is. Where another optimizer of the embedding has them already, both have the same ones, as with
    DGL's optimizers.

    Raises
    ------
    ValueError
        Another optimizer of the embedding has state of that name and another shape.
    """
    identity, num_rows = identity_of(embedding), embedding.weight.shape[0]
    if any((*identity, key) in _STATE for key in shapes):
        gc.collect()  # an unreferenced optimizer may still be part of a reference cycle
    state = {}
    for key, shape in shapes.items():
        name = f"{embedding.name}_{key}"
        earlier = _STATE.get((*identity, key))
        if earlier is not None and tuple(earlier.shape) != (num_rows, *shape):
            raise ValueError(
                f"embedding {embedding.name!r}: another optimizer keeps its state {name!r} with rows "
                f"{tuple(earlier.shape[1:])}, this one needs {shape}: delete the other one first"
            )
        if earlier is None:  # is_gdata=False: not data of the graph
            policy = policy_of(embedding)
            earlier = DistTensor((num_rows, *shape), dtype, name, part_policy=policy, is_gdata=False)
        state[key] = _STATE[(*identity, key)] = earlier
    return state


def policy_of(embedding: Any) -> Any:
    """Partition policy of an embedding's rows.

    ``DistEmbedding.part_policy`` is the constructor's argument, None where DGL found the policy itself; the
    tensor has the one that was found.
    """
    return embedding.part_policy or embedding.weight.part_policy


def adopt_tensor(embedding: Any, tensor: DistTensor, part_policy: Any) -> None:
    """Set the attributes that ``DistEmbedding``'s constructor sets, around a tensor that exists."""
    embedding._tensor = tensor
    embedding._trace = []
    embedding._name = tensor.tensor_name
    embedding._num_embeddings, embedding._embedding_dim = tensor.shape
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        embedding._rank = torch.distributed.get_rank()
        embedding._world_size = torch.distributed.get_world_size()
    embedding._optm_state = None
    embedding._part_policy = part_policy


def record_read(embedding: Any, ids: Tensor, rows: Tensor) -> Tensor:
    """Return rows that were read, as a leaf that an embedding records while torch records gradients."""
    if torch.is_grad_enabled():
        rows = rows.requires_grad_()
        embedding._trace.append((ids.to(rows.device), rows))
    return rows


class Trace:
    """Recorded reads of one embedding, and the gradients that they received.

    Rows that are read while torch records gradients are leaves of the graph; DGL appends (ids, rows) to
    ``embedding._trace`` and empties the list in ``reset_trace``, which its own optimizers call in the step
    after ``zero_grad``. Here :meth:`take` returns each gradient once. A pair without a gradient yet is kept,
    by a weak reference to its rows: rows that were read ahead of a step still count in the step after their
    backward, and rows that were dropped without a backward do not stay in memory.
    """

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._waiting: list[tuple[Tensor, TensorWeakRef]] = []

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """All pairs (ids, rows) that have a gradient or may still receive one."""
        alive = [(ids, reference()) for ids, reference in self._waiting]
        return [(ids, rows) for ids, rows in alive if rows is not None] + list(self._embedding._trace)

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Remove and return the pairs (ids "(n,)", gradients "(n, D)") that arrived since the last call."""
        pairs = self._pairs()
        self._waiting = [(ids, TensorWeakRef(rows)) for ids, rows in pairs if rows.grad is None]
        self._embedding.reset_trace()
        return [(ids, rows.grad) for ids, rows in pairs if rows.grad is not None]

    def gradients(self) -> list[Tensor]:
        """Gradients "(n, D)" that have arrived and that no step has taken yet."""
        return [rows.grad for _, rows in self._pairs() if rows.grad is not None]

    def drop_gradients(self) -> None:
        """Remove the gradients that have arrived; reads without a backward so far are kept."""
        pairs = [(ids, rows) for ids, rows in self._pairs() if rows.grad is None]
        self._waiting = []
        self._embedding.reset_trace()
        self._embedding._trace.extend(pairs)


def call_alive(method: Callable[[], Any]) -> None:
    """Call a method that is referenced weakly, if its object is still there."""
    if (alive := method()) is not None:
        alive()


class FencedTensor(DistTensor):
    """View of a distributed tensor that waits for the background step before each read or write.

    The tensor stays the owner of the data; ``finish`` waits for the step, as long as the optimizer lives.
    """

    def __init__(self, tensor: DistTensor, finish: WeakMethod[Any]) -> None:
        # DistTensor.__init__ would create a tensor in the kvstore, and DistTensor.__del__ deletes it where
        # _owner is set: a copy of the attributes with _owner=False does neither.
        self.__dict__.update(tensor.__dict__)
        self._owner = False
        self._fenced = tensor
        self._fence = finish

    def __getitem__(self, ids: Any) -> Any:
        call_alive(self._fence)
        return self._fenced[ids]

    def __setitem__(self, ids: Any, rows: Any) -> None:
        call_alive(self._fence)
        self._fenced[ids] = rows


def fence_rows(embedding: Any, finish: WeakMethod[Any]) -> None:
    """Let each read and write through an embedding wait for the background step.

    ``DistEmbedding`` reads ``self._tensor[ids]`` and has no hook before it.
    """
    embedding._tensor = FencedTensor(embedding.weight, finish)


#: Type of words of 16 bits, whose meaning the embedding knows; never converted.
WORD_DTYPE = torch.int16

#: Types that are updated in place; rows of others are fetched, updated in float32 and written back.
IN_PLACE_DTYPES = (torch.float32, torch.float64, WORD_DTYPE)


def local_array(tensor: Any) -> ndarray | None:
    """This machine's rows of a ``DistTensor`` as an array "(n, ...)" that can be written in place.

    The servers of a machine keep their partition in POSIX shared memory, which every client of the machine
    maps when the tensor is created: ``data_store[key]`` is that memory, row i has node id "start of the
    partition + i". Servers read it when they answer other machines, without locks; so a row may be read while
    it is written, as with DGL's own optimizers. Words of 16 bits are uint16.

    Returns None where the servers share no memory with this process or the type is not float32 or float64.
    """
    rows = tensor.kvstore.data_store.get(tensor.kvstore_key)
    if rows is None or rows.dtype not in IN_PLACE_DTYPES:
        return None
    return as_array(rows)


def as_array(rows: Tensor) -> ndarray:
    """View a tensor as an array, words of 16 bits as uint16."""
    array: ndarray = rows.numpy()
    return array.view(np.uint16) if rows.dtype == WORD_DTYPE else array


def state_array(tensor: Any) -> ndarray:
    """This machine's rows of a state tensor, which DGL always keeps in shared memory; else a RuntimeError."""
    array = local_array(tensor)
    if array is None:
        raise RuntimeError(f"the rows of {tensor.name!r} are not in this machine's shared memory")
    return array


def fetch(tensors: Sequence[Any], ids: ndarray) -> list[ndarray]:
    """Copies of the given rows of some distributed tensors, float32 where their type is narrower.

    Words of 16 bits stay words, uint16.
    """
    index = torch.from_numpy(ids)
    fetched = [tensor[index] for tensor in tensors]
    return [as_array(rows if rows.dtype in IN_PLACE_DTYPES else rows.float()).copy() for rows in fetched]


def write_back(
    tensors: Sequence[Any], ids: ndarray, rows: Sequence[ndarray], timeout_seconds: float | None
) -> None:
    """Write rows "(n, ...)" for each tensor through the kvstore and wait until they can be read again.

    ``KVClient.push`` sends and returns: servers acknowledge nothing, and any server of the machine may answer
    the next pull. As each row has one owner, reading back the written values shows that the servers have
    stored them. With several writers of a row (Hogwild) the value may be another trainer's: without a timeout
    nothing is waited for.

    Raises
    ------
    TimeoutError
        The rows cannot be read back in time.
    """
    index = torch.from_numpy(ids)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for tensor, new_rows in zip(tensors, rows):
        is_word = tensor.dtype == WORD_DTYPE
        value = torch.from_numpy(new_rows.view(np.int16) if is_word else new_rows).to(tensor.dtype)
        tensor[index] = value
        while deadline is not None and not torch.allclose(
            tensor[index], value, rtol=0, atol=0, equal_nan=True
        ):
            if time.monotonic() > deadline:
                what = f"{len(ids)} rows of {tensor.name!r} within {timeout_seconds:g} s"
                raise TimeoutError(f"optimizer step: the servers did not take {what}")


#: Method that multiplies the gradients by a number; returns whether one of any trainer is not finite.
Unscale = Callable[[Tensor], bool]

_UNSCALE_OF_TORCH = "_amp_foreach_non_finite_check_and_unscale_"


class EmbeddingParameter(Tensor):
    """Entry of ``param_groups`` for an embedding: an empty tensor with a reference to it.

    A ``torch.amp.GradScaler`` passes the gradients of all tensors in ``param_groups`` to one function of
    torch, which divides them by the scale and sets a flag if one is not finite. The gradients of an embedding
    are as many tensors as there were reads. So the first entry of an optimizer has a gradient, empty too,
    which overrides that function through ``__torch_function__``: it unscales the gradients of all reads, and
    sums the flag over the trainers. All of them then skip the step and lower the scale.
    """

    embedding: Any
    _scaled: ScaledGradients | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, embedding: Any, unscale: WeakMethod[Unscale] | None) -> EmbeddingParameter:
        """Make the entry of an embedding.

        ``unscale`` unscales the gradients of all embeddings of the optimizer: for its first embedding only.
        Weak, so that the optimizer is not part of a reference cycle.
        """
        parameter = torch.empty(0).as_subclass(cls)
        parameter.embedding = embedding
        parameter._scaled = None
        if unscale is not None:
            parameter._scaled = torch.empty(0).as_subclass(ScaledGradients)
            parameter._scaled._unscale = unscale
        return parameter

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self._scaled


class ScaledGradients(Tensor):
    """Empty gradient that represents those of all reads."""

    _unscale: WeakMethod[Unscale]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") != _UNSCALE_OF_TORCH:
            return super().__torch_function__(function, types, args, kwargs or {})
        gradients, found_inf, inverse_scale = args
        for gradient in gradients:
            unscale = gradient._unscale()
            if unscale is not None and unscale(inverse_scale):
                found_inf.fill_(1.0)
        return None
