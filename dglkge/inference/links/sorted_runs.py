"""Rows sorted in runs on the disk, merged into one order with a bounded share of each in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

LINK = np.dtype([("score", "<f8"), ("head", "<i8"), ("tail", "<i8"), ("relation", "<i8")])
"""A link in original ids."""

MERGED_ROWS = 1 << 21
"""Rows of all runs that are in memory during a merge."""


def sort_links(links: np.ndarray) -> np.ndarray:
    """Return links by descending score, and by relation, head and tail among equal scores."""
    return links[np.lexsort((links["tail"], links["head"], links["relation"], -links["score"]))]


@dataclass
class _Run:
    """A file of sorted links, read piece by piece."""

    path: Path
    num_rows: int
    chunk: int
    next_row: int = 0
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, LINK))

    def fill(self) -> None:
        """Read on if nothing is left in memory."""
        if not len(self.rows) and self.next_row < self.num_rows:
            count = min(self.chunk, self.num_rows - self.next_row)
            self.rows = np.fromfile(self.path, LINK, count, offset=self.next_row * LINK.itemsize)
            self.next_row += count

    def take(self, least_score: float) -> np.ndarray:
        """Return the rows in memory from a score on, and keep the others."""
        end = int(np.searchsorted(-self.rows["score"], -least_score, side="right"))
        taken, self.rows = self.rows[:end], self.rows[end:]
        return taken


def merge_runs(runs: Sequence[tuple[Path, int]]) -> Iterator[np.ndarray]:
    """Yield the links of sorted files, (path, rows) each, in one descending order of scores, in blocks."""
    chunk = max(1024, MERGED_ROWS // max(1, len(runs)))
    open_runs = [_Run(path, num_rows, chunk) for path, num_rows in runs if num_rows]
    while open_runs:
        for run in open_runs:
            run.fill()
        # What a file still has is not above its last row in memory.
        limits = [run.rows["score"][-1] for run in open_runs if run.next_row < run.num_rows]
        least = max(limits, default=-np.inf)
        yield sort_links(np.concatenate([run.take(least) for run in open_runs]))
        open_runs = [run for run in open_runs if len(run.rows) or run.next_row < run.num_rows]
