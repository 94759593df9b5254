"""Reports of a run: a progress bar, JSON lines, and the phases of a batch where they are measured."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from dglkge.data.dataset_files import VALID
from dglkge.distributed.log_format import timestamp
from dglkge.distributed.runtime import Cluster, log_folder
from dglkge.distributed.world import World
from dglkge.step.clock import PHASES, PhaseClock, as_array
from dglkge.step.objectives.measures import MEASURES
from dglkge.training.process_usage import ProcessUsage

logger = logging.getLogger(__name__)

REPORTS_PER_EPOCH = 20
"""Reports of the loss in an epoch; each costs a round of messages."""


@dataclass(frozen=True)
class LossSoFar:
    """Sums over the batches of an epoch so far: loss, triples and bytes sent.

    With batch statistics four more: the triples that have some, and the sums of
    :data:`dglkge.step.objectives.measures.MEASURES`.

    Attributes
    ----------
    epoch : int
    total : (3 or 7,) array
        Over all trainers, up to the last report.
    recent : (3 or 7,) array
        Of this trainer, since then.
    """

    epoch: int
    total: np.ndarray
    recent: np.ndarray


class EpochReport:
    """Follows one epoch; a collective, since losses are summed over all trainers.

    Parameters
    ----------
    cluster : Cluster
    path : Path
        File of JSON lines; rank 0 appends to it.
    epoch, num_epochs : int
        This epoch, and how many there will be.
    first_batch, num_batches : int
        First batch of this report, and the number of global batches of the epoch.
    bar : bool
        Whether to show a progress bar on stderr.
    clock : PhaseClock, optional
        If it is on, the last record of the epoch has the seconds of each phase, summed over trainers.
    before : LossSoFar, optional
        Sums of the epoch's earlier batches, from an earlier run of the job for instance.
    check : callable, optional
        Called before a line is written; raises if this job may no longer write to the run's folder.
    follow : callable, optional
        Called on rank 0 at each report, with the numbers of trackers by name and the step: global batches of
        all epochs.
    usage : ProcessUsage, optional
        By default one without servers.
    place : callable, optional
        Takes the number of batches that are done, returns fields of the line about the place in the order.
    has_measures : bool
        Whether batches have the statistics of :class:`.objectives.measures.BatchMeasures`.
    """

    def __init__(
        self,
        cluster: Cluster,
        path: Path,
        epoch: int,
        num_epochs: int,
        first_batch: int,
        num_batches: int,
        bar: bool,
        clock: PhaseClock | None = None,
        before: LossSoFar | None = None,
        check: Callable[[], object] = lambda: None,
        follow: Callable[[dict[str, float], int], object] = lambda values, step: None,
        usage: ProcessUsage | None = None,
        place: Callable[[int], dict[str, Any]] = lambda batches_done: {},
        has_measures: bool = False,
    ) -> None:
        self._place = place
        num_sums = num_epoch_sums(has_measures)
        self._check = check
        self._follow = follow
        self._clock = PhaseClock() if clock is None else clock
        # The clock is shared by all reports of a trainer: drop the time of an earlier epoch.
        self._clock.take()
        self._cluster = cluster
        self._usage = ProcessUsage(cluster.world, 0) if usage is None else usage
        # Of this trainer in this epoch, since this job began with it.
        self._own_bytes = 0
        self._path = path
        self._epoch = epoch
        self._every = reports_apart(num_batches)
        self._num_batches = num_batches
        # This trainer's summed loss, triples and bytes since the last report, and all trainers' before that.
        self._recent = np.zeros(num_sums) if before is None else before.recent.copy()
        self._epoch_total = np.zeros(num_sums) if before is None else before.total.copy()
        # Last counted batch and its sums. It is not done until the loop requests the next one.
        self._open = (first_batch, np.zeros(num_sums))
        self._started = self._last = time.monotonic()
        self._title = f"epoch {epoch + 1}/{num_epochs}"
        self._has_bar = bar
        # Whether the warning about a line that could not be written was given: once a report is enough.
        self._is_warned = False
        self._bar = tqdm(
            total=num_batches, initial=first_batch, desc=self._title, unit="batch", disable=not bar
        )

    def count(
        self,
        batches_done: int,
        loss: float,
        num_triples: int,
        num_bytes: int = 0,
        measures: Sequence[float] | npt.NDArray[np.float64] = (),
        flags: int = 0,
    ) -> int | None:
        """Count a trained batch and the bytes that it sent to other machines (step 7 of a batch).

        Returns the sum of the flags over all trainers where a report is due, else None.
        """
        more = [num_triples, *measures] if len(measures) else []
        self._open = (batches_done, np.array([loss, num_triples, num_bytes, *more], dtype=float))
        self._recent += self._open[1]
        self._own_bytes += num_bytes
        if batches_done % self._every == 0 or batches_done == self._num_batches:
            return self._report(batches_done, flags)
        return None

    def so_far(self, batches_done: int) -> LossSoFar:
        """Return the sums of the batches that are done; one that is still open will be trained again."""
        last, of_last = self._open
        # A commit inside the loop's body comes before the open batch counts as done.
        recent = self._recent - of_last if last > batches_done else self._recent.copy()
        return LossSoFar(self._epoch, self._epoch_total.copy(), recent)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def _report(self, batches_done: int, flags: int) -> int:
        """Sum over the trainers, show and write; returns the sum of the flags."""
        # Reached by all trainers at the same batch number: the cadence depends on shared values only.
        usage = self._usage.measure(self._own_bytes)
        # One message for all.
        num_sums = len(self._recent)
        sums = self._cluster.sum(np.concatenate([self._recent, usage.ravel(), [flags]]))
        total, usage = sums[:num_sums], sums[num_sums:-1].reshape(usage.shape)
        self._recent[:] = 0
        self._epoch_total += total
        phases = self._phases(batches_done)
        memory = self._memory(batches_done)
        now = time.monotonic()
        if self._cluster.world.rank == 0:
            record: dict[str, Any] = {
                "time": timestamp(),
                "epoch": self._epoch,
                "batches_done": batches_done,
                "num_batches": self._num_batches,
                "loss": total[0] / max(total[1], 1),
                "epoch_loss": self._epoch_total[0] / max(self._epoch_total[1], 1),
                **means_of(total),
                "edges_per_second": total[1] / max(now - self._last, 1e-9),
                "epoch_seconds": now - self._started,
                "bytes_sent": int(self._epoch_total[2]),
                "processes": self._usage.describe(usage),
                **self._place(batches_done),
                **phases,
                **memory,
            }
            self._write(record)
            values = {
                "train/loss": total[0] / max(total[1], 1),
                "train/epoch_loss": self._epoch_total[0] / max(self._epoch_total[1], 1),
                "train/edges_per_second": record["edges_per_second"],
                "train/epoch": self._epoch + batches_done / self._num_batches,
                **{f"train/{name}": value for name, value in means_of(total).items()},
            }
            self._follow(values, self._epoch * self._num_batches + batches_done)
            speed = f"{record['edges_per_second']:,.0f}"
            self._bar.set_postfix_str(f"loss {record['loss']:.4f}, {speed} edges/s", refresh=False)
            self._bar.update(batches_done - self._bar.n)
            if batches_done == self._num_batches and not self._has_bar:
                loss, seconds = record["epoch_loss"], record["epoch_seconds"]
                logger.info("%s: loss %.4f, %.1f s", self._title, loss, seconds)
        self._last = now
        return int(sums[-1])

    def _write(self, record: dict[str, Any]) -> None:
        """Append a line. A failure does not stop training: a later commit may find space."""
        self._check()
        try:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            if not self._is_warned:
                logger.warning("cannot write %s: %s; training goes on", self._path, error.strerror or error)
            self._is_warned = True

    def _phases(self, batches_done: int) -> dict[str, Any]:
        """Return the seconds of the phases of the epoch at its end, summed over the trainers."""
        if not self._clock.is_on or batches_done != self._num_batches:
            return {}
        seconds = self._cluster.sum(as_array(self._clock.take()))
        return {"phase_seconds": dict(zip(PHASES, seconds.tolist()))}

    def _memory(self, batches_done: int) -> dict[str, int]:
        """Return the number of trainers and the memory of all of them at the end of the epoch."""
        if batches_done != self._num_batches:
            return {}
        total = self._cluster.sum(np.array([_MEMORY.measure()], dtype=np.int64))
        return {"num_trainers": self._cluster.world.world_size, "trainer_memory_bytes": int(total[0])}


def num_epoch_sums(has_measures: bool) -> int:
    """Return the length of the arrays of :class:`LossSoFar`."""
    return 4 + len(MEASURES) if has_measures else 3


def means_of(sums: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the means of batch statistics by name, given an array of :class:`LossSoFar`; empty without."""
    if len(sums) == num_epoch_sums(False) or not sums[3]:
        return {}
    return dict(zip(MEASURES, (sums[4:] / sums[3]).tolist()))


def memory_bytes() -> int:
    """Return this process's share of its memory: pages shared by n processes count 1/n; 0 if unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0  # a kernel before 4.14, or a container that hides it
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class MemoryMeter:
    """Measures :func:`memory_bytes`, but not for each of many short epochs: the kernel walks all pages.

    Parameters
    ----------
    pause_seconds : float
        For so long the last figure is good.
    """

    def __init__(self, pause_seconds: float = 1.0) -> None:
        self._pause_seconds = pause_seconds
        self._measured_at = -math.inf
        self._last = 0

    def measure(self) -> int:
        """Return this process's share of its memory, in bytes."""
        now = time.monotonic()
        if now - self._measured_at >= self._pause_seconds:
            self._measured_at, self._last = now, memory_bytes()
        return self._last


_MEMORY = MemoryMeter()


def describe_job(output: Path) -> dict[str, Any]:
    """Return what finds the logs of the present job, for ``job.json`` in the run's folder.

    Parameters
    ----------
    output : Path
        The run's folder.
    """
    folder = log_folder()
    # Relative as well: with --sync, or after a move, the logs lie in the same place beside the run.
    relative = os.path.relpath(folder, output) if folder else ""
    return {"started": timestamp(), "log_dir": folder, "log_dir_from_here": relative}


def append_validation(path: Path, epochs_done: int, metrics: Mapping[str, float]) -> None:
    """Append the metrics of the valid split to the file of JSON lines: time, epoch and ``valid``.

    Parameters
    ----------
    path : Path
    epochs_done : int
        Epochs before the ranking; the line has the last one, which counts from 0 as in the other lines.
    metrics : mapping of str to float
        Over the queries of both sides.
    """
    record = {"time": timestamp(), "epoch": epochs_done - 1, VALID: dict(metrics)}
    try:
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
    except OSError as error:
        # As for the other lines: a later commit may find space.
        logger.warning("cannot write %s: %s; training goes on", path, error.strerror or error)


def reports_apart(num_batches: int) -> int:
    """Return the number of batches between two reports of an epoch."""
    return max(1, num_batches // REPORTS_PER_EPOCH)


def wants_bar(setting: str, world: World) -> bool:
    """Return whether this trainer shows progress bars: rank 0 does.

    Parameters
    ----------
    setting : str
        ``always``, ``never``, or ``auto``: on a terminal.
    world : World
    """
    watched = world.shows_progress or sys.stderr.isatty()
    return world.rank == 0 and (setting == "always" or (setting == "auto" and watched))
