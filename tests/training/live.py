"""Trainers of this process, one after another, and training beside a dense loop in float64."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import extended
from dglkge.evaluation.metrics import Protocol
from dglkge.training.script import JOB
from dglkge.training.trainer import Trainer
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset

Rows = dict[str, torch.Tensor]
Run = tuple[list[float], dict[str, np.ndarray], Any]


def settings(dataset: Path, run: Path, *more: str) -> list[str]:
    uniform = [] if "negatives.name=all_entities" in more else ["negatives.num_uniform=12"]
    return [
        *(f"dataset={dataset}", f"output={run}", "model.dimension=8", "model.init_scale=0.3"),
        *("regularizer.name=none", *uniform, "negatives.chunk_size=20", "training.batch_size=50"),
        *("training.num_epochs=3", "training.matmul_dtype=float32", "checkpoint.every_epochs=0", *more),
    ]


def stats_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "stats.jsonl").read_text(encoding="utf-8").splitlines()]


@contextmanager
def opened(config: dglkge.Config) -> Iterator[Trainer]:
    """Build a trainer for a block; its tables go before others of the same names come."""
    gc.collect()  # reference cycles hold tables of tests that failed
    try:
        with dglkge.join_cluster(config) as cluster:
            yield dglkge.build_trainer(config, cluster)
    finally:
        JOB.restore(0)
        gc.collect()


def batches_of(trainer: Trainer, until: int) -> Iterator[tuple[int, Any]]:
    for epoch in dglkge.remaining_epochs_until(until):
        for batch in trainer.batches():
            yield epoch, batch


def train(trainer: Trainer, until: int) -> list[float]:
    return [trainer.step(batch) for _, batch in batches_of(trainer, until)]


def trained(folder: Path, kernels: str, *more: str) -> Run:
    """Train an epoch; return the losses of its batches and the MRR, the tables, and the objective."""
    usual = ("training.num_epochs=1", "training.batch_size=20", "optimizer.lr=0.05", "regularizer.name=auto")
    words = (*usual, "evaluation.max_triples=3", f"training.kernels={kernels}", *more)
    sets = settings(toy_dataset(typed=True), folder / kernels, *words)
    with opened(dglkge.load_config(None, sets)) as trainer:
        losses = train(trainer, 1)
        tables = {name: rows.numpy() for name, rows in rows_by_node(trainer).items()}
        losses.append(trainer.evaluate("test").both.mrr)
        return losses, tables, trainer._train_step.objective


def assert_same_tables(got: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare rows by table; bit for bit by default."""
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_allclose(got[name], rows, rtol=rtol, atol=atol, err_msg=name)


def assert_same(got: Run, expected: Run, rtol=0.0, atol=0.0, loss_rtol=0.0) -> None:
    """Compare losses and tables of :func:`trained`; ``loss_rtol`` is the relative tolerance of losses."""
    assert len(expected[0]) > 5
    np.testing.assert_allclose(got[0], expected[0], rtol=loss_rtol)
    assert_same_tables(got[1], expected[1], rtol, atol)


def rows_by_node(trainer: Trainer) -> Rows:
    return {name: table.local_rows.clone() for name, table in trainer.tables.items()}


def dense_rows(trainer: Trainer) -> Rows:
    """Return all rows by original id, as leaves in float64."""
    return {
        name: table.gather(table.node_ids[torch.arange(len(table))]).double().requires_grad_()
        for name, table in trainer.tables.items()
    }


def chunks_of(batch: Any) -> np.ndarray:
    """Return the chunk of each triple of a batch, whose groups are sorted by chunk."""
    return np.repeat(*zip(*((group.chunk, group.end - group.start) for group in batch.groups)))


def queries_of(trainer: Trainer, batch: Any) -> list[tuple[Side, int, int]]:
    """Return side, relation and entity of each query of a batch, by original ids."""
    original = {name: np.asarray(table.original_ids) for name, table in trainer.tables.items()}
    original[RELATION] = extended(original[RELATION], trainer._job.layout.num_times)
    queries = []
    for run in batch.runs:
        entities = original[run.anchor_type][run.anchors].tolist()
        relations = original[RELATION][run.relations].tolist()
        queries += [(run.side, *pair) for pair in zip(relations, entities)]
    return queries


def assert_resumes(
    opened: Callable[..., AbstractContextManager[Trainer]],
    folder: Path,
    state: Callable[[Trainer], Rows],
    *more: str,
    after_one: Callable[[Rows], None] = lambda half_way: None,
) -> Rows:
    """Hold that a restart after the first epoch changes no bit, and that files rank as live rows do."""
    with opened(folder, *more) as trainer:
        train(trainer, 1)
        half_way = {**rows_by_node(trainer), **state(trainer)}
    after_one(half_way)
    with opened(folder, *more) as trainer:
        train(trainer, 2)
        resumed = {**rows_by_node(trainer), **state(trainer)}
        metrics = ranking(trainer)
    with opened(folder.with_name(f"{folder.name}_at_once"), *more) as trainer:
        train(trainer, 2)
        at_once = {**rows_by_node(trainer), **state(trainer)}
    assert at_once.keys() == resumed.keys() and half_way.keys() <= resumed.keys()
    assert not [name for name, values in at_once.items() if not torch.equal(values, resumed[name])]
    assert any(not torch.equal(values, resumed[name]) for name, values in half_way.items())
    ranked = dglkge.open_run(folder).evaluate(Protocol(split="test")).to_dict()
    assert {key: ranked[key] for key in metrics} == metrics
    return resumed


def ranking(trainer: Trainer) -> dict[str, Any]:
    """Rank the test split, without the loss: files are ranked without."""
    return dataclasses.replace(trainer.evaluate("test"), loss=None).to_dict()


def loss_against_all(trainer: Trainer, batch: Any, rows: Rows, query: Callable) -> torch.Tensor:
    """Return the summed softmax loss of a batch of triples among all entities, by node id."""
    total = torch.zeros((), dtype=torch.float64)
    for group in trainer._train_step.objective.plan(batch).groups:
        heads, tails = rows[group.lhs], rows[group.rhs]
        relations = rows[RELATION][torch.from_numpy(group.relation_ids)]
        h, t = torch.from_numpy(group.head_ids), torch.from_numpy(group.tail_ids)
        directions = (Side.TAIL, heads[h], tails, t), (Side.HEAD, tails[t], heads, h)
        for side, anchors, candidates, answers in directions:
            scores = query(anchors, relations, side) @ candidates.T
            total = total + functional.cross_entropy(scores, answers, reduction="sum")
    return total


def assert_epochs_equal(
    config: dglkge.Config,
    loss_of: Callable[[Dataset, Trainer, Rows, Any], torch.Tensor],
    num_epochs: int = 2,
    rel: float = 1e-3,
    sums_batch: bool = False,
) -> None:
    """Train by both, from the same rows; ``loss_of(data, trainer, rows, batch)`` is a batch's summed loss."""
    data = Dataset.open(config.dataset)
    with opened(config) as trainer:
        rows = dense_rows(trainer)
        optimizer = torch.optim.Adagrad(rows.values(), lr=0.1, eps=1e-10)
        for _, batch in batches_of(trainer, num_epochs):
            optimizer.zero_grad()
            loss = loss_of(data, trainer, rows, batch)
            (loss / (1 if sums_batch else batch.global_size)).backward()
            optimizer.step()
            assert trainer.step(batch) == pytest.approx(loss.item(), rel=rel)
        for name, expected in rows.items():
            table = trainer.tables[name]
            got = table.gather(table.node_ids[torch.arange(len(expected))])
            atol = max(1e-4, rel / 5)
            np.testing.assert_allclose(got, expected.detach(), rtol=1e-3, atol=atol, err_msg=name)
