"""Rows of a batch where the tables are on devices: fetched from their owners, gradients left there.

As :mod:`.staged_rows`, but for rows and gradients, which never are on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dglkge.embeddings.device_tables import DeviceTables, Route
from dglkge.embeddings.table_set import TableSet
from dglkge.model.device import ComputeDevice
from dglkge.step.planning import Plan
from dglkge.step.rows import Transforms
from dglkge.step.staged_rows import DeviceTableRows, StagedRows, StagedStore, Upload


class DeviceRows(StagedRows):
    """Rows of a batch whose gradients stay on the device."""

    def _returned(self, name: str, merged: torch.Tensor) -> torch.Tensor:
        return merged


class DeviceStore(StagedStore):
    """Fetches the rows of batches from the shards of all trainers; each method is a collective.

    Parameters
    ----------
    tables : TableSet
    transforms : Transforms
    device : ComputeDevice
    device_tables : DeviceTables
    """

    def __init__(
        self, tables: TableSet, transforms: Transforms, device: ComputeDevice, device_tables: DeviceTables
    ) -> None:
        super().__init__(tables, transforms, device)
        self._device_tables = device_tables

    def _routes(self, number: int, ids: Mapping[str, torch.Tensor], upload: Upload) -> Mapping[str, Route]:
        return self._device_tables.routes(number, ids, upload.add)

    def _fetched(self, plan: Plan) -> dict[str, torch.Tensor]:
        plan.staged.upload.wait()  # the routes are part of it
        return {name: self._device_tables.fetch(name, plan.staged.routes[name]) for name in plan.ids}

    def _on_device(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def _staged_rows(self, tables: Mapping[str, DeviceTableRows]) -> StagedRows:
        return DeviceRows(tables, self._memory, self._device)
