"""The exact mode, float32 products, at a size where the default may take them in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglkge.training.building import computing
from tests.functional import job as commands
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset

LARGE_ENOUGH = (
    "model.dimension=64",
    "model.init_scale=0.1",
    "training.num_epochs=3",
    "training.batch_size=150",
    "negatives.num_uniform=300",
    "negatives.chunk_size=150",
    "optimizer.lr=0.05",
)
"""A size at which products may be taken in bfloat16."""


def test_float32_products_are_the_exact_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting gives the same tables with one process and with two trainers, at a size where the default
    would choose bfloat16, with which they differ by about 6e-4: ten times this tolerance."""
    monkeypatch.setattr(computing, "matmul_seconds", lambda left, right: float(left.element_size()))
    assert computing.faster_type((300, 300, 64)) == "bfloat16"
    exact = ("training.matmul_dtype=float32", f"dataset={toy_dataset()}", *LARGE_ENOUGH)
    runs = [tmp_path / name for name in ("alone", "two")]
    for done in (
        commands.train_alone(*exact, f"output={runs[0]}"),
        commands.train(tmp_path, 2, *exact, f"output={runs[1]}"),
    ):
        assert done.returncode == 0, done.stderr
    one, two = ([record["loss"] for record in stats(run)] for run in runs)
    assert two == pytest.approx(one, rel=1e-5)
    theirs = tables(toy_dataset(), runs[1])
    for name, rows in tables(toy_dataset(), runs[0]).items():
        np.testing.assert_allclose(theirs[name], rows, rtol=0, atol=5e-5, err_msg=name)
