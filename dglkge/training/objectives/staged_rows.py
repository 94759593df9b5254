"""Rows and ids of a batch on a device: copies there, gradients back (``training.device``).

Rows stay in the machine's memory, where the optimizer updates them. A batch takes this way:

1. While the batch before computes: ids, negatives and masks of the batch are made on the host and copied to
   the device on a stream of their own, in one piece for each type (:class:`Upload`). No row is read: rows
   must be those after the update of the batch before.
2. Each distinct row is gathered once into page-locked memory, copied, and repeated on the device for each
   place that requests it (:meth:`StagedRequest.send`).
3. After the backward pass the gradients of equal rows are summed on the device, and one gradient for each
   distinct row comes back (:meth:`StagedRequest.collect`).

There are two sets of requests and uploads, used in turn. Memory of a set is used again two batches later, and
every batch ends with a synchronization, so no copy is still under way then.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.found_rows import FoundRows
from dglkge.model.device import ComputeDevice
from dglkge.training.objectives.group_inputs import HostInputs, StagedInputs
from dglkge.training.objectives.rows import Group, RowRequest, Scratch
from dglkge.typing import Side


class Upload:
    """Arrays of one batch, copied to the device in one piece for each type of number.

    Parameters
    ----------
    device : ComputeDevice
    stream : torch.cuda.Stream or torch.cpu.Stream
        The copies' stream.
    """

    def __init__(self, device: ComputeDevice, stream: Any) -> None:
        self._backend = device.backend
        self._stream = stream
        self._host = Scratch(pinned=device.pins_memory)
        self._there = Scratch(device.device)
        self.clear()

    def clear(self) -> None:
        """Drop the batch; its memory is used again."""
        self._arrays: dict[np.dtype[Any], list[npt.NDArray[Any]]] = {}
        self._copies: dict[np.dtype[Any], torch.Tensor] = {}

    def add(self, array: npt.NDArray[Any]) -> Piece:
        """Add an array (n,) to the batch; the piece has it on the device after :meth:`send`."""
        arrays = self._arrays.setdefault(array.dtype, [])
        start = sum(map(len, arrays))
        arrays.append(array)
        return Piece(self, array.dtype, slice(start, start + len(array)))

    def send(self) -> None:
        """Begin the copies."""
        for dtype, arrays in self._arrays.items():
            found = torch.from_numpy(np.concatenate(arrays))
            host = self._host.take(dtype.name, len(found), 1, found.dtype).copy_(found[:, None])
            # Allocated in the stream's own pool: memory of the main stream may still be read by kernels that
            # wait there.
            with self._backend.stream(self._stream):
                there = self._there.take(dtype.name, len(found), 1, found.dtype)
                self._copies[dtype] = there.copy_(host, non_blocking=True)[:, 0]

    def wait(self) -> None:
        """Let what is queued on the device from now on wait for the copies."""
        self._backend.current_stream().wait_stream(self._stream)

    def tensor(self, piece: Piece) -> torch.Tensor:
        """Return an array on the device."""
        return self._copies[piece.dtype][piece.place]


@dataclass(frozen=True)
class Piece:
    """An array (n,) of an :class:`Upload`."""

    upload: Upload
    dtype: np.dtype[Any]
    place: slice

    @property
    def tensor(self) -> torch.Tensor:
        """The array on the device."""
        return self.upload.tensor(self)


class StagedRequest(RowRequest):
    """Rows of one table for a batch on a device; each distinct row is copied once.

    Parameters
    ----------
    table : EmbeddingTable
    memory : StagedMemory
        Shared with requests that are never open at the same time.
    upload : Upload
        Of the same batches.
    """

    def __init__(self, table: EmbeddingTable, memory: StagedMemory, upload: Upload) -> None:
        self.upload = upload
        self._memory = memory
        super().__init__(table, memory.host)

    def merge(self) -> None:
        """Find the distinct rows once all are requested; their places are part of the upload."""
        distinct, places = np.unique(self.ids.numpy(), return_inverse=True)
        self._row_ids = torch.from_numpy(distinct)
        self._places = self.upload.add(places.reshape(-1).astype(np.int64, copy=False))

    @property
    def row_ids(self) -> torch.Tensor:
        """Node ids of the distinct rows, (U,)."""
        return self._row_ids

    def open(self, copy: bool, rows: FoundRows | None = None) -> None:
        """Gather the distinct rows into page-locked memory; see :meth:`RowRequest.open`."""
        room = self._scratch.take("rows", len(self._row_ids), self.table.dim)
        self._rows = self.table.gather(self._row_ids, room) if rows is None else rows.copied(room)
        if self.shift is not None:
            self._rows += self.shift(self._row_ids)

    def send(self) -> None:
        """Copy the rows to the device, and repeat them there for each place that requests them."""
        there, dim = self._memory.device, self.table.dim
        self._repeat(there.take("distinct", len(self._row_ids), dim).copy_(self._rows, non_blocking=True))

    def _repeat(self, distinct: torch.Tensor) -> None:
        """Repeat distinct rows (U, D) on the device for each place, with gradients of 0."""
        there, dim = self._memory.device, self.table.dim
        self.upload.wait()
        places = self._places.tensor
        self._of_places = torch.index_select(distinct, 0, places, out=there.take("rows", len(places), dim))
        # Autograd adds to gradients that exist.
        self._gradients = there.take("gradients", len(places), dim).zero_()

    def leaf(self, place: slice) -> torch.Tensor:
        """Return some of the rows on the device as a leaf; see :meth:`RowRequest.leaf`."""
        leaf = self._of_places[place].detach().requires_grad_()
        leaf.grad = self._gradients[place]
        return leaf

    def collect(self) -> None:
        """Sum the gradients of equal rows and begin the copy back; complete after a synchronization."""
        merged = self._merged()
        room = self._scratch.take("gradients", len(self._row_ids), self.table.dim)
        self.gradients = room.copy_(merged, non_blocking=True)

    def _merged(self) -> torch.Tensor:
        """Return the sums of the gradients of equal rows, (U, D) on the device."""
        merged = self._memory.device.take("merged", len(self._row_ids), self.table.dim).zero_()
        with _fixed_order_of_sums():
            merged.index_add_(0, self._places.tensor, self._gradients)
        return merged


class StagedMemory:
    """Memory of a table's rows and gradients: page-locked on the host, and on the device."""

    def __init__(self, device: ComputeDevice) -> None:
        self.host = Scratch(pinned=device.pins_memory)
        self.device = Scratch(device.device)


@contextlib.contextmanager
def _fixed_order_of_sums() -> Iterator[None]:
    """Sum in the same order in every run inside the block; ``index_add_`` on a GPU does not by itself."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Staging:
    """Makes requests for a device, and the uploads of batches.

    Parameters
    ----------
    device : ComputeDevice
    inputs_of : callable or None
        Returns what the loss of a group takes besides rows; None: it takes that from the host.
    """

    def __init__(self, device: ComputeDevice, inputs_of: Callable[[Group], HostInputs] | None = None) -> None:
        self._device = device
        self._inputs_of = inputs_of
        self._stream = device.backend.Stream()

    def request_sets(self, tables: Mapping[str, EmbeddingTable]) -> list[dict[str, StagedRequest]]:
        """Return two sets of requests, by table, that are filled in turn."""
        memory = {name: StagedMemory(self._device) for name in tables}
        uploads = [Upload(self._device, self._stream) for _ in range(2)]
        return [
            {name: self._request(table, memory[name], upload) for name, table in tables.items()}
            for upload in uploads
        ]

    def _request(self, table: EmbeddingTable, memory: StagedMemory, upload: Upload) -> StagedRequest:
        return StagedRequest(table, memory, upload)

    def _prepare(self, requests: Mapping[str, Any], upload: Upload, number: int) -> None:
        """Add to a batch's upload what its rows need besides their places: nothing."""

    def stage(self, requests: Mapping[str, Any], groups: Sequence[Any], number: int = 0) -> list[Any]:
        """Begin to copy the ids of a batch, all of whose rows are requested; no row is read.

        Parameters
        ----------
        requests : mapping of str to StagedRequest
        groups : sequence of Group, or of QueryGroup
        number : int
            Number of the batch, the same on every trainer.

        Returns
        -------
        list
            The groups, with their inputs on the device.
        """
        upload = next(iter(requests.values())).upload
        upload.clear()
        for request in requests.values():
            request.merge()
        self._prepare(requests, upload, number)
        staged = list(groups)
        if self._inputs_of is not None:
            staged = [_staged(group, upload, self._inputs_of(group)) for group in groups]
        upload.send()
        return staged

    def finish(self) -> None:
        """Wait until the device has done all that is queued, copies included."""
        self._device.backend.synchronize()


def _staged(group: Group, upload: Upload, host: HostInputs) -> Group:
    """Return a group with its inputs on the device."""

    def optional(array: npt.NDArray[Any] | None) -> Piece | None:
        return None if array is None else upload.add(array)

    masks: dict[Side, tuple[Piece, tuple[int, int]]] = {}
    for side in group.negatives:
        places, shape = host.ignored_places(side)
        masks[side] = (upload.add(places), shape)
    inputs = StagedInputs(
        upload.add(group.relation_ids),
        optional(group.relation_places),
        optional(group.weights),
        optional(group.labels),
        masks,
        {
            side: (upload.add(of_side.anchors), upload.add(of_side.truths), upload.add(of_side.negatives))
            for side, of_side in group.ranges.items()
        },
    )
    return dataclasses.replace(group, inputs=inputs)
