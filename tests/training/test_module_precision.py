"""Modules in 16 bits and compiled: gradients, the loss scale's rule, skipped batches, resume and refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

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
from dglkge.training.building import computing
from dglkge.training.trainer import Trainer
from dglkge.typing import Side
from tests.training.live import ranking, rows_by_node, train
from tests.training.test_dense_parameters import dense_of, opened

needs_float16 = pytest.mark.skipif(
    autocast_problem("cpu", torch.float16) is not None, reason="torch has no float16 autocast on the CPU"
)


def difference(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got - true).detach().norm() / true.detach().norm())


def gradients(
    model: KgeModel, side: Side, factor: float = 1.0, rows: int = 40, places: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return queries, and the gradients of the rows and parameters of a function of them times a factor."""
    draw = torch.Generator().manual_seed(5)
    entities = torch.randn(rows, model.dim, generator=draw).requires_grad_()
    num_relations = rows if places is None else 5
    relations = torch.randn(num_relations, model.relation_width, generator=draw).requires_grad_()
    query = model.query(entities, relations, side, **({} if places is None else {"places": places}))
    weights = torch.randn(query.shape, generator=draw)
    leaves = [entities, relations, *model.module.parameters()]
    return query, list(torch.autograd.grad((query * weights).sum() * factor, leaves))


@pytest.mark.parametrize(("name", "dim", "dtype", "factor", "is_shared"), [
    ("tucker", 16, torch.bfloat16, 1.0, False),
    ("tucker", 16, torch.bfloat16, 1.0, True),
    ("transformer", 16, torch.bfloat16, 1.0, False),
    pytest.param("conve", 17, torch.float16, 1.0, False, marks=needs_float16),
    # Below float16's smallest number without a loss scale.
    pytest.param("conex", 16, torch.float16, 1e-9, False, marks=needs_float16),
])  # fmt: skip
def test_gradients_are_near_those_of_float32(name, dim, dtype, factor, is_shared):
    model = build_model(name, dim, True)
    precision, scale = ModulePrecision("cpu", dtype), 1.0
    if precision.loss_scale is not None:
        scale = precision.loss_scale.scale = 2.0**4 if factor == 1 else 2.0**30
    narrow = model.in_precision(precision)
    # Each layer rounds its operands, its output and the gradients of both.
    limit = (8 if is_shared else 32) * torch.finfo(dtype).eps
    places = torch.randint(5, (40,), generator=torch.Generator().manual_seed(5)) if is_shared else None
    for side in Side:
        query, expected = gradients(model, side, factor, places=places)
        narrow_query, narrow_gradients = gradients(narrow, side, factor, places=places)
        assert narrow_query.dtype == torch.float32
        assert 0 < difference(narrow_query, query) < limit
        for number, (gradient, true) in enumerate(zip(narrow_gradients, expected)):
            assert gradient.dtype == torch.float32
            # Those of rows are divided by the scale already, those of parameters are not.
            if true.norm():
                assert difference(gradient / (scale if number > 1 else 1), true) < limit, number


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
    words = "not finite even with a loss scale of .*; resume with dense"
    with pytest.raises(FloatingPointError, match=words):
        scale.update(True)
    assert scale.num_skipped == 31


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of rows, optimizer state and dense parameters with theirs; not of the loss scale."""
    copies = {path: values for path, values in dense_of(trainer).items() if "/loss_scale/" not in path}
    for name, table in trainer.tables.items():
        for key, part in trainer.optimizer.state_tensors(table.embedding).items():
            copies[f"{name}/{key}"] = torch.as_tensor(part[0 : len(part)]).clone()
    return {**copies, **rows_by_node(trainer)}


@needs_float16
@pytest.mark.parametrize("more", [
    ("training.objective=one_vs_all", "model.score_function=transformer"),
    ("model.score_function={name: conve, channels: 2}", "model.dimension=9", "optimizer.clip_norm=0.1"),
], ids=["one vs all", "sampled and clipped"])  # fmt: skip
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


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=needs_float16)])
def test_training_in_16_bits_is_near_float32_and_ranks_as_it_is_written(tmp_path: Path, dtype: str) -> None:
    """Beside projections of features, whose gradients have no loss scale."""
    np.save(tmp_path / "people.npy", np.random.default_rng(1).normal(size=(40, 3)))
    (tmp_path / "people.names.txt").write_text("".join(f"person{i}\n" for i in range(40)))
    settings = ("model.score_function={name: conex, channels: 2}", "dense.optimizer=SGD")
    settings += (f"features.files=[person={tmp_path}/people.npy]", "training.num_epochs=1")
    runs = []
    for autocast in ("none", dtype):
        with opened(tmp_path / autocast, *settings, f"dense.autocast={autocast}") as trainer:
            if autocast == "float16":
                trainer._job.dense.loss_scale.scale = 2.0**6
            before = dense_of(trainer)
            train(trainer, 1)
            rows, after = rows_by_node(trainer), dense_of(trainer)
            paths = {path for path in after if path.startswith("dense/parameters/")}
            features = {path for path in paths if "features" in path}
            for name, group in (("features", features), ("module", paths - features)):
                rows[name] = torch.cat([(after[path] - before[path]).flatten() for path in sorted(group)])
            runs.append(rows)
            metrics = ranking(trainer)
    for name, values in runs[1].items():
        assert 0 < difference(values, runs[0][name]) < 16 * torch.finfo(torch.bfloat16).eps, name
    # Files are ranked by a model that knows nothing of autocast.
    assert dglkge.open_run(tmp_path / dtype).evaluate("test").to_dict()["both"] == metrics["both"]


class Layer(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2 * dim, dim)

    def forward(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
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
    for rows, side in itertools.product((40, 64, 37, 16, 15, 2, 1, 0, 41), Side):
        query, expected = gradients(model, side, rows=rows)
        compiled_query, compiled_gradients = gradients(compiled, side, rows=rows)
        torch.testing.assert_close(compiled_query, query, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(compiled_gradients, expected, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert any((tmp_path / "cache").rglob("*.cpp"))


class Beside(OneLayer):
    def operate(self, entity: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        return self.run_module(entity, relation) + self.module.inner.bias


def test_float16_takes_parameters_in_the_module_only(tmp_path: Path) -> None:
    config, cpu = load_config(None, ["dataset=x", f"output={tmp_path}"]), torch.device("cpu")
    sizes = {"tucker": 8, "conve": 9, "conex": 8, "transformer": 8}
    models = [build_model(name, dim, True) for name, dim in sizes.items()]
    for model in (*models, KgeModel(OneLayer(), 8, True)):
        computing._require_scaled(config, model, cpu)
    with pytest.raises(InputError, match="uses parameters of its module beside run_module and run_precisely"):
        computing._require_scaled(config, KgeModel(Beside(), 8, True), cpu)
