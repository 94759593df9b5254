"""Ranking of held-out triples against plain loops over every negative."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.errors import InputError
from dglkge.model.kge_model import build_model
from dglkge.model.losses import build_loss
from dglkge.sampling.triple_order import EdgeSet, TripleOrder
from dglkge.training.building.components import check_edge_sets
from dglkge.training.held_out import HeldOutEvaluator
from dglkge.typing import RELATION, Relation, Side

RELATIONS = (Relation("a", "person", "person"), Relation("b", "person", "town"))
COUNTS = {"person": 12, "town": 5}
DIM, BATCH, UNIFORM = 6, 4, 3


@pytest.fixture
def tables():
    generator = torch.Generator().manual_seed(1)
    widths = {**dict.fromkeys(COUNTS, DIM), RELATION: DIM}
    counts = {**COUNTS, RELATION: len(RELATIONS)}
    return {name: torch.randn(counts[name], widths[name], generator=generator) for name in counts}


@pytest.fixture
def triples():
    rng = np.random.default_rng(2)
    relations = rng.integers(0, 2, 60)
    tails = np.where(relations == 0, rng.integers(0, 12, 60), rng.integers(0, 5, 60))
    return np.stack([rng.integers(0, 12, 60), relations, tails], axis=1)


def evaluator(tables, triples, turn=(0, 1), reduce=lambda values: values, seed=9):
    """An evaluator of a quarter of the triples."""
    order = TripleOrder([EdgeSet("train", range(60))], seed=3, held_out=0.25)
    model = build_model("distmult", DIM, False)
    loss = build_loss("softmax")
    return HeldOutEvaluator(
        order, 1, triples, model, loss, RELATIONS, COUNTS, lambda name, ids: tables[name][ids],
        reduce, turn, seed, BATCH, UNIFORM,
    )  # fmt: skip


def by_loops(one, tables, triples):
    """The same means, one negative after another."""
    held = triples[np.sort(one._order.held_out(0))]
    batches = []
    for relation_id in (0, 1):
        of_pair = held[held[:, 1] == relation_id].tolist()
        batches += [of_pair[start : start + BATCH] for start in range(0, len(of_pair), BATCH)]
    sums = dict.fromkeys(
        ("pos_rank", "mrr", "r1", "r10", "r50", "violators_lhs", "violators_rhs", "loss"), 0.0
    )
    for place, batch in enumerate(batches):
        relation = RELATIONS[batch[0][1]]
        for side in (Side.TAIL, Side.HEAD):
            column = 2 if side is Side.TAIL else 0
            drawn = one._uniform(relation.candidate_type(side), side, (0, 0, place)).tolist()
            assert len(drawn) == UNIFORM

            def score(triple, relation=relation):
                rows = (
                    tables[relation.lhs][triple[0]],
                    tables[RELATION][triple[1]],
                    tables[relation.rhs][triple[2]],
                )
                return float((rows[0].double() * rows[1].double() * rows[2].double()).sum())

            for triple in batch:
                negatives = []
                for candidate in [other[column] for other in batch] + drawn:
                    if candidate != triple[column]:
                        changed = list(triple)
                        changed[column] = candidate
                        negatives.append(score(changed))
                positive = score(triple)
                rank = 1 + sum(value >= positive for value in negatives)
                sums["pos_rank"] += rank / 2
                sums["mrr"] += 1 / rank / 2
                for k in (1, 10, 50):
                    sums[f"r{k}"] += (rank <= k) / 2
                name = "violators_rhs" if side is Side.TAIL else "violators_lhs"
                sums[name] += sum(value > positive for value in negatives)
                sums["loss"] += float(np.logaddexp.reduce([positive, *negatives]) - positive)
    return {name: value / len(held) for name, value in sums.items()}


def test_metrics_are_those_of_plain_loops(tables, triples):
    one = evaluator(tables, triples)
    found = one.evaluate(0, 0)
    assert found["count"] == 15
    expected = by_loops(one, tables, triples)
    for name, value in expected.items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-4), name
    assert 0 < found["metrics"]["auc"] < 1


def test_two_trainers_add_up_to_one(tables, triples):
    alone = evaluator(tables, triples).evaluate(0, 0)
    parts = []
    for rank in range(2):
        evaluator(tables, triples, (rank, 2), lambda values: parts.append(values) or values).evaluate(0, 0)
    summed = evaluator(tables, triples, (0, 2), lambda values: sum(parts)).evaluate(0, 0)
    for name, value in alone["metrics"].items():
        assert summed["metrics"][name] == pytest.approx(value)


def test_equal_scores_count_against_the_truth(triples):
    tables = {name: torch.ones(count, DIM) for name, count in {**COUNTS, RELATION: 2}.items()}
    found = evaluator(tables, triples).evaluate(0, 0)["metrics"]
    assert found["auc"] == pytest.approx(0.5)
    assert found["violators_lhs"] == found["violators_rhs"] == 0
    assert found["pos_rank"] > 1


def test_fields_that_queries_have_not():
    with pytest.raises(
        InputError, match="evaluation.eval_fraction is 0.1 and training.objective is k_vs_all"
    ):
        check_edge_sets(
            load_config(None, ["dataset=x", "training.objective=k_vs_all", "evaluation.eval_fraction=0.1"])
        )
    with pytest.raises(InputError, match="training.edge_sets is .* a set occurs twice"):
        check_edge_sets(load_config(None, ["dataset=x", "training.edge_sets=[a, a]"]))
