"""Ranking of held-out triples against plain loops over every negative."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import EdgeTable
from dglkge.distributed.world import World
from dglkge.formats.bigraph_files import read_stats
from dglkge.model.kge_model import build_model
from dglkge.planning import memory
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions
from dglkge.sampling.triple_order import EdgeSet, TripleOrder
from dglkge.training.building.batches import build_passes
from dglkge.training.statistics import held_out
from dglkge.training.statistics.held_out import HeldOutEvaluator
from dglkge.typing import RELATION, Relation, Side
from tests.toy_kg import toy_dataset
from tests.training import live
from tests.training.live import opened, settings

RELATIONS = (Relation("a", "person", "person"), Relation("b", "person", "town"))
COUNTS = {"person": 12, "town": 5}
DIM, BATCH, UNIFORM = 6, 4, 3


@pytest.fixture
def tables():
    generator = torch.Generator().manual_seed(1)
    counts = {**COUNTS, RELATION: len(RELATIONS)}
    return {name: torch.randn(count, DIM, generator=generator) for name, count in counts.items()}


@pytest.fixture
def triples():
    rng = np.random.default_rng(2)
    relations = rng.integers(0, 2, 60)
    tails = np.where(relations == 0, rng.integers(0, 12, 60), rng.integers(0, 5, 60))
    return np.stack([rng.integers(0, 12, 60), relations, tails], axis=1)


def job_of(triples, settings=(), world=None, reduce=lambda values: values):
    """A job of which a quarter of the triples is held out."""
    section = f"{{fraction: 0.25, batch_negatives: {BATCH}, uniform_negatives: {UNIFORM}}}"
    dataset = SimpleNamespace(
        split=lambda name: triples,
        relations=SimpleNamespace(relations=RELATIONS),
        entity_types=list(COUNTS),
        num_entities=COUNTS.__getitem__,
    )
    return SimpleNamespace(
        config=load_config(None, ["dataset=x", "seed=9", f"evaluation.held_out={section}", *settings]),
        dataset=dataset,
        model=build_model("distmult", DIM, False),
        ranking=nullcontext,
        cluster=SimpleNamespace(world=world or World(), sum=reduce),
    )


def quarter():
    return TripleOrder([EdgeSet("train", range(60))], seed=3, held_out=0.25)


def evaluator(tables, triples, **job):
    return HeldOutEvaluator(job_of(triples, **job), quarter(), lambda name, ids: tables[name][ids])


def softmax(positive, negatives):
    return float(np.logaddexp.reduce([positive, *negatives]) - positive)


def logistic_sum(positive, negatives):
    return float(np.logaddexp(0, -positive) + np.logaddexp(0, negatives).sum())


def adversarial(positive, negatives):
    """Return the logistic loss with negatives weighted by the softmax of half their scores."""
    weights = np.exp(0.5 * np.array(negatives))
    terms = np.logaddexp(0, negatives) * weights / weights.sum()
    return float(np.logaddexp(0, -positive) + terms.sum())


def ranked_by_loops(groups, tables, relations, loss):
    """Return PyTorch-BigGraph's sums by DistMult, one negative after another.

    Groups are (side, triples, drawn entities); the other answers of a group are its negatives too.
    """

    def score(head, relation_id, tail):
        relation = relations[relation_id]
        rows = tables[relation.lhs][head], tables[RELATION][relation_id], tables[relation.rhs][tail]
        return float((rows[0].double() * rows[1].double() * rows[2].double()).sum().detach())

    sums = defaultdict(float)
    for side, batch, drawn in groups:
        column = 2 if side is Side.TAIL else 0
        for triple in batch:
            entities = [other[column] for other in batch] + drawn
            answers = [entity for entity in entities if entity != triple[column]]
            negatives = [score(*triple[:column], entity, *triple[column + 1 :]) for entity in answers]
            positive = score(*triple)
            rank = 1 + sum(value >= positive for value in negatives)
            sums["pos_rank"] += rank / 2
            sums["mrr"] += 1 / rank / 2
            for k in (1, 10, 50):
                sums[f"r{k}"] += (rank <= k) / 2
            sums[held_out.VIOLATORS[side]] += sum(value > positive for value in negatives)
            sums["loss"] += loss(positive, negatives)
    return sums


def by_loops(ranker, tables, triples, loss=softmax):
    """The same means, one negative after another."""
    held = triples[np.sort(ranker.order.held_out(0))]
    batches = []
    for relation_id in (0, 1):
        pair_triples = held[held[:, 1] == relation_id].tolist()
        batches += [pair_triples[start : start + BATCH] for start in range(0, len(pair_triples), BATCH)]
    groups = []
    for place, batch in enumerate(batches):
        for side in (Side.TAIL, Side.HEAD):
            entity_type = RELATIONS[batch[0][1]].candidate_type(side)
            groups.append((side, batch, ranker.uniform(entity_type, side, (0, 0, place)).tolist()))
            assert len(groups[-1][2]) == UNIFORM
    sums = ranked_by_loops(groups, tables, RELATIONS, loss)
    return {name: value / len(held) for name, value in sums.items()}


def test_metrics_are_those_of_plain_loops(tables, triples):
    ranker, ranking = evaluator(tables, triples), MagicMock()
    ranker.job.ranking, gather = ranking, ranker.gather

    def gather_final(name, ids):
        assert ranking().__enter__.called and not ranking().__exit__.called
        return gather(name, ids)

    ranker.gather = gather_final
    record = ranker.evaluate(0, 0)
    assert record["count"] == 15
    expected = by_loops(ranker, tables, triples)
    for name, value in expected.items():
        assert record["metrics"][name] == pytest.approx(value, rel=1e-4), name
    assert 0 < record["metrics"]["auc"] < 1


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        (["loss.name=logistic", "loss.reduction=sum"], logistic_sum),
        (
            ["loss={name: logistic, adversarial_weights: true, adversarial_temperature: 0.5}"],
            adversarial,
        ),
    ],
)
def test_the_loss_is_the_one_that_is_configured(tables, triples, settings, loss):
    edges = EdgeTable(np.arange(60), np.zeros((60, 3), np.int64), None)
    options = EdgeOptions(np.zeros(2, np.int64), 60, BATCH, BATCH, 0, 1, seed=1, order=quarter())
    batches = EdgeBatches(edges, options)
    passes = build_passes(job_of(triples, settings), batches, lambda name, ids: tables[name][ids])
    got = passes.held_out.evaluate(0, 0)["metrics"]["loss"]
    assert got == pytest.approx(by_loops(passes.held_out, tables, triples, loss)["loss"], rel=1e-4)


@pytest.mark.parametrize("limit", [1, 3 * DIM * (BATCH + UNIFORM)])
def test_queries_are_compared_block_by_block(tables, triples, limit, monkeypatch):
    whole = evaluator(tables, triples).evaluate(0, 0)["metrics"]
    monkeypatch.setattr(held_out, "BLOCK_NUMBERS", limit)
    ranker, sizes = evaluator(tables, triples), []
    compare = ranker.job.model.compare_plainly

    def noted(query, candidates):
        sizes.append(len(query) * len(candidates) * query.shape[1])
        return compare(query, candidates)

    monkeypatch.setattr(ranker.job.model, "compare_plainly", noted)
    assert ranker.evaluate(0, 0)["metrics"] == pytest.approx(whole, rel=1e-6)
    # One query is compared with all candidates in any case.
    assert max(sizes) <= max(limit, DIM * (BATCH + UNIFORM))


def test_the_plan_has_the_block():
    """At the defaults the scores of 1,000 queries by 2,000 candidates are planned, not their differences."""
    assert memory.HELD_OUT_NUMBERS == held_out.BLOCK_NUMBERS
    config = load_config(None, ["dataset=x", "evaluation.held_out.fraction=0.1", "model.dimension=400"])
    batch = config.evaluation.held_out.batch_negatives
    num_scores = batch * (batch + config.evaluation.held_out.uniform_negatives)
    planned = memory.held_out_bytes(config)
    assert 4 * (num_scores + memory.HELD_OUT_NUMBERS) < planned < 4 * 400 * num_scores / 10
    assert memory.held_out_bytes(load_config(None, ["dataset=x"])) == 0


def test_two_trainers_add_up_to_one(tables, triples):
    alone, parts = evaluator(tables, triples).evaluate(0, 0), []

    def add(values):
        parts.append(values)
        return sum(parts)

    for rank in range(2):
        summed = evaluator(tables, triples, world=World(rank, 2), reduce=add).evaluate(0, 0)
    assert summed["metrics"] == pytest.approx(alone["metrics"])


def test_equal_scores_count_against_the_truth(triples):
    tables = {name: torch.ones(count, DIM) for name, count in {**COUNTS, RELATION: 2}.items()}
    metrics = evaluator(tables, triples).evaluate(0, 0)["metrics"]
    assert metrics["auc"] == pytest.approx(0.5)
    assert metrics["violators_lhs"] == metrics["violators_rhs"] == 0
    assert metrics["pos_rank"] > 1


@pytest.mark.parametrize("prediction", [0, 0.5])
def test_k_vs_all_trains_the_queries_of_the_other_triples(prediction, tmp_path):
    data, run = toy_dataset(typed=True), tmp_path / "run"
    words = [word for word in settings(data, run) if not word.startswith("negatives.")]
    words += ["training.objective=k_vs_all", "evaluation.held_out.fraction=0.2", "training.num_epochs=2"]
    words += [f"training.relation_prediction={prediction}", "checkpoint.every_epochs=1"]
    train = Dataset.open(data).split("train")
    with opened(load_config(None, words)) as trainer:
        batches = trainer._edge_batches.batches
        held = {tuple(row) for row in train[trainer._passes.held_out.order.held_out(0)].tolist()}
        live.train(trainer, 2)
    index, trained = batches.index, set()
    groups, anchors = (of(np.arange(len(index))) for of in (index.groups, index.anchors))
    answers = np.concatenate([block for *_, block in index.blocks()])
    for query, (first, end) in enumerate(zip(index.starts, index.starts[1:])):
        for answer in answers[first:end].tolist():
            lacks_head, relation = divmod(int(groups[query]), index.num_relations)
            head, tail = (int(anchors[query]), answer)[:: -1 if lacks_head else 1]
            trained.add((head, relation, tail))
    expected = {tuple(row) for row in train.tolist()} - held
    assert trained == expected and len(held) == -(-len(train) // 5)
    if prediction:
        assert int(batches.pairs.starts[-1]) == len(expected)
    records = read_stats(run / "checkpoint" / "latest")
    assert [record["eval_stats_after"]["count"] for record in records] == [len(held)] * 2
    names = ("eval_stats_before", "eval_stats_after")
    losses = [record[name]["metrics"]["loss"] for record in records for name in names]
    assert losses[1] == pytest.approx(losses[2]) and losses[3] < losses[0]
