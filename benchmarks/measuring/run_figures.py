"""Figures of a training run, ours or a peer's."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """One pass over the triples.

    Attributes
    ----------
    edges : int
        Triples trained.
    seconds : float
        Time in batches.
    processor_seconds : float
        Of the trainers in that time; 0 where it is not known.
    ended_at : float
        In seconds since 1970; 0 where it is not known.
    """

    edges: int
    seconds: float
    processor_seconds: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True)
class RunFigures:
    """One run.

    Attributes
    ----------
    epochs : sequence of Epoch
    wall_seconds : float
        From the first epoch's start until the last checkpoint is written.
    first_batch_seconds : float
        From the start of the command until the first batch is done (a peer: until its first batch begins).
    peak_bytes : int
        Of all processes together.
    processor_seconds : float
        Of all processes from start to end.
    job_seconds : float
        From start to end.
    mrr : float or None
        Filtered, of the test split.
    phase_seconds : dict
        Time of each phase, in seconds a batch of one trainer; empty if it was not measured.
    start_marks : dict
        Seconds from the start of the command to some milestones before the first batch.
    """

    epochs: Sequence[Epoch]
    wall_seconds: float
    first_batch_seconds: float
    peak_bytes: int
    processor_seconds: float
    job_seconds: float
    mrr: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    start_marks: dict[str, float] = field(default_factory=dict)

    @property
    def first_edges_per_second(self) -> float:
        """Speed of the first epoch."""
        return self.epochs[0].edges / self.epochs[0].seconds

    @property
    def edges_per_second(self) -> float:
        """Median speed of the epochs after the first; of the first if there is no other."""
        # The first epoch includes the warm-up.
        return statistics.median(epoch.edges / epoch.seconds for epoch in (self.epochs[1:] or self.epochs))

    @property
    def wall_edges_per_second(self) -> float:
        """Speed over the wall, checkpoints included."""
        return sum(epoch.edges for epoch in self.epochs) / self.wall_seconds

    @property
    def processor_seconds_per_million(self) -> float:
        """Processor time of the trainers for a million edges, after the first epoch."""
        later = self.epochs[1:] or self.epochs
        edges = sum(epoch.edges for epoch in later)
        return 1e6 * sum(epoch.processor_seconds for epoch in later) / edges

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        derived = {
            "edges_per_second": self.edges_per_second,
            "first_edges_per_second": self.first_edges_per_second,
            "wall_edges_per_second": self.wall_edges_per_second,
            "processor_seconds_per_million": self.processor_seconds_per_million,
        }
        return {**derived, **dataclasses.asdict(self)}


COLUMNS = (
    "edges_per_second",
    "first_edges_per_second",
    "wall_edges_per_second",
    "first_batch_seconds",
    "peak_bytes",
    "processor_seconds_per_million",
    "mrr",
)
"""Numbers of which a table shows the median over the repeats of a run."""


def medians(runs: Sequence[RunFigures]) -> dict[str, float | None]:
    """Return the median of each number over the repeats of a run; None where no run has it."""
    figures: dict[str, float | None] = {}
    for name in COLUMNS:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        figures[name] = statistics.median(values) if values else None
    return figures
