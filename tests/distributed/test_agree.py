"""All trainers raise the error of the first that failed, of its kind, after the same messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dglkge.distributed.agreement import agree
from dglkge.errors import CheckpointError, InputError, InputErrors, StorageError
from tests.optim.test_exchanges import Threads


def outcomes(works: list[Callable[[], Any]]) -> list[Any]:
    """Return what each of several trainers, which are threads, returns or raises."""
    texts: list[str] = [""] * len(works)
    threads = Threads(len(works))

    def trainer(rank: int) -> Any:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            threads.barrier.wait(30)
            return list(texts)

        try:
            return agree(gather, works[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(trainer, range(len(works))))


def failing(error: Exception) -> Callable[[], Any]:
    """Return work that fails."""

    def work() -> Any:
        raise error

    return work


def test_without_an_error_each_has_its_own_result() -> None:
    assert outcomes([lambda: 1, lambda: None, lambda: "c"]) == [1, None, "c"]


@pytest.mark.parametrize("kind", [InputError, CheckpointError, StorageError])
def test_all_raise_the_first_error_of_its_kind(kind: type[Exception]) -> None:
    found = outcomes([lambda: 1, failing(kind("no room")), failing(InputError("later"))])
    assert [type(error) for error in found] == [kind] * 3
    assert [str(error) for error in found] == ["rank 1: no room"] * 3


def test_an_error_of_rank_0_has_no_rank_and_a_kind_without_constructor_is_its_base() -> None:
    found = outcomes([failing(InputErrors(["a", "b"])), lambda: 1])
    assert [(type(error), str(error)) for error in found] == [(InputError, "a; b")] * 2


def test_a_bug_is_not_sent_to_others() -> None:
    with pytest.raises(ZeroDivisionError):
        agree(lambda text: pytest.fail("sent"), failing(ZeroDivisionError()))
    with pytest.raises(InputError, match="^known$"):
        agree(lambda text: [text, json.dumps(None)], failing(InputError("known")))
