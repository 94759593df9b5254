"""The device path on a device whose tensors the host cannot read: no copy is made without being asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from tests.toy_kg import REPOSITORY
from tests.training.test_device import CASES, OBJECTIVES

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} takes no device that is written in Python",
)

ON_DEVICE = "tables.storage=device"


@pytest.mark.parametrize(
    "cases",
    [CASES, OBJECTIVES, (ON_DEVICE, f"{ON_DEVICE} model.score_function=tucker optimizer.clip_norm=0.5")],
)
def test_runs_are_those_of_the_host(cases: tuple[str, ...], tmp_path: Path) -> None:
    """Training in every objective, and the ranking after it; bit by bit but where sums have another order."""
    command = [sys.executable, "-m", "tests.training.separate_device_runs", str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [case for case, *_ in runs] == list(cases)
    for case, num_losses, loss_difference, difference in runs:
        is_exact = "dropout" not in case and "global" not in case
        assert num_losses > 5, case
        assert max(loss_difference, difference) <= (0 if is_exact else 1e-5), (
            case,
            loss_difference,
            difference,
        )


def test_operations_on_two_devices_are_errors(tmp_path: Path) -> None:
    """The device of these tests refuses what a GPU refuses."""
    script = """
import torch
from tests.training.separate_device import open_separate_device
device = open_separate_device().device
rows = torch.ones(2, 3, device=device)
for mixed in (lambda: rows + torch.ones(2, 3), lambda: torch.ones(2, 3).mul_(rows), lambda: rows.numpy(),
              lambda: rows[torch.tensor([0, 1])], lambda: torch.cat([rows, torch.ones(2, 3)])):
    try:
        mixed()
    except RuntimeError:
        continue
    raise SystemExit("mixed")
assert (rows + 1).cpu().tolist() == [[2.0] * 3] * 2
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
