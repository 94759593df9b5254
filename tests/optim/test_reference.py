"""``kernels="reference"``, the plain twins, against the compiled loops; both against torch's optimizers."""

from __future__ import annotations

import sys

import pytest
import torch

from dglkge.kernels import chains
from dglkge.optim import RowAdagrad, SparseAdagrad, SparseAdam
from tests.optim.oracle import CASES, EVERYTHING, Case, Oracle, batch

each_kind = pytest.mark.parametrize("kernels", ["auto", "reference"])


def train(make_table, case: Case, kernels: str, num_steps: int = 40) -> tuple[list[torch.Tensor], Oracle]:
    table = make_table(6)
    optimizer = case.optimizer_of([table], kernels=kernels)
    oracle = Oracle(case, 50, 6)
    for step in range(num_steps):
        ids, gradients = batch(step, 50, 6)
        gradients *= 1 + step % 3  # some rows are clipped, some are not
        if step % 2:
            optimizer.step_rows([(table, ids, gradients)])
        else:
            (table(ids) * gradients).sum().backward()
            optimizer.step()
        oracle.step(ids, gradients)
    state = optimizer.state_tensors(table)
    assert list(state) == list(oracle.state)
    return [tensor[EVERYTHING] for tensor in (table.weight, *state.values())], oracle


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_every_case_equals_the_compiled_loops_and_calls_none(make_table, monkeypatch, case: Case) -> None:
    """Rows and state after 40 steps differ by rounding only; both are the oracle's."""
    compiled, oracle = train(make_table, case, "auto")

    def fail(*arguments: object) -> None:
        raise AssertionError("a compiled loop was called")

    loops = [loop for loop in vars(chains).values() if hasattr(loop, "py_func")]
    assert len(loops) > 10
    for name, module in list(sys.modules.items()):
        if name.startswith("dglkge.optim"):
            for attribute, value in list(vars(module).items()):
                if any(value is loop for loop in loops):
                    monkeypatch.setattr(module, attribute, fail)
    plain, _ = train(make_table, case, "reference")
    for tensor, twin, expected in zip(compiled, plain, [oracle.rows, *oracle.state.values()]):
        assert twin.dtype == tensor.dtype
        torch.testing.assert_close(twin, tensor, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(twin.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="a compiled loop was called"):
        train(make_table, case, "auto", num_steps=1)


@each_kind
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05), (torch.float16, 0.005)], ids=str
)
def test_tables_of_other_types(make_table, dtype: torch.dtype, tolerance: float, kernels: str) -> None:
    """float64 tables are computed in float64; 16-bit tables in float32 and rounded when they are written."""
    table, oracle = make_table(6, dtype), Oracle(Case("", "RowAdagrad"), 50, 6)
    optimizer = RowAdagrad([table], lr=0.1, kernels=kernels)
    for step in range(30):
        ids, gradients = batch(step, 50, 6)
        optimizer.step_rows([(table, ids, gradients.to(dtype))])
        oracle.step(ids, gradients)
    rows = table.weight[EVERYTHING]
    assert rows.dtype == dtype
    torch.testing.assert_close(rows.double(), oracle.rows, rtol=tolerance, atol=tolerance)
    total = optimizer.state_tensors(table)["sum"]
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(total[EVERYTHING].double(), oracle.state["sum"], rtol=exact, atol=exact)


@each_kind
def test_nonfinite_rows_are_left_alone(make_table, caplog, kernels: str) -> None:
    """NaN, infinity, and sums that overflow; the other rows move. None of the former decays."""
    table = make_table()
    options = {"weight_decay": 0.5, "decoupled_weight_decay": True, "nonfinite": "skip", "kernels": kernels}
    optimizer = SparseAdam([table], lr=0.1, **options)
    before = table.weight[EVERYTHING]
    rows = torch.ones(5, 4)
    rows[0, 3], rows[1, 0], rows[2, 0], rows[3, 1] = float("nan"), 3e38, 3e38, float("-inf")
    optimizer.step_rows([(table, torch.tensor([1, 2, 2, 4, 3]), rows)])
    assert torch.nonzero((table.weight[EVERYTHING] != before).any(1)).flatten().tolist() == [3]
    assert optimizer.state_tensors(table)["step"][EVERYTHING].count_nonzero() == 1
    assert optimizer.num_skipped_rows == 3
    assert f"the gradient is not finite for 3 rows of '{table.name}'" in caplog.text


DECAY, DECOUPLED = {"eps": 1e-6, "weight_decay": 0.1}, {"decoupled_weight_decay": True}


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
    tensors, state = optimizer.state_tensors(table), reference.state[weight]
    for key, name_of_torch in {"sum": "sum", "mem": "exp_avg", "power": "exp_avg_sq"}.items():
        if key in tensors:
            actual = tensors[key][EVERYTHING[:40]].double()
            torch.testing.assert_close(actual, state[name_of_torch], **tolerance)


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
    table, twin = make_table(), make_table()
    optimizers = [SparseAdam([embedding], lr=0.1) for embedding in (table, twin)]
    for step in range(20):
        ids, gradients = batch(step, 50, 4)
        for embedding, device in ((table, "cuda"), (twin, "cpu")):
            (embedding(ids, device=torch.device(device)) * gradients.to(device)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(table.weight[EVERYTHING], twin.weight[EVERYTHING])
