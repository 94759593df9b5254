"""Rows of a batch where the tables are on devices: fetched from their owners, gradients left there.

As :mod:`.staged_rows`, but for rows and gradients, which never are on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

from dglkge.embeddings.device_tables import DeviceTables, Route
from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.found_rows import FoundRows
from dglkge.model.device import ComputeDevice
from dglkge.training.objectives.group_inputs import HostInputs
from dglkge.training.objectives.rows import Group
from dglkge.training.objectives.staged_rows import StagedMemory, StagedRequest, Staging, Upload


class DeviceRequest(StagedRequest):
    """Rows of one table for a batch, from the shards of all trainers.

    Parameters
    ----------
    table : EmbeddingTable
    memory : StagedMemory
    upload : Upload
    tables : DeviceTables
    """

    def __init__(
        self, table: EmbeddingTable, memory: StagedMemory, upload: Upload, tables: DeviceTables
    ) -> None:
        self._tables = tables
        self.route: Route
        super().__init__(table, memory, upload)

    def open(self, copy: bool, rows: FoundRows | None = None) -> None:
        """Fetch copies of the distinct rows from their owners; a collective."""
        self.upload.wait()  # the route is part of it
        self._rows = self._tables.fetch(self.table.name, self.route)

    def send(self) -> None:
        """Repeat the rows for each place that requests them."""
        self._repeat(self._rows)

    def collect(self) -> None:
        """Sum the gradients of equal rows; they stay on the device."""
        self.gradients = self._merged()


class DeviceStaging(Staging):
    """Makes requests of rows on devices, and the uploads of batches.

    Parameters
    ----------
    device, inputs_of
        As of :class:`Staging`.
    tables : DeviceTables
    """

    def __init__(
        self,
        device: ComputeDevice,
        inputs_of: Callable[[Group], HostInputs] | None,
        tables: DeviceTables,
    ) -> None:
        super().__init__(device, inputs_of)
        self._tables = tables

    def _request(self, table: EmbeddingTable, memory: StagedMemory, upload: Upload) -> DeviceRequest:
        return DeviceRequest(table, memory, upload, self._tables)

    def _prepare(self, requests: Mapping[str, Any], upload: Upload, number: int) -> None:
        """Exchange the ids of a batch; a collective."""
        wanted = {name: request.row_ids for name, request in requests.items()}
        for name, route in self._tables.routes(number, wanted, upload.add).items():
            requests[name].route = route
