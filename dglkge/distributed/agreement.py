"""All trainers raise one trainer's error, so that none is left waiting in a collective."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from dglkge.errors import CheckpointError, DglkgeError, InputError, JobError, NotReadyError, StorageError

Result = TypeVar("Result")

_KINDS = {
    kind.__name__: kind for kind in (CheckpointError, InputError, JobError, NotReadyError, StorageError)
}


def agree(
    gather: Callable[[str], Sequence[str]],
    work: Callable[[], Result],
    wait: Callable[[], object] = lambda: None,
) -> Result:
    """Run a function on every trainer, a collective; if it fails on one, all raise its error.

    Parameters
    ----------
    gather : callable
        Returns the texts of all trainers in the order of ranks, within a fixed timeout.
    work : callable
    wait : callable
        A barrier before that, which allows for work of very different length.

    Raises
    ------
    DglkgeError
        That of the first rank that failed, of its kind; of ranks above 0 with the rank before the text.
    """
    problem: tuple[str, str] | None = None
    results: list[Result] = []
    try:
        results.append(work())
    except DglkgeError as error:
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
        problem = (name, str(error))
    wait()
    for rank, text in enumerate(gather(json.dumps(problem))):
        found = json.loads(text)
        if found is not None:
            raise _KINDS[found[0]](found[1] if rank == 0 else f"rank {rank}: {found[1]}")
    return results[0]
