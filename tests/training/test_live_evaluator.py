"""The loss of a split, in rankings, against its formula in float64 and against the training's own loss."""

from __future__ import annotations

import json

import pytest
import torch

from dglkge.config import load_config
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset, weighted_dataset
from tests.training.live import dense_rows, opened, settings, train

PLAIN = ["model.score_function=distmult", "model.reciprocal_relations=false"]
RECIPROCAL = "model.reciprocal_relations=true"
ALL_NEGATIVE = ["negatives.name=all_entities"]
ONE_VS_ALL = ["training.objective=one_vs_all"]
K_VS_ALL = ["training.objective=k_vs_all"]
LEFT_OUT = ["regularizer.name=n3", "regularizer.weight=0.1", "model.entity_dropout=0.3"]


def configured(run, *words):
    """Return the configuration of two epochs."""
    sets = settings(toy_dataset(typed=True), run, "training.num_epochs=2", *words)
    if not {*ONE_VS_ALL, *K_VS_ALL}.isdisjoint(words):
        sets = [word for word in sets if not word.startswith("negatives.")]
    return load_config(None, sets)


def records(run):
    return [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]


def cross_entropy(rows, relations, triples):
    """Return the mean over triples of the softmax losses of head and tail among all entities, in float64."""
    total = 0.0
    for head, relation_id, tail in triples.tolist():
        heads, tails = rows[relations[relation_id].lhs], rows[relations[relation_id].rhs]
        for entity, candidates, answer in ((heads[head], tails, tail), (tails[tail], heads, head)):
            scores = candidates @ (rows[RELATION][relation_id] * entity)
            total += torch.nn.functional.cross_entropy(scores, torch.tensor(answer)).item()
    return total / len(triples)


@pytest.mark.parametrize("words", [ONE_VS_ALL, ALL_NEGATIVE])
def test_it_is_the_formula_without_regularizer_and_dropout(words, tmp_path):
    words = [*PLAIN, *words, *LEFT_OUT, "evaluation.valid_every_epochs=1"]
    with opened(configured(tmp_path / "run", *words)) as trainer:
        dataset = trainer._job.dataset
        num_pieces = len(trainer._job.step_memory)
        train(trainer, 2)
        result = trainer.evaluate("valid")
        expected = cross_entropy(dense_rows(trainer), dataset.relations.relations, dataset.split("valid"))
        # It computes in the memory of the training's objective.
        assert len(trainer._job.step_memory) == num_pieces > 0
    assert result.loss == pytest.approx(expected, rel=1e-5)
    losses = [record["valid"]["loss"] for record in records(tmp_path / "run") if "valid" in record]
    assert len(losses) == 2 and losses[1] == pytest.approx(expected, rel=1e-5)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["valid"]["both"]["loss"] == losses[1]


@pytest.mark.parametrize(
    "words",
    [
        ONE_VS_ALL,
        [*ONE_VS_ALL, "training.relation_prediction=0.5", "loss.name=logistic"],
        [*K_VS_ALL, "loss.name=logistic"],
        [*K_VS_ALL, "training.relation_prediction=0.5", "training.kernels=reference"],
        [*ALL_NEGATIVE, "loss.name=logistic", "training.relation_prediction=0.5"],
        [*ALL_NEGATIVE, "loss.name=self_adversarial", "model.score_function=rotate", RECIPROCAL],
        ["training.device=cpu_staged", *ONE_VS_ALL],
    ],
)
def test_of_the_training_triples_it_is_the_loss_of_an_epoch_that_changes_nothing(words, tmp_path):
    words = [*PLAIN, *words, "optimizer.lr=1e-30", "optimizer.relations.lr=1e-30"]
    with opened(configured(tmp_path / "run", *words)) as trainer:
        triples = trainer._job.dataset.split("train")
        before = trainer._evaluator._loss("train", triples)
        train(trainer, 2)
        after = trainer._evaluator._loss("train", triples)
    ends = [end for end in records(tmp_path / "run") if end["batches_done"] == end["num_batches"]]
    epochs = [end["epoch_loss"] for end in ends]
    assert len(epochs) == 2 and epochs == pytest.approx([before] * 2, rel=1e-4)
    assert after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        ["model.score_function={name: conve, channels: 2}", "model.reciprocal_relations=true", *K_VS_ALL],
        [*ONE_VS_ALL, "regularizer.name=n3", "regularizer.weight=0.1"],
        ["model.entity_dropout=0.2", "training.relation_prediction=0.5", *PLAIN, "model.global_vectors=true"],
        ["sampling.num_ranges=3", "negatives.mask_known=true", "loss.name=logistic", "optimizer.clip_norm=1"],
    ],
)
def test_training_is_the_same_with_it(words, tmp_path):
    """Drawn negatives and gradients of a split leave no trace, in the parameters of a module neither."""
    losses = []
    for interval in (0, 1):
        run = tmp_path / str(interval)
        with opened(configured(run, *words, f"evaluation.valid_every_epochs={interval}")) as trainer:
            losses.append(train(trainer, 2))
    assert losses[0] == losses[1]


def test_confidences_of_a_split_are_those_of_true_triples(tmp_path):
    """Only training triples have them: a triple of a split is true."""
    weighted, losses = weighted_dataset(tmp_path), []
    for confidences in ("true", "false"):
        words = [*PLAIN, "loss.name=logistic", f"loss.confidences={confidences}"]
        with opened(load_config(None, settings(weighted, tmp_path / confidences, *words))) as trainer:
            losses.append(trainer.evaluate("valid").loss)
    assert losses[0] == losses[1]
