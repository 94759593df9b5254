"""How an objective computes: where, in which numbers, by which of two codes; seconds of its phases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dglkge.model.device import HOST, ComputeDevice

PHASES = (
    "order",
    "edges",
    "negatives",
    "gather",
    "score",
    "loss",
    "backward",
    "merge",
    "exchange",
    "update",
    "waiting",
    "other",
)
"""Phases of a trainer, in the order of a batch; the last is all time outside the others."""

_NUMBER = {phase: number for number, phase in enumerate(PHASES)}


class PhaseClock:
    """Adds up seconds by phase; does nothing unless it is switched on.

    Examples
    --------
    >>> clock = PhaseClock(is_on=True)
    >>> clock.enter("gather")
    >>> clock.stop()
    >>> clock.take()["gather"] > 0, clock.take()["gather"]
    (True, 0.0)
    """

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self._seconds = np.zeros(len(PHASES))
        self._running = -1
        self._since = 0.0

    def enter(self, phase: str) -> None:
        """End the running phase and begin another."""
        if not self.is_on:
            return
        now = time.perf_counter()
        if self._running >= 0:
            self._seconds[self._running] += now - self._since
        self._running, self._since = _NUMBER[phase], now

    def stop(self) -> None:
        """End the running phase; the time until the next one begins is not counted."""
        if self.is_on and self._running >= 0:
            self._seconds[self._running] += time.perf_counter() - self._since
            self._running = -1

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        taken = dict(zip(PHASES, self._seconds.tolist()))
        self._seconds[:] = 0
        return taken


def as_array(seconds: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Return the seconds in the order of :data:`PHASES`, to be summed over trainers."""
    return np.array([seconds[phase] for phase in PHASES])


@dataclass(frozen=True)
class Computation:
    """How an objective computes.

    Attributes
    ----------
    device : ComputeDevice
        Device of the rows.
    matmul_dtype : torch.dtype
        Type of the matmuls that score negatives and candidates, ``torch.float32`` or ``torch.bfloat16``.
        Queries and the scores of true answers are float32 in any case.
    is_reference : bool
        Compute by plain torch and numpy: no compiled loop, no gradient that is written by hand.
    is_compiled : bool
        Compile scores and losses by ``torch.compile``.
    clock : PhaseClock
    """

    device: ComputeDevice = HOST
    matmul_dtype: torch.dtype = torch.float32
    is_reference: bool = False
    is_compiled: bool = False
    clock: PhaseClock = field(default_factory=PhaseClock)
