"""What one trainer draws and computes on its device (a GPU, or the CPU in its place), against the host."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from dglkge.errors import InputError
from dglkge.model.device import compiler_problem
from dglkge.step import reductions
from dglkge.step.objectives import device_softmax
from dglkge.step.objectives.device_softmax import DeviceSoftmax, DeviceSoftmaxShard
from tests.toy_kg import toy_dataset
from tests.training.live import Run, assert_same, trained

GPU = torch.cuda.is_available()
DEVICE = (f"training.device={'cuda' if GPU else 'cpu_staged'}", "tables.storage=device")
COMPILED = "training.compile=true"
SAMPLED = (
    "",
    "negatives.num_for_heads=5 model.score_function=distmult optimizer.name=row_adagrad",
    "negatives.own_entity=true regularizer.name=n3 regularizer.weight=0.1 model.reciprocal_relations=false",
    "negatives.num_for_heads=0 loss.batch_reduction=sum model.score_function=simple "
    "optimizer.name=sparse_adam",
    "training.relation_prediction=0.5 model.reciprocal_relations=false",
    "training.objective=one_vs_all",
    f"{COMPILED} training.objective=one_vs_all training.relation_prediction=0.5 regularizer.name=n3 "
    "regularizer.weight=0.1 optimizer.schedule.name=CosineAnnealingLR optimizer.schedule.T_max=3 "
    "optimizer.clip_norm=0.5",
)
OVER_ALL = (
    "training.objective=one_vs_all training.objective.label_smoothing=0.1 training.relation_prediction=0.5 "
    "regularizer.name=n3 regularizer.weight=0.1",
    "training.objective=k_vs_all loss.name=softmax regularizer.name=f2 regularizer.weight=0.1",
)


def ran(folder: Path, kernels: str, *more: str) -> Run:
    return trained(folder, kernels, f"dataset={toy_dataset()}", "negatives.chunk_size=6", *more)


def assert_equal_runs(case: str, folder: Path) -> object:
    """Train both ways and compare; returns the objective on the device."""
    plain = [word for word in case.split() if word != COMPILED]
    got = ran(folder, "auto", *DEVICE, *case.split())
    assert_same(got, ran(folder, "reference", *plain), 1e-3, 1e-5, loss_rtol=1e-5)
    return got[2]


@pytest.mark.parametrize("case", SAMPLED)
def test_batches_are_those_of_the_host(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, negatives, those that are the true answer, losses and updates; chunks in several runs."""
    if COMPILED in case and compiler_problem() is not None:
        pytest.skip("no C++ compiler for torch.compile")
    monkeypatch.setattr(reductions, "SCORES_A_BLOCK", 2 * 6 * 12)
    assert isinstance(assert_equal_runs(case, tmp_path), DeviceSoftmax)


def test_a_compiler_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = mock.Mock(side_effect=RuntimeError("no such\ninstruction"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: failing)
    with pytest.raises(InputError, match="to compile the loss: no such instruction; allowed here: false"):
        ran(tmp_path, "auto", *DEVICE, COMPILED)


@pytest.mark.parametrize(
    ("case", "kept_shares"), [*((case, device_softmax.KEPT_SHARES) for case in OVER_ALL), (OVER_ALL[0], 100)]
)
def test_shards_are_those_of_the_host(case, kept_shares, tmp_path, monkeypatch):
    """Without room for shares they are computed by autograd."""
    monkeypatch.setattr(reductions, "MOST_COLUMNS", 7)
    monkeypatch.setattr(device_softmax, "KEPT_SHARES", kept_shares)
    objective = assert_equal_runs(case, tmp_path)
    assert all(isinstance(candidates.shard, DeviceSoftmaxShard) for candidates in objective.candidates)


@pytest.mark.parametrize("more", ["negatives.mask_known=true", "model.entity_dropout=0.1", "loss.name=bce"])
def test_other_settings_take_the_general_way(more: str, tmp_path: Path) -> None:
    assert not isinstance(ran(tmp_path, "auto", *DEVICE, more)[2], DeviceSoftmax)
