"""``kernels="reference"``: the plain twins of merging and updating, against the compiled loops."""

from __future__ import annotations

import sys

import pytest
import torch

from dglkge.kernels import chains
from dglkge.optim import RowAdagrad, SparseAdam
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
    table = make_table(6, dtype)
    optimizer = RowAdagrad([table], lr=0.1, kernels=kernels)
    oracle = Oracle(Case("", "RowAdagrad"), 50, 6)
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
