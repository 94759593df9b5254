"""Parts of loops and matmuls on the threads of a trainer."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dglkge.optim import workspace


@pytest.fixture(autouse=True)
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workspace, "PRODUCTS_A_TILE", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(13)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [0, 1, 12, 13, 1000])
def test_parts_are_all_rows_in_their_order(num_rows: int) -> None:
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


def test_an_error_of_a_part_is_raised_when_all_have_ended() -> None:
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


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert len(workspace.split(13, workspace.NUMBERS_A_PART, str)) == 13
    process = multiprocessing.get_context("fork").Process(
        target=workspace.split, args=(13, workspace.NUMBERS_A_PART, str)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 5, 17), (100, 7, 33), (7, 40, 300)], ids=str)
def test_matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Also of transposed operands, into a part of an array: whole numbers, so that every order is exact."""
    rows, inner, columns = shape
    rng = np.random.default_rng(rows)
    left, right = rng.integers(-2, 3, (rows, inner)), rng.integers(-2, 3, (inner, columns))
    out = torch.full((rows + 2, columns), 77.0, dtype=dtype)
    as_tensor = [torch.from_numpy(operand.copy()).to(dtype) for operand in (left.T, right.T)]
    workspace.matmul(as_tensor[0].T, as_tensor[1].T, out[1:-1])
    np.testing.assert_array_equal(out[1:-1].float(), left @ right)
    assert (out[[0, -1]] == 77).all()
