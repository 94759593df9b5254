"""Parts of loops on the threads of a trainer."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from dglkge.optim import workspace


@pytest.fixture(autouse=True)
def many_threads() -> None:
    torch.set_num_threads(13)  # that of other tests is restored in tests/conftest.py


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
    fork, arguments = multiprocessing.get_context("fork"), (13, workspace.NUMBERS_A_PART, str)
    process = fork.Process(target=workspace.split, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0
