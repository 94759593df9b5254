"""Losses of splits and ranks of held-out triples, against plain loops and the training's own loss."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.distributed.world import World
from dglkge.formats.bigraph_files import read_stats
from dglkge.planning import memory
from dglkge.training.job import Job
from dglkge.training.statistics import held_out
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset, weighted_dataset
from tests.training import live
from tests.training.live import dense_rows, opened, settings, stats_lines

DIM, BATCH, UNIFORM = 8, 4, 3
PLAIN = ["model.score_function=distmult", "model.reciprocal_relations=false"]
RECIPROCAL = "model.reciprocal_relations=true"
ALL_NEGATIVE = ["negatives.name=all_entities"]
ONE_VS_ALL = ["training.objective=one_vs_all"]
K_VS_ALL = ["training.objective=k_vs_all"]
LEFT_OUT = ["regularizer.name=n3", "regularizer.weight=0.1", "model.entity_dropout=0.3"]


def two_epochs(run, *words):
    return load_config(None, settings(toy_dataset(typed=True), run, "training.num_epochs=2", *words))


def configured(run, *more):
    section = f"{{fraction: 0.25, batch_negatives: {BATCH}, uniform_negatives: {UNIFORM}}}"
    return two_epochs(run, *PLAIN, *more, f"evaluation.held_out={section}")


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
    """Return PyTorch-BigGraph's sums by DistMult; the other answers of a group are negatives, too."""

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
            sums["auc"] += np.mean([(value < positive) + (value == positive) / 2 for value in negatives]) / 2
            for k in (1, 10, 50):
                sums[f"r{k}"] += (rank <= k) / 2
            sums[held_out.VIOLATORS[side]] += sum(value > positive for value in negatives)
            sums["loss"] += loss(positive, negatives)
    return sums


def by_loops(trainer, triples, size, draw, loss):
    """Return the means over triples, in batches of one pair of types; ``draw`` has a batch's negatives."""
    relations = trainer._job.dataset.relations.relations
    pairs = [(relation.lhs, relation.rhs) for relation in relations]
    batches = []
    for pair in dict.fromkeys(pairs):
        of_pair = [triple for triple in triples.tolist() if pairs[triple[1]] == pair]
        batches += [(pair, of_pair[start : start + size]) for start in range(0, len(of_pair), size)]
    groups = []
    for place, (pair, batch) in enumerate(batches):
        for side in (Side.TAIL, Side.HEAD):
            groups.append((side, batch, draw(pair[side is Side.TAIL], side, place).tolist()))
    sums = ranked_by_loops(groups, dense_rows(trainer), relations, loss)
    return {name: value / len(triples) for name, value in sums.items()}


@pytest.mark.parametrize(("settings", "loss"), [
    ([], softmax),
    (["loss.name=logistic", "loss.reduction=sum"], logistic_sum),
    (["loss={name: logistic, adversarial_weights: true, adversarial_temperature: 0.5}"], adversarial),
])  # fmt: skip
def test_metrics_and_the_configured_loss_are_those_of_plain_loops(tmp_path, settings, loss, monkeypatch):
    def draw(name, side, place):
        return ranker.uniform(name, side, (0, 0, place))

    def gather_final(name, ids):
        assert ranking().__enter__.called and not ranking().__exit__.called
        return gather(name, ids)

    with opened(configured(tmp_path, *settings)) as trainer:
        ranker, train = trainer._passes.held_out, trainer._job.dataset.split("train")
        held, gather, ranking = train[np.sort(ranker.order.held_out(0))], ranker.gather, MagicMock()
        assert len(draw("town", Side.TAIL, 0)) == UNIFORM and len(held) == -(-len(train) // 4)
        expected = by_loops(trainer, held, BATCH, draw, loss)
        ranker.gather = gather_final
        monkeypatch.setattr(Job, "ranking", ranking)
        record = ranker.evaluate(0, 0)
    assert record["count"] == len(held)
    assert record["metrics"] == pytest.approx(expected, rel=1e-4)


def test_blocks_of_queries_and_parts_of_trainers_add_up(tmp_path, monkeypatch):
    sizes, parts = [], []
    assert memory.HELD_OUT_NUMBERS == held_out.BLOCK_NUMBERS  # the plan has the block

    def noted(query, candidates):
        sizes.append(len(query) * len(candidates) * query.shape[1])
        return compare(query, candidates)

    def add(values):
        parts.append(values)
        return sum(parts)

    with opened(configured(tmp_path)) as trainer:
        ranker, job = trainer._passes.held_out, trainer._job
        whole, compare = ranker.evaluate(0, 0), job.model.compare_plainly
        for rank in range(2):
            cluster = SimpleNamespace(world=World(rank, 2), sum=add)
            part_job = SimpleNamespace(
                config=job.config, dataset=job.dataset, model=job.model, ranking=nullcontext, cluster=cluster
            )
            summed = dataclasses.replace(ranker, job=part_job).evaluate(0, 0)
        assert summed["count"] == whole["count"] and len(parts) == 2
        assert summed["metrics"] == pytest.approx(whole["metrics"])
        monkeypatch.setattr(job.model, "compare_plainly", noted)
        for limit in (1, 3 * DIM * (BATCH + UNIFORM)):
            monkeypatch.setattr(held_out, "BLOCK_NUMBERS", limit)
            sizes.clear()
            assert ranker.evaluate(0, 0)["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)
            # One query is compared with all candidates in any case.
            assert max(sizes) <= max(limit, DIM * (BATCH + UNIFORM))


def test_equal_scores_count_against_the_truth(tmp_path):
    with opened(configured(tmp_path)) as trainer:
        for table in trainer.tables.values():
            table.local_rows.fill_(1)
        metrics = trainer._passes.held_out.evaluate(0, 0)["metrics"]
    assert metrics["auc"] == pytest.approx(0.5)
    assert metrics["violators_lhs"] == metrics["violators_rhs"] == 0
    assert metrics["pos_rank"] > 1


@pytest.mark.parametrize("prediction", [0, 0.5])
def test_k_vs_all_trains_the_queries_of_the_other_triples(prediction, tmp_path):
    words = [f"training.relation_prediction={prediction}", "checkpoint.every_epochs=1", *K_VS_ALL]
    with opened(two_epochs(tmp_path, "evaluation.held_out.fraction=0.2", *words)) as trainer:
        batches, train = trainer._edge_batches.batches, trainer._job.dataset.split("train")
        held = {tuple(row) for row in train[trainer._passes.held_out.order.held_out(0)].tolist()}
        live.train(trainer, 2)
    index = batches.index
    queries = np.repeat(np.arange(len(index)), np.diff(index.starts))
    lacks_head, relations = np.divmod(index.groups(queries), index.num_relations)
    anchors, answers = index.anchors(queries), np.concatenate([block for *_, block in index.blocks()])
    heads, tails = np.where(lacks_head, answers, anchors), np.where(lacks_head, anchors, answers)
    trained = set(zip(heads.tolist(), relations.tolist(), tails.tolist()))
    expected = {tuple(row) for row in train.tolist()} - held
    assert trained == expected and len(held) == -(-len(train) // 5)
    if prediction:
        assert int(batches.pairs.starts[-1]) == len(expected)
    records = read_stats(tmp_path / "checkpoint" / "latest")
    assert [record["eval_stats_after"]["count"] for record in records] == [len(held)] * 2
    names = ("eval_stats_before", "eval_stats_after")
    losses = [record[name]["metrics"]["loss"] for record in records for name in names]
    assert losses[1] == pytest.approx(losses[2]) and losses[3] < losses[0]


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
    with opened(two_epochs(tmp_path / "run", *words)) as trainer:
        dataset = trainer._job.dataset
        num_pieces = len(trainer._job.step_memory)
        live.train(trainer, 2)
        result = trainer.evaluate("valid")
        expected = cross_entropy(dense_rows(trainer), dataset.relations.relations, dataset.split("valid"))
        # It computes in the memory of the training's objective.
        assert len(trainer._job.step_memory) == num_pieces > 0
    assert result.loss == pytest.approx(expected, rel=1e-5)
    losses = [record["valid"]["loss"] for record in stats_lines(tmp_path / "run") if "valid" in record]
    assert len(losses) == 2 and losses[1] == pytest.approx(expected, rel=1e-5)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["valid"]["both"]["loss"] == losses[1]


@pytest.mark.parametrize("words", [
    ONE_VS_ALL,
    [*ONE_VS_ALL, "training.relation_prediction=0.5", "loss.name=logistic"],
    [*K_VS_ALL, "training.relation_prediction=0.5", "training.kernels=reference"],
    [*ALL_NEGATIVE, "loss.name=logistic", "training.relation_prediction=0.5"],
    [*ALL_NEGATIVE, "loss.name=self_adversarial", "model.score_function=rotate", RECIPROCAL],
    ["training.device=cpu_staged", *ONE_VS_ALL],
])  # fmt: skip
def test_of_the_training_triples_it_is_the_loss_of_an_epoch_that_changes_nothing(words, tmp_path):
    words = [*PLAIN, *words, "optimizer.lr=1e-30", "optimizer.relations.lr=1e-30"]
    with opened(two_epochs(tmp_path / "run", *words)) as trainer:
        triples = trainer._job.dataset.split("train")
        before = trainer._evaluator._loss("train", triples)
        live.train(trainer, 2)
        after = trainer._evaluator._loss("train", triples)
    ends = [end for end in stats_lines(tmp_path / "run") if end["batches_done"] == end["num_batches"]]
    epochs = [end["epoch_loss"] for end in ends]
    assert len(epochs) == 2 and epochs == pytest.approx([before] * 2, rel=1e-4)
    assert after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("words", [
    ["model.score_function={name: conve, channels: 2}", "model.reciprocal_relations=true", *K_VS_ALL],
    [*ONE_VS_ALL, "regularizer.name=n3", "regularizer.weight=0.1"],
    ["model.entity_dropout=0.2", "training.relation_prediction=0.5", *PLAIN, "model.global_vectors=true"],
    ["sampling.num_ranges=3", "negatives.mask_known=true", "loss.name=logistic", "optimizer.clip_norm=1"],
])  # fmt: skip
def test_training_is_the_same_with_it(words, tmp_path):
    """Drawn negatives and gradients of a split leave no trace, in the parameters of a module neither."""
    losses = []
    for interval in (0, 1):
        run = tmp_path / str(interval)
        with opened(two_epochs(run, *words, f"evaluation.valid_every_epochs={interval}")) as trainer:
            losses.append(live.train(trainer, 2))
    assert losses[0] == losses[1]


def test_confidences_of_a_split_are_those_of_true_triples(tmp_path):
    """Only training triples have them: a triple of a split is true."""
    weighted, losses = weighted_dataset(tmp_path), []
    for confidences in ("true", "false"):
        words = [*PLAIN, "loss.name=logistic", f"loss.confidences={confidences}"]
        with opened(load_config(None, settings(weighted, tmp_path / confidences, *words))) as trainer:
            losses.append(trainer.evaluate("valid").loss)
    assert losses[0] == losses[1]
