"""``kernels="reference"``: the plain twins of merging and updating, against the compiled loops."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import dglkge.optim
from dglkge.kernels import chains as compiled_chains
from dglkge.kernels import updates as compiled_updates
from dglkge.optim import RowAdagrad, SparseAdagrad, SparseAdam
from tests.optim.cluster import run_cluster
from tests.optim.oracle import CASES, Case, Oracle, batch
from tests.optim.test_cluster import NUM_NODES, NUM_STEPS, TABLES, compare

EVERYTHING = torch.arange(50)


@pytest.fixture
def no_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compiled loop of the optimizers fails when it is called, wherever it was imported."""

    def fail(*arguments: object) -> None:
        raise AssertionError("a compiled loop was called")

    loops = [
        loop
        for module in (compiled_chains, compiled_updates)
        for loop in vars(module).values()
        if hasattr(loop, "py_func")
    ]
    assert len(loops) > 10
    for name, module in list(sys.modules.items()):
        if name.startswith("dglkge.optim"):
            for attribute, value in list(vars(module).items()):
                if any(value is loop for loop in loops):
                    monkeypatch.setattr(module, attribute, fail)


def train(make_table, case: Case, kernels: str, num_steps: int = 40) -> tuple[list[torch.Tensor], Oracle]:
    """Rows and state after some steps, and the oracle."""
    table = make_table(6)
    optimizer = getattr(dglkge.optim, case.optimizer)(
        [table], lr=case.lr, kernels=kernels, **case.options, **case.transport
    )
    oracle = Oracle(case, 50, 6)
    for step in range(num_steps):
        ids, gradients = batch(step, 50, 6)
        gradients *= 1 + step % 3  # some rows are clipped, some are not
        optimizer.step_rows([(table, ids, gradients)])
        oracle.step(ids, gradients)
    state = optimizer.state_tensors(table)
    assert list(state) == list(oracle.state)
    return [tensor[EVERYTHING] for tensor in (table.weight, *state.values())], oracle


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_every_case_equals_the_compiled_loops(make_table, case: Case) -> None:
    """Rows and state after 40 steps differ by rounding only; both are the oracle's."""
    compiled, oracle = train(make_table, case, "auto")
    plain, _ = train(make_table, case, "reference")
    for ours, twin, expected in zip(compiled, plain, [oracle.rows, *oracle.state.values()]):
        assert twin.dtype == ours.dtype
        torch.testing.assert_close(twin, ours, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(twin.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("no_compiled_loops")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_no_compiled_loop_is_called(make_table, case: Case) -> None:
    """Neither when the optimizer is made nor in a step."""
    train(make_table, case, "reference", num_steps=3)
    with pytest.raises(AssertionError, match="a compiled loop was called"):
        train(make_table, case, "auto", num_steps=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_tables_of_other_types(make_table, dtype: torch.dtype) -> None:
    """float64 tables are computed in float64; rows of 16-bit tables are fetched and written back."""
    tables = [make_table(6, dtype) for _ in range(2)]
    optimizers = [
        SparseAdam([table], lr=0.01, kernels=kernels) for table, kernels in zip(tables, ("auto", "reference"))
    ]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for step in range(20):
        ids, gradients = batch(step, 50, 6)
        for table, optimizer in zip(tables, optimizers):
            optimizer.step_rows([(table, ids, gradients.to(dtype))])
    for name in ("step", "mem", "power"):
        ours, twin = (
            optimizer.state_tensors(table)[name][EVERYTHING] for table, optimizer in zip(tables, optimizers)
        )
        torch.testing.assert_close(twin, ours, rtol=tolerance, atol=tolerance)
    rows, twin_rows = (table.weight[EVERYTHING] for table in tables)
    assert twin_rows.dtype == dtype
    # a number beside the middle of two 16-bit numbers may be rounded to either
    spacing = {torch.float64: 1e-12, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(twin_rows.double(), rows.double(), rtol=spacing, atol=spacing)


def test_nonfinite_rows_are_left_alone(make_table) -> None:
    """NaN, infinity, and sums that overflow; the other rows move, and the number is that of the loops."""
    moved, skipped = [], []
    for kernels in ("auto", "reference"):
        table = make_table()
        optimizer = RowAdagrad([table], lr=0.1, nonfinite="skip", kernels=kernels)
        before = table.weight[EVERYTHING]
        rows = torch.ones(5, 4)
        rows[0, 3], rows[1, 0], rows[2, 0], rows[3, 1] = float("nan"), 3e38, 3e38, float("-inf")
        optimizer.step_rows([(table, torch.tensor([1, 2, 2, 4, 3]), rows)])
        moved.append(torch.nonzero((table.weight[EVERYTHING] != before).any(1)).flatten().tolist())
        skipped.append(optimizer.num_skipped_rows)
    assert moved == [[3], [3]]
    assert skipped == [3, 3]


def test_an_unknown_value_is_named(make_table) -> None:
    """With the values that there are."""
    with pytest.raises(ValueError, match="kernels must be 'auto' or 'reference', got 'plain'"):
        SparseAdagrad([make_table()], lr=0.1, kernels="plain")


@pytest.mark.parametrize(("num_trainers", "num_machines"), [(3, 1), (3, 2)])
@pytest.mark.parametrize("kernels", [["reference"], ["auto", "reference"]], ids=["all", "mixed"])
def test_trainers_match_the_oracle(num_trainers: int, num_machines: int, kernels: list[str]) -> None:
    """Through shared memory and the network; a trainer with either kind understands one with the other."""
    results = run_cluster(
        "tests.optim.workers:all_cases",
        num_trainers,
        num_machines=num_machines,
        num_nodes=NUM_NODES,
        arguments={"tables": TABLES, "num_steps": NUM_STEPS, "kernels": kernels},
    )
    for case in CASES:
        compare(case, results)
    assert all(np.array([result["sent_bytes"] for result in results]) > 0)
