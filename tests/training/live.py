"""Trainers of this process, one after another, and training beside a dense loop in float64."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import dglkge
from dglkge.data.dataset import Dataset
from dglkge.training.epochs import JOB
from dglkge.training.trainer import Trainer
from dglkge.typing import RELATION, Side

Rows = dict[str, torch.Tensor]


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


def train(trainer: Trainer, until: int) -> list[float]:
    """Run the usual loops; return the losses of all batches."""
    return [trainer.step(batch) for _ in dglkge.remaining_epochs_until(until) for batch in trainer.batches()]


def rows_by_node(trainer: Trainer) -> Rows:
    """Return copies of all rows by node id."""
    return {name: table.local_rows.clone() for name, table in trainer.tables.items()}


def dense_rows(trainer: Trainer) -> Rows:
    """Return all rows by original id, as leaves in float64."""
    return {
        name: trainer.tables.gather(name, torch.arange(len(table))).double().requires_grad_()
        for name, table in trainer.tables.items()
    }


def chunks_of(batch: Any) -> np.ndarray:
    """Return the chunk of each triple of a batch, whose groups are sorted by chunk."""
    return np.repeat(*zip(*((group.chunk, group.end - group.start) for group in batch.groups)))


def asked(trainer: Trainer, batch: Any) -> list[tuple[Side, int, int]]:
    """Return side, relation and entity of each query of a batch, by original ids."""
    original = {name: np.asarray(table.original_ids) for name, table in trainer.tables.items()}
    queries = []
    for run in batch.runs:
        part = slice(run.start, run.end)
        entities = original[run.anchor_type][batch.anchors[part]].tolist()
        relations = original[RELATION][batch.relations[part]].tolist()
        queries += [(run.side, *pair) for pair in zip(relations, entities)]
    return queries


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
        for _ in dglkge.remaining_epochs_until(num_epochs):
            for batch in trainer.batches():
                optimizer.zero_grad()
                loss = loss_of(data, trainer, rows, batch)
                (loss / (1 if sums_batch else batch.global_size)).backward()
                optimizer.step()
                assert trainer.step(batch) == pytest.approx(loss.item(), rel=rel)
        for name, expected in rows.items():
            got = trainer.tables.gather(name, torch.arange(len(expected)))
            np.testing.assert_allclose(
                got, expected.detach(), rtol=1e-3, atol=max(1e-4, rel / 5), err_msg=name
            )
