"""Rows and ids of a batch on a device: copies there, gradients back (``training.device``).

Rows stay in the machine's memory, where the optimizer updates them. A batch takes this way:

1. While the batch before computes: ids, negatives and masks of the batch are made on the host and copied to
   the device on a stream of their own, in one piece for each type (:class:`Upload`). No row is read: rows
   must be those after the update of the batch before.
2. Each distinct row is gathered once into page-locked memory, copied, and repeated on the device for each
   place that asks for it (:meth:`StagedStore.rows`).
3. After the backward pass the gradients of equal rows are summed on the device, and one gradient for each
   distinct row comes back (:meth:`StagedRows.collect`).

There are two uploads, used in turn. Memory of one is used again two batches later, and every batch ends with
a synchronization, so no copy is still under way then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dglkge.embeddings.device_tables import DeviceTables, OnDevice, Present, Route
from dglkge.embeddings.row_lookup import FoundRows
from dglkge.embeddings.table_set import TableSet
from dglkge.model.device import ComputeDevice
from dglkge.optim.scratch import Scratch
from dglkge.step.contracts import RowGradients
from dglkge.step.planning import Places, Plan
from dglkge.step.reductions import sum_by_place
from dglkge.step.rows import CopiedRows, LookupStore, TableRows, Transforms


class Upload:
    """Arrays of one batch, copied to the device on a stream in one piece for each type of number."""

    def __init__(self, device: ComputeDevice, stream: Any) -> None:
        self._backend = device.backend
        self._stream = stream
        self._host = Scratch(pinned=device.pins_memory)
        self._there = Scratch(device.device)
        self.clear()

    def clear(self) -> None:
        """Drop the batch; its memory is used again."""
        self._arrays: dict[np.dtype[Any], list[npt.NDArray[Any]]] = {}
        self.copies: dict[np.dtype[Any], Tensor] = {}

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
                self.copies[dtype] = there.copy_(host, non_blocking=True)[:, 0]

    def wait(self) -> None:
        """Let what is queued on the device from now on wait for the copies."""
        self._backend.current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class Piece:
    """An array (n,) of an :class:`Upload`."""

    upload: Upload
    dtype: np.dtype[Any]
    place: slice

    @property
    def tensor(self) -> Tensor:
        """The array on the device."""
        return self.upload.copies[self.dtype][self.place]


class StagedMemory:
    """Memory of a table's rows and gradients: page-locked on the host, and on the device."""

    def __init__(self, device: ComputeDevice) -> None:
        self.host = Scratch(pinned=device.pins_memory)
        self.device = Scratch(device.device)


@dataclass(frozen=True)
class Staged:
    """What is on its way to the device for a plan, by table.

    ``places`` are the place among the distinct rows of each place of the batch; ``routes``, where rows are on
    devices.
    """

    upload: Upload
    places: Mapping[str, OnDevice]
    routes: Mapping[str, Any]


@dataclass(frozen=True)
class DeviceTableRows(TableRows):
    """Rows (n, D) of one table on a device, one for each place (n,) of its ids (U,)."""

    places: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class StagedRows(CopiedRows):
    """Rows of a batch on a device; their gradients are merged there and copied to the host."""

    tables: Mapping[str, DeviceTableRows]
    memory: Mapping[str, StagedMemory] | None
    device: ComputeDevice

    def found(self, places: Places) -> FoundRows:
        raise RuntimeError(f"rows of {places.table} are on a device: compiled loops read the host's memory")

    def collect(self) -> list[RowGradients]:
        collected = [
            RowGradients(
                name, rows.ids, self._returned(name, sum_by_place(rows.gradients, rows.places, len(rows.ids)))
            )
            for name, rows in self.tables.items()
        ]
        self.device.backend.synchronize()
        return collected

    def _returned(self, name: str, merged: Tensor) -> Tensor:
        """Begin the copy of merged gradients to the host; complete after a synchronization."""
        if self.memory is None:
            return merged
        room = self.memory[name].host.take("gradients", *merged.shape)
        return room.copy_(merged, non_blocking=True)


class StagedStore(LookupStore):
    """Copies the rows of batches from memory to a device, and gradients back."""

    _returns = True

    def __init__(self, tables: TableSet, transforms: Transforms, device: ComputeDevice) -> None:
        super().__init__(tables, transforms)
        self._device = device
        stream = device.backend.Stream()
        # Used in turn: while a batch computes, the ids of the next one are uploaded.
        self._upload, self._spare_upload = Upload(device, stream), Upload(device, stream)
        self._memory = {name: StagedMemory(device) for name in tables}

    @property
    def num_ahead(self) -> int:
        return 1

    def prepare(self, plan: Plan) -> Plan:
        upload, self._spare_upload = self._spare_upload, self._upload
        self._upload = upload
        upload.clear()
        distinct, places = {}, {}
        for name, ids in plan.ids.items():
            distinct[name], places[name] = self._distinct(ids, upload)
        routes = self._routes(plan.number, distinct, upload)
        groups = [group.staged(upload.add) for group in plan.groups]
        upload.send()
        return dataclasses.replace(plan, ids=distinct, groups=groups, staged=Staged(upload, places, routes))

    def _distinct(self, ids: Tensor, upload: Upload) -> tuple[Tensor, OnDevice]:
        """Return the distinct ids (U,), ascending, and the place of each id among them."""
        rows, inverse = np.unique(ids.numpy(), return_inverse=True)
        return torch.from_numpy(rows), upload.add(inverse.reshape(-1).astype(np.int64, copy=False))

    def _routes(self, number: int, ids: Mapping[str, Tensor], upload: Upload) -> Mapping[str, Any]:
        """Return the routes of rows between devices: none, they are in the host's memory."""
        return {}

    def rows(self, plan: Plan) -> StagedRows:
        distinct = self._fetched(plan)
        tables = {}
        for name, rows in distinct.items():
            self._transforms.forward(name, plan.ids[name], rows)
        for name, rows in distinct.items():
            tables[name] = self._repeated(name, plan, self._on_device(name, rows))
        return StagedRows(tables, self._memory if self._returns else None, self._device)

    def _fetched(self, plan: Plan) -> dict[str, Tensor]:
        """Return copies of the distinct rows in page-locked memory."""
        located = self._lookup.rows(plan.number, self._row_ids(plan))
        return {
            name: located[name].copied(self._memory[name].host.take("rows", len(ids), self._tables[name].dim))
            for name, ids in plan.ids.items()
        }

    def _on_device(self, name: str, rows: Tensor) -> Tensor:
        """Begin to copy rows to the device."""
        return self._memory[name].device.take("distinct", *rows.shape).copy_(rows, non_blocking=True)

    def _repeated(self, name: str, plan: Plan, distinct: Tensor) -> DeviceTableRows:
        """Repeat distinct rows (U, D) on the device for each place, with gradients of 0."""
        memory, dim = self._memory[name].device, self._tables[name].dim
        plan.staged.upload.wait()
        places = plan.staged.places[name].tensor
        rows = torch.index_select(distinct, 0, places, out=memory.take("rows", len(places), dim))
        # Autograd adds to gradients that exist.
        gradients = memory.take("gradients", len(places), dim).zero_()
        return DeviceTableRows(plan.ids[name], rows, gradients, places=places)


class DeviceStore(StagedStore):
    """Fetches the rows of batches from the shards of all trainers; each method is a collective.

    Gradients stay on the device.
    """

    _returns = False

    def __init__(
        self, tables: TableSet, transforms: Transforms, device: ComputeDevice, device_tables: DeviceTables
    ) -> None:
        super().__init__(tables, transforms, device)
        self._device_tables = device_tables

    def _distinct(self, ids: Tensor, upload: Upload) -> tuple[Tensor, OnDevice]:
        if not ids.is_cuda:
            return super()._distinct(ids, upload)
        rows, inverse = torch.unique(ids, return_inverse=True)
        return rows, Present(inverse)

    def _routes(self, number: int, ids: Mapping[str, Tensor], upload: Upload) -> Mapping[str, Route]:
        rows, repeats = dict(ids), {}
        for name, of_table in ids.items():
            of_rows = self._tables.row_ids(name, of_table)
            if of_rows is not of_table:
                rows[name], counts = torch.unique_consecutive(of_rows, return_counts=True)
                repeats[name] = Present(counts) if counts.is_cuda else upload.add(counts.numpy())
        routes = self._device_tables.routes(number, rows, upload.add)
        return {name: dataclasses.replace(one, repeats=repeats.get(name)) for name, one in routes.items()}

    def _fetched(self, plan: Plan) -> dict[str, Tensor]:
        plan.staged.upload.wait()  # the routes are part of it
        return {name: self._device_tables.fetch(name, plan.staged.routes[name]) for name in plan.ids}

    def _on_device(self, name: str, rows: Tensor) -> Tensor:
        return rows
