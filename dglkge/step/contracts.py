"""Contracts of a training step: rows, their transforms, objectives, parameters beside rows, and results.

A :class:`Computation` says how an objective computes: where, in which numbers, by which of two codes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dglkge.embeddings.row_lookup import FoundRows
from dglkge.model.device import HOST, ComputeDevice
from dglkge.step.planning import Places, Plan
from dglkge.typing import Doubles, Ids, Side

MEASURES = ("reg", "violators_lhs", "violators_rhs")
"""PyTorch-BigGraph's names. Means over triples: the regularizer's part of the loss, both sides summed; and
the number of negatives that score above the true head, and above the true tail."""


class BatchMeasures:
    """Sums of :data:`MEASURES` over the triples of a trainer in one batch, (3,) float64; (0,) if not counted.

    Examples
    --------
    >>> measures = BatchMeasures(True)
    >>> measures.add_penalty(0.5)
    >>> measures.add_violators(Side.TAIL, 3)
    >>> measures.sums.tolist()
    [0.5, 0.0, 3.0]
    """

    def __init__(self, are_counted: bool) -> None:
        self.are_counted = are_counted
        self.sums: Doubles = np.zeros(len(MEASURES) if are_counted else 0)

    def add_penalty(self, penalty: float) -> None:
        """Add the penalty of some triples, where it is counted."""
        if self.are_counted:
            self.sums[0] += penalty

    def add_violators(self, side: Side, count: int) -> None:
        """Add negatives of a side that score above the true answer."""
        self.sums[1 if side is Side.HEAD else 2] += count


class RowGradients(NamedTuple):
    """Gradients (n, D) of some rows of a table, by node ids (n,) int64, which may repeat."""

    table: str
    ids: Tensor
    rows: Tensor


@dataclass(frozen=True)
class TableRows:
    """Rows of one table: ids (n,), copies (n, D) if there are any, gradients (n, D), and where rows lie.

    On a device there are copies and gradients for each of the ``places`` (n,) of ids (U,).
    """

    ids: Tensor
    copies: Any
    gradients: Tensor
    in_place: Any = None
    places: Any = None

    @functools.cached_property
    def gradient_addresses(self) -> Ids:
        """Addresses (n,) of the gradients."""
        return FoundRows.in_array(self.gradients.numpy()).addresses


@dataclass(frozen=True)
class Rows:
    """Rows of one batch by table, after all transforms, and their gradients: in the host's memory here."""

    tables: Mapping[str, TableRows]

    def leaf(self, places: Places) -> Tensor:
        """Return rows (n, D) as a leaf of autograd, whose gradient is added to that of the places."""
        rows = self.tables[places.table]
        leaf = rows.copies[places.run].detach().requires_grad_()
        # Set before backward(): autograd then accumulates into this memory in place.
        leaf.grad = rows.gradients[places.run]
        return leaf

    def in_place(self, places: Places) -> FoundRows:
        """Return the addresses of rows in the host's memory, without a copy."""
        return self.tables[places.table].in_place.part(places.run)

    def gradients(self, places: Places) -> Tensor:
        """Return the gradients (n, D) of some places, to be written."""
        return self.tables[places.table].gradients[places.run]

    def addresses(self, runs: Sequence[Places]) -> tuple[Ids, Ids]:
        """Return the addresses of the rows of several runs and of their gradients, in the host's memory."""
        rows = [self.tables[table].in_place.addresses[run] for table, run, _ in runs]
        gradients = [self.tables[table].gradient_addresses[run] for table, run, _ in runs]
        return np.concatenate(rows), np.concatenate(gradients)

    def collect(self) -> list[RowGradients]:
        """Return the gradients of all rows, table by table; waits for a device."""
        return [RowGradients(name, rows.ids, rows.gradients) for name, rows in self.tables.items()]


class RowTransform(Protocol):
    """Change of rows between table and objective, and of gradients on the way back.

    One that a configuration chooses is made with its settings, the original id of each node id by table
    (mapping of str to (n,) int64 tensor), and the run's seed.

    Attributes
    ----------
    tables : sequence of str
        Names of the tables whose rows it changes.
    """

    tables: Sequence[str]

    def start_batch(self, number: int) -> None:
        """Begin a batch, by a number that no other batch of any epoch has."""
        return  # not abstract: a subclass leaves out what it does not need

    def forward(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Change the copied rows (n, D) of node ids (n,) in place."""

    def backward(self, table: str, ids: Tensor, gradients: Tensor) -> None:
        """Turn gradients (n, D) of what ``forward`` gave into those of what it got, in place."""
        return


class Stateful(Protocol):
    """Something with a state that a version of the checkpoint holds, in torch's words."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Take a state that was returned before, perhaps by another number of trainers."""


class ModelStateful(Stateful, Protocol):
    """Something whose state is in the model file, where other programs read it.

    ``state_dict`` returns copies of tensors by their dataset in the file, and ``load_state_dict`` takes the
    open file (h5py.File).
    """

    @property
    def is_collective(self) -> bool:
        """Whether every trainer must take part in ``state_dict``; otherwise rank 0's alone is asked for."""


class Parameters(ModelStateful, Protocol):
    """Parameters beside the rows, which all trainers update alike."""

    def start_batch(self, number: int) -> None:
        """Drop the gradients of the batch before. May be a collective."""

    def sum_gradients(self, gradients: Sequence[RowGradients]) -> float | None:
        """Sum the gradients of all trainers, and clip them by value; a collective.

        The ``gradients`` of this trainer's rows may make the step fail too. Returns the sum of the squares,
        equal on all trainers; None if no trainer may make the step.
        """

    def update(self, factor: float) -> None:
        """Update by the summed gradients times a factor."""


@dataclass(frozen=True)
class Gradients:
    """What an objective computes from the rows of a batch, besides their gradients.

    ``loss`` is summed over this trainer's triples, regularizer included, and may be a number on the device;
    ``candidates`` are gradients of rows that are not of the plan, which this trainer owns; ``measures`` are
    sums of :data:`MEASURES`, if counted.
    """

    loss: float | Tensor
    candidates: Sequence[RowGradients] = ()
    measures: Doubles = field(default_factory=lambda: np.zeros(0))


class Objective(Protocol):
    """A loss of batches: which rows it reads, and their gradients.

    Attributes
    ----------
    reads_in_place : bool
        Whether rows may be left where they are stored; otherwise they are copied.
    """

    reads_in_place: bool

    @property
    def sent_bytes(self) -> int:
        """Bytes of queries and their gradients that this trainer sent to other machines."""

    def plan(self, batch: Any) -> Plan:
        """Draw negatives and ask for all rows; no row is read."""

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        """Queue the work of a batch on a device; returns a function that waits for it.

        On the host the function does the work. Gradients, divided by ``plan.divisor``, are left with the
        rows, and with the parameters of a module. The function may be a collective.
        """


@dataclass(frozen=True)
class StepResult:
    """What a training step did.

    Attributes
    ----------
    loss : float
        Summed over this trainer's triples, both sides, regularizer included. Shares are uneven, so losses are
        summed over trainers and divided by the global batch, never averaged.
    measures : (3,) or (0,) float64 array
        Sums of :data:`MEASURES`, where they are counted.
    sent_bytes : int
        Bytes of ids, rows, queries and gradients that this trainer sent to other machines.
    is_skipped : bool
        Whether nothing was changed, as a gradient in float16 was not finite; equal on all trainers.
    flag_sum : int
        Sum over all trainers of the flags that were given to the step.
    """

    loss: float
    measures: Doubles
    sent_bytes: int
    is_skipped: bool
    flag_sum: int


PHASES: tuple[str, ...] = (
    *("order", "edges", "negatives", "gather", "score", "loss", "backward"),
    *("merge", "exchange", "update", "waiting", "other"),
)
"""Phases of a trainer, in the order of a batch; the last is all time outside the others."""


class PhaseClock:
    """Adds up seconds by phase; does nothing unless it is switched on.

    Examples
    --------
    >>> clock = PhaseClock(is_on=True)
    >>> clock.enter("gather")
    >>> clock.stop()
    >>> seconds = dict(zip(PHASES, clock.take().tolist()))
    >>> seconds["gather"] > 0, clock.take().tolist() == [0.0] * len(PHASES)
    (True, True)
    """

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self._seconds = np.zeros(len(PHASES))
        self._running = -1
        self._since = 0.0

    def enter(self, phase: str) -> None:
        """End the running phase and begin another."""
        self.stop()
        if self.is_on:
            self._running, self._since = PHASES.index(phase), time.perf_counter()

    def stop(self) -> None:
        """End the running phase; the time until the next one begins is not counted."""
        if self.is_on and self._running >= 0:
            self._seconds[self._running] += time.perf_counter() - self._since
            self._running = -1

    def take(self) -> Doubles:
        """Return the seconds of each phase since the last call, in the order of :data:`PHASES`."""
        taken, self._seconds = self._seconds, np.zeros(len(PHASES))
        return taken


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
