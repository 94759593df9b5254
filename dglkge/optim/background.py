"""A step that runs while its caller goes on, and tensors that wait for it before they are read or written."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable
from weakref import WeakMethod

from dgl.distributed import DistTensor


class Background:
    """Runs one piece of work at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-optim")
        self._work: Future | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start some work; the work before it must have been finished."""
        self._work = self._thread.submit(work)

    def finish(self) -> None:
        """Wait for the work, if any, and raise what it raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()


class FencedTensor(DistTensor):
    """A distributed tensor that lets a background step end before its rows are read or written.

    Parameters
    ----------
    tensor : dgl.distributed.DistTensor
        The tensor; it goes on owning the data.
    finish : weakref.WeakMethod
        Waits for the step, as long as the optimizer lives.
    """

    def __init__(self, tensor: DistTensor, finish: WeakMethod) -> None:
        self.__dict__.update(tensor.__dict__)
        self._owner = False
        self._fenced = tensor
        self._fence = finish

    def _finish(self) -> None:
        finish = self._fence()
        if finish is not None:
            finish()

    def __getitem__(self, ids: Any) -> Any:
        self._finish()
        return self._fenced[ids]

    def __setitem__(self, ids: Any, rows: Any) -> None:
        self._finish()
        self._fenced[ids] = rows
