"""Merging rows without moving them, against a plain loop; parts of loops on the threads of a trainer."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest
import torch

from dglkge.optim import workspace
from dglkge.optim.row_chains import GradientRows, PlainRows

each_kind = pytest.mark.parametrize("kind", [GradientRows, PlainRows])


def merged(chains: GradientRows, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    rows = torch.empty(chains.num_keys, chains.dim, dtype=dtype)
    counts = np.empty(chains.num_keys, np.int64)
    chains.merge_into(np.arange(chains.num_keys), rows, counts, workspace.Scratch())
    return rows.double().numpy(), counts


@each_kind
@pytest.mark.parametrize(("num_ids", "num_rows"), [(0, 5), (700, 40), (9000, 2**40)])
def test_sums_of_equal_ids(kind: type[GradientRows], num_ids: int, num_rows: int) -> None:
    """Several sources of strided rows, far more than the first capacity, ids beyond 32 bits."""
    rng = np.random.default_rng(num_ids)
    chains = kind(3, np.dtype(np.float32))
    for _ in range(2):  # the second time in the same arrays
        chains.clear()
        sums: dict[int, np.ndarray] = {}
        numbers: dict[int, int] = {}
        for stride in (3, 8):
            ids = rng.integers(0, num_rows, num_ids)
            rows = (rng.integers(-9, 9, (num_ids, stride)) / 4).astype(np.float32)[:, :3]
            weights = rng.integers(1, 4, num_ids)
            chains.add(ids, rows, weights)
            for key, row, weight in zip(ids.tolist(), rows, weights):
                sums[key] = sums.get(key, 0) + row.astype(np.float64)
                numbers[key] = numbers.get(key, 0) + int(weight)
        assert list(sums) == chains.keys.tolist()  # in order of first appearance
        rows64, counts = merged(chains, torch.float32)
        assert counts.tolist() == list(numbers.values())
        assert rows64.tolist() == [row.tolist() for row in sums.values()]
        owners, shared = np.zeros((2, chains.num_keys), np.int64)
        keys = np.array([*list(sums)[:5], num_rows + 1])
        places = chains.match(keys, 0, 1, owners, shared.astype(bool))
        assert places.tolist() == [*range(min(5, len(sums))), -1]


@each_kind
def test_sums_may_be_written_in_a_narrow_type(kind: type[GradientRows]) -> None:
    chains = kind(2, np.dtype(np.float32))
    chains.add(np.array([8, 9]), np.array([[1.001, 100.3], [1, 2]], np.float32))
    assert merged(chains, torch.bfloat16)[0].tolist() == [[1.0, 100.5], [1.0, 2.0]]


@pytest.fixture
def many_threads() -> None:
    torch.set_num_threads(13)  # that of other tests is restored in tests/conftest.py


@pytest.mark.parametrize("num_rows", [0, 1, 12, 13, 1000])
def test_parts_are_all_rows_in_their_order(many_threads, num_rows: int) -> None:
    """As many as there are threads, unless they would be too small; all at the same time."""
    num_parts = min(13, num_rows)
    together = threading.Barrier(max(1, num_parts), timeout=60)

    def work(part: slice) -> list[int]:
        together.wait()
        assert num_parts < 2 or torch.get_num_threads() == 1
        return list(range(num_rows)[part])

    parts = workspace.split(num_rows, workspace.NUMBERS_A_PART, work)
    assert len(parts) == max(1, num_parts)
    assert sum(parts, []) == list(range(num_rows))


def test_an_error_of_a_part_is_raised_when_all_have_ended(many_threads) -> None:
    ended, late = [], threading.Event()

    def work(part: slice) -> None:
        if part.start == 3:
            late.set()
            raise ValueError("part 3")
        assert late.wait(60)
        ended.append(part.start)

    with pytest.raises(ValueError, match="part 3"):
        workspace.split(13, workspace.NUMBERS_A_PART, work)
    assert sorted(ended) == [row for row in range(13) if row != 3]


def test_a_forked_process_has_threads_of_its_own(many_threads) -> None:
    assert len(workspace.split(13, workspace.NUMBERS_A_PART, str)) == 13
    fork, arguments = multiprocessing.get_context("fork"), (13, workspace.NUMBERS_A_PART, str)
    process = fork.Process(target=workspace.split, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0
