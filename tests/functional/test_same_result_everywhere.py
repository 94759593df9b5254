"""The same training in one process, with several trainers, on several hosts: equal but for float32 sums."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.results import assert_same_training, metrics, parameters, stats
from tests.functional.simulated_hosts import CHECKED_TRAIN, train_on_hosts
from tests.toy_kg import toy_dataset, weighted_dataset

SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "training.matmul_dtype=float32", "training.num_epochs=3"),
    *("training.batch_size=50", "negatives.num_uniform=20", "negatives.chunk_size=25"),
    *("sampling.order=global", "regularizer={name: n3, weight: 0.01}", "evaluation.split=none"),
)
ONE_VS_ALL = "training.objective={name: one_vs_all, label_smoothing: 0.1}"
K_VS_ALL = "training.objective={name: k_vs_all, label_smoothing: 0.1}"
RELATIONS = "training.relation_prediction=2"
MAX_NORM = 0.8
BIGRAPH = (
    *("model.dimension=8", "model.init_scale=0.3", "model.reciprocal_relations=false", "optimizer.lr=0.05"),
    *("regularizer={name: none}", "model.global_vectors=true", f"model.max_norm={MAX_NORM}"),
)
DROPPED = ("model.entity_dropout=0.2", "model.relation_dropout=0.1")


@dataclass(frozen=True)
class Case:
    """Settings, a data set, trainers of a job on one machine (0: no such job) and of each of two hosts."""

    settings: tuple[str, ...]
    typed: bool = True
    trainers: int = 0
    per_host: int = 1
    atol: float = 1e-4


CASES = {
    "one vs all, one type": Case((ONE_VS_ALL, RELATIONS), False, 3, 2),
    "k vs all": Case((K_VS_ALL, "loss.name=logistic")),
    "k vs all with pairs": Case(
        ("training.objective=k_vs_all", "loss={name: margin_ranking, adversarial_weights: true}")
    ),
    "k vs all with dura and dropout": Case(
        (K_VS_ALL, RELATIONS, "regularizer={name: dura, weight: 0.01}", *DROPPED), *(True, 3, 2)
    ),
    "relations beside samples": Case((RELATIONS, "regularizer={name: ivr, weight: 0.01}", DROPPED[0])),
    # A softmax over candidates does not depend on some biases: Adagrad would turn gradients that are nothing
    # but rounding into steps.
    "PyTorch-BigGraph's model, sampled": Case(
        (*BIGRAPH, "model.score_function=affine_cos_bias", "loss.name=logistic"), atol=1e-3
    ),
    "PyTorch-BigGraph's model, one vs all": Case(
        (*BIGRAPH, "model.score_function=diagonal_l2", "training.objective=one_vs_all"), atol=1e-3
    ),
    "weighted, autograd": Case(
        (
            *("negatives.mask_known=true", "negatives.degree_power=0.75", "negatives.num_for_heads=7"),
            *("loss.name=bce", "loss.confidences=true", "loss.adversarial_weights=true"),
            "loss.relation_weights={near: 0.5, knows: 3}",
        ),
        trainers=3,
    ),
    "features": Case(
        (
            *("model.dimension=8", "model.init_scale=0.3", "model.entity_dropout=0.1", "features.mlp={}"),
            *("features.mlp.hidden=6", "dense.lr=0.01", "regularizer={name: none}"),
            *("training.objective=one_vs_all", "optimizer.clip_norm=0.5"),
        ),
        atol=1e-3,
    ),
    # At a size where the default may take products in bfloat16, with which tables differ by about 6e-4.
    "exact products": Case(
        (
            *("model.dimension=64", "training.batch_size=150", "negatives.num_uniform=300"),
            *("negatives.chunk_size=150", "optimizer.lr=0.05"),
        ),
        *(False, 2, 0),
        atol=5e-5,
    ),
}


def write_features(folder: Path, dataset: Path) -> str:
    """Write features of the persons; returns the setting that names them."""
    names = Dataset.open(dataset).vocabulary("person").names
    np.save(folder / "person.npy", np.random.default_rng(0).normal(size=(len(names), 5)))
    (folder / "person.names.txt").write_text("\n".join(names) + "\n")
    return f"features.files=[person={folder / 'person.npy'}]"


def stored_lengths(run: Path) -> np.ndarray:
    """Return the lengths of the entities' rows as the files have them, without global vectors."""
    lengths = []
    for path in (run / "checkpoint" / "latest").glob("embeddings_*.h5"):
        with h5py.File(path) as file:
            lengths.append(np.linalg.norm(file["embeddings"][...].astype(float), axis=1))
    return np.concatenate(lengths)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_parameters_do_not_depend_on_trainers_and_hosts(tmp_path: Path, name: str) -> None:
    case, runs = CASES[name], {where: tmp_path / where for where in ("alone", "machine", "hosts")}
    settings = (*SETTINGS, *case.settings)
    if name.startswith("weighted"):
        dataset, on_two = (weighted_dataset(tmp_path / f"data{num}", num_parts=num) for num in (1, 2))
    else:
        method = "metis" if case.typed else "random"
        dataset, on_two = toy_dataset(typed=case.typed), toy_dataset(2, case.typed, method)
    if name == "features":
        settings += (write_features(tmp_path, dataset),)
    commands.train_alone(f"dataset={dataset}", f"output={runs['alone']}", *settings)
    if case.trainers:
        more = (f"dataset={dataset}", f"output={runs['machine']}")
        commands.train(tmp_path, case.trainers, *more, *settings)
        if any("_vs_all" in word for word in case.settings):
            # What trainers of one machine agree on, all have.
            assert not any(record["bytes_sent"] for record in stats(runs["machine"]))
    if case.per_host:
        train_on_hosts(tmp_path / "job", on_two, case.per_host, f"output={runs['hosts']}", *settings)
        assert all(record["bytes_sent"] > 0 for record in stats(runs["hosts"]))
    made = [run for run in runs.values() if run.exists()]
    assert len(made) == 1 + bool(case.trainers) + bool(case.per_host)
    for run in made:
        assert_same_training(run, runs["alone"], atol=case.atol)
    num_dense = {"features": 4}.get(name, 3 * (BIGRAPH[0] in settings))
    assert len(parameters(runs["alone"])) == (2, 4)[case.typed] + num_dense
    for run in made if f"model.max_norm={MAX_NORM}" in settings else ():
        lengths = stored_lengths(run)
        assert lengths.max() <= MAX_NORM * (1 + 1e-6) and (lengths > 0.999 * MAX_NORM).mean() > 0.1


@pytest.mark.parametrize(
    "num_hosts, typed, method, per_host", [(2, True, "metis", 2), (4, False, "random", 1)]
)
def test_rows_of_other_hosts_are_those_of_the_kvstore(tmp_path, num_hosts, typed, method, per_host):
    """And ranks do not depend on the hosts either."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    settings = (*SETTINGS, "training.num_epochs=4", "optimizer.lr=0.05", "evaluation.split=test")
    commands.train_alone(f"dataset={toy_dataset(typed=typed)}", f"output={alone}", *settings)
    dataset = toy_dataset(num_hosts, typed, method)
    words = (f"output={run}", *settings)
    logs = train_on_hosts(tmp_path / "job", dataset, per_host, *words, script=CHECKED_TRAIN)
    assert len(logs) == num_hosts * per_host
    assert all(re.search(r"compared \d{3,} rows", log) for log in logs), logs
    assert_same_training(run, alone)
    places = [[(record["epoch"], record["batches_done"]) for record in stats(path)] for path in (run, alone)]
    assert places[0] == places[1]
    assert not any(record["bytes_sent"] for record in stats(alone))
    assert all(record["bytes_sent"] > 0 for record in stats(run))
    assert metrics(run)["both"]["mrr"] == pytest.approx(metrics(alone)["both"]["mrr"], abs=0.02)
    assert open_checkpoint(run).meta.progress["finished_epochs"] == 4
