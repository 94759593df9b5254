"""Relation prediction beside sampled negatives, against float64 loops over triples and relations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.training.building.checks import check_config
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset
from tests.training import test_train_step
from tests.training.live import Rows, assert_epochs_equal, dense_rows, opened
from tests.training.test_one_vs_all import side_scores
from tests.training.test_train_step import oracle_batch, settings

WEIGHT = 3.0


def relation_loss(
    data: Dataset, rows: dict[str, torch.Tensor], batch: EdgeBatch, name: str, reciprocal: bool
) -> torch.Tensor:
    """Return the summed cross entropy of each triple's relation among all, for both directions."""
    total = torch.zeros((), dtype=torch.float64)
    width = rows[RELATION].shape[1] // (2 if reciprocal else 1)
    forward, backward = rows[RELATION][:, :width], rows[RELATION][:, -width:]
    single = {name: table.unbind() for name, table in rows.items()}
    for h, r, t in torch.from_numpy(np.array(data.split("train"))[batch.triple_ids].astype(np.int64)):
        relation = data.relations.relations[int(r)]
        head, tail = single[relation.lhs][h], single[relation.rhs][t]
        for side, given, true, relations in (
            (Side.TAIL, head, tail, forward),
            (Side.HEAD, tail, head, backward),
        ):
            scores = side_scores(name, given, relations, true, side is Side.HEAD and not reciprocal)
            total = total + functional.cross_entropy(scores[None], r[None])
    return total


@pytest.mark.parametrize("typed", [False, True], ids=["one type", "three types"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_three_epochs_equal_a_dense_float64_loop(
    tmp_path: Path, typed: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_train_step, "WEIGHT", 0.0)
    dataset = toy_dataset(typed=typed)
    more = (f"training.relation_prediction={WEIGHT}", f"training.kernels={kernels}")
    config = load_config(None, settings(dataset, tmp_path / "run", *more, "training.matmul_dtype=float32"))

    def loss_of(data: Dataset, _: Any, rows: Rows, batch: EdgeBatch) -> torch.Tensor:
        predicted = relation_loss(data, rows, batch, "complex", True)
        return oracle_batch(data, rows, batch) + WEIGHT * predicted

    assert_epochs_equal(config, loss_of, 3, rel=1e-4)


CHOICES = [
    ("transe_l2", "margin_ranking", True),
    ("distmult", "logistic", False),
    ("distmult", "softmax", False),
    ("rotate", "self_adversarial", False),
]


@pytest.mark.parametrize(("score_function", "loss", "reciprocal"), CHOICES)
def test_it_is_a_softmax_with_every_score_function_and_loss(
    tmp_path: Path, score_function: str, loss: str, reciprocal: bool
) -> None:
    """The first batch's loss, less that of the same batch without relation prediction."""
    dataset, losses, expected = toy_dataset(typed=True), [], 0.0
    data = Dataset.open(dataset)
    for weight in (0.0, WEIGHT):
        more = (
            f"model.score_function={score_function}",
            f"model.reciprocal_relations={str(reciprocal).lower()}",
            f"loss.name={loss}",
            f"training.relation_prediction={weight}",
            "training.matmul_dtype=float32",
        )
        config = load_config(None, settings(dataset, tmp_path / str(weight), *more))
        with opened(config) as trainer:
            rows = dense_rows(trainer)
            for _ in dglkge.remaining_epochs_until(1):
                batch = next(iter(trainer.batches()))
                losses.append(trainer.step(batch))
                expected = relation_loss(data, rows, batch, score_function, reciprocal).item()
    assert losses[1] - losses[0] == pytest.approx(WEIGHT * expected, rel=1e-4)


def test_trainers_must_wait_for_each_other() -> None:
    overrides = ["dataset=toy", "training.relation_prediction=2", "training.synchronous=false"]
    words = "training.synchronous is false and training.relation_prediction is 2, .*; allowed: true"
    with pytest.raises(InputError, match=words):
        check_config(load_config(None, overrides))
