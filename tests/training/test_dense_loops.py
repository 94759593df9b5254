"""Epochs of every objective equal plain loops in float64, with torch's own Adagrad: losses and all tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.optim.links import UpdateResult
from dglkge.step.objectives.dot_softmax import DotSoftmax
from dglkge.step.objectives.scored_losses import AutogradLoss
from tests.toy_kg import temporal_dataset, toy_dataset, weighted_dataset
from tests.training.dense_loops import Oracle
from tests.training.live import assert_epochs_equal, dense_rows, opened, settings, train

N3 = "regularizer.name=n3 regularizer.weight=0.02"
PREDICTED = "training.relation_prediction=3"
SMOOTHED = "training.objective.label_smoothing=0.1"
DROPPED = "model.entity_dropout=0.25 model.relation_dropout=0.125"
ONE_VS_ALL, K_VS_ALL = "training.objective=one_vs_all", "training.objective=k_vs_all training.batch_size=70"
NOT_RECIPROCAL = "model.reciprocal_relations=false"
REFERENCE = "training.kernels=reference"
ON_DEVICE = "training.device=cpu_staged tables.storage=device"


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose triples have weights in [0, 1]."""
    return weighted_dataset(tmp_path_factory.mktemp("weighted"))


def assert_equal(dataset: Path, run: Path, case: str, num_epochs: int = 2, rel: float = 1e-3) -> Oracle:
    """Train by both, from the same rows."""
    config = load_config(None, settings(dataset, run, *case.split()))
    oracle = Oracle(config)
    sums_batch = config.loss.batch_reduction == "sum"
    assert_epochs_equal(config, oracle.loss, num_epochs, rel=rel, sums_batch=sums_batch)
    return oracle


NEGATIVE_SAMPLING = [
    "negatives.num_for_heads=5",
    f"negatives.num_for_tails=0 {N3}",
    f"negatives.num_for_heads=0 loss.name=bce {N3}",
    "negatives.mask_known=true negatives.num_for_tails=4",
    "negatives.mask_known=true loss.name=hinge",
    f"negatives.mask_known=true loss.name=bce {REFERENCE}",
    "negatives.degree_power=0.75",
    "negatives.degree_power=2 negatives.num_for_heads=7 loss.name=squared",
    "negatives.name=all_entities",
    "negatives.name=all_entities loss.name=margin_ranking negatives.num_for_heads=0",
    "loss.adversarial_weights=true loss.adversarial_temperature=2",
    "loss.adversarial_weights=true loss.name=bce",
    "loss.name=bce loss.reduction=sum",
    "loss.batch_reduction=sum",
    "loss.name=squared loss.batch_reduction=sum",
    f"{PREDICTED} {REFERENCE}",
    f"{PREDICTED} model.score_function=distmult loss.name=logistic {NOT_RECIPROCAL}",
]


@pytest.mark.parametrize("case", NEGATIVE_SAMPLING)
def test_sampled_negatives(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(typed=True), tmp_path / "run", case, rel=1e-4)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("case", ["", ONE_VS_ALL, K_VS_ALL])
def test_relations_are_predicted_at_the_times_of_triples(case: str, on_device: bool, tmp_path: Path) -> None:
    """A relation at a time has the row of the relation, on the host and on a device."""
    more = ON_DEVICE if on_device else ""
    oracle = assert_equal(temporal_dataset(), tmp_path / "run", f"{case} {PREDICTED} {more}", 1, rel=1e-4)
    assert oracle.data.num_times == 4


@pytest.mark.parametrize("case", [N3, PREDICTED])
def test_three_epochs_on_one_entity_type(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(), tmp_path / "run", case, num_epochs=3, rel=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        f"{PREDICTED} model.score_function=transe_l2 loss.name=margin_ranking",
        f"{PREDICTED} model.score_function=rotate loss.name=self_adversarial loss.margin=2 {NOT_RECIPROCAL}",
    ],
)
def test_distances_against_sampled_negatives(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(typed=True), tmp_path / "run", case)


@pytest.mark.parametrize(
    "case",
    [
        "loss.relation_weights.near=0.5 loss.relation_weights.knows=3",
        "loss.relation_weights.lives_in=0 loss.name=hinge negatives.num_for_heads=0",
        "loss.confidences=true loss.name=logistic",
        "loss.confidences=true loss.name=bce loss.relation_weights.near=2",
        "loss.confidences=true loss.name=squared negatives.mask_known=true",
        f"loss.confidences=true loss.name=hinge {REFERENCE}",
        "loss.name=squared",
    ],
)
def test_weights_of_triples_and_relations(case: str, weighted: Path, tmp_path: Path) -> None:
    assert_equal(weighted, tmp_path / "run", case, rel=1e-4)


FULL = f"{ONE_VS_ALL} {N3} {PREDICTED} {SMOOTHED}"


@pytest.mark.parametrize(
    "case",
    [
        FULL,
        f"{FULL} loss.name=logistic",
        f"{ONE_VS_ALL} loss.name=logistic",
        *(
            f"{ONE_VS_ALL} {PREDICTED} loss.name={name}"
            for name in ("margin_ranking", "self_adversarial", "hinge", "squared")
        ),
        f"{FULL} {REFERENCE}",
        f"{FULL} {REFERENCE} model.score_function=rotate",
    ],
)
def test_one_vs_all(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(typed=True), tmp_path / "run", case)


@pytest.mark.parametrize(
    "case",
    [
        f"distmult {NOT_RECIPROCAL}",
        f"complex {NOT_RECIPROCAL}",
        "transe_l2",
        f"rotate {NOT_RECIPROCAL}",
        "rotate",
        f"rescal {NOT_RECIPROCAL}",
        f"simple {NOT_RECIPROCAL}",
        "simple",
        f"quate {NOT_RECIPROCAL}",
        "quate",
    ],
)
def test_score_functions_over_all_candidates(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(typed=True), tmp_path / "run", f"{FULL} model.score_function={case}")


@pytest.mark.parametrize("case", [ONE_VS_ALL, f"{K_VS_ALL} loss.name=logistic"])
def test_all_candidates_on_one_entity_type(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(), tmp_path / "run", case)


@pytest.mark.parametrize(
    "case",
    [
        K_VS_ALL,
        f"{K_VS_ALL} loss.name=logistic {SMOOTHED} {N3}",
        f"{K_VS_ALL} {SMOOTHED} {PREDICTED}",
        f"{K_VS_ALL} {PREDICTED} loss.name=margin_ranking",
        f"{K_VS_ALL} {PREDICTED} loss.batch_reduction=sum",
        f"{K_VS_ALL} {SMOOTHED} {PREDICTED} loss.name=logistic model.score_function=distmult",
        f"{K_VS_ALL} {SMOOTHED} {PREDICTED} loss.name=logistic model.score_function=transe_l2",
    ],
)
def test_k_vs_all_has_each_query_and_each_pair_once_an_epoch(case: str, tmp_path: Path) -> None:
    oracle = assert_equal(toy_dataset(typed=True), tmp_path / "run", case)
    epoch = [*oracle.answers, *(oracle.relations if PREDICTED in case else ())]
    assert sorted(oracle.seen, key=str) == sorted([*epoch, *epoch], key=str)
    assert set(oracle.seen[: len(epoch)]) == set(epoch)


PENALTIES = {
    "n3": "regularizer.entity_ratio=0.5 regularizer.relation_ratio=3",
    "lp": "regularizer.relation_ratio=0 regularizer.p=2",
    "f2": "regularizer.relation_ratio=0.5",
    "dura": "regularizer.product_ratio=3 regularizer.entity_ratio=0.5",
    "ivr": "regularizer.product_ratio=2 regularizer.p=2.5",
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, "") for name in PENALTIES),
        *((name, REFERENCE) for name in ("f2", "dura", "ivr")),
        *((name, f"{ONE_VS_ALL} {PREDICTED} model.score_function=distmult {NOT_RECIPROCAL}")
          for name in ("n3", "dura", "ivr")),
        *((name, f"{ONE_VS_ALL} {PREDICTED}") for name in ("lp", "f2", "dura")),
        *((name, K_VS_ALL) for name in ("n3", "lp", "f2", "dura")),
    ],
)  # fmt: skip
def test_regularizers(name: str, case: str, tmp_path: Path) -> None:
    """Of queries with several answers the mean over the answers."""
    penalty = f"regularizer.name={name} regularizer.weight=0.02 {PENALTIES[name]}"
    assert_equal(toy_dataset(typed=True), tmp_path / "run", f"{case} {penalty}")


@pytest.mark.parametrize(
    "case", [N3, f"{N3} {REFERENCE}", f"{ONE_VS_ALL} {N3} {PREDICTED}", f"{K_VS_ALL} {N3} {REFERENCE}"]
)
def test_row_dropout(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(typed=True), tmp_path / "run", f"{case} {DROPPED}")


def gradients_of_a_batch(trainer: dglkge.Trainer, batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Return the summed loss of a batch and the sum of the gradients of each row, without an update."""
    sums = {name: np.zeros((len(table), table.dim)) for name, table in trainer.tables.items()}

    def collect(gradients: list, **_: object) -> UpdateResult:
        for name, table in trainer.tables.items():
            for embedding, ids, values in gradients:
                if embedding is table.embedding:
                    np.add.at(sums[name], np.asarray(ids), values.numpy())
        return UpdateResult(0)

    trainer.optimizer.step_rows = collect
    return trainer.step(batch), sums


@pytest.mark.parametrize("case", ["pairre", f"triplere {NOT_RECIPROCAL}"])
def test_wide_queries(tmp_path: Path, case: str) -> None:
    """Loss and gradients of a batch; Adagrad would turn noise of signs that cancel into whole steps."""
    sets = f"{FULL} model.score_function={case}".split()
    config = load_config(None, settings(toy_dataset(typed=True), tmp_path / "run", *sets))
    oracle = Oracle(config)
    with opened(config) as trainer:
        rows = dense_rows(trainer)
        for _ in dglkge.remaining_epochs_until(1):
            batch = next(iter(trainer.batches()))
            loss = oracle.loss(oracle.data, trainer, rows, batch) / batch.global_size
            loss.backward()
            total, sums = gradients_of_a_batch(trainer, batch)
            assert total / batch.global_size == pytest.approx(loss.item(), rel=1e-4)
        for name, twin in rows.items():
            original = trainer.tables[name].original_ids
            expected = twin.grad[original] if twin.grad is not None else 0 * twin.detach()
            np.testing.assert_allclose(sums[name], expected, rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", [f"{SMOOTHED} {N3}", PREDICTED])
def test_queries_with_all_their_answers_learn_as_much_as_their_triples(case: str, tmp_path: Path) -> None:
    """All triples in one batch of either objective: one gradient, but for the factor of the mean."""
    results = []
    for objective in ("one_vs_all", "k_vs_all"):
        words = f"training.objective={objective} training.batch_size=100000 {case}".split()
        config = load_config(None, settings(toy_dataset(typed=True), tmp_path / objective, *words))
        with opened(config) as trainer:
            for _ in dglkge.remaining_epochs_until(1):
                (batch,) = trainer.batches()
                loss, sums = gradients_of_a_batch(trainer, batch)
        results.append((loss / batch.global_size, sums))
    (by_triples, expected), (by_queries, sums) = results
    triples = Dataset.open(toy_dataset(typed=True)).split("train")
    assert len(np.unique(triples, axis=0)) == len(triples)
    # A triple has an answer on each side, and its relation where relations are predicted.
    answers = 3 if "relation_prediction" in case else 2
    assert answers * by_queries == pytest.approx(by_triples, rel=1e-5)
    for name, rows in expected.items():
        assert np.abs(rows).max() > 1e-3
        np.testing.assert_allclose(answers * sums[name], rows, rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("penalty", ["regularizer.name=lp regularizer.weight=0.1", "regularizer.name=none"])
def test_products_in_bfloat16_are_near(tmp_path: Path, penalty: str) -> None:
    totals = []
    for dtype in ("float32", "bfloat16"):
        sets = f"{ONE_VS_ALL} {PREDICTED} {SMOOTHED} {penalty} training.matmul_dtype={dtype}".split()
        with opened(load_config(None, settings(toy_dataset(), tmp_path / dtype, *sets))) as trainer:
            totals.append(train(trainer, 2))
    assert totals[0][-1] != totals[1][-1]
    np.testing.assert_allclose(*totals, rtol=2e-3)


def test_the_cases_have_what_they_are_about(tmp_path: Path) -> None:
    """Known answers among the negatives, and loops of their own for both kinds of kernels."""
    triples = Dataset.open(toy_dataset(typed=True)).split("train")
    pairs, counts = np.unique(triples[:, 1:], axis=0, return_counts=True)
    assert counts.max() > 2 and len(pairs) > 20
    for case, kind in (
        (N3, DotSoftmax),
        (f"{N3} {REFERENCE}", AutogradLoss),
        ("loss.name=hinge", DotSoftmax),
    ):
        with opened(
            load_config(None, settings(toy_dataset(typed=True), tmp_path / "run", *case.split()))
        ) as trainer:
            assert isinstance(trainer._train_step.objective, kind)


@pytest.mark.parametrize(
    ("case", "scale", "message"),
    [
        ("loss.confidences=true loss.name=bce", 1.0, "and the triples of .* have no weights; allowed: false"),
        ("loss.confidences=true loss.name=bce", 2.0, r"training triple \d+ of .* has the weight 1.*\[0, 1\]"),
        ("loss.relation_weights.knowz=2", 1.0, "unknown relation 'knowz'; did you mean 'knows'"),
    ],
)
def test_weights_that_do_not_fit_the_data_are_refused(case, scale, message, tmp_path):
    dataset = toy_dataset(typed=True) if scale == 1 else weighted_dataset(tmp_path / "data", scale)
    config = load_config(None, [f"dataset={dataset}", f"output={tmp_path / 'run'}", *case.split()])
    with pytest.raises(InputError, match=message), dglkge.join_cluster(config):
        pass
    assert not (tmp_path / "run").exists()
