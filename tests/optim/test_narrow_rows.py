"""Rows of 16 bits: steps against float64 with the same random bits; writes through late servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dglkge.optim
from dglkge.kernels.hashing import combine, stream_key
from dglkge.kernels.rows import round_rows_plain
from dglkge.optim import NarrowEmbedding, SparseAdagrad
from dglkge.optim.dgl_tables import fetch, local_array, state_array, write_back
from dglkge.optim.narrow_rows import widen
from tests.optim.conftest import TABLE_NUMBERS
from tests.optim.oracle import EVERYTHING, NUM_ROWS, Case, Oracle

ROW_IDS = np.random.default_rng(5).permutation(NUM_ROWS)


@pytest.fixture
def make_narrow(standalone_graph: Any) -> Callable[..., NarrowEmbedding]:
    def make(dim: int = 6, dtype: torch.dtype = torch.bfloat16, **options: Any) -> NarrowEmbedding:
        policy, name = standalone_graph.get_node_partition_policy("thing"), f"narrow{next(TABLE_NUMBERS)}"
        table = NarrowEmbedding(NUM_ROWS, dim, name, policy, dtype=dtype, row_ids=ROW_IDS, **options)
        draw = torch.Generator().manual_seed(dim)
        table.write(EVERYTHING, torch.randn(NUM_ROWS, dim, generator=draw))
        return table

    return make


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [
        ("SparseAdagrad", torch.float16, "reference"),
        ("RowAdagrad", torch.float16, "auto"),
        ("SparseAdam", torch.bfloat16, "auto"),
        ("SparseAdam", torch.bfloat16, "reference"),
    ],
    ids=str,
)
def test_steps_are_those_of_float64_rounded_by_the_same_bits(make_narrow, monkeypatch, name, dtype, kernels):
    if kernels == "auto":
        monkeypatch.setattr("dglkge.optim.narrow_rows.NarrowUpdate.NUMBERS_A_BLOCK", 65)
    table = make_narrow(7, dtype, seed=3)
    optimizer = getattr(dglkge.optim, name)([table], lr=0.1, kernels=kernels)
    oracle, rng = Oracle(Case("", name, lr=0.1), NUM_ROWS, 7), np.random.default_rng(1)
    is_half, num_same, num_all = dtype == torch.float16, 0, 0
    for number in range(100, 112):
        before = table.read(EVERYTHING)
        ids = rng.integers(0, NUM_ROWS, 60)
        gradients = rng.standard_normal((60, 7)).astype(np.float32)
        optimizer.step_rows([(table, torch.from_numpy(ids), torch.from_numpy(gradients))], number=number)
        oracle.rows = before.double()
        oracle.step(torch.from_numpy(ids), torch.from_numpy(gradients))
        words = np.zeros((NUM_ROWS, 7), np.uint16)
        key = combine(int(stream_key(3, "rounding", table.name)[0]), number)
        round_rows_plain(oracle.rows.float().numpy(), words, np.arange(NUM_ROWS), ROW_IDS, key, is_half)
        expected = torch.from_numpy(words.view(np.int16)).view(dtype).float()
        rows = table.read(EVERYTHING)
        # Float32 differs from float64 in the last digits, and may so cross a random limit: at most one unit.
        unit = torch.finfo(dtype).eps * torch.maximum(expected.abs(), before.abs())
        assert bool(((rows - expected).abs() <= unit).all())
        num_same, num_all = num_same + int((rows == expected).sum()), num_all + rows.numel()
        untouched = np.setdiff1d(np.arange(NUM_ROWS), ids)
        assert torch.equal(rows[untouched], before[untouched])
    assert num_same > 0.99 * num_all
    assert all(tensor.dtype == torch.float32 for tensor in optimizer.state_tensors(table).values())


def test_reads_are_float32_and_their_gradients_arrive(make_narrow) -> None:
    table = make_narrow()
    assert table.weight.dtype == torch.int16 and table.weight.shape == (NUM_ROWS, 6)
    optimizer = SparseAdagrad([table], lr=0.5)
    before = table.read(EVERYTHING)
    rows = table(torch.tensor([4, 4, 9]))
    assert rows.dtype == torch.float32 and torch.equal(rows.detach(), before[[4, 4, 9]])
    rows.sum().backward()
    optimizer.step()
    after = table.read(EVERYTHING)
    assert (before != after).any(dim=1).nonzero().flatten().tolist() == [4, 9]
    # Adagrad's first step is lr times the sign of the gradient.
    torch.testing.assert_close(after[[4, 9]], before[[4, 9]] - 0.5, rtol=2**-7, atol=2**-7)


def test_small_steps_are_lost_by_nearest_and_kept_in_the_mean_by_stochastic(make_narrow):
    num_steps, lr = 64, 2.0**-12  # the next bfloat16 below 1 is 1 - 2**-8
    moved = {}
    for rounding in ("nearest", "stochastic"):
        table = make_narrow(100, rounding=rounding)
        table.write(EVERYTHING, torch.ones(NUM_ROWS, 100))
        optimizer = SparseAdagrad([table], lr=lr)
        for step in range(num_steps):
            # Gradients that grow: g / sqrt(sum of g**2) tends to a constant.
            optimizer.step_rows([(table, EVERYTHING, torch.full((NUM_ROWS, 100), 2.0**step))])
        moved[rounding] = 1 - table.read(EVERYTHING).double()
    squares = np.cumsum(4.0 ** np.arange(num_steps))
    exact = lr * (2.0 ** np.arange(num_steps) / np.sqrt(squares)).sum()
    assert not moved["nearest"].any()
    error = float(moved["stochastic"].std()) / np.sqrt(moved["stochastic"].numel())
    assert abs(float(moved["stochastic"].mean()) - exact) < 5 * error


def test_rows_are_limited_before_rounding_and_kept_without_a_finite_gradient(make_narrow) -> None:
    table = make_narrow(20)
    optimizer = SparseAdagrad([table], lr=1.0, nonfinite="skip")
    optimizer.limit_norms(table, 0.5)
    before, gradient = table.read(EVERYTHING), torch.randn(11, 20)
    gradient[10, 3] = torch.nan
    optimizer.step_rows([(table, EVERYTHING[:11], gradient)])
    after = table.read(EVERYTHING)
    assert bool((after[:10].norm(dim=1) < 0.5 * (1 + 2**-7)).all())
    assert torch.equal(after[10:], before[10:]) and bool((before.norm(dim=1) > 1).all())
    assert optimizer.num_skipped_rows == 1


def test_mistakes_are_named(make_narrow) -> None:
    with pytest.raises(ValueError, match="dtype must be torch.bfloat16 or torch.float16, got torch.float32"):
        make_narrow(dtype=torch.float32)
    with pytest.raises(ValueError, match="rounding must be 'stochastic' or 'nearest', got 'up'"):
        make_narrow(rounding="up")
    rows = torch.zeros(3, 2, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="rows 1 to 3, expected 0 to 2"):
        widen(rows, np.array([1, 3]))


class LateTensor:
    """A distributed tensor whose servers show a write only after some reads."""

    def __init__(self, rows: torch.Tensor, num_stale_reads: int) -> None:
        self.rows, self.dtype, self.name = rows, rows.dtype, "late"
        self.kvstore, self.kvstore_key, self.data_store = self, "late", {"late": rows}
        self.num_stale_reads, self.pending = num_stale_reads, []

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_stale_reads -= 1
        if self.num_stale_reads < 0:
            for rows, values in self.pending:
                self.rows[rows] = values
        return self.rows[ids]

    def __setitem__(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.pending.append((ids, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_write_is_over_when_it_can_be_read(dtype: torch.dtype) -> None:
    """Stale answers are asked again; NaN equals itself; 16-bit rows are rounded."""
    tensor = LateTensor(torch.zeros(5, 2, dtype=dtype), 4)
    rows = np.array([[1.001, 2], [np.nan, 4]], np.float32)
    write_back([tensor], np.array([3, 1]), [rows], 10.0)
    expected = torch.from_numpy(rows).to(dtype)
    torch.testing.assert_close(tensor.rows[[3, 1]], expected, rtol=0, atol=0, equal_nan=True)
    fetched = fetch([tensor], np.array([3]))[0]
    assert fetched.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    fetched += 1
    torch.testing.assert_close(tensor.rows[3], expected[0], rtol=0, atol=0)  # fetch copies
    tensor = LateTensor(torch.zeros(5, 2, dtype=dtype), 10**9)
    with pytest.raises(TimeoutError, match="the servers did not take 1 rows of 'late' within 0.05 s"):
        write_back([tensor], np.array([2]), [np.ones((1, 2), np.float32)], 0.05)


def test_words_travel_through_the_kvstore_as_they_are() -> None:
    tensor = LateTensor(torch.tensor([[1, -2], [3, -4]], dtype=torch.int16), 2)
    (words,) = fetch([tensor], np.array([1]))
    assert words.dtype == np.uint16 and words.tolist() == [[3, 65532]]
    write_back([tensor], np.array([0]), [words], 10.0)
    assert tensor.rows.tolist() == [[3, -4], [3, -4]]


def test_which_rows_can_be_written_in_place() -> None:
    """32 and 64 bits in shared memory; a state tensor that is not there is an error."""
    wide, narrow = LateTensor(torch.zeros(3, 2), 0), LateTensor(torch.zeros(3, 2).half(), 0)
    local_array(wide)[1] = 5
    assert wide.rows[1].tolist() == [5, 5]
    assert local_array(narrow) is None
    wide.data_store.clear()
    assert local_array(wide) is None
    with pytest.raises(RuntimeError, match="the rows of 'late' are not in this machine's shared memory"):
        state_array(wide)
