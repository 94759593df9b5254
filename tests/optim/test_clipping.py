"""Clipping of gradients, rows of limited length, and rules of groups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.kernels.rules import limit_norms
from dglkge.optim import SparseAdagrad, SparseAdam
from dglkge.optim.links import limit_norms_plain
from dglkge.optim.rules import Adagrad, RowWiseAdagrad
from tests.optim.cluster import NUM_NODES, run_cluster
from tests.optim.oracle import EVERYTHING, Case, Oracle, batch, start_rows

TABLES = [("user", 6), ("item", 3)]


BOTH = [(0.7, 0.4, "mean", "auto"), (0.7, 0.4, "sum", "reference")]


@pytest.mark.parametrize(
    ("norm", "value", "duplicates", "kernels"),
    [(0.5, None, "sum", "auto"), (None, 0.25, "mean", "reference"), *BOTH],
)
def test_clipping_is_torchs_on_the_merged_gradients(make_table, norm, value, duplicates, kernels) -> None:
    """Two tables; duplicates are merged first, then value, then norm over both, then weight decay."""
    tables, lengths = [make_table(4), make_table(7)], []
    optimizer = SparseAdagrad(tables, lr=0.1, eps=1e-6, duplicates=duplicates, kernels=kernels)
    optimizer.clip_gradients(norm, value)
    weights = [torch.nn.Parameter(start_rows(50, dim).double()) for dim in (4, 7)]
    dense = torch.optim.Adagrad(weights, lr=0.1, eps=1e-6)
    for step in range(60):
        sparse = []
        for table, weight in zip(tables, weights):
            ids, gradients = batch(step, 50, weight.shape[1])
            gradients = gradients * (8.0 if step % 3 else 2.0**-7)  # exact sums
            sparse.append((table, ids, gradients))
            weight.grad = torch.zeros_like(weight).index_add_(0, ids, gradients.double())
            if duplicates == "mean":
                weight.grad /= ids.bincount(minlength=50).clamp(min=1)[:, None]
        optimizer.step_rows(sparse)
        if value is not None:
            torch.nn.utils.clip_grad_value_(weights, value)
        lengths.append(float(torch.nn.utils.clip_grad_norm_(weights, norm or math.inf)))
        dense.step()
    if norm == 0.5:
        assert min(lengths) < norm < max(lengths)  # some steps are clipped and others are not
    for table, weight in zip(tables, weights):
        torch.testing.assert_close(table.weight[EVERYTHING].double(), weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_rows_that_are_not_finite_are_not_part_of_the_norm(make_table, kernels) -> None:
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1, eps=0.5, nonfinite="skip", kernels=kernels)
    optimizer.clip_gradients(norm=1.0, value=2.0)
    gradients = torch.zeros(3, 4)
    gradients[0, 0], gradients[1, 1], gradients[2, 2] = math.inf, math.nan, 8.0
    optimizer.step_rows([(table, torch.tensor([0, 1, 2]), gradients)])
    expected, length = torch.zeros(50, 4), 2.0 / (2.0 + 1e-6)
    expected[2, 2] = 0.1 * length / (length + 0.5)
    torch.testing.assert_close(start_rows(50, 4) - table.weight[EVERYTHING], expected, rtol=1e-5, atol=1e-7)


def test_limits_are_checked_and_can_be_removed(make_table) -> None:
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    with pytest.raises(ValueError, match="value must be a positive finite number, got 0"):
        optimizer.clip_gradients(value=0)
    with pytest.raises(ValueError, match="norm must be a positive finite number, got inf"):
        optimizer.clip_gradients(norm=math.inf)
    optimizer.clip_gradients(norm=1e-3)
    optimizer.clip_gradients()
    optimizer.step_rows([(table, EVERYTHING[:1], torch.full((1, 4), 3.0))])
    assert optimizer.state_tensors(table)["sum"][EVERYTHING[:1]].tolist() == [[9.0] * 4]
    alone = SparseAdagrad([make_table()], lr=0.1, synchronous=False)
    alone.clip_gradients(value=1.0)
    with pytest.raises(ValueError, match="norm needs synchronous=True"):
        alone.clip_gradients(norm=1.0)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_groups_have_rules_of_their_own(make_table, kernels) -> None:
    """A group inherits learning rate and links; epsilon is the rule's own. Two tables have one name."""
    name = f"shared_{kernels}"
    tables = [make_table(6, name=name), make_table(3, ntype="other", name=name), make_table(5)]
    decay = {"weight_decay": 0.3, "decoupled_weight_decay": True}
    options = {"weight_decay": 0.02, "decoupled_weight_decay": False}
    groups: list[dict[str, Any]] = [
        {"params": tables[:1]},
        {"params": tables[1:2], "rule": Adagrad()},
        {"params": tables[2:], "rule": RowWiseAdagrad(1e-2), "lr": 0.05, **options},
    ]
    optimizer = SparseAdam(groups, lr=0.1, eps=1e-3, kernels=kernels, **decay)
    cases = [
        Case("", "SparseAdam", options={"eps": 1e-3, **decay}),
        Case("", "SparseAdagrad", options=decay),
        Case("", "RowAdagrad", lr=0.05, options={"eps": 1e-2, **options}),
    ]
    oracles = [Oracle(case, table.num_embeddings, table.embedding_dim) for case, table in zip(cases, tables)]
    for step in range(40):
        batches = [batch(step, table.num_embeddings, table.embedding_dim) for table in tables]
        gradients = [(table, *pair) for table, pair in zip(tables, batches)]
        if step % 2:
            optimizer.step_rows(gradients)
        else:
            sum((table(ids) * values).sum() for table, ids, values in gradients).backward()
            optimizer.step()
        for oracle, pair in zip(oracles, batches):
            oracle.step(*pair)
    for table, oracle in zip(tables, oracles):
        actual = {"rows": table.weight, **optimizer.state_tensors(table)}
        expected = {"rows": oracle.rows, **oracle.state}
        assert set(actual) == set(expected)
        for key, values in expected.items():
            tensor = actual[key][torch.arange(table.num_embeddings)].double()
            torch.testing.assert_close(tensor, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_trainers", "num_machines"), [(3, 1), (2, 2)])
def test_the_norm_is_that_of_all_trainers(num_trainers: int, num_machines: int) -> None:
    """The oracle sees whole batches; norm and value with any number of trainers, two rules."""
    arguments = {"tables": TABLES, "num_steps": 60, "norm": 2.0, "value": 0.75}
    results = run_cluster("clipped", num_trainers, num_machines=num_machines, arguments=arguments)
    cases = [Case("", "RowAdagrad", lr=0.1), Case("", "SparseAdagrad", lr=0.05)]
    oracles = [Oracle(case, NUM_NODES[ntype], dim) for case, (ntype, dim) in zip(cases, TABLES)]
    for step in range(60):
        dense = []
        for oracle, (ntype, dim) in zip(oracles, TABLES):
            ids, gradients = batch(step, NUM_NODES[ntype], dim)
            merged = torch.zeros(NUM_NODES[ntype], dim).double().index_add_(0, ids, gradients.double())
            dense.append((oracle, ids.unique(), merged.clamp(-0.75, 0.75)))
        length = math.sqrt(sum(float((merged**2).sum()) for _, _, merged in dense))
        for oracle, touched, merged in dense:
            oracle.step(touched, merged[touched] * min(1.0, 2.0 / (length + 1e-6)))
    for rows_of_trainer in results:
        for rows, oracle in zip(rows_of_trainer, oracles):
            torch.testing.assert_close(rows.double(), oracle.rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_only_longer_rows_are_scaled(dtype: Any) -> None:
    start = np.array([[3, 4], [0.3, 0.4], [0, 0], [3e30, 4e30]], dtype)
    compiled, plain = start.copy(), start.copy()
    limit_norms(compiled, 1.0)
    limit_norms_plain(torch.from_numpy(plain), 1.0)
    for rows in (compiled, plain):
        np.testing.assert_allclose(rows, [[0.6, 0.8], [0.3, 0.4], [0, 0], [0.6, 0.8]], rtol=1e-6)
        assert rows[1].tolist() == start[1].tolist()
