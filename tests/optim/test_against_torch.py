"""Optimizers against those of torch, in float64, in one process."""

from __future__ import annotations

import pytest
import torch

from dglkge.optim import SparseAdagrad, SparseAdam
from tests.optim.oracle import batch, start_rows

EVERYTHING = torch.arange(50)


@pytest.mark.parametrize("dim", [1, 8, 401])
def test_adagrad_is_torch_adagrad(make_table, dim) -> None:
    """300 steps with duplicates and a hub; weight decay too, as torch applies it, on touched rows."""
    table = make_table(dim)
    optimizer = SparseAdagrad([table], lr=0.1, eps=1e-6)
    weight = torch.nn.Parameter(start_rows(50, dim).double())
    dense = torch.optim.Adagrad([weight], lr=0.1, eps=1e-6)
    for step in range(300):
        ids, gradients = batch(step, 50, dim)
        optimizer.step_rows([(table, ids, gradients)])
        weight.grad = torch.zeros(50, dim).double().index_add_(0, ids, gradients.double())
        dense.step()
    torch.testing.assert_close(table.weight[EVERYTHING].double(), weight.detach(), rtol=1e-5, atol=1e-5)
    state = optimizer._state[table.name][EVERYTHING]
    torch.testing.assert_close(state.double(), dense.state[weight]["sum"], rtol=1e-5, atol=1e-5)


def test_global_adam_is_torch_sparse_adam(make_table) -> None:
    """300 steps; some without any gradient, which torch does not count."""
    table = make_table()
    optimizer = SparseAdam([table], lr=0.01, bias_correction="global")
    weight = torch.nn.Parameter(start_rows(50, 4).double())
    sparse = torch.optim.SparseAdam([weight], lr=0.01)
    for step in range(300):
        ids, gradients = batch(step, 50, 4)
        if step % 7 == 0:
            optimizer.step()
            continue
        optimizer.step_rows([(table, ids, gradients)])
        weight.grad = torch.sparse_coo_tensor(ids[None], gradients.double(), (50, 4), check_invariants=False)
        sparse.step()
    torch.testing.assert_close(table.weight[EVERYTHING].double(), weight.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        optimizer._state[table.name][1][EVERYTHING].double(),
        sparse.state[weight]["exp_avg"],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_row_adam_equals_dense_adam_where_every_row_is_touched(make_table, dtype, tolerance) -> None:
    """The per-row bias correction is torch's Adam for a row that is in every step."""
    table = make_table(33, dtype)
    optimizer = SparseAdam([table], lr=0.02)
    weight = torch.nn.Parameter(table.weight[EVERYTHING].double())
    dense = torch.optim.Adam([weight], lr=0.02)
    for step in range(200):
        gradients = torch.randn(50, 33, generator=torch.Generator().manual_seed(step))
        gradients *= 10.0 ** (step % 5 - 3)
        optimizer.step_rows([(table, EVERYTHING, gradients)])
        weight.grad = gradients.double()
        dense.step()
    torch.testing.assert_close(
        table.weight[EVERYTHING].double(), weight.detach(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("Adagrad", "auto"), ("Adam", "reference"), ("AdamW", "auto"), ("AdamW", "reference")],
)
def test_weight_decay_is_torchs_where_every_row_is_touched(make_table, name, kernels) -> None:
    """L2 for Adagrad and Adam, decoupled for AdamW; a row that no gradient touches does not decay."""
    table = make_table()
    options: dict = {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.1}
    make = SparseAdagrad if name == "Adagrad" else SparseAdam
    decoupled = {"decoupled_weight_decay": True} if name == "AdamW" else {}
    optimizer = make([table], **options, **decoupled, kernels=kernels)
    weight = torch.nn.Parameter(start_rows(50, 4).double()[:40])
    dense = getattr(torch.optim, name)([weight], **options)
    for step in range(100):
        gradients = torch.randn(40, 4, generator=torch.Generator().manual_seed(step))
        optimizer.step_rows([(table, EVERYTHING[:40], gradients)])
        weight.grad = gradients.double()
        dense.step()
    got = table.weight[EVERYTHING]
    torch.testing.assert_close(got[:40].double(), weight.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[40:], start_rows(50, 4)[40:])


def test_a_row_whose_gradient_is_not_finite_does_not_decay(make_table) -> None:
    table = make_table()
    optimizer = SparseAdam(
        [table], lr=0.1, weight_decay=0.5, decoupled_weight_decay=True, nonfinite="skip", eps=1.0
    )
    gradients = torch.zeros(2, 4)
    gradients[1, 2] = torch.nan
    optimizer.step_rows([(table, torch.tensor([3, 4]), gradients)])
    got, before = table.weight[EVERYTHING], start_rows(50, 4)
    torch.testing.assert_close(got[3], before[3] * 0.95)
    assert torch.equal(got[4], before[4])


def test_gradients_of_any_kind_on_one_table(make_table) -> None:
    """int32 ids, strided and float64 rows, several entries and an empty one."""
    table, other = make_table(), make_table(2)
    optimizer = SparseAdagrad([table, other], lr=0.1)
    strided = torch.ones(4, 3).t()
    optimizer.step_rows(
        [
            (table, torch.tensor([3, 4, 3], dtype=torch.int32), strided),
            (table, torch.tensor([4]), torch.full((1, 4), 2.0).double()),
            (table, torch.empty(0, dtype=torch.int64), torch.empty(0, 4)),
        ]
    )
    total = optimizer._state[table.name][torch.tensor([3, 4, 5])]
    assert total[:, 0].tolist() == [4.0, 9.0, 0.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_gradients_on_a_gpu(make_table) -> None:
    """Rows read to a GPU, gradients there, table on the host."""
    table, twin = make_table(), make_table()
    optimizers = [SparseAdam([embedding], lr=0.1) for embedding in (table, twin)]
    for step in range(20):
        ids, gradients = batch(step, 50, 4)
        for embedding, device in ((table, "cuda"), (twin, "cpu")):
            (embedding(ids, device=torch.device(device)) * gradients.to(device)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(table.weight[EVERYTHING], twin.weight[EVERYTHING])
