"""Devices and tables on them, against the path of the CPU, which is in the place of a GPU, too."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils import backend_registration

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.choices import OPTIMIZERS
from dglkge.model.device import HOST, ComputeDevice, compiler_problem
from dglkge.model.functions import autograd
from dglkge.model.losses import build_loss
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.step.contracts import Computation
from dglkge.step.objectives.scored_losses import AutogradLoss
from dglkge.step.planning import Plan, RowIds
from dglkge.step.rows import StagedStore, Transforms
from dglkge.training import job
from dglkge.training.building import computing
from tests import warm
from tests.model.regularizer_by_name import build_regularizer
from tests.toy_kg import REPOSITORY, temporal_dataset, toy_dataset
from tests.training import live
from tests.training.live import assert_same, assert_same_tables, opened, settings, train, trained
from tests.training.test_dot_softmax import DIM, Case, MemoryTables, Table

STAGED = "training.device=cpu_staged"
STAND_IN = ComputeDevice("cpu_staged")


def computed(
    name: str, loss_name: str, device: ComputeDevice, has_ranges: bool, **options: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a batch of weighted edges, and the gradients of its rows, summed by id."""
    penalty, loss = build_regularizer("lp", 0.1), build_loss(loss_name)
    case = Case(name, regularizer=penalty, has_ranges=has_ranges, loss=loss)
    objective = case.objective(AutogradLoss, computation=Computation(device, **options))
    return case.run(objective, device)


# A loss sees nothing but scores: one score function has all.
@pytest.mark.parametrize(("name", "loss", "has_ranges"), [
    *((name, "softmax", False) for name in sorted(SCORE_FUNCTIONS)),
    *(("rotate", "self_adversarial", False), ("rotate", "margin_ranking", False)),
    ("transe_l1", "self_adversarial", True),
])  # fmt: skip
def test_gradients_equal_those_of_the_cpu(name, loss, has_ranges, monkeypatch):
    expected_loss, expected = computed(name, loss, HOST, has_ranges, is_reference=True)
    staged_loss, staged = computed(name, loss, STAND_IN, has_ranges, is_reference=True)
    assert staged_loss == expected_loss
    # One by one where a relation's row is requested once for a group; the sums of two groups have one order.
    assert_same_tables(staged, expected)
    assert all(gradients.any() for gradients in expected.values())
    # With training.kernels auto the CPU takes compiled loops, and a GPU torch's operations, never the loops.
    auto_runs = [computed(name, loss, HOST, has_ranges)]
    for loop in ("fill_manhattan", "fill_moduli", "fill_euclidean"):
        monkeypatch.setattr(autograd.loops, loop, None)
    auto_runs.append(computed(name, loss, STAND_IN, has_ranges))
    for auto_loss, auto in auto_runs:
        assert auto_loss == pytest.approx(expected_loss, rel=1e-4)
        assert_same_tables(auto, expected, 1e-3, 1e-4)


def test_a_run_with_compiled_losses_trains_the_tables_of_the_cpu(tmp_path: Path) -> None:
    """Violators are counted, too; one code with, one without a negative for each query."""
    # Not asked earlier: torch's list of what it needs takes long to import.
    if (problem := compiler_problem()) is not None:
        pytest.skip(problem)
    torch._dynamo.reset()  # it keeps at most 8 forms of a function a process, those of other tests among them
    torch._dynamo.utils.counters.clear()
    common = ("training.batch_statistics=true", "model.init_scale=0.5", "model.score_function=pairre")
    common += ("loss.name=self_adversarial",)
    _, expected, _ = trained(tmp_path, "reference", *common)
    losses, got, objective = trained(tmp_path, "auto", STAGED, "training.compile=true", *common)
    assert np.isfinite(losses).all() and isinstance(objective, AutogradLoss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert_same_tables(got, expected, 1e-3, 1e-4)


# Trained on a device that the host cannot read, and in test_on_gpu.py on a GPU.
CASES = (
    "negatives.mask_known=true loss.name=self_adversarial model.score_function=rotate",
    "model.score_function=rescal regularizer.name=dura regularizer.weight=0.1",
    "model.entity_dropout=0.2 model.relation_dropout=0.1",
    "model.global_vectors=true model.reciprocal_relations=false",
    "sampling.num_ranges=2 negatives.num_for_heads=5 training.synchronous=false",
    "model.score_function=tucker optimizer.clip_norm=0.5",
    "negatives.name=all_entities model.init_scale=0.1 loss.reduction=sum loss.name=margin_ranking",
)

OBJECTIVES = (
    "training.objective=one_vs_all training.objective.label_smoothing=0.1 regularizer.name=n3 "
    "regularizer.weight=0.1",
    "training.objective=k_vs_all loss.name=logistic regularizer.name=f2 regularizer.weight=0.1",
    "training.objective=one_vs_all model.score_function=rotate training.relation_prediction=0.5",
    "training.relation_prediction=0.5",
    "training.objective=one_vs_all model.score_function=conve model.dimension=16",
)
ON_DEVICE = ("training.device=cpu_staged", "tables.storage=device")

TABLES = [f"optimizer.name={name}" for name in OPTIMIZERS] + [
    "optimizer.name=sparse_adam optimizer.weight_decay=0.01 optimizer.decoupled_weight_decay=true",
    "negatives.mask_known=true loss.name=self_adversarial model.score_function=rotate",
    "model.reciprocal_relations=false regularizer.name=n3 regularizer.weight=0.1",
    "model.score_function=tucker optimizer.clip_norm=0.5",
    "optimizer.clip_norm=0.01 optimizer.clip_value=0.001 model.max_norm=0.4",
    *OBJECTIVES[1::2],
]


@pytest.mark.parametrize("case", TABLES)
def test_trains_the_tables_of_the_host_bit_by_bit(case: str, tmp_path: Path) -> None:
    expected = trained(tmp_path, "reference", *case.split())
    assert_same(trained(tmp_path / "device", "reference", *ON_DEVICE, *case.split()), expected)


@pytest.mark.parametrize(
    ("case", "is_temporal"),
    [("training.objective=one_vs_all", False), ("model.score_function.name=tntcomplex", True)],
)
def test_masks_are_those_of_rows_that_are_copied(case: str, is_temporal: bool, tmp_path: Path) -> None:
    """There too a mask multiplies the sum of a row's gradients; masks are of relations at a time."""
    more = ["model.entity_dropout=0.2", "training.relation_prediction=0.5"]
    more = [f"dataset={temporal_dataset()}"] if is_temporal else more
    more += ["model.relation_dropout=0.1", case]
    expected = trained(tmp_path, "reference", ON_DEVICE[0], *more)
    got = trained(tmp_path / "device", "reference", *ON_DEVICE, *more)
    rtol = 1e-5 if is_temporal else 0.0
    assert_same(got, expected, rtol, rtol / 10, rtol / 10)


def test_a_gradient_that_is_not_finite_is_an_error_as_on_the_host(tmp_path: Path) -> None:
    """The second batch has rows that the first one made infinite."""
    words = []
    for name, more in (("host", ()), ("device", ON_DEVICE)):
        with pytest.raises(FloatingPointError, match=r"the gradient is not finite for \d+ rows") as error:
            trained(tmp_path / name, "reference", "optimizer.lr=1e38", *more)
        words.append(str(error.value))
    assert words[0] == words[1]


def test_a_device_that_is_too_small_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore words.")
    monkeypatch.setattr(job, "DeviceTables", mock.Mock(side_effect=full))
    words = r"0 does not fit its GPU \(CUDA out of memory. Tried to allocate 9 GiB.\); dglkge plan shows"
    with pytest.raises(InputError, match=words):
        trained(tmp_path, "reference", *ON_DEVICE)


def test_a_run_moves_between_device_and_host(tmp_path: Path) -> None:
    rows = []
    for number, devices in enumerate((((), ()), ((), ON_DEVICE), (ON_DEVICE, ()))):
        for num_epochs, device in enumerate(devices, 1):
            more = ("training.kernels=reference", "checkpoint.every_epochs=1", *device)
            run = settings(toy_dataset(typed=True), tmp_path / str(number), *more)
            with opened(load_config(None, run)) as trainer:
                train(trainer, num_epochs)
                tables_there = live.rows_by_node(trainer)
        rows.append(tables_there)
    for moved in rows[1:]:
        assert_same_tables(moved, rows[0])


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} takes no device that is written in Python",
)
def test_runs_are_those_of_the_host(tmp_path: Path) -> None:
    """Training in every objective, and the ranking after it; bit by bit but where sums have another order."""
    dense = "model.score_function=tucker optimizer.clip_norm=0.5"
    times = f"dataset={temporal_dataset()} model.score_function.name=tntcomplex model.relation_dropout=0.1 "
    times += "training.batch_size=20"
    on_device = [f"tables.storage=device {more}".strip() for more in ("", dense, times)]
    cases = [*CASES, *OBJECTIVES, *on_device]
    command = [*warm.python(), "-m", "tests.training.separate_device", str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [case for case, *_ in runs] == cases
    for case, num_losses, *differences in runs:
        # Masks multiply the sum of gradients of a row and not each; gradients of types are sums of such sums.
        is_exact = "dropout" not in case and "global" not in case
        assert num_losses > 3, case
        assert max(differences) <= (0 if is_exact else 1e-5), (case, differences)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [([True, True], ("cuda", "training.device", 1)), ([True, False], ("cpu", "training.device", 0))],
)
def test_auto_is_a_gpu_only_where_every_trainer_has_one(gpus, expected, monkeypatch):
    """Of two trainers, the second in this process; the other's number is added by the sum."""
    open_device = mock.Mock(return_value=ComputeDevice())
    monkeypatch.setattr(computing, "problem_of", lambda name: None if gpus[1] else "no GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(computing.devices, "open_device", open_device)
    world = SimpleNamespace(world_size=2, local_rank=1)
    cluster: Any = SimpleNamespace(world=world, sum=lambda array: array + gpus[0])
    computing.choose_device(load_config(None, ["dataset=x"]), cluster)
    # Without our launcher trainers see all GPUs of the machine, and share them out.
    open_device.assert_called_once_with(*expected)


def test_share_without_triples() -> None:
    tables: Any = MemoryTables({"person": Table("person", DIM)})
    store = StagedStore(tables, Transforms([]), STAND_IN)
    plan = store.prepare(Plan(0, 1, RowIds(tables).joined(), []))
    ((table, ids, gradients),) = store.rows(plan).collect()
    assert table == "person" and ids.shape == (0,) and gradients.shape == (0, DIM)
