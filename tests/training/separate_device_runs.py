"""Trains small runs on the host and on a device with memory of its own; prints a line of JSON for each.

A process of its own, because torch takes a new device only before it has computed a gradient.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dglkge.model.device import ComputeDevice
from dglkge.training.building import computing
from tests.training.live import trained
from tests.training.separate_device import open_separate_device

STAGED = "training.device=cpu_staged"


def main() -> None:
    """Train the cases that are given as arguments, after a folder."""
    separate = open_separate_device()

    def opened(name: str, *_: Any) -> ComputeDevice:
        return ComputeDevice(name) if name == "cpu" else separate

    with mock.patch.object(computing, "open_device", opened):
        for number, case in enumerate(sys.argv[2:]):
            folder = Path(sys.argv[1]) / str(number)
            settings = case.split()
            on_host = [setting for setting in settings if not setting.startswith("tables.storage")]
            losses, tables, _ = trained(folder / "host", "reference", *on_host)
            device_losses, device_tables, _ = trained(folder / "device", "reference", STAGED, *settings)
            difference = max(np.abs(device_tables[name] - rows).max() for name, rows in tables.items())
            loss_difference = np.abs(np.subtract(device_losses, losses)).max()
            print(json.dumps([case, len(losses), float(loss_difference), float(difference)]), flush=True)


if __name__ == "__main__":
    main()
