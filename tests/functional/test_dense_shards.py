"""Sharded dense parameters under the launcher: the result of one process, resumed at other sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from tests.functional import job as commands
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset

pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "fully_shard"),
    reason=f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard",
)

SETTINGS = (
    # A core (7, 16, 16): slices of 3, 3 and 1 matrices on three trainers, of 4 and 3 on two.
    *("model.score_function=tucker", "model.dimension=16", "model.relation_dimension=7"),
    *("model.init_scale=0.3", "training.matmul_dtype=float32", "training.batch_size=50", "dense.lr=0.01"),
    *("dense.optimizer=AdamW", "dense.options=[weight_decay=0.1]", "optimizer.clip_norm=0.05"),
    *("optimizer.schedule=ExponentialLR", "optimizer.schedule_options=[gamma=0.7]"),
    *("evaluation.split=none", "evaluation.valid_every_epochs=2"),
)


@pytest.mark.parametrize("objective", ["negative_sampling", "one_vs_all"])
def test_shards_train_as_one_process_and_resume_at_any_size(tmp_path: Path, objective: str) -> None:
    """Three trainers for two epochs with slices, then two without, then three with them again."""
    dataset, alone, run = toy_dataset(), tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={dataset}", f"training.objective={objective}", *SETTINGS)
    done = commands.train_alone(f"output={alone}", "training.num_epochs=4", *settings)
    assert done.returncode == 0, done.stderr
    for trainers, epochs, sharding in ((3, 2, "fsdp"), (2, 3, "replicated"), (3, 4, "fsdp")):
        more = (f"training.num_epochs={epochs}", f"dense.sharding={sharding}", *settings)
        done = commands.train(tmp_path, trainers, f"output={run}", *more)
        assert done.returncode == 0, done.stderr
    assert not list(run.glob("tmp*"))
    expected, found = stats(alone), stats(run)
    assert len(found) == len(expected)
    for one, several in zip(expected, found):
        # Of an epoch, or of a ranking of the valid split.
        assert several.get("loss") == pytest.approx(one.get("loss"), rel=1e-4)
        assert several.get("valid", {}) == pytest.approx(one.get("valid", {}), rel=1e-2)
    of_run = tables(dataset, run)
    for name, rows in tables(dataset, alone).items():
        np.testing.assert_allclose(of_run[name], rows, rtol=1e-3, atol=1e-4, err_msg=name)
    saved, reference = open_checkpoint(run).dense_tensors(), open_checkpoint(alone).dense_tensors()
    assert saved.keys() == reference.keys() and len(saved) == 4
    for name, values in reference.items():
        np.testing.assert_allclose(saved[name], values, rtol=1e-3, atol=1e-4, err_msg=name)
