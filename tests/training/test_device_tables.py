"""Tables on devices (``tables.storage: device``), the CPU in the place of GPUs, against those in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglkge.model.choices import OPTIMIZERS
from tests.training.test_device import OBJECTIVES
from tests.training.test_reference import trained

ON_DEVICE = ("training.device=cpu_staged", "tables.storage=device")

CASES = [f"optimizer.name={name}" for name in OPTIMIZERS] + [
    "optimizer.name=sparse_adam optimizer.weight_decay=0.01 optimizer.decoupled_weight_decay=true",
    "negatives.mask_known=true loss.name=self_adversarial model.score_function=rotate",
    "model.reciprocal_relations=false regularizer.name=n3 regularizer.weight=0.1",
    "model.score_function=tucker optimizer.clip_norm=0.5",
    "optimizer.clip_norm=0.01 optimizer.clip_value=0.001 model.max_norm=0.4",
    *OBJECTIVES,
]


@pytest.mark.parametrize("case", CASES)
def test_trains_the_tables_of_the_host_bit_by_bit(case: str, tmp_path: Path) -> None:
    losses, tables, _ = trained(tmp_path, "reference", *case.split())
    found_losses, found, _ = trained(tmp_path / "device", "reference", *ON_DEVICE, *case.split())
    assert len(losses) > 5 and found_losses == losses
    for name, rows in tables.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)
