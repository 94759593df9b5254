"""Training and ranking on a GPU, against the plain twin; other tests have the CPU in a GPU's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.live import assert_same, trained
from tests.training.test_device import CASES, OBJECTIVES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


@pytest.mark.parametrize("storage", ["memory", "device"])
@pytest.mark.parametrize("case", [*CASES, *OBJECTIVES])
def test_trains_the_tables_of_the_cpu(case: str, storage: str, tmp_path: Path) -> None:
    """Several steps of both sides and all types; sums have another order, so tables agree within rounding."""
    on_gpu = ["training.device=cuda"]
    if storage == "device":
        if any(word in case for word in ("global_vectors", "num_ranges", "synchronous=false")):
            pytest.skip("refused with tables on the device")
        on_gpu.append("tables.storage=device")
    expected = trained(tmp_path, "reference", *case.split())
    got = trained(tmp_path / "gpu", "reference", *on_gpu, *case.split())
    assert_same(got, expected, 1e-3, 1e-3, loss_rtol=1e-3)
