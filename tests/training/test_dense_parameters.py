"""Dense parameters of a module, whole and in slices: steps in float64, clipping, files, refusals."""

from __future__ import annotations

import copy
import json
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import dglkge
from dglkge.checkpoint import open_checkpoint
from dglkge.checkpoint.conversion import convert_to_run
from dglkge.config import load_config
from dglkge.config.schema import DenseConfig
from dglkge.data.dataset import Dataset
from dglkge.distributed.process_group import DeviceGroups
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.model.functions.dense import DenseScore
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.step.dense_parameters import DenseParameters
from dglkge.training.building.components import has_slices_on_processors, known_optimizers, works_by_number
from dglkge.training.trainer import Trainer
from tests import warm
from tests.functional.job import environment
from tests.surroundings import free_ports
from tests.toy_kg import toy_dataset
from tests.training import live
from tests.training.live import loss_against_all, ranking, rows_by_node, train

DIM = 8
LR, DENSE_LR = 0.05, 0.02


def opened(folder: Path, *more: str) -> AbstractContextManager[Trainer]:
    """Open a trainer in this process, on entities of several types."""
    usual = (
        "training.batch_size=40",
        f"optimizer.lr={LR}",
        f"dense.lr={DENSE_LR}",
        "checkpoint.every_epochs=1",
    )
    return live.opened(load_config(None, live.settings(toy_dataset(typed=True), folder, *usual, *more)))


def dense_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of the dense parameters and their optimizer's state."""
    assert trainer._job.dense is not None
    return trainer._job.dense.state_dict()


@pytest.mark.parametrize(
    ("score_function", "more", "clip"),
    [
        ("tucker", ("model.reciprocal_relations=false", "model.score_function.relation_dimension=5"), 0.0),
        ("tucker", (), 0.02),
        ("transformer", ("optimizer.clip_value=0.001",), 0.0),
        ("conex", ("model.score_function.channels=2",), 0.02),
    ],
)
def test_several_steps_against_all_entities_equal_float64(tmp_path, score_function, more, clip):
    """Autograd in float64 over rows and parameters; Adagrad by its formula, torch's Adam; one norm."""
    limit = 0.001 if score_function == "transformer" else np.inf
    # With the default seed an input of ReLU is so near 0 that its sign, and with it the gradient, depends on
    # how a processor rounds.
    seed = 3
    settings = (f"model.score_function={score_function}", "training.objective=one_vs_all", f"seed={seed}")
    with opened(tmp_path / "run", *settings, *more, f"optimizer.clip_norm={clip}") as trainer:
        live_model = trainer._evaluator.job.model
        # A model of its own, in float64, that starts equal.
        function = copy.copy(live_model.score_function)
        function._module = copy.deepcopy(live_model.module).double()
        function.run_module = function._module  # type: ignore[method-assign]
        model = KgeModel(function, DIM, live_model.reciprocal, seed)
        parameters = dict(model.module.named_parameters())
        adam = torch.optim.Adam(parameters.values(), lr=DENSE_LR)
        rows = {name: values.double().requires_grad_() for name, values in rows_by_node(trainer).items()}
        sums = {name: torch.zeros_like(values) for name, values in rows.items()}
        for _ in dglkge.remaining_epochs_until(1):
            for batch in trainer.batches():
                loss = loss_against_all(trainer, batch, rows, model.query)
                adam.zero_grad()
                leaves = (*rows.values(), *parameters.values())
                gradients = torch.autograd.grad(loss / batch.global_size, leaves, materialize_grads=True)
                gradients = [gradient.clamp(-limit, limit) for gradient in gradients]
                norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
                factor = min(1.0, clip / (float(norm) + 1e-6)) if clip else 1.0
                assert clip == 0 or factor < 0.9
                assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-4)
                with torch.no_grad():
                    for (name, values), gradient in zip(rows.items(), gradients):
                        sums[name] += (gradient * factor) ** 2
                        values -= LR * gradient * factor / (sums[name].sqrt() + 1e-10)
                for values, gradient in zip(parameters.values(), gradients[len(rows) :]):
                    values.grad = gradient * factor
                adam.step()
        assert batch.index >= 2  # three steps
        for name, values in rows_by_node(trainer).items():
            torch.testing.assert_close(values.double(), rows[name].detach(), rtol=1e-4, atol=2e-5, msg=name)
        for name, values in live_model.module.named_parameters():
            torch.testing.assert_close(values.double(), parameters[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("objective", ["one_vs_all", "k_vs_all"])
def test_shared_relations_train_as_single_ones(tmp_path: Path, objective: str) -> None:
    """TuckER makes a matrix once for each relation; the reference makes one for each query of a batch."""
    runs = []
    for kernels, objectives in (("auto", objective), ("reference", objective)):
        more = ("model.score_function=tucker", f"training.objective={objectives}", "dense.optimizer=SGD")
        with opened(tmp_path / kernels, *more, f"training.kernels={kernels}") as trainer:
            train(trainer, 1)
            runs.append({**rows_by_node(trainer), **dense_of(trainer)})
    for name, values in runs[0].items():
        torch.testing.assert_close(values, runs[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("score_function", "optimizer", "more"),
    [
        ("tucker", "Adam", ()),
        ("conve", "NAdam", ("model.score_function.channels=2",)),
        ("transformer", "Rprop", ()),
    ],
)
def test_files_resume_and_ranking(tmp_path, score_function, optimizer, more):
    """Files, exports, conversions and runs that start from them rank as live rows do."""
    folder, dataset = tmp_path / "run", toy_dataset(typed=True)
    more = (f"model.score_function={score_function}", f"dense.optimizer={optimizer}", "training.num_epochs=2",
            "optimizer.schedule={name: ExponentialLR, gamma: 0.5}", *more)  # fmt: skip

    def look_at_files(half_way: dict[str, torch.Tensor]) -> None:
        dense = {path: values for path, values in half_way.items() if path.startswith("dense/")}
        assert any(path.startswith("dense/optimizer") for path in dense)
        with h5py.File(folder / "checkpoint" / "v1" / "model.v1.h5") as file:
            assert all(np.array_equal(file[path][()], values.numpy()) for path, values in dense.items())
            assert set(file) == {"dense", "model", "optimizer", "reciprocal"}
        assert json.loads((folder / "checkpoint" / "latest" / "config.json").read_text())["relations"]

    state = live.assert_resumes(opened, folder, dense_of, *more, after_one=look_at_files)
    run = dglkge.open_run(folder)
    assert not any(parameter.requires_grad for parameter in run.model.module.parameters())
    run.export("huggingface", tmp_path / "hub")
    assert rank(dglkge.open_run(tmp_path / "hub", str(dataset))) == rank(run)
    convert_to_run(open_checkpoint(folder), Dataset.open(dataset), tmp_path / "converted")
    assert rank(dglkge.open_run(tmp_path / "converted")) == rank(run)
    assert open_checkpoint(tmp_path / "converted").dense_tensors().keys() <= state.keys()
    with opened(tmp_path / "next", *more, f"checkpoint.init_path={folder}") as trainer:
        taken = dense_of(trainer)
        assert taken.keys() == {path for path in state if path.startswith("dense/")}
        assert all(torch.equal(values, state[path]) for path, values in taken.items())
        metrics = ranking(trainer)
        assert {key: metrics[key] for key in rank(run)} == rank(run)
    other = ("dense.optimizer=Adagrad", f"checkpoint.init_path={folder}")
    with opened(tmp_path / "other", *more, *other) as trainer:
        (group,) = trainer._job.dense.param_groups
        sums = [trainer._job.dense.optimizer.state[parameter]["sum"] for parameter in group["params"]]
        assert not any(values.any() for values in sums)  # another optimizer's state is not taken
    with opened(folder, *more) as trainer:
        assert trainer._job.dense.param_groups[0]["lr"] == DENSE_LR / 2


def rank(run: dglkge.inference.run.Run) -> dict:
    metrics = run.evaluate(Protocol(split="test")).to_dict()
    return {key: metrics[key] for key in ("both", "head", "tail")}


def test_initial_values_are_keyed_and_leave_the_global_generator() -> None:
    class Own(DenseScore):
        def build_module(self, dim: int, seed: int) -> torch.nn.Module:
            return torch.nn.Bilinear(dim, dim, dim)

    before = torch.random.get_rng_state()
    first, same, other = (KgeModel(Own(), 4, True, seed).module.weight for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert Own().module_numbers(4) == 4**3 + 4
    weights = build_model("conve", 41, True, seed=1).module.linear.weight
    assert float(weights.detach().std()) * weights.shape[1] ** 0.5 == pytest.approx(1, rel=0.02)
    core = build_model("tucker", 30, True, seed=1).module.core.detach()
    assert float(core.abs().max()) <= 1 and float(core.std()) == pytest.approx(3**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ("name", "options", "dim"),
    [
        *(("tucker", {"relation_dimension": 3}, 6), ("tucker", {}, 5), ("conve", {"channels": 3}, 13)),
        *(("conve", {}, 3), ("conex", {"channels": 5}, 6), ("transformer", {"layers": 3, "heads": 2}, 6)),
    ],
)
def test_planned_numbers_are_those_of_the_module(name: str, options: dict[str, int], dim: int) -> None:
    function = build_model(name, dim, True, options=options).score_function
    assert function.module_numbers(dim) == sum(map(torch.numel, function.module.parameters()))
    assert function.options == {**type(function)().options, **options}


def test_a_gradient_that_is_not_finite_updates_nothing() -> None:
    layer = torch.nn.Linear(2, 1)
    dense = DenseParameters(layer, lambda some: torch.optim.SGD(some, lr=1.0), DeviceGroups())
    before = layer.weight.detach().clone()
    layer(torch.full((1, 2), float("nan"))).sum().backward()
    with pytest.raises(FloatingPointError, match="gradient of the dense parameter 'weight' is not finite"):
        dense.sum_gradients([])
    assert torch.equal(layer.weight, before)
    dense.start_batch(1)
    assert dense.sum_gradients([]) == 0  # a share of a batch without triples
    dense.update()
    assert torch.equal(layer.weight, before)


class Dropping(DenseScore):
    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Dropout(0.1))


class Running(DenseScore):
    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(dim))


class Narrow(DenseScore):
    """A module in bfloat16."""

    def build_module(self, dim: int, seed: int) -> torch.nn.Module:
        return torch.nn.Linear(dim, dim).bfloat16()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Dropping, "the layer 1 of the score function Dropping is a Dropout, whose result depends on how"),
        (Running, "the layer 0 of the score function Running is a BatchNorm1d, whose result depends on how"),
        (
            Narrow,
            "the parameter weight of the score function Narrow is torch.bfloat16; allowed: torch.float32",
        ),
    ],
)
def test_refused_modules(function: type[DenseScore], words: str) -> None:
    with pytest.raises(InputError, match=words):
        _ = KgeModel(function(), 4, True).module


def test_a_checkpoint_without_a_parameter_is_refused() -> None:
    model = build_model("tucker", 4, True)
    with pytest.raises(InputError, match="here: the dense parameter 'core' is missing"):
        model.load_module({}, "here")
    with pytest.raises(InputError, match="here: the dense parameter 'other' is none of the score function's"):
        model.load_module({"core": model.module.core, "other": torch.ones(1)}, "here")
    with pytest.raises(InputError, match=r"'core' has shape \(1, 4, 4\), expected \(4, 4, 4\)"):
        model.load_module({"core": torch.ones(1, 4, 4)}, "here")


SIZE = 3
NEEDS_SLICES = pytest.mark.skipif(
    not has_slices_on_processors(), reason="this torch has no FSDP2 on processors"
)


@NEEDS_SLICES
def test_slices_are_summed_updated_joined_and_read(tmp_path: Path) -> None:
    """The checks are in shard_ranks.py, on each of three processes."""
    port = str(free_ports())
    script = str(Path(__file__).with_name("shard_ranks.py"))
    ranks = [
        subprocess.Popen(
            [*warm.python(), script, str(rank), str(SIZE), port, str(tmp_path)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * SIZE, "\n".join(errors)


def test_optimizers_that_need_whole_parameters_are_found() -> None:
    names = {name for name in known_optimizers() if not works_by_number(DenseConfig(optimizer=name, lr=0.1))}
    assert names == {"Adafactor", "Muon"} & set(known_optimizers())
