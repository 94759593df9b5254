"""The device path on a device whose tensors the host cannot read: no copy is made without being asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from tests.toy_kg import REPOSITORY, temporal_dataset
from tests.training.test_device import CASES, OBJECTIVES

ON_DEVICE, DROPPED = "tables.storage=device", "model.relation_dropout=0.1"


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} takes no device that is written in Python",
)
def test_runs_are_those_of_the_host(tmp_path: Path) -> None:
    """Training in every objective, and the ranking after it; bit by bit but where sums have another order."""
    cases = [*CASES, *OBJECTIVES, ON_DEVICE]
    cases.append(f"{ON_DEVICE} model.score_function=tucker optimizer.clip_norm=0.5")
    cases.append(f"{ON_DEVICE} dataset={temporal_dataset()} model.score_function.name=tntcomplex {DROPPED}")
    command = [sys.executable, "-m", "tests.training.separate_device", str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [case for case, *_ in runs] == cases
    for case, num_losses, *differences in runs:
        # Masks multiply the sum of gradients of a row and not each; gradients of types are sums of such sums.
        is_exact = "dropout" not in case and "global" not in case
        assert num_losses > 5, case
        assert max(differences) <= (0 if is_exact else 1e-5), (case, differences)
