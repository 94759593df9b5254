"""Rows of a batch: left in the host's memory, or copied, widened to float32 and transformed, or on a device.

With a device (``training.device``) rows stay in the machine's memory, where the optimizer updates them. A
batch takes this way:

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

import contextlib
import dataclasses
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dglkge.embeddings.device_tables import DeviceTables, OnDevice, Route
from dglkge.embeddings.row_lookup import FoundRows, RowLookup
from dglkge.embeddings.table_set import TableSet
from dglkge.model.device import ComputeDevice
from dglkge.optim.workspace import Scratch
from dglkge.step.contracts import RowGradients, Rows, RowTransform, TableRows
from dglkge.step.planning import Plan
from dglkge.step.reductions import sum_by_place


class Transforms:
    """Transforms of rows, in their order."""

    def __init__(self, transforms: Sequence[RowTransform]) -> None:
        self._transforms = transforms
        self._chains: dict[str, list[RowTransform]] = {}
        for transform in transforms:
            for name in transform.tables:
                self._chains.setdefault(name, []).append(transform)

    def __contains__(self, table: str) -> bool:
        return table in self._chains

    def start_batch(self, number: int) -> None:
        """Begin a batch."""
        for transform in self._transforms:
            transform.start_batch(number)

    def forward(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Change copied rows (n, D) in place."""
        for transform in self._chains.get(table, ()):
            transform.forward(table, ids, rows)

    def backward(self, gradients: Sequence[RowGradients]) -> None:
        """Change gradients in place: from those of transformed rows to those of the tables' rows."""
        for table, ids, rows in gradients:
            for transform in reversed(self._chains.get(table, [])):
                transform.backward(table, ids, rows)


class RowStore(ABC):
    """Where rows live: the lookup of the tables finds them in this machine's memory, or on other machines."""

    def __init__(self, tables: TableSet, transforms: Transforms) -> None:
        self._tables, self._transforms = tables, transforms

    @property
    def _lookup(self) -> RowLookup:
        return self._tables.lookup

    @property
    def num_ahead(self) -> int:
        """Number of the next batches that should be planned while one computes."""
        return self._lookup.num_ahead

    @property
    def sent_bytes(self) -> int:
        """Bytes of ids and rows that this trainer sent to other machines."""
        return self._lookup.sent_bytes

    def planning(self) -> AbstractContextManager[Any]:
        """Return the context in which batches are drawn and planned."""
        return contextlib.nullcontext()

    def prepare(self, plan: Plan) -> Plan:
        """Start what does not read rows: copies of ids to a device, routes. May be a collective."""
        return plan

    def announce(self, plan: Plan) -> None:
        """Start to fetch the rows of the plan after those announced, where they may be fetched early."""
        self._lookup.announce(plan.number, self._row_ids(plan))

    @abstractmethod
    def rows(self, plan: Plan) -> Rows:
        """Return the rows of a prepared plan, after all transforms."""

    def before_update(self) -> None:
        """Wait until the rows of this machine have been read for the announced plan."""
        self._lookup.before_update()

    def _row_ids(self, plan: Plan) -> dict[str, Tensor]:
        """Return the ids of the rows of a plan, by table."""
        return {name: self._tables.row_ids(name, ids) for name, ids in plan.ids.items()}


class HostStore(RowStore):
    """Rows in the host's memory: left where they are stored, or copied and widened to float32.

    Rows of a table with transforms are copied in any case, others unless the objective reads them in place.
    """

    def __init__(self, tables: TableSet, transforms: Transforms, reads_in_place: bool) -> None:
        super().__init__(tables, transforms)
        self._reads_in_place = reads_in_place
        self._scratch = {name: Scratch() for name in tables}

    def rows(self, plan: Plan) -> Rows:
        located = self._lookup.rows(plan.number, self._row_ids(plan))
        tables = {}
        for name, ids in plan.ids.items():
            size = (ids.shape[0], self._tables[name].dim)
            if not size[0]:
                continue
            gradients = self._scratch[name].take("gradients", *size)
            room = functools.partial(self._scratch[name].take, "rows", *size)
            copies = None
            if self._reads_in_place and name not in self._transforms:
                # Compiled loops write all gradients.
                in_place = located[name].in_place(room)
            else:
                # Autograd adds to gradients that exist.
                gradients.zero_()
                copies = located[name].copied(room())
                self._transforms.forward(name, ids, copies)
                in_place = FoundRows.in_array(copies.numpy())
            tables[name] = TableRows(ids, copies, gradients, in_place)
        return Rows(tables)


class Upload:
    """Arrays of one batch, copied to the device on a stream in one piece for each type of number."""

    def __init__(self, device: ComputeDevice, stream: Any) -> None:
        self._backend = device.backend
        self._stream = stream
        self._host = Scratch(pinned=device.pins_memory)
        self._there = Scratch(device.device)
        self._pairs: dict[np.dtype[Any], list[tuple[np.ndarray, OnDevice]]] = {}

    def add(self, array: np.ndarray) -> OnDevice:
        """Add an array (n,) to the batch."""
        piece = OnDevice()
        self._pairs.setdefault(array.dtype, []).append((array, piece))
        return piece

    def send(self) -> None:
        """Begin the copies, into the memory of the batch that was sent before."""
        all_pairs, self._pairs = self._pairs, {}
        for dtype, pairs in all_pairs.items():
            arrays, pieces = zip(*pairs)
            joined = torch.from_numpy(np.concatenate(arrays))
            host = self._host.take(dtype.name, len(joined), 1, joined.dtype).copy_(joined[:, None])
            # Allocated in the stream's own pool: memory of the main stream may still be read by kernels that
            # wait there.
            with self._backend.stream(self._stream):
                there = self._there.take(dtype.name, len(joined), 1, joined.dtype)
                copy = there.copy_(host, non_blocking=True)[:, 0]
            for piece, part in zip(pieces, copy.split([*map(len, arrays)])):
                piece.tensor = part

    def wait(self) -> None:
        """Let what is queued on the device from now on wait for the copies."""
        self._backend.current_stream().wait_stream(self._stream)


class Staged(NamedTuple):
    """What is on its way to the device for a plan, by table.

    ``places`` are the place among the distinct rows of each place of the batch; ``routes``, where rows are on
    devices.
    """

    upload: Upload
    places: Mapping[str, OnDevice]
    routes: Mapping[str, Any]


@dataclass(frozen=True)
class StagedRows(Rows):
    """Rows of a batch on a device; their gradients are merged there and copied to the host."""

    host: Mapping[str, Scratch] | None
    device: ComputeDevice

    def collect(self) -> list[RowGradients]:
        collected = []
        for name, rows in self.tables.items():
            merged = sum_by_place(rows.gradients, rows.places, len(rows.ids))
            if self.host is not None:
                room = self.host[name].take("gradients", *merged.shape)
                merged = room.copy_(merged, non_blocking=True)
            collected.append(RowGradients(name, rows.ids, merged))
        if self.host is not None:
            self.device.backend.synchronize()
        return collected


class StagedStore(RowStore):
    """Copies the rows of batches from memory to a device, and gradients back."""

    num_ahead = 1
    _returns = True

    def __init__(self, tables: TableSet, transforms: Transforms, device: ComputeDevice) -> None:
        super().__init__(tables, transforms)
        self._device = device
        # Of priority, so that what is small need not wait for a kernel that fills the device.
        self._stream = device.backend.Stream(priority=-1)
        # Used in turn: while a batch computes, the ids of the next one are uploaded.
        self._uploads = itertools.cycle([Upload(device, self._stream) for _ in range(2)])
        # Of each table's rows and gradients.
        self._host = {name: Scratch(pinned=device.pins_memory) for name in tables}
        self._there = {name: Scratch(device.device) for name in tables}

    def planning(self) -> AbstractContextManager[Any]:
        # What is planned on the device must not wait for the batch that computes. Its memory is used again
        # after the step of its batch, which ends when the device has done it.
        return self._device.backend.stream(self._stream)

    def prepare(self, plan: Plan) -> Plan:
        upload = next(self._uploads)
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
        for name, rows in distinct.items():
            self._transforms.forward(name, plan.ids[name], rows)
        tables = {name: self._repeated(name, plan, rows) for name, rows in distinct.items()}
        return StagedRows(tables, self._host if self._returns else None, self._device)

    def _fetched(self, plan: Plan) -> dict[str, Tensor]:
        """Return copies of the distinct rows in page-locked memory."""
        located = self._lookup.rows(plan.number, self._row_ids(plan))
        return {
            name: located[name].copied(self._host[name].take("rows", len(ids), self._tables[name].dim))
            for name, ids in plan.ids.items()
        }

    def _on_device(self, name: str, rows: Tensor) -> Tensor:
        """Begin to copy rows to the device."""
        return self._there[name].take("distinct", *rows.shape).copy_(rows, non_blocking=True)

    def _repeated(self, name: str, plan: Plan, rows: Tensor) -> TableRows:
        """Repeat distinct rows (U, D) on the device for each place, with gradients of 0."""
        memory, dim, distinct = self._there[name], self._tables[name].dim, self._on_device(name, rows)
        plan.staged.upload.wait()
        places = plan.staged.places[name].tensor
        rows = torch.index_select(distinct, 0, places, out=memory.take("rows", len(places), dim))
        # Autograd adds to gradients that exist.
        gradients = memory.take("gradients", len(places), dim).zero_()
        return TableRows(plan.ids[name], rows, gradients, places=places)


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
        return rows, OnDevice(inverse)

    def _routes(self, number: int, ids: Mapping[str, Tensor], upload: Upload) -> Mapping[str, Route]:
        rows, repeats = dict(ids), {}
        for name, table_ids in ids.items():
            row_ids = self._tables.row_ids(name, table_ids)
            if row_ids is not table_ids:
                rows[name], counts = torch.unique_consecutive(row_ids, return_counts=True)
                repeats[name] = OnDevice(counts) if counts.is_cuda else upload.add(counts.numpy())
        routes = self._device_tables.routes(number, rows, upload.add)
        return {name: dataclasses.replace(route, repeats=repeats.get(name)) for name, route in routes.items()}

    def _fetched(self, plan: Plan) -> dict[str, Tensor]:
        plan.staged.upload.wait()  # the routes are part of it
        return {name: self._device_tables.fetch(name, plan.staged.routes[name]) for name in plan.ids}

    def _on_device(self, name: str, rows: Tensor) -> Tensor:
        return rows
