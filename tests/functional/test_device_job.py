"""A launched job of two trainers on the device path, with the CPU in the place of GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.typing import RELATION
from tests.functional import job as commands
from tests.toy_kg import toy_dataset


def tables_of(folder: Path, *settings: str) -> dict[str, np.ndarray]:
    """Train with two trainers; return the tables of the run."""
    common = (
        "model.dimension=16",
        "training.num_epochs=3",
        "training.batch_size=48",
        "evaluation.max_triples=5",
    )
    run = folder / "run"
    folder.mkdir()
    done = commands.train(
        folder, 2, f"dataset={toy_dataset(typed=True)}", f"output={run}", *common, *settings
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = open_checkpoint(run)
    return {name: checkpoint[name][:].numpy() for name in (*checkpoint.entity_types, RELATION)}


@pytest.mark.parametrize("objective", ["negative_sampling", "one_vs_all"])
def test_two_trainers_train_the_tables_of_the_cpu(objective: str, tmp_path: Path) -> None:
    settings = (f"training.objective={objective}", "training.kernels=reference")
    expected = tables_of(tmp_path / "cpu", "training.device=cpu", *settings)
    found = tables_of(tmp_path / "staged", "training.device=cpu_staged", *settings)
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)
