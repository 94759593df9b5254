"""Rows and state of a table on a device, copied from the kvstore's memory and back."""

from __future__ import annotations

import torch

from dglkge.optim.dgl_tables import local_array
from dglkge.optim.links import RuleStep
from dglkge.optim.table import Table

ROWS_A_BLOCK = 65536
"""Rows that are updated at a time."""


class DeviceRows:
    """A run of this machine's rows of one table, with their optimizer state, on a device.

    The kvstore's memory keeps what :meth:`load` read, or the last :meth:`store` wrote.

    Parameters
    ----------
    table : Table
        Of an optimizer; float32 or float64.
    run : slice
        Rows of the machine's part.
    device : torch.device

    Raises
    ------
    ValueError
        If the machine's servers share no memory with this process, or the rows have 16 bits.
    """

    def __init__(self, table: Table, run: slice, device: torch.device) -> None:
        arrays = [local_array(tensor) for tensor in table.tensors]
        found = [torch.from_numpy(array[run]) for array in arrays if array is not None]
        if len(found) < len(arrays) or any(not one.is_floating_point() for one in found):
            raise ValueError(f"{table.label}: rows and state must be float32 or float64 in shared memory")
        self.table = table
        self._host = found
        self._there = [torch.empty_like(one, device=device) for one in found]

    @property
    def rows(self) -> torch.Tensor:
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

    def update(self, step: RuleStep, targets: torch.Tensor, gradient: torch.Tensor) -> int:
        """Apply an update rule on the device.

        Parameters
        ----------
        step : RuleStep
        targets : Tensor
            "(n,) int64": distinct places in :attr:`rows`.
        gradient : Tensor
            "(n, D)" sums of their gradients.

        Returns
        -------
        int
            Number of rows that were skipped because their gradient was not finite.
        """
        num_bad = 0
        # In blocks: the update works on copies of rows and state.
        for some, of_some in zip(targets.split(ROWS_A_BLOCK), gradient.split(ROWS_A_BLOCK)):
            num_bad += step.update_plain(self._there, some, of_some)
        return num_bad
