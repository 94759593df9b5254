"""The device path (``training.device``) with the CPU in the place of a GPU, against the path of the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.device import HOST, ComputeDevice, compiler_problem
from dglkge.model.functions import autograd
from dglkge.model.losses import build_loss
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.step.contracts import Computation
from dglkge.step.objectives.scored_losses import AutogradLoss, ScoredLosses
from dglkge.step.planning import Plan, RowIds
from dglkge.step.rows import HostStore, StagedStore, Transforms, Upload
from dglkge.training.building import computing
from tests.model.regularizer_by_name import build_regularizer
from tests.training import batch_rows
from tests.training.batch_rows import MemoryTables
from tests.training.live import assert_same_tables, trained
from tests.training.test_dot_softmax import DIM, Case, Table

STAGED = "training.device=cpu_staged"

STAND_IN = ComputeDevice("cpu_staged")


@pytest.fixture
def compiler() -> None:
    """Skip where torch.compile has no compiler; not asked earlier: torch's list takes long to import."""
    if (problem := compiler_problem()) is not None:
        pytest.skip(problem)


def computed(
    name: str,
    loss_name: str,
    device: ComputeDevice,
    dtype: torch.dtype = torch.float32,
    has_ranges: bool = False,
    **options: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a batch of weighted edges, and the gradients of its rows, summed by id."""
    case = Case(name, True, weighted=True, has_ranges=has_ranges)
    computation = Computation(device, dtype, **options)
    objective = AutogradLoss(
        case.planner, case.model, build_loss(loss_name), build_regularizer("lp", 0.1), True, computation,
        range_offset=case.offset,
    )  # fmt: skip
    tables: Any = MemoryTables(case.tables)
    store: Any = HostStore(tables, Transforms([]), False)
    if device.is_staged:
        store = StagedStore(tables, Transforms([]), device)
    outcome, gradients = batch_rows.computed(objective, store, store.prepare(objective.plan(case.batch)))
    return outcome.loss, gradients


# A loss sees nothing but scores: one score function has all.
@pytest.mark.parametrize(
    ("name", "loss"),
    [(name, "softmax") for name in sorted(SCORE_FUNCTIONS)]
    + [("rotate", "self_adversarial"), ("rotate", "margin_ranking")],
)
def test_gradients_equal_those_of_the_cpu(name: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"is_reference": True}
    expected_loss, expected = computed(name, loss, HOST, **options)
    found_loss, got = computed(name, loss, STAND_IN, **options)
    assert found_loss == expected_loss
    # One by one where a relation's row is requested once for a group; the sums of two groups have one order.
    for table, gradients in expected.items():
        assert torch.equal(got[table], gradients), table
        assert gradients.abs().sum() > 0
    # With training.kernels auto a GPU takes torch's operations, never the loops for the CPU.
    for loop in ("fill_manhattan", "fill_moduli", "fill_euclidean"):
        monkeypatch.setattr(autograd.loops, loop, None)
    auto_loss, auto = computed(name, loss, STAND_IN)
    assert auto_loss == pytest.approx(expected_loss, rel=1e-4)
    for table, gradients in expected.items():
        torch.testing.assert_close(auto[table], gradients, rtol=1e-3, atol=1e-4)


def test_offset_within_ranges_equals_that_of_the_cpu() -> None:
    loss = "self_adversarial"
    expected_loss, expected = computed("transe_l1", loss, HOST, is_reference=True, has_ranges=True)
    found_loss, got = computed("transe_l1", loss, STAND_IN, is_reference=True, has_ranges=True)
    assert found_loss == expected_loss
    assert_same_tables(got, expected)
    without, _ = computed("transe_l1", loss, HOST, is_reference=True)
    assert abs(without - expected_loss) > 1e-3


def test_a_compiler_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*sizes: Any) -> None:
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(ScoredLosses, "try_out", failing)
    with pytest.raises(InputError, match="to compile the loss: no such instruction; allowed"):
        trained(tmp_path, "auto", STAGED, "training.compile=true")


@pytest.mark.usefixtures("compiler")
def test_a_run_with_compiled_losses_trains_the_tables_of_the_cpu(tmp_path: Path) -> None:
    """Whole and last batches of an epoch; violators are counted there too. One code with, one without a
    negative for each query.
    """
    torch._dynamo.reset()  # it keeps at most 8 forms of a function a process, those of other tests among them
    torch._dynamo.utils.counters.clear()
    common = (
        "training.batch_statistics=true",
        "model.init_scale=0.5",
        "model.score_function=pairre",
        "loss.name=self_adversarial",
    )
    _, expected, _ = trained(tmp_path, "reference", *common)
    losses, got, objective = trained(tmp_path, "auto", STAGED, "training.compile=true", *common)
    assert np.isfinite(losses).all() and isinstance(objective, AutogradLoss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert_same_tables(got, expected, 1e-3, 1e-4)


def test_matmuls_in_bfloat16_are_near() -> None:
    loss, gradients = computed("complex", "softmax", STAND_IN)
    narrow_loss, narrow = computed("complex", "softmax", STAND_IN, torch.bfloat16)
    assert narrow_loss != loss and narrow_loss == pytest.approx(loss, rel=0.01)
    for table, wide in gradients.items():
        assert (narrow[table] - wide).norm() < 0.02 * wide.norm()


# Trained on a device that the host cannot read, in test_separate_device.py, and on a GPU.
CASES = (
    "",
    "negatives.mask_known=true loss.name=self_adversarial model.score_function=rotate",
    "model.reciprocal_relations=false regularizer.name=n3 regularizer.weight=0.1",
    "model.score_function=rescal regularizer.name=dura regularizer.weight=0.1",
    "model.entity_dropout=0.2 model.relation_dropout=0.1",
    "model.global_vectors=true model.reciprocal_relations=false",
    "negatives.name=all_entities",
    "sampling.num_ranges=2 negatives.num_for_heads=5",
    "model.score_function=tucker optimizer.clip_norm=0.5",
    "model.init_scale=0.1 training.synchronous=false loss.reduction=sum loss.name=margin_ranking",
)


OBJECTIVES = (
    "training.objective=one_vs_all training.objective.label_smoothing=0.1 regularizer.name=n3 "
    "regularizer.weight=0.1",
    "training.objective=k_vs_all loss.name=logistic regularizer.name=f2 regularizer.weight=0.1",
    "training.objective=one_vs_all model.score_function=rotate training.relation_prediction=0.5",
    "training.relation_prediction=0.5",
    "training.objective=one_vs_all model.score_function=conve model.dimension=16",
)


@pytest.mark.parametrize(("gpus", "expected"), [([True, True], "cuda"), ([True, False], "cpu")])
def test_auto_is_a_gpu_only_where_every_trainer_has_one(gpus, expected, monkeypatch):
    """Of two trainers, the second in this process; the other's number is added by the sum."""
    opened = []
    monkeypatch.setattr(computing, "problem_of", lambda name: None if gpus[1] else "no GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        computing.devices, "open_device", lambda *arguments: opened.append(arguments) or ComputeDevice()
    )
    cluster: Any = SimpleNamespace(
        world=SimpleNamespace(world_size=2, local_rank=1), sum=lambda array: array + gpus[0]
    )
    computing.choose_device(load_config(None, ["dataset=x"]), cluster)
    # Without our launcher trainers see all GPUs of the machine, and share them out.
    assert opened == [(expected, "training.device", 1 if expected == "cuda" else 0)]


def test_uploads_are_in_one_piece_for_each_type() -> None:
    upload = Upload(STAND_IN, torch.cpu.Stream())
    for turn in range(2):
        upload.clear()
        arrays = [np.arange(3) + turn, np.ones(2, np.float32), np.arange(0), np.arange(5) * 7]
        pieces = [upload.add(array) for array in arrays]
        upload.send()
        upload.wait()
        assert [piece.tensor.tolist() for piece in pieces] == [array.tolist() for array in arrays]
        assert pieces[0].tensor.data_ptr() + 3 * 8 == pieces[3].tensor.data_ptr()


def test_share_without_triples() -> None:
    """A trainer that owns none of a batch's triples still takes part in its exchanges."""
    tables: Any = MemoryTables({"person": Table("person", DIM, is_whole=True)})
    store = StagedStore(tables, Transforms([]), STAND_IN)
    plan = store.prepare(Plan(0, 1, RowIds(tables).joined(), []))
    ((table, ids, gradients),) = store.rows(plan).collect()
    assert table == "person" and ids.shape == (0,) and gradients.shape == (0, DIM)
