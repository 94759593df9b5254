"""The recorded reads of an embedding, with a stand-in that records as DGL does."""

from __future__ import annotations

import gc

import torch

from dglkge.optim.dgl_tables import Trace


class Embedding:
    """Records (ids, rows) where gradients are on."""

    def __init__(self) -> None:
        self._trace: list = []

    def __call__(self, ids: list[int]) -> torch.Tensor:
        rows = torch.zeros(len(ids), 2)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._trace.append((torch.tensor(ids), rows))
        return rows

    def reset_trace(self) -> None:
        self._trace = []


def taken(trace: Trace) -> list[tuple[list[int], float]]:
    """Ids and the sum of the gradients of each pair."""
    return [(ids.tolist(), float(gradients.sum())) for ids, gradients in trace.take()]


def test_each_gradient_is_taken_once() -> None:
    """In the order of reading; a second call finds nothing."""
    embedding = Embedding()
    trace = Trace(embedding)
    (embedding([1, 2]).sum() + 3 * embedding([5]).sum()).backward()
    assert taken(trace) == [([1, 2], 4.0), ([5], 6.0)]
    assert taken(trace) == []
    assert embedding._trace == []


def test_a_graph_that_lives_keeps_its_rows_waiting() -> None:
    """Only the loss is held; its backward may come several steps later."""
    embedding = Embedding()
    trace = Trace(embedding)
    loss = embedding([4]).sum()
    for _ in range(3):
        assert taken(trace) == []
        gc.collect()
    loss.backward()
    assert taken(trace) == [([4], 2.0)]
    assert taken(trace) == []


def test_a_graph_that_is_gone_leaves_nothing() -> None:
    """Rows that were read for nothing are not kept alive."""
    embedding = Embedding()
    trace = Trace(embedding)
    for _ in range(3):
        embedding([4])
        assert taken(trace) == []
    gc.collect()
    assert trace._pairs() == []


def test_dropping_gradients_keeps_reads_that_wait() -> None:
    """As zero_grad needs it between forward and backward, also for rows from before a step."""
    embedding = Embedding()
    trace = Trace(embedding)
    early = embedding([1]).sum()
    assert taken(trace) == []
    done, late = embedding([2]).sum(), embedding([3]).sum()
    done.backward()
    trace.drop_gradients()
    (early + late).backward()
    assert taken(trace) == [([1], 2.0), ([3], 2.0)]


def test_nothing_is_recorded_without_gradients() -> None:
    """Under no_grad there is nothing to take."""
    embedding = Embedding()
    with torch.no_grad():
        embedding([1])
    assert taken(Trace(embedding)) == []
