"""Dense parameters of a module, whole and in slices: steps in float64, clipping, files, refusals."""

from __future__ import annotations

import copy
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import dglkge
from dglkge.checkpoint.conversion import convert_to_run
from dglkge.checkpoint.reader import open_checkpoint
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
    steps = ("training.batch_size=40", f"optimizer.lr={LR}", f"dense.lr={DENSE_LR}")
    usual = (*steps, "checkpoint.every_epochs=1")
    return live.opened(load_config(None, live.settings(toy_dataset(typed=True), folder, *usual, *more)))


def dense_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer._job.dense.state_dict()


@pytest.mark.parametrize(("score_function", "more", "clip"), [
    ("tucker", ("model.reciprocal_relations=false", "model.score_function.relation_dimension=5"), 0.0),
    ("tucker", (), 0.02),
    ("transformer", ("optimizer.clip_value=0.001",), 0.0),
    ("conex", ("model.score_function.channels=2",), 0.02),
])  # fmt: skip
def test_several_steps_against_all_entities_equal_float64(tmp_path, score_function, more, clip):
    """Autograd in float64 over rows and parameters; torch's Adagrad, Adam and clipping by one norm."""
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
        rows = {name: values.double().requires_grad_() for name, values in rows_by_node(trainer).items()}
        leaves = [*rows.values(), *parameters.values()]
        adagrad = torch.optim.Adagrad(rows.values(), lr=LR, eps=1e-10)
        adam = torch.optim.Adam(parameters.values(), lr=DENSE_LR)
        for _ in dglkge.remaining_epochs_until(1):
            for batch in trainer.batches():
                loss = loss_against_all(trainer, batch, rows, model.query)
                gradients = torch.autograd.grad(loss / batch.global_size, leaves, materialize_grads=True)
                for leaf, gradient in zip(leaves, gradients):
                    leaf.grad = gradient
                torch.nn.utils.clip_grad_value_(leaves, limit)
                norm = torch.nn.utils.clip_grad_norm_(leaves, clip or np.inf)
                assert 0.9 * float(norm) > clip
                assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-4)
                adagrad.step()
                adam.step()
        assert batch.index >= 2  # three steps
        trained = {**rows_by_node(trainer), **dict(live_model.module.named_parameters())}
        for name, expected in {**rows, **parameters}.items():
            torch.testing.assert_close(trained[name].double(), expected, rtol=1e-4, atol=2e-5, msg=name)


def test_shared_relations_train_as_single_ones(tmp_path: Path) -> None:
    """TuckER makes a matrix once for each relation; the reference makes one for each query of a batch."""
    runs = []
    for kernels in ("auto", "reference"):
        more = ("model.score_function=tucker", "training.objective=k_vs_all", "dense.optimizer=SGD")
        with opened(tmp_path / kernels, *more, f"training.kernels={kernels}") as trainer:
            train(trainer, 1)
            runs.append({**rows_by_node(trainer), **dense_of(trainer)})
    live.assert_same_tables(*runs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("score_function", "optimizer"),
    [("tucker", "Adam"), ("{name: conve, channels: 2}", "NAdam"), ("transformer", "Rprop")],
)
def test_files_resume_and_ranking(tmp_path, score_function, optimizer):
    folder, dataset = tmp_path / "run", toy_dataset(typed=True)
    more = (f"model.score_function={score_function}", f"dense.optimizer={optimizer}", "training.num_epochs=2",
            "optimizer.schedule={name: ExponentialLR, gamma: 0.5}")  # fmt: skip

    def look_at_files(half_way: dict[str, torch.Tensor]) -> None:
        dense = {path: values for path, values in half_way.items() if path.startswith("dense/")}
        assert any(path.startswith("dense/optimizer") for path in dense)
        with h5py.File(folder / "checkpoint" / "v1" / "model.v1.h5") as file:
            assert all(np.array_equal(file[path][()], values.numpy()) for path, values in dense.items())
            assert set(file) == {"dense", "model", "optimizer", "reciprocal"}

    state = live.assert_resumes(opened, folder, dense_of, *more, after_one=look_at_files)
    run = dglkge.open_run(folder)
    assert not any(parameter.requires_grad for parameter in run.model.module.parameters())
    run.export("huggingface", tmp_path / "hub")
    convert_to_run(open_checkpoint(folder), Dataset.open(dataset), tmp_path / "converted")
    assert open_checkpoint(tmp_path / "converted").dense_tensors().keys() <= state.keys()
    others = dglkge.open_run(tmp_path / "hub", str(dataset)), dglkge.open_run(tmp_path / "converted")
    ranks = [rank(other) for other in (run, *others)]
    assert ranks[0] == ranks[1] == ranks[2]
    init = f"checkpoint.init_path={folder}"
    with opened(tmp_path / "next", *more, init) as trainer:
        copied = dense_of(trainer)
        assert copied.keys() == {path for path in state if path.startswith("dense/")}
        assert all(torch.equal(values, state[path]) for path, values in copied.items())
        metrics = ranking(trainer)
        assert {key: metrics[key] for key in ranks[0]} == ranks[0]
    with opened(tmp_path / "other", *more, "dense.optimizer=Adagrad", init) as trainer:
        states = trainer._job.dense.optimizer.state.values()
        assert not any(state["sum"].any() for state in states)  # another optimizer's state is not taken
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


@pytest.mark.parametrize(("name", "options", "dim"), [
    *(("tucker", {"relation_dimension": 3}, 6), ("tucker", {}, 5), ("conve", {"channels": 3}, 13)),
    *(("conve", {}, 3), ("conex", {"channels": 5}, 6), ("transformer", {"layers": 3, "heads": 2}, 6)),
])  # fmt: skip
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


@pytest.mark.parametrize(("module", "words"), [
    (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)), "layer 1 of .* is a Dropout, whose"),
    (torch.nn.Sequential(torch.nn.BatchNorm1d(4)), "the layer 0 of .* is a BatchNorm1d, whose result"),
    (torch.nn.Linear(4, 4).bfloat16(), "parameter weight of .* is torch.bfloat16; allowed: torch.float32"),
], ids=["dropout", "batch norm", "bfloat16"])  # fmt: skip
def test_refused_modules(module: torch.nn.Module, words: str) -> None:
    class Own(DenseScore):
        def build_module(self, dim: int, seed: int) -> torch.nn.Module:
            return module

    with pytest.raises(InputError, match=words):
        _ = KgeModel(Own(), 4, True).module


@pytest.mark.parametrize(("parameters", "words"), [
    ({}, "here: the dense parameter 'core' is missing"),
    ({"core": torch.ones(4, 4, 4), "other": torch.ones(1)}, "'other' is none of the score function's"),
    ({"core": torch.ones(1, 4, 4)}, r"'core' has shape \(1, 4, 4\), expected \(4, 4, 4\)"),
])  # fmt: skip
def test_parameters_of_another_module_are_refused(parameters: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model("tucker", 4, True).load_module(parameters, "here")


SIZE = 3
NEEDS_SLICES = pytest.mark.skipif(
    not has_slices_on_processors(), reason="this torch has no FSDP2 on processors"
)


@NEEDS_SLICES
def test_slices_are_summed_updated_and_joined(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("shard_ranks.py"))
    words = (str(SIZE), str(free_ports()), str(tmp_path))
    options = {"env": environment(), "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*warm.python(), script, str(rank), *words], **options) for rank in range(SIZE)]
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
