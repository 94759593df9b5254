"""Statistics of a run: sums over the open epoch, and where they go: a bar, JSON lines, and trackers.

Each report has the memory and the traffic of every process of the job.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dglkge.checkpoint import layout
from dglkge.config import Config
from dglkge.data.dataset_files import VALID
from dglkge.distributed.jobs import find_servers, memory_of
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.runtime import Cluster, log_folder, num_servers
from dglkge.distributed.world import World, timestamp
from dglkge.evaluation.metrics import BOTH
from dglkge.sampling.edge_batches import EpochBatches
from dglkge.step.contracts import MEASURES, PHASES, StepResult
from dglkge.training.cadence import reports_apart
from dglkge.training.callbacks import Trackers
from dglkge.training.job import Job
from dglkge.training.state import Position
from dglkge.typing import Doubles

logger = logging.getLogger(__name__)

COLUMNS = ("memory_bytes", "shared_bytes", "bytes_sent")
"""Resident memory, the part of it that other processes may share, bytes sent to other machines."""


@dataclass
class ProcessUsage:
    """Measures this process and, on the first trainer of a machine, the machine's servers.

    Each trainer fills its rows of one array for all processes. Reports sum over the trainers anyway, and that
    sum is the exchange.

    Attributes
    ----------
    num_servers : int
        Servers of each machine.
    """

    world: World
    num_servers: int

    def __post_init__(self) -> None:
        # Looked up once: a server that ends is not replaced within a job.
        has_servers = self.num_servers and self.world.is_machine_leader
        self._servers = find_servers(self.world.job) if has_servers else {}

    def measure(self, bytes_sent: int) -> Doubles:
        """Return an array (processes, 3) with this trainer's rows filled: trainers first, then servers."""
        world = self.world
        usage = np.zeros((world.world_size + self.num_servers * world.num_machines, len(COLUMNS)))
        usage[world.rank] = (*memory_of(os.getpid()), bytes_sent)
        for number, pid in self._servers.items():
            row = world.world_size + number
            if row < len(usage):
                usage[row, :2] = memory_of(pid)
        return usage

    def describe(self, total: Doubles) -> dict[str, dict[str, Any]]:
        """Return the sum over all trainers as a mapping of process name to its numbers and its machine."""
        trainers, servers = np.split(total.astype(np.int64), [self.world.world_size])
        described = {}
        for role, rows, num_a_machine, columns in (
            ("trainer", trainers, self.world.trainers_per_machine, COLUMNS),
            # Servers answer inside of DGL, which does not count bytes.
            ("server", servers, self.num_servers, COLUMNS[:-1]),
        ):
            for number, values in enumerate(rows.tolist()):
                numbers = {"machine": number // num_a_machine, **dict(zip(columns, values))}
                described[f"{role} {number}"] = numbers
        return described


MEMORY_SECONDS = 10
"""Seconds for which the memory of a process is that of the first epoch that ended in them."""


@functools.lru_cache(maxsize=1)
def memory_bytes(interval: int) -> int:
    """Return this process's share of its memory: pages shared by n processes count 1/n; 0 if unknown.

    Once for all short epochs of an interval: the kernel walks all pages, which takes 0.25 s for 4 GB.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0  # a kernel before 4.14, or a container that hides it
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def open_bar(is_shown: bool, **options: Any) -> tqdm[Any]:
    """Return a progress bar on stderr; one that is not shown if stderr's terminal has been closed."""
    try:
        return tqdm(disable=not is_shown, **options)
    except OSError:
        return tqdm(disable=True, **options)


NUM_SUMS = 4 + len(MEASURES)
"""Sums over triples: their loss and number, bytes sent, the number of those with batch statistics, and the
sums of these (:data:`dglkge.step.contracts.MEASURES`)."""


class Statistics:
    """Follows the epochs of a run; reports are collectives, since losses are summed over all trainers.

    Parameters
    ----------
    batches : EpochBatches
        They describe their place in the order.
    records : LeasedFolder
        The run's folder.
    """

    def __init__(
        self, job: Job, batches: EpochBatches, position: Position, records: LeasedFolder, trackers: Trackers
    ) -> None:
        self._job, self._batches, self._position = job, batches, position
        self._records, self.trackers = records, trackers
        self._path = job.output / layout.RUN_STATS_FILE
        self._is_leader = job.world.rank == 0
        self.has_bar = job.world.wants_bar(job.config.training.progress)
        self._usage = ProcessUsage(job.world, num_servers() if job.world.launched else 0)
        # Of all trainers up to the last report, and of this trainer since then.
        self._total, self._recent = np.zeros(NUM_SUMS), np.zeros(NUM_SUMS)
        # Last counted batch and its sums. It is not done until the loop requests the next one.
        self._open = (0, np.zeros(NUM_SUMS))
        # Bytes: of this trainer in this epoch, since this job began with it.
        self._epoch = self._own_bytes = 0
        self._started = self._last = 0.0
        self._bar: tqdm[Any] | None = None
        # Whether the warning about a line that could not be written was given: once is enough.
        self._is_warned = False

    def begin(self, epoch: int) -> None:
        """Begin with an epoch, or go on with it after the batches of it that are done."""
        done = self._position.batches_done
        if not done or epoch != self._epoch:
            self._total, self._recent = np.zeros(NUM_SUMS), np.zeros(NUM_SUMS)
        self._epoch, self._own_bytes, self._open = epoch, 0, (done, np.zeros(NUM_SUMS))
        # Drop the time of an earlier epoch.
        self._job.clock.take()
        self._started = self._last = time.monotonic()
        size, title = len(self._batches), self._title()
        self._bar = open_bar(self.has_bar, total=size, initial=done, desc=title, unit="batch")

    def count(self, batches_done: int, result: StepResult, num_triples: int, flags: int) -> int | None:
        """Count a trained batch (step 7 of a batch); ignored outside of an epoch.

        Returns the sum of the flags over all trainers where a report is due, else None.
        """
        if self._bar is None:
            return None
        sums = np.zeros(NUM_SUMS)
        sums[2] = result.sent_bytes
        # The loss of a skipped batch may be infinite, and would be the epoch's.
        if not result.is_skipped:
            sums[:2] = result.loss, num_triples
            if len(result.measures):
                sums[3:] = num_triples, *result.measures
        self._open = (batches_done, sums)
        self._recent += sums
        self._own_bytes += result.sent_bytes
        batch_size = self._job.config.training.batch_size
        apart = reports_apart(len(self._batches), batch_size, self._job.is_lagged)
        is_due = batches_done % apart == 0 or batches_done == len(self._batches)
        return self._report(batches_done, flags) if is_due else None

    def close(self) -> None:
        """Leave an epoch, finished or not: a batch that is still open will be trained again."""
        self._recent = self._done_recently()
        self._open = (0, np.zeros(NUM_SUMS))
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def sums(self) -> Doubles:
        """Return the sums over the batches of the epoch that are done, of all trainers; a collective."""
        return self._total + self._job.cluster.sum(self._done_recently())

    def sums_of(self, batches_done: int) -> Doubles:
        """Return the sums of this trainer's last batch; 0 if the script did not train it."""
        last, sums = self._open
        return sums if last == batches_done else np.zeros(NUM_SUMS)

    def _done_recently(self) -> Doubles:
        last, sums = self._open
        # A commit inside the loop's body comes before the open batch counts as done.
        return self._recent - sums if last > self._position.batches_done else self._recent.copy()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums inside of an epoch; empty elsewhere. A collective."""
        finished, batches_done = self._position.now
        is_open = batches_done and finished == self._epoch
        return {"epoch": self._epoch, "sums": self.sums().tolist()} if is_open else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from sums of the open epoch."""
        self._epoch, self._total = int(state["epoch"]), np.array(state["sums"])
        self._recent = np.zeros(NUM_SUMS)

    def _report(self, batches_done: int, flags: int) -> int:
        """Sum over the trainers, show and write; returns the sum of the flags."""
        # Reached by all trainers at the same batch number: the cadence depends on shared values only.
        usage = self._usage.measure(self._own_bytes)
        # One message for all.
        summed = self._job.cluster.sum(np.concatenate([self._recent, usage.ravel(), [flags]]))
        recent, usage = summed[:NUM_SUMS], summed[NUM_SUMS:-1].reshape(usage.shape)
        self._recent[:] = 0
        self._total += recent
        fields = self._fields_at_end() if batches_done == len(self._batches) else {}
        now = time.monotonic()
        if self._is_leader:
            record: dict[str, Any] = {
                "time": timestamp(),
                "epoch": self._epoch,
                "batches_done": batches_done,
                "num_batches": len(self._batches),
                "loss": recent[0] / max(recent[1], 1),
                "epoch_loss": self._total[0] / max(self._total[1], 1),
                **means_of(recent),
                "edges_per_second": recent[1] / max(now - self._last, 1e-9),
                "epoch_seconds": now - self._started,
                "bytes_sent": int(self._total[2]),
                "processes": self._usage.describe(usage),
                **self._batches.place(self._epoch, batches_done),
                **({} if self._job.dense is None else self._job.dense.statistics()),
                **fields,
            }
            self._append(record)
            self._show(record)
        self._last = now
        return int(summed[-1])

    def _fields_at_end(self) -> dict[str, Any]:
        """Return the fields of the last line of an epoch; a collective.

        The number of trainers and the memory of all of them, and the seconds of the phases where these are
        measured, summed over the trainers.
        """
        cluster, clock, phases = self._job.cluster, self._job.clock, {}
        if clock.is_on:
            phases = {"phase_seconds": dict(zip(PHASES, cluster.sum(clock.take()).tolist()))}
        own_memory = memory_bytes(int(time.monotonic() // MEMORY_SECONDS))
        memory = cluster.sum(np.array([own_memory], dtype=np.int64))
        return {**phases, "num_trainers": cluster.world.world_size, "trainer_memory_bytes": int(memory[0])}

    def _show(self, record: Mapping[str, Any]) -> None:
        """Give a line to the trackers, with the learning rates, and to the bar; at an epoch's end log it."""
        done, num_batches = record["batches_done"], record["num_batches"]
        names = ("loss", "epoch_loss", "edges_per_second", *(name for name in MEASURES if name in record))
        values = {f"train/{name}": record[name] for name in names}
        values["train/epoch"] = self._epoch + done / num_batches
        # The group of the relations is the second, where they have one.
        groups = zip(("train/lr", "train/relation_lr"), getattr(self._job.optimizer, "param_groups", []))
        values.update({name: group["lr"] for name, group in groups})
        if self._job.dense is not None:
            values["train/dense_lr"] = self._job.dense.param_groups[0]["lr"]
        self.trackers.log(values, self._epoch * num_batches + done)
        if self._bar is not None:
            speed = f"{record['edges_per_second']:,.0f}"
            self._bar.set_postfix_str(f"loss {record['loss']:.4f}, {speed} edges/s", refresh=False)
            self._bar.update(done - self._bar.n)
        if done == num_batches and not self.has_bar:
            logger.info("%s: loss %.4f, %.1f s", self._title(), record["epoch_loss"], record["epoch_seconds"])

    def _title(self) -> str:
        return f"epoch {self._epoch + 1}/{self._job.config.training.num_epochs}"

    def _append(self, record: Mapping[str, Any]) -> None:
        """Append a line. A failure does not stop training: a later commit may find space."""
        if self._records.lease is not None:
            self._records.lease.check()
        try:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            if not self._is_warned:
                logger.warning("cannot write %s: %s; training goes on", self._path, error.strerror or error)
            self._is_warned = True

    def add_buckets(self, epoch: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of buckets that ended; on rank 0."""
        for record in records if self._is_leader else ():
            self._append({"time": timestamp(), "epoch": epoch, layout.BUCKET_RECORD: record})

    def add_ranking(self, split: str, record: Mapping[str, Any]) -> None:
        """Write a ranking to ``metrics.json``, and give its measures to the trackers; on rank 0."""
        if self._is_leader:
            self.write_metrics(split, record)
            # MLflow refuses "@" in a name.
            values = {f"{split}/{name.replace('@', '_at_')}": record[BOTH][name] for name in record[BOTH]}
            self.trackers.log(values, self._position.steps_done)

    def write_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Write what ``metrics.json`` has of a split."""
        known = layout.parse_object(self._records.read(layout.RUN_METRICS_FILE))
        self._records.write_json(layout.RUN_METRICS_FILE, {**known, split: metrics})

    def add_validation(self, epochs_done: int, measures: Mapping[str, float]) -> None:
        """Append the measures of the valid split after an epoch, and note that it was ranked; on rank 0.

        The line has the epoch's number, which counts from 0 as in the other lines.
        """
        self._append({"time": timestamp(), "epoch": epochs_done - 1, VALID: dict(measures)})
        self._records.write_json(layout.RUN_VALIDATION_FILE, {layout.Progress.FINISHED_EPOCHS: epochs_done})

    def is_validated(self, epochs_done: int) -> bool:
        """Return whether the valid split was ranked after a number of epochs, from rank 0's file."""
        noted = None
        # Unreadable: the split is ranked once more, which only takes time.
        with contextlib.suppress(OSError, ValueError):
            noted = json.loads(self._records.read(layout.RUN_VALIDATION_FILE) or "null")
        is_noted = self._is_leader and noted == {layout.Progress.FINISHED_EPOCHS: epochs_done}
        return bool(self._job.cluster.sum(np.array([is_noted], dtype=np.int64))[0])


def open_trackers(config: Config, cluster: Cluster, records: LeasedFolder) -> Trackers:
    """Return the trackers, which end when this trainer ends; none on ranks above 0."""
    trackers = Trackers(() if cluster.world.rank else config.training.loggers, config.to_dict(), records)
    cluster.on_exit(trackers.finish)
    return trackers


def means_of(sums: Doubles) -> dict[str, float]:
    """Return the means of batch statistics by name; empty without."""
    return dict(zip(MEASURES, (sums[4:] / sums[3]).tolist())) if sums[3] else {}


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
