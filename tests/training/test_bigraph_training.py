"""Training with PyTorch-BigGraph's operators and comparators: auto and reference agree, files rank alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dglkge
from dglkge.evaluation.metrics import Protocol
from dglkge.inference.import_tables import import_tables
from dglkge.inference.search import NamedQuery
from dglkge.typing import Side
from tests.training.test_reference import momentum, trained  # noqa: F401

DYNAMIC, STATIC = "model.reciprocal_relations=true", "model.reciprocal_relations=false"
ALL = ("training.objective=one_vs_all", "training.matmul_dtype=float32")
CASES = [
    ("none_cos", STATIC),
    ("rescal", DYNAMIC, *ALL),
    ("affine_cos_bias", STATIC),
    ("affine_l2", DYNAMIC),
    ("diagonal_squared_l2", STATIC, *ALL, "training.relation_prediction=1"),
    ("complex_diagonal_cos", STATIC, "training.objective=k_vs_all"),
    ("translation_dot", STATIC, "model.max_norm=0.7"),
    ("diagonal_dot_bias", STATIC, *ALL, "loss.name=logistic"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_reference_and_auto_agree_and_files_rank_alike(
    case: tuple[str, ...],
    tmp_path: Path,
    momentum: str,  # noqa: F811
) -> None:
    settings = " ".join([f"model.score_function={case[0]}", *case[1:], "evaluation.max_triples=0", momentum])
    settings = settings.split()
    losses, tables, _ = trained(tmp_path, "auto", *settings)
    plain_losses, plain_tables, _ = trained(tmp_path, "reference", *settings)
    np.testing.assert_allclose(losses[:-1], plain_losses[:-1], rtol=1e-4)
    for name, rows in tables.items():
        np.testing.assert_allclose(rows, plain_tables[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert losses[-2] < losses[0] * 1.5
    if "model.max_norm=0.7" in case:
        lengths = np.linalg.norm(tables["person"], axis=1)
        assert lengths.max() <= 0.7 * (1 + 1e-6) and (lengths > 0.699).sum() > 3
    run = dglkge.open_run(tmp_path / "auto")
    live = json.loads((tmp_path / "auto" / "metrics.json").read_text())["test"]
    found = run.evaluate(Protocol(split="test")).to_dict()
    assert {key: found[key] for key in live} == live
    run.export("npy", tmp_path / "npy")
    reciprocal = run.tables.meta.reciprocal
    import_tables(tmp_path / "npy", "npy", run.dataset, case[0], reciprocal, tmp_path / "imported")
    imported = dglkge.open_run(tmp_path / "imported").evaluate(Protocol(split="test")).to_dict()
    assert {key: imported[key] for key in live} == live
    (prediction,) = run.answer([_question(run)], k=3)
    scores = [answer.score for answer in prediction.answers]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)


def _question(run: dglkge.Run) -> NamedQuery:
    head, relation, _ = run.dataset.split("test")[0].tolist()
    known = run.tables.meta.relations[relation]
    return NamedQuery(
        Side.TAIL, run.tables.vocabulary(known.lhs)[head], run.tables.relations.labels[relation]
    )
