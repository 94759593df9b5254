"""Three defects of DGL's distributed SparseAdagrad, held beside ours; they would fail here if DGL were
mended."""

from __future__ import annotations

import math

import torch

from tests.optim.cluster import run_cluster
from tests.optim.oracle import start_rows

NUM_NODES = {"item": 24, "user": 60}


def test_state_and_duplicates() -> None:
    """DGL keeps the root of its state and averages duplicates; ours follows torch."""
    result = run_cluster(
        "tests.optim.workers:dgl_defects", 1, num_nodes=NUM_NODES, arguments={"process_group": True}
    )[0]
    weight = torch.nn.Parameter(start_rows(60, 1).double())
    dense = torch.optim.Adagrad([weight], lr=0.1, eps=1e-10)
    torch.manual_seed(0)
    for _ in range(200):
        weight.grad = torch.zeros(60, 1).double()
        weight.grad[3] = 2 + torch.rand(1).double()
        dense.step()
    weight.grad = torch.zeros(60, 1).double()
    weight.grad[7] = 6
    dense.step()
    rows, state = result["ours"]
    torch.testing.assert_close(rows.double(), weight.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), dense.state[weight]["sum"], rtol=1e-5, atol=1e-5)
    dgl_rows, dgl_state = result["dgl"]
    assert dgl_state[3] < 4 < 1000 < state[3]  # about sqrt(g^2 + 3) against the sum of 200 squares
    assert dgl_rows[3] < -10 < -3 < rows[3]  # so DGL's learning rate never decays
    assert math.isclose(dgl_state[7], 2.0, rel_tol=1e-5)  # the root of the square of the mean of 1, 2 and 3
    assert math.isclose(state[7], 36.0, rel_tol=1e-5)  # the square of their sum


def test_trainers_that_are_no_multiple_of_servers() -> None:
    """Three trainers and two servers: DGL's exchange breaks, ours does not care."""
    results = run_cluster(
        "tests.optim.workers:dgl_uneven", 3, num_servers=2, num_nodes=NUM_NODES, expected_status={}
    )
    start = start_rows(60, 2)
    wanted = start.clone()
    wanted[:4] -= (
        0.1  # rows 0, 1, 2 by one trainer each, row 3 by all three: Adagrad's first step is the sign
    )
    for result in results:
        torch.testing.assert_close(result["ours"], wanted)
    assert any("Error" in result["dgl"] for result in results if isinstance(result["dgl"], str))
