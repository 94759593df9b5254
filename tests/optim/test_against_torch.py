"""Optimizers against those of torch, in float64, in one process."""

from __future__ import annotations

import pytest
import torch

from dglkge.optim import SparseAdagrad, SparseAdam
from tests.optim.oracle import EVERYTHING, batch

DECAY = {"eps": 1e-6, "weight_decay": 0.1}
DECOUPLED = {"decoupled_weight_decay": True}
STATE_OF_TORCH = {"sum": "sum", "mem": "exp_avg", "power": "exp_avg_sq"}


@pytest.mark.parametrize(
    ("name", "options", "more", "dim", "dtype"),
    [
        ("Adagrad", {"eps": 1e-6}, {}, 1, torch.float32),
        ("Adagrad", {"eps": 1e-6}, {}, 401, torch.float32),
        ("Adagrad", DECAY, {}, 8, torch.float32),
        ("SparseAdam", {}, {"bias_correction": "global"}, 4, torch.float32),
        ("Adam", {}, {}, 33, torch.float32),
        ("Adam", {}, {}, 33, torch.float64),
        ("Adam", DECAY, {"kernels": "reference"}, 4, torch.float32),
        ("AdamW", DECAY, DECOUPLED, 4, torch.float32),
        ("AdamW", DECAY, {**DECOUPLED, "kernels": "reference"}, 4, torch.float32),
    ],
    ids=str,
)
def test_rows_and_state_are_those_of_torch(make_table, name, options, more, dim, dtype) -> None:
    """Duplicates and a hub; some steps without a gradient; rows without one do not move, nor decay."""
    table = make_table(dim, dtype)
    make = SparseAdagrad if name == "Adagrad" else SparseAdam
    optimizer = make([table], lr=0.02, **options, **more)
    before = table.weight[EVERYTHING]
    weight = torch.nn.Parameter(before[:40].double())
    reference = getattr(torch.optim, name)([weight], lr=0.02, **options)
    is_lazy = name == "SparseAdam" or options == {"eps": 1e-6}  # else torch moves all rows in each step
    for step in range(300):
        if step % 7 == 0:
            optimizer.step()
            continue
        ids, gradients = batch(step, 40, dim, num_ids=80)
        gradients *= 8.0 ** -(step % 3)  # exact sums
        if not is_lazy:
            ids[40:] = EVERYTHING[:40]
        optimizer.step_rows([(table, ids, gradients)])
        weight.grad = torch.zeros(40, dim).double().index_add_(0, ids, gradients.double())
        if name == "SparseAdam":
            places = ids.unique()
            values = weight.grad[places]
            weight.grad = torch.sparse_coo_tensor(places[None], values, (40, dim), check_invariants=False)
        reference.step()
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    rows = table.weight[EVERYTHING]
    torch.testing.assert_close(rows[:40].double(), weight.detach(), **tolerance)
    assert torch.equal(rows[40:], before[40:])
    for key, tensor in optimizer.state_tensors(table).items():
        if key in STATE_OF_TORCH:
            expected = reference.state[weight][STATE_OF_TORCH[key]]
            torch.testing.assert_close(tensor[EVERYTHING[:40]].double(), expected, **tolerance)


def test_gradients_of_any_kind_on_one_table(make_table) -> None:
    """int32 ids, strided and float64 rows, several entries and an empty one."""
    table, other = make_table(), make_table(2)
    optimizer = SparseAdagrad([table, other], lr=0.1)
    gradients = [
        (table, torch.tensor([3, 4, 3], dtype=torch.int32), torch.ones(4, 3).t()),
        (table, torch.tensor([4]), torch.full((1, 4), 2.0).double()),
        (table, torch.empty(0, dtype=torch.int64), torch.empty(0, 4)),
    ]
    optimizer.step_rows(gradients)
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
