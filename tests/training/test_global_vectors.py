"""A vector for each entity type: gradients, updates over several steps, files, resume and refusals."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.config import load_config
from dglkge.step.row_transforms import GlobalVectors
from dglkge.step.train_step import TrainStep
from dglkge.training.trainer import Trainer
from tests.toy_kg import toy_dataset
from tests.training import live
from tests.training.live import rows_by_node, train

DIM = 8
LR = 0.05


def opened(folder: Path, *more: str) -> AbstractContextManager[Trainer]:
    usual = ("model.reciprocal_relations=false", "model.global_vectors=true", "training.batch_size=20")
    usual += (f"optimizer.lr={LR}", "checkpoint.every_epochs=1")
    return live.opened(load_config(None, live.settings(toy_dataset(typed=True), folder, *usual, *more)))


STEPS, CONSTANT = np.arange(20), np.ones(20)


@pytest.mark.parametrize(("settings", "factors", "clip_value", "clip_norm"), [
    ([], CONSTANT, None, None),
    (["optimizer.warmup_batches=4"], np.minimum(1, (STEPS + 1) / 4), None, None),
    (["optimizer.schedule={name: ExponentialLR, gamma: 0.5, every: batch}"], 0.5**STEPS, None, None),
    (["optimizer.clip_value=0.01", "optimizer.clip_norm=0.05"], CONSTANT, 0.01, 0.05),
], ids=["plain", "warm-up", "schedule", "value and norm"])  # fmt: skip
def test_several_steps_against_all_entities_equal_float64(tmp_path, settings, factors, clip_value, clip_norm):
    """DistMult and Adagrad by their formulas, autograd in float64 over (rows, vectors), torch's clipping."""
    more = ("model.score_function=distmult", "training.objective=one_vs_all", "training.num_epochs=1")
    with opened(tmp_path / "run", *more, *settings) as trainer:
        vectors = trainer._job.global_vectors.vectors
        sums = {name: torch.zeros(DIM, dtype=torch.float64) for name in vectors}
        assert len(trainer._train_step.objective.planner.pairs) > 1
        for num_steps, (_, batch) in enumerate(live.batches_of(trainer, 1)):
            rows = {name: table.double().requires_grad_() for name, table in rows_by_node(trainer).items()}
            leaves = {name: values.double().requires_grad_() for name, values in vectors.items()}
            moved = {name: rows[name] + leaves[name] if name in leaves else rows[name] for name in rows}
            loss = live.loss_against_all(trainer, batch, moved, lambda anchors, r, side: anchors * r)
            (loss / batch.global_size).backward()
            parameters = [leaf for leaf in (*rows.values(), *leaves.values()) if leaf.grad is not None]
            if clip_value is not None:
                torch.nn.utils.clip_grad_value_(parameters, clip_value)
            if clip_norm is not None:
                assert torch.nn.utils.clip_grad_norm_(parameters, clip_norm) > clip_norm
            lr = LR * factors[num_steps]
            assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-5)
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    sums[name] += leaf.grad**2
                    expected = leaf.detach() - lr * leaf.grad / (sums[name].sqrt() + 1e-10)
                    got, atol = vectors[name].double(), 1e-4 * lr / LR
                    torch.testing.assert_close(got, expected, rtol=1e-3, atol=atol)
        assert num_steps > 2


def loss_of(step: TrainStep, plan: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute the mean loss of a batch and the gradients of its rows by table, with rows read anew."""
    rows = step.store.rows(plan)
    outcome = step.objective.gradients(plan, rows)()
    return outcome.loss / plan.divisor, {part.table: part.rows for part in rows.collect()}


@pytest.mark.parametrize("score_function", ["diagonal_cos", "affine_l2_bias"])
def test_gradients_against_sampled_negatives_equal_differences(tmp_path: Path, score_function: str) -> None:
    more = (f"model.score_function={score_function}", "regularizer.name=n3", "regularizer.weight=0.1")
    with opened(tmp_path / "run", *more) as trainer:
        step, vectors = trainer._train_step, trainer._job.global_vectors.vectors
        for vector in vectors.values():
            vector.normal_(0, 0.3)
        _, batch = next(live.batches_of(trainer, 1))
        plan = step.store.prepare(step.objective.plan(batch))
        gradients = {name: rows.sum(0).clone() for name, rows in loss_of(step, plan)[1].items()}
        for name, vector in vectors.items():
            for place in range(0, DIM, 3):
                before, ends = vector[place].item(), []
                for sign in (1, -1):
                    vector[place] = before + sign * 1e-2
                    ends.append(loss_of(step, plan)[0])
                vector[place] = before
                difference = (ends[0] - ends[1]) / 2e-2
                assert gradients[name][place].item() == pytest.approx(difference, rel=3e-2, abs=2e-3)


def vectors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {f"vector {name}": vector.clone() for name, vector in trainer._job.global_vectors.vectors.items()}


def test_files_resume_and_ranking(tmp_path: Path) -> None:
    """Vectors under PyTorch-BigGraph's names; files have rows with the vectors added."""
    more = ("model.score_function=diagonal_cos", "training.num_epochs=2")
    folder = tmp_path / "run"

    def look_at_files(half_way: dict[str, torch.Tensor]) -> None:
        vectors = {name.removeprefix("vector "): half_way[name] for name in half_way if " " in name}
        with h5py.File(folder / "checkpoint" / "v1" / "model.v1.h5") as file:
            num_relations = len(file["model/relations"])
            state = hdf5_format.read_blob(file["optimizer/state_dict"])["state"]
            # The sums of the vectors are behind those of the operators.
            assert len(state) == num_relations + len(vectors)
            for number, (name, vector) in enumerate(vectors.items()):
                dataset = file[f"model/entities/{name}/global_embedding"]
                assert dataset.attrs["state_dict_key"] == f"global_embs.emb_{name}" and vector.any()
                assert dataset.dtype == np.float32 and np.array_equal(dataset[...], vector.numpy())
                assert np.array_equal(state[num_relations + number]["sum"], file[f"global_sums/{name}"][...])
        config = json.loads((folder / "checkpoint" / "latest" / "config.json").read_text())
        assert config["global_emb"] is True

    state = live.assert_resumes(opened, folder, vectors_of, *more, after_one=look_at_files)
    with opened(folder, *more) as trainer:
        original = {name: table.original_ids for name, table in trainer.tables.items()}
    for name in [path.removeprefix("vector ") for path in state if " " in path]:
        gathered = open_checkpoint(folder).gather(name, original[name])
        assert torch.equal(gathered, state[name] + state[f"vector {name}"])


def test_another_run_starts_with_the_rows_as_they_are_scored(tmp_path: Path) -> None:
    more = ("model.score_function=none_l2", "training.num_epochs=1")
    with opened(tmp_path / "run", *more) as trainer:
        train(trainer, 1)
        metrics = trainer.evaluate("test").to_dict()
        sums = {name: values.tolist() for name, values in trainer._job.global_vectors._sums.items()}
    assert all(any(values) for values in sums.values())
    with opened(tmp_path / "next", *more, f"checkpoint.init_path={tmp_path / 'run'}") as trainer:
        assert not any(vector.any() for vector in trainer._job.global_vectors.vectors.values())
        assert {name: values.tolist() for name, values in trainer._job.global_vectors._sums.items()} == sums
        assert trainer.evaluate("test").to_dict() == metrics


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    vectors = GlobalVectors(["a", "b"], 2, {"lr": 0.5}, lambda total: total)
    vectors.start_batch(0)
    vectors.backward("a", torch.arange(1), torch.tensor([[1.0, float("nan")]]))
    vectors.backward("b", torch.arange(3), torch.ones(3, 2))
    squares = vectors.sum_gradients([])
    vectors.update(1.0)
    assert squares == 2 * 3**2
    assert vectors.vectors["a"].tolist() == [0, 0]
    torch.testing.assert_close(vectors.vectors["b"], torch.full((2,), -0.5))
