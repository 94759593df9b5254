"""Embeddings of several node types may have one name."""

from __future__ import annotations

import pytest
import torch

from dglkge.optim import SparseAdagrad, SparseAdam
from tests.optim.oracle import start_rows


def test_embeddings_of_one_name_have_their_own_state(make_table) -> None:
    """Each table moves by its own gradients, by both entries of a step, and keeps its own sums."""
    tables = [make_table(3, ntype=ntype, name="shared") for ntype in ("thing", "other")]
    optimizer = SparseAdagrad(
        [{"params": [tables[0]], "lr": 0.5}, {"params": [tables[1]], "lr": 0.1}], lr=0.1
    )
    dense = [torch.nn.Parameter(start_rows(num_rows, 3).double()) for num_rows in (50, 7)]
    oracles = [torch.optim.Adagrad([rows], lr=lr, eps=1e-10) for rows, lr in zip(dense, (0.5, 0.1))]
    for step in range(4):
        gradients = []
        for number, (table, rows, oracle) in enumerate(zip(tables, dense, oracles)):
            ids = torch.tensor([step % 2, 3 + number])
            values = torch.full((2, 3), 1.0 + step + 10 * number)
            gradients.append((table, ids, values))
            rows.grad = torch.zeros_like(rows).index_add_(0, ids, values.double())
            oracle.step()
        if step % 2:
            optimizer.step_rows(gradients)
        else:
            sum((table(ids) * values).sum() for table, ids, values in gradients).backward()
            optimizer.step()
    for table, rows, oracle in zip(tables, dense, oracles):
        everything = torch.arange(len(rows))
        torch.testing.assert_close(table.weight[everything].double(), rows.detach(), rtol=1e-5, atol=1e-6)
        state = optimizer.state_tensors(table)["sum"][everything].double()
        torch.testing.assert_close(state, oracle.state[rows]["sum"], rtol=1e-5, atol=1e-6)


def test_state_of_one_name_is_saved_and_loaded_apart(make_table, tmp_path) -> None:
    """Names in the kvstore tell the tables apart in files and in dictionaries."""
    tables = [make_table(2, ntype=ntype, name="apart") for ntype in ("thing", "other")]
    optimizer = SparseAdam([{"params": [tables[0]], "lr": 0.5}, {"params": [tables[1]], "lr": 0.1}], lr=0.1)
    for number, table in enumerate(tables):
        optimizer.step_rows([(table, torch.tensor([2]), torch.full((1, 2), 1.0 + number))])
    assert sorted(optimizer._state) == ["node~other~apart", "node~thing~apart"]
    optimizer.save(tmp_path / "state")
    memory = [optimizer.state_tensors(table)["mem"][torch.tensor([2])].clone() for table in tables]
    assert memory[0][0, 0] == pytest.approx(0.1) and memory[1][0, 0] == pytest.approx(0.2)
    for table in tables:
        optimizer.step_rows([(table, torch.tensor([2]), torch.ones(1, 2))])
    for group in optimizer.param_groups:
        group["lr"] = 0.9
    optimizer.load(tmp_path / "state")
    for table, rows, group, lr in zip(tables, memory, optimizer.param_groups, (0.5, 0.1)):
        assert torch.equal(optimizer.state_tensors(table)["mem"][torch.tensor([2])], rows)
        assert group["lr"] == lr
    del optimizer
    alone = SparseAdam([tables[1]], lr=0.9)
    alone.load(tmp_path / "state")
    assert torch.equal(alone.state_tensors(tables[1])["mem"][torch.tensor([2])], memory[1])
    assert alone._lr == 0.1
