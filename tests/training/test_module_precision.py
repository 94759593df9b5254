"""Modules in 16 bits and compiled: gradients, the loss scale's rule, skipped batches, resume and refusals."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import dglkge
from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.device import LossScale, ModulePrecision, autocast_problem, compiler_problem
from dglkge.model.functions.dense import DenseScore
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.step.contracts import RowGradients
from dglkge.step.dense_parameters import DenseParameters
from dglkge.training.building import computing
from dglkge.training.trainer import Trainer
from dglkge.typing import Side
from tests.toy_kg import toy_dataset
from tests.training.live import ranking, rows_by_node, train
from tests.training.test_dense_parameters import dense_of, opened

needs_float16 = pytest.mark.skipif(
    autocast_problem("cpu", torch.float16) is not None, reason="torch has no float16 autocast on the CPU"
)


def difference(got: torch.Tensor, true: torch.Tensor) -> float:
    """Return the norm of the difference relative to that of the true numbers."""
    return float((got - true).detach().norm() / true.detach().norm())


def gradients(
    model: KgeModel, side: Side, factor: float, rows: int = 40
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return queries, and the gradients of the rows and parameters of a function of them times a factor."""
    draw = torch.Generator().manual_seed(5)
    entities = torch.randn(rows, model.dim, generator=draw).requires_grad_()
    relations = torch.randn(rows, model.relation_width, generator=draw).requires_grad_()
    query = model.query(entities, relations, side)
    weights = torch.randn(query.shape, generator=draw)
    assert model.module is not None
    leaves = [entities, relations, *model.module.parameters()]
    return query, list(torch.autograd.grad((query * weights).sum() * factor, leaves))


@pytest.mark.parametrize(
    ("name", "dim", "dtype", "factor"),
    [
        ("tucker", 16, torch.bfloat16, 1.0),
        ("transformer", 16, torch.bfloat16, 1.0),
        pytest.param("conve", 17, torch.float16, 1.0, marks=needs_float16),
        # Below float16's smallest number without a loss scale.
        pytest.param("conex", 16, torch.float16, 1e-9, marks=needs_float16),
    ],
)
def test_gradients_are_near_those_of_float32(name: str, dim: int, dtype: torch.dtype, factor: float) -> None:
    model = build_model(name, dim, True)
    precision = ModulePrecision("cpu", dtype)
    scale = 1.0
    if precision.loss_scale is not None:
        scale = precision.loss_scale.scale = 2.0**4 if factor == 1 else 2.0**30
    narrow = model.in_precision(precision)
    assert narrow.module is model.module
    for side in Side:
        query, expected = gradients(model, side, factor)
        found_query, got = gradients(narrow, side, factor)
        assert found_query.dtype == torch.float32
        # Each layer rounds its operands, its output and the gradients of both.
        limit = 32 * torch.finfo(dtype).eps
        assert 0 < difference(found_query, query) < limit
        for number, (gradient, true) in enumerate(zip(got, expected)):
            assert gradient.dtype == torch.float32
            # Those of rows are divided by the scale already, those of parameters are not.
            unscaled = gradient / (scale if number > 1 else 1)
            if true.norm():
                assert difference(unscaled, true) < limit, number


def test_relations_that_share_a_matrix_do_so_in_bfloat16() -> None:
    draw = torch.Generator().manual_seed(5)
    model = build_model("tucker", 16, True)
    narrow = model.in_precision(ModulePrecision("cpu", torch.bfloat16))
    places = torch.randint(5, (30,), generator=draw)
    entities, relations = torch.randn(30, 16, generator=draw), torch.randn(5, 32, generator=draw)
    results = []
    for variant in (model, narrow):
        leaves = [entities.clone().requires_grad_(), relations.clone().requires_grad_(), variant.module.core]
        query = variant.query(*leaves[:2], Side.HEAD, places=places)
        results.append([query, *torch.autograd.grad(query.square().sum(), leaves)])
    for true, got in zip(*results):
        assert 0 < difference(got, true) < 8 * torch.finfo(torch.bfloat16).eps


@needs_float16
def test_without_a_loss_scale_small_gradients_vanish() -> None:
    model = build_model("tucker", 8, True)
    precision = ModulePrecision("cpu", torch.float16)
    assert precision.loss_scale is not None
    precision.loss_scale.scale = 1.0
    _, got = gradients(model.in_precision(precision), Side.TAIL, 1e-9)
    assert not got[2].any()


@pytest.mark.parametrize("start", [2.0**16, 2.0**126, 3.0])
def test_the_loss_scale_follows_torch_step_by_step(start: float) -> None:
    """torch.amp.GradScaler on the CPU: scale, steps since its change, and which steps are made."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=3)
    scale = LossScale(start, growth_interval=3)
    made = 0
    overflows = np.random.default_rng(0).random(60) < 0.25
    overflows[20:40] = False  # the scale reaches the greatest number of float32
    for is_bad in overflows.tolist():
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * 0)
        parameter.grad = torch.full((1,), float("inf")) if is_bad else -torch.ones(1) * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scale.update(is_bad)
        made += not is_bad
        assert (scale.scale, scale.num_good) == (scaler.get_scale(), scaler._get_growth_tracker())
        assert float(parameter.detach()) == made
    assert scale.num_skipped == len(overflows) - made > 5
    copy = LossScale(growth_interval=3)
    copy.load(scale.state())
    assert copy.state() == scale.state() and copy.scale == scale.scale


def test_a_scale_that_is_too_small_ends_the_training() -> None:
    scale = LossScale()
    for _ in range(30):
        scale.update(True)
    with pytest.raises(
        FloatingPointError, match="not finite even with a loss scale of .*; resume with dense"
    ):
        scale.update(True)
    assert scale.num_skipped == 31


@pytest.mark.parametrize("in_rows", [False, True])
def test_an_overflow_on_one_of_two_trainers_skips_on_both(in_rows: bool) -> None:
    barrier, sent = threading.Barrier(2, timeout=20), {}

    def run(rank: int) -> tuple[bool, DenseParameters, torch.nn.Linear]:
        def sum_over_trainers(values: torch.Tensor) -> torch.Tensor:
            sent[rank] = values.clone()
            barrier.wait()
            values.copy_(sent[0] + sent[1])
            barrier.wait()
            return values

        layer = torch.nn.Linear(2, 1)
        groups: Any = SimpleNamespace(sum=sum_over_trainers, sum_gradients=sum_over_trainers)
        dense = DenseParameters(
            layer, lambda some: torch.optim.Adam(some, lr=1.0), groups, rank == 0,
            loss_scale=LossScale(), scaled=["weight"],
        )  # fmt: skip
        before = layer.weight.detach().clone()
        overflows = rank == 1 and not in_rows
        (layer.weight.sum() * (float("inf") if overflows else 2.0**16) + layer.bias.sum()).backward()
        values = float("nan") if in_rows and rank == 1 else 1.0
        rows = RowGradients("person", torch.zeros(1, dtype=torch.int64), torch.full((1, 2), values))
        made = dense.sum_gradients([rows]) is not None
        assert torch.equal(layer.weight, before)
        state = dense.state_dict()
        dense.start_batch(1)
        (layer.weight.sum() * 2.0**15 + layer.bias.sum()).backward()
        assert dense.sum_gradients([]) is not None
        # The scale is half of what it was, and the other parameter is not scaled.
        assert layer.weight.grad.tolist() == [[2.0, 2.0]] and layer.bias.grad.tolist() == [2.0]
        dense.update()
        results[rank] = made, state, dense

    results: dict = {}
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [0, 1]
    for made, state, dense in results.values():
        assert not made
        assert dense.loss_scale.state() == {"scale": 2.0**15, "num_good": 1, "num_skipped": 1}
        assert not any(path.startswith("dense/optimizer/") for path in state)
    assert torch.equal(*(result[2].state_dict()["dense/parameters/weight"] for result in results.values()))


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of rows, optimizer state and dense parameters with theirs; not of the loss scale."""
    copies = {path: values for path, values in dense_of(trainer).items() if "/loss_scale/" not in path}
    for name, table in trainer.tables.items():
        state = trainer.optimizer.state_tensors(table.embedding)
        copies |= {
            f"{name}/{key}": torch.as_tensor(part[0 : len(part)]).clone() for key, part in state.items()
        }
    return {**copies, **rows_by_node(trainer)}


@needs_float16
@pytest.mark.parametrize(
    "more",
    [
        ("training.objective=one_vs_all", "model.score_function=transformer"),
        ("model.score_function={name: conve, channels: 2}", "model.dimension=9", "optimizer.clip_norm=0.1"),
    ],
    ids=["one vs all", "sampled and clipped"],
)
def test_a_batch_that_overflows_changes_nothing(tmp_path: Path, more: tuple[str, ...]) -> None:
    folder, settings = tmp_path / "run", ("dense.autocast=float16", "training.num_epochs=2", *more)
    with opened(folder, *settings) as trainer:
        scale = trainer._job.dense.loss_scale
        scale.scale = 2.0**6
        for _ in dglkge.remaining_epochs_until(1):
            for batch in trainer.batches():
                before = everything(trainer)
                if batch.index == 1:
                    scale.scale = 2.0**60  # more than float16 has, whatever the gradient
                trainer.step(batch)
                after = everything(trainer)
                same = [path in before and torch.equal(after[path], before[path]) for path in after]
                if batch.index == 1:
                    assert all(same) and scale.scale == 2.0**59 and scale.num_good == 0
                    scale.scale = 2.0**6
                else:
                    assert not same[0] and not same[-1] and scale.scale == 2.0**6
        assert batch.index >= 2
        saved = {"scale": 2.0**6, "num_good": batch.index - 1, "num_skipped": 1}
        last = json.loads((folder / "stats.jsonl").read_text().splitlines()[-1])
        assert last["skipped_batches"] == 1 and np.isfinite(last["epoch_loss"])
    with h5py.File(folder / "checkpoint" / "v1" / "model.v1.h5") as file:
        assert {key: value[()] for key, value in file["dense/loss_scale"].items()} == saved
    with opened(folder, *settings) as trainer:
        assert trainer._job.dense.loss_scale.state() == saved
        train(trainer, 2)
    with opened(folder, *settings, "dense.autocast=bfloat16", "training.num_epochs=3") as trainer:
        assert trainer._job.dense.loss_scale is None
        train(trainer, 3)


def test_bfloat16_trains_near_float32_and_ranks_as_it_is_written(tmp_path: Path) -> None:
    runs = []
    for dtype in ("none", "bfloat16"):
        settings = ("model.score_function={name: conex, channels: 2}", f"dense.autocast={dtype}")
        with opened(tmp_path / dtype, *settings, "dense.optimizer=SGD", "training.num_epochs=1") as trainer:
            train(trainer, 1)
            # Together: some start at 0 and have moved little.
            dense = torch.cat([values.flatten() for values in dense_of(trainer).values()])
            runs.append({**rows_by_node(trainer), "dense": dense})
            metrics = ranking(trainer)
    for name, values in runs[1].items():
        limit = 16 * torch.finfo(torch.bfloat16).eps
        assert 0 < difference(values, runs[0][name]) < limit, name
    # Files are ranked by a model that knows nothing of autocast.
    ranked = dglkge.open_run(tmp_path / "bfloat16").evaluate(dglkge.evaluation.metrics.Protocol(split="test"))
    assert ranked.to_dict()["both"] == metrics["both"]


class Layer(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2 * dim, dim)

    def forward(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Return (n, D)."""
        return entity + torch.tanh(self.inner(torch.cat([entity, relation], dim=1)))


class OneLayer(DenseScore):
    """<h + tanh(A [h, r]), t>."""

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        return Layer(dim)


def test_compiled_gradients_are_those_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In uneven shares, of which none compiles again; a home without a place to write does not matter."""
    if compiler_problem():
        pytest.skip(f"{compiler_problem()}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", "/proc/none")
    from torch._dynamo.utils import counters

    counters.clear()
    torch._dynamo.reset()
    model = KgeModel(OneLayer(), 8, True)
    compiled = model.in_precision(ModulePrecision("cpu", is_compiled=True))
    for rows in (40, 64, 37, 16, 15, 2, 1, 0, 41):
        for side in Side:
            query, expected = gradients(model, side, 1.0, rows)
            found_query, got = gradients(compiled, side, 1.0, rows)
            torch.testing.assert_close(found_query, query, rtol=1e-5, atol=1e-6)
            for gradient, true in zip(got, expected):
                torch.testing.assert_close(gradient, true, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert any((tmp_path / "cache").rglob("*.cpp"))


class Beside(OneLayer):
    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        return self.run_module(entity, relation) + self.module.inner.bias


def test_float16_takes_parameters_in_the_module_only(tmp_path: Path) -> None:
    """Their gradients would be divided by a scale that they do not have."""
    config = load_config(None, [f"dataset={toy_dataset()}", f"output={tmp_path}"])
    cpu = torch.device("cpu")
    for name, dim in (("tucker", 8), ("conve", 9), ("conex", 8), ("transformer", 8)):
        computing._require_scaled(config, build_model(name, dim, True), cpu)
    computing._require_scaled(config, KgeModel(OneLayer(), 8, True), cpu)
    with pytest.raises(InputError, match="uses parameters of its module beside run_module and run_precisely"):
        computing._require_scaled(config, KgeModel(Beside(), 8, True), cpu)
