"""Training with each regularizer and objective against dense float64 loops with torch's own optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.typing import RELATION, Side
from tests.model.penalty_oracle import query_penalty
from tests.toy_kg import toy_dataset
from tests.training import test_k_vs_all, test_one_vs_all, test_train_step
from tests.training.live import assert_epochs_equal

Rows = dict[str, torch.Tensor]

CASES = [
    ("n3", "regularizer.entity_ratio=0.5", "regularizer.relation_ratio=3"),
    ("lp", "regularizer.relation_ratio=0", "regularizer.p=2"),
    ("f2",),
    ("f2", "regularizer.relation_ratio=0.5"),
    ("dura",),
    ("dura", "regularizer.product_ratio=3", "regularizer.entity_ratio=0.5"),
    ("ivr", "regularizer.product_ratio=2", "regularizer.p=2.5"),
]
IDS = [" ".join(text.replace("regularizer.", "") for text in case) for case in CASES]


@pytest.fixture(autouse=True)
def without_penalties_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops of other tests add no penalty."""
    monkeypatch.setattr(test_train_step, "WEIGHT", 0.0)
    monkeypatch.setattr(test_one_vs_all, "N3_WEIGHT", 0.0)
    monkeypatch.setattr(test_k_vs_all, "N3_WEIGHT", 0.0)


def regularized(name: str, *more: str) -> tuple[str, ...]:
    """Return the settings of a regularizer."""
    return (f"regularizer.name={name}", "regularizer.weight=0.02", *more)


def penalty(config: dglkge.Config, rows: Rows, relation: int, side: Side, given: Any, answer: Any) -> Any:
    """Return the penalty of a query with one answer; the rows of both entities are given."""
    chosen, reciprocal = config.regularizer, config.model.reciprocal_relations
    row = rows[RELATION][relation]
    if reciprocal:
        half = len(row) // 2
        row = row[:half] if side is Side.TAIL else row[half:]
    return chosen.weight * query_penalty(
        chosen.name,
        given,
        row,
        answer,
        is_complex=config.model.score_function.name == "complex",
        is_turned=side is Side.HEAD and not reciprocal,
        p=getattr(chosen, "p", 3.0),
        entity=getattr(chosen, "entity_ratio", 1.0),
        of_relation=getattr(chosen, "relation_ratio", 1.0),
        product=getattr(chosen, "product_ratio", 1.0),
    )


def penalty_of_triples(data: Dataset, rows: Rows, batch: Any, config: dglkge.Config) -> torch.Tensor:
    """Return the summed penalty of both queries of each triple of a batch."""
    rows = {name: table.unbind() for name, table in rows.items()}
    total = torch.zeros((), dtype=torch.float64)
    for h, r, t in np.array(data.split("train"))[batch.triple_ids].tolist():
        relation = data.relations.relations[r]
        head, tail = rows[relation.lhs][h], rows[relation.rhs][t]
        total = total + penalty(config, rows, r, Side.TAIL, head, tail)
        total = total + penalty(config, rows, r, Side.HEAD, tail, head)
    return total


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_against_sampled_negatives(tmp_path: Path, case: tuple[str, ...], kernels: str) -> None:
    more = (f"training.kernels={kernels}", "training.matmul_dtype=float32")
    dataset = toy_dataset(typed=True)
    config = load_config(
        None, test_train_step.settings(dataset, tmp_path / "run", *more, *regularized(*case))
    )

    def oracle(data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
        loss = test_train_step.oracle_batch(data, rows, batch)
        return loss + penalty_of_triples(data, rows, batch, config)

    assert_epochs_equal(config, oracle)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize(("score_function", "reciprocal"), [("distmult", "false"), ("complex", "true")])
def test_against_all_entities(
    tmp_path: Path, case: tuple[str, ...], score_function: str, reciprocal: str
) -> None:
    more = (f"model.score_function={score_function}", f"model.reciprocal_relations={reciprocal}")
    more += (f"training.relation_prediction={test_one_vs_all.RELATION_WEIGHT}",)
    dataset = toy_dataset(typed=True)
    config = load_config(
        None, test_one_vs_all.settings(dataset, tmp_path / "run", *more, *regularized(*case))
    )

    def oracle(data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
        loss = test_one_vs_all.oracle(data, rows, batch, config)
        return loss + penalty_of_triples(data, rows, batch, config)

    assert_epochs_equal(config, oracle)


@pytest.mark.parametrize("case", CASES[:-1], ids=IDS[:-1])
def test_queries_with_all_their_answers(tmp_path: Path, case: tuple[str, ...]) -> None:
    """The mean over the answers of each query."""
    dataset = toy_dataset(typed=True)
    config = load_config(None, test_k_vs_all.settings(dataset, tmp_path / "run", *regularized(*case)))

    def oracle(data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
        known = test_k_vs_all.known_answers(data)
        original = {name: np.asarray(table.original_ids) for name, table in trainer.tables.items()}
        queries, total = [], torch.zeros((), dtype=torch.float64)
        for run in batch.runs:
            part = slice(run.start, run.end)
            for r, anchor in zip(batch.relations[part], batch.anchors[part]):
                relation, entity = int(original[RELATION][r]), int(original[run.anchor_type][anchor])
                answers = known[run.side, relation, entity]
                queries.append(((run.side, relation, entity), answers))
                given = rows[run.anchor_type][entity]
                penalties = [
                    penalty(config, rows, relation, run.side, given, rows[run.answer_type][answer])
                    for answer in answers
                ]
                total = total + torch.stack(penalties).mean()
        return test_k_vs_all.oracle(data, rows, queries, config) + total

    assert_epochs_equal(config, oracle)
