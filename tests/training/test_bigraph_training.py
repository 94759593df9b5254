"""Training with PyTorch-BigGraph's operators and comparators: auto and reference agree, files rank alike."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.config import load_config
from dglkge.evaluation.metrics import Protocol
from dglkge.inference.exports.import_tables import import_tables
from dglkge.model.choices import OPTIMIZERS
from tests.optim.test_new_rule import MomentumRule
from tests.toy_kg import toy_dataset
from tests.training.live import assert_same_tables, dense_rows, opened, ranking, settings, train, trained
from tests.training.test_entity_dimensions import scores

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
def test_reference_and_auto_agree_and_files_rank_alike(case, tmp_path, monkeypatch):
    # SGD with momentum is linear: Adagrad turns gradients of rounding noise into steps.
    monkeypatch.setitem(OPTIMIZERS._members, "momentum", MomentumRule)
    more = [f"model.score_function={case[0]}", *case[1:], "optimizer.name=momentum"]
    more.append("evaluation.max_triples=0")
    losses, tables, _ = trained(tmp_path, "auto", *more)
    plain_losses, plain_tables, _ = trained(tmp_path, "reference", *more)
    np.testing.assert_allclose(losses[:-1], plain_losses[:-1], rtol=1e-4)
    assert_same_tables(tables, plain_tables, 1e-3, 1e-4)
    assert losses[-2] < losses[0] * 1.5
    if "model.max_norm=0.7" in case:
        lengths = np.linalg.norm(tables["person"], axis=1)
        assert lengths.max() <= 0.7 * (1 + 1e-6) and (lengths > 0.699).sum() > 3
    run = dglkge.open_run(tmp_path / "auto")
    live = json.loads((tmp_path / "auto" / "metrics.json").read_text())["test"]
    for results in (live, live["both"]):
        results.pop("loss", None)  # files are ranked without
    metrics = run.evaluate(Protocol(split="test")).to_dict()
    assert {key: metrics[key] for key in live} == live
    run.export("npy", tmp_path / "npy")
    reciprocal = run.tables.meta.reciprocal
    import_tables(tmp_path / "npy", "npy", run.dataset, case[0], reciprocal, tmp_path / "imported")
    imported = dglkge.open_run(tmp_path / "imported").evaluate(Protocol(split="test")).to_dict()
    assert {key: imported[key] for key in live} == live


OWN = {"lives_in": "translation", "near": "affine", "knows": "complex_diagonal"}
"""Operators of relations in the typed toy graph; lies_in has the first one."""


@pytest.mark.parametrize("objective", ["training.objective=one_vs_all", "negatives.name=all_entities"])
@pytest.mark.parametrize("comparator", ["dot", "cos", "l2"])
@pytest.mark.parametrize("reciprocal", [False, True])
def test_several_operators_train_as_autograd_in_float64(objective, comparator, reciprocal, tmp_path):
    named = "{" + ", ".join(f"{relation}: {operator}" for relation, operator in OWN.items()) + "}"
    more = (f"model.score_function=diagonal+translation+affine+complex_diagonal_{comparator}", objective)
    more += (f"model.relation_operators={named}", f"model.reciprocal_relations={reciprocal}")
    more += ("training.batch_size=1000", "negatives.chunk_size=1000", "loss.name=softmax")
    more += ("training.num_epochs=4", "optimizer.lr=0.02")
    with opened(load_config(None, settings(toy_dataset(typed=True), tmp_path / "run", *more))) as trainer:
        tables = dense_rows(trainer)
        losses = train(trainer, 4)
        live = ranking(trainer)
    run = dglkge.open_run(tmp_path / "run")
    relations = run.tables.meta.relations
    operators = [OWN.get(relation.name, "diagonal") for relation in relations]
    assert list(run.tables.meta.operators) == operators
    assert torch.equal(tables["relation"], run.model.operator_rows(operators).double())
    optimizer = torch.optim.Adagrad(tables.values(), lr=0.02, eps=1e-10)
    triples = run.dataset.split("train").tolist()
    for got_loss in losses:
        optimizer.zero_grad()
        terms = []
        for h, r, t in triples:
            lhs, rhs, row = tables[relations[r].lhs], tables[relations[r].rhs], tables["relation"][r]
            for_tail, for_head = row.chunk(2) if reciprocal else (row, row)
            heads, tails = lhs[h : h + 1], rhs[t : t + 1]
            # Without reciprocal relations a relation carries tails, also where they are the candidates.
            queries, answers = heads, rhs
            if reciprocal:
                queries = carried(operators[r], for_tail, heads)
            else:
                answers = carried(operators[r], for_tail, rhs)
            terms.append(functional.cross_entropy(scores(comparator, queries, answers), torch.tensor(t)))
            for_heads = scores(comparator, carried(operators[r], for_head, tails), lhs)
            terms.append(functional.cross_entropy(for_heads, torch.tensor(h)))
        loss = torch.stack(terms).sum()
        (loss / len(triples)).backward()
        assert got_loss == pytest.approx(loss.item(), rel=1e-4)
        optimizer.step()
    for name, expected in tables.items():
        got = run.tables[name][:].numpy()
        np.testing.assert_allclose(got, expected.detach(), rtol=2e-3, atol=2e-4, err_msg=name)
    ranked = run.evaluate("test").to_dict()
    assert {key: ranked[key] for key in live} == live


def carried(operator: str, row: torch.Tensor, entities: torch.Tensor) -> torch.Tensor:
    """Return entities (n, D) after a relation's operator, from its definition."""
    dim = entities.shape[1]
    if operator == "translation":
        return entities + row[:dim]
    if operator == "diagonal":
        return entities * row[:dim]
    if operator == "affine":
        return entities @ row[: dim * dim].view(dim, dim).T + row[dim * dim : dim * dim + dim]
    products = torch.complex(*entities.chunk(2, dim=1)) * torch.complex(*row[:dim].chunk(2))
    return torch.cat([products.real, products.imag], dim=1)
