"""Training on queries with all their answers, step by step against a dense float64 loop."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset
from tests.training.live import Rows, asked, assert_epochs_equal
from tests.training.test_one_vs_all import cubes, pair_scores

DIM, N3_WEIGHT, SMOOTHING = 8, 0.02, 0.1
LABELS = f"training.objective.label_smoothing={SMOOTHING}"


def settings(dataset: Path, run: Path, *more: str) -> list[str]:
    """Return the settings of the run."""
    return [
        f"dataset={dataset}",
        f"output={run}",
        f"model.dimension={DIM}",
        "model.init_scale=0.3",
        "regularizer.name=none",
        "training.objective=k_vs_all",
        "training.batch_size=70",
        "training.num_epochs=2",
        "checkpoint.every_epochs=0",
        *more,
    ]


def known_answers(data: Dataset) -> dict[tuple[Side, int, int], set[int]]:
    """Return the answers of every query (side, relation, entity), by original ids."""
    found = defaultdict(set)
    for h, r, t in np.array(data.split("train")).tolist():
        found[Side.TAIL, r, h].add(t)
        found[Side.HEAD, r, t].add(h)
    return found


def oracle(data: Dataset, rows: dict[str, torch.Tensor], queries: Any, config: dglkge.Config) -> torch.Tensor:
    """Return the summed loss of queries (side, relation, entity) with their answers."""
    smoothing, total = (config.training.objective.smoothing, torch.zeros((), dtype=torch.float64))
    single = {name: table.unbind() for name, table in rows.items()}
    for (side, r, entity), answers in queries:
        lhs, rhs = data.relations.relations[r].lhs, data.relations.relations[r].rhs
        anchor_type, answer_type = (lhs, rhs) if side is Side.TAIL else (rhs, lhs)
        width = rows[RELATION].shape[1] // 2
        relation = single[RELATION][r][:width] if side is Side.TAIL else single[RELATION][r][width:]
        given, candidates = single[anchor_type][entity], rows[answer_type]
        scores = pair_scores(config.model.score_function.name, given, relation, candidates)
        labels = torch.zeros(len(candidates), dtype=torch.float64)
        labels[sorted(answers)] = 1 / len(answers) if config.loss.name == "softmax" else 1.0
        labels = (1 - smoothing) * labels + smoothing / len(candidates)
        if config.loss.name == "softmax":
            total = total + functional.cross_entropy(scores[None], labels[None], reduction="sum")
        else:
            total = total + functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        if getattr(config.regularizer, "weight", 0):
            of_answers = cubes(candidates[sorted(answers)], True).mean()
            total = total + N3_WEIGHT * (cubes(given, True) + cubes(relation, True) + of_answers)
    return total


@pytest.mark.parametrize("typed", [False, True], ids=["one type", "three types"])
@pytest.mark.parametrize("loss", ["softmax", "logistic"])
@pytest.mark.parametrize(
    "more",
    [(), (LABELS, "regularizer.name=n3", f"regularizer.weight={N3_WEIGHT}")],
    ids=["plain", "all options"],
)
def test_two_epochs_equal_a_dense_float64_loop(
    tmp_path: Path, typed: bool, loss: str, more: tuple[str, ...]
) -> None:
    dataset = toy_dataset(typed=typed)
    config = load_config(None, settings(dataset, tmp_path / "run", f"loss.name={loss}", *more))
    known, seen = known_answers(Dataset.open(dataset)), []

    def loss_of(data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
        queries = asked(trainer, batch)
        assert len(queries) == len(batch) == batch.global_size
        seen.extend(queries)
        return oracle(data, rows, [(query, known[query]) for query in queries], config)

    assert_epochs_equal(config, loss_of)
    # Each query once in each of two epochs.
    assert sorted(seen, key=str) == sorted([*known, *known], key=str) and set(seen[: len(known)]) == set(
        known
    )


RELATION_WEIGHT = 3.0


def relation_oracle(
    data: Dataset, rows: dict[str, torch.Tensor], pairs: Any, config: dglkge.Config
) -> torch.Tensor:
    """Return the summed loss of queries (types, head, tail) with their relations, for each direction."""
    name, total = config.model.score_function.name, torch.zeros((), dtype=torch.float64)
    width = rows[RELATION].shape[1] // 2
    forward, backward = rows[RELATION].split(width, 1)
    single = {name: table.unbind() for name, table in rows.items()}
    for ((lhs, rhs), h, t), answers in pairs:
        head, tail = single[lhs][h], single[rhs][t]
        for given, answer, relations in ((head, tail, forward), (tail, head, backward)):
            scores = pair_scores(name, given, relations, answer)
            labels = torch.zeros(len(relations), dtype=torch.float64)
            labels[sorted(answers)] = 1 / len(answers) if config.loss.name == "softmax" else 1.0
            labels = (1 - SMOOTHING) * labels + SMOOTHING / len(relations)
            if config.loss.name == "softmax":
                loss = functional.cross_entropy(scores[None], labels[None], reduction="sum")
            else:
                loss = functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
            total = total + RELATION_WEIGHT * loss
    return total


@pytest.mark.parametrize("loss", ["softmax", "logistic"])
@pytest.mark.parametrize("score_function", ["complex", "distmult", "transe_l2"])
def test_relations_of_pairs_are_predicted_beside(tmp_path: Path, score_function: str, loss: str) -> None:
    dataset = toy_dataset(typed=True)
    more = (
        f"model.score_function={score_function}",
        LABELS,
        f"training.relation_prediction={RELATION_WEIGHT}",
    )
    config = load_config(None, settings(dataset, tmp_path / "run", f"loss.name={loss}", *more))
    data, seen = Dataset.open(dataset), []
    known, related = known_answers(data), defaultdict(set)
    for h, r, t in np.array(data.split("train")).tolist():
        relation = data.relations.relations[r]
        related[(relation.lhs, relation.rhs), h, t].add(r)

    def loss_of(data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
        original = {name: np.asarray(table.original_ids) for name, table in trainer.tables.items()}
        queries = asked(trainer, batch)
        pairs = [
            ((run.lhs, run.rhs), int(original[run.lhs][h]), int(original[run.rhs][t]))
            for run in batch.pair_runs
            for h, t in zip(batch.pair_heads[run.start : run.end], batch.pair_tails[run.start : run.end])
        ]
        assert len(queries) + len(pairs) == len(batch) == batch.global_size
        seen.extend(pairs)
        expected = oracle(data, rows, [(query, known[query]) for query in queries], config)
        return expected + relation_oracle(data, rows, [(pair, related[pair]) for pair in pairs], config)

    assert_epochs_equal(config, loss_of)
    # Each pair once in each of two epochs.
    assert sorted(seen) == sorted([*related, *related]) and set(seen[: len(related)]) == set(related)
