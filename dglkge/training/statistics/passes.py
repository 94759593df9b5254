"""Records of the parts of an epoch: passes over chunks of edge sets, and buckets of ranges of rows.

A bucket has statistics of training, held-out triples and I/O. They are what users of PyTorch-BigGraph
diagnose bad partitions and slow disks by.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.formats.bigraph_files import epoch_record, pass_fields, pass_of, read_stats
from dglkge.sampling.bucket_batches import BucketBatches
from dglkge.sampling.triple_order import Pass
from dglkge.step.contracts import MEASURES
from dglkge.training.job import Job
from dglkge.training.statistics.held_out import SUMMED, HeldOutBuckets, HeldOutEvaluator, described
from dglkge.training.statistics.stats import NUM_SUMS, means_of
from dglkge.typing import Doubles

logger = logging.getLogger(__name__)


USAGE = ("seconds", "bytes_read", "bytes_written", "major_faults")
"""Of all trainers of a machine; seconds of one of them. Bytes are those that the kernel moved between disks
and memory for a process, and major faults pages that it waited for."""

_TRAINED = slice(0, NUM_SUMS)
_USAGE = slice(_TRAINED.stop, _TRAINED.stop + len(USAGE))
_BEFORE = slice(_USAGE.stop, _USAGE.stop + 1 + len(SUMMED))
_AFTER = slice(_BEFORE.stop, _BEFORE.stop + 1 + len(SUMMED))
_ENDED = _AFTER.stop
"""Columns of the sums of a bucket; the last is not 0 once the bucket has ended."""


def process_usage(io: Path = Path("/proc/self/io")) -> Doubles:
    """Return time, bytes read and written, and major faults of this process so far; 0 where unknown."""
    try:
        lines = dict(line.split(": ") for line in io.read_text(encoding="ascii").splitlines())
    except OSError:
        lines = {}
    moved = (float(lines.get(name, 0)) for name in ("read_bytes", "write_bytes"))
    return np.array([time.monotonic(), *moved, resource.getrusage(resource.RUSAGE_SELF).ru_majflt])


class BucketStatistics:
    """Follows the buckets of the machines' walks.

    A batch with triples of several buckets counts for each by its share of them, as do its time and I/O.
    Those of ranking held-out triples and of commits are of no bucket.

    Parameters
    ----------
    held_out : HeldOutBuckets, optional
        Ranked when a bucket opens and when it closes.
    """

    def __init__(self, job: Job, batches: BucketBatches, held_out: HeldOutBuckets | None = None) -> None:
        self._job, self._batches, self._held_out = job, batches, held_out
        num_buckets = batches.walk.num_buckets
        # By machine and turn: of all trainers up to the last exchange, and of this trainer since then.
        self._total = np.zeros((job.world.num_machines, num_buckets, _ENDED + 1))
        self._recent = np.zeros((num_buckets, _ENDED + 1))
        self._epoch = -1
        self._opens: dict[int, list[int]] = {}
        self._closes: dict[int, list[int]] = {}
        # Batches before and after which one of the machines ranks: all must have settled.
        self._ranks = np.zeros((2, len(batches)), bool)
        # Turns of the batches that run, with their shares.
        self._open: list[tuple[int, float]] = []
        self._since: Doubles | None = None

    def begin(self, epoch: int, batches_done: int) -> None:
        """Begin with an epoch, or go on inside of it; a collective where triples are held out."""
        if not batches_done or epoch != self._epoch:
            self._total[:] = self._recent[:] = 0
        self._epoch, self._open, self._since = epoch, [], None
        self._opens, self._closes = {}, {}
        marks = np.zeros(self._ranks.shape, np.int64)
        for turn, first, last in self._batches.walk.batches_of(epoch):
            self._opens.setdefault(first, []).append(turn)
            self._closes.setdefault(last, []).append(turn)
            marks[0, first] = marks[1, last] = 1
        if self._held_out is not None:
            self._ranks = self._job.cluster.sum(marks) > 0

    def before(self, index: int) -> None:
        """Open the buckets that begin with a batch; a collective where held-out triples are ranked."""
        turns = self._opens.get(index, [])
        if self._ranks[0, index]:
            self._rank(turns, _BEFORE)
        if turns or not self._open:
            self._add_usage()
            pieces = [piece for piece, _ in self._batches.pieces(self._epoch, index)]
            size = sum(map(len, pieces))
            self._open = [(piece.turn, len(piece) / size) for piece in pieces]
        if self._since is None:
            self._since = self._usage()

    def after(self, index: int, sums: Doubles) -> None:
        """Count a batch that is done, and close the buckets that end with it; a collective as :meth:`before`.

        Parameters
        ----------
        sums : (7,) array
            Of this trainer's triples.
        """
        pieces = [share for _, share in self._batches.pieces(self._epoch, index)]
        num_triples = max(1, sum(map(len, pieces)))
        for piece in pieces:
            self._recent[piece.turn, _TRAINED] += sums * (len(piece) / num_triples)
        turns = self._closes.get(index, [])
        if turns:
            self._add_usage()
            self._open = []
        if self._ranks[1, index]:
            self._rank(turns, _AFTER)
        self._recent[turns, _ENDED] = self._job.world.is_machine_leader

    def pause(self) -> None:
        """Leave out what comes before the next batch."""
        self._add_usage()
        self._since = None

    def _rank(self, turns: Sequence[int], columns: slice) -> None:
        if self._held_out is None:
            return
        self.pause()
        with self._job.ranking():
            for turn in turns:
                self._recent[turn, columns] += self._held_out.bucket_sums(self._epoch, turn)

    def _usage(self) -> Doubles:
        usage = process_usage()
        usage[0] *= self._job.world.is_machine_leader
        return usage

    def _add_usage(self) -> None:
        """Count time and I/O up to now for the open buckets."""
        if self._since is not None:
            now = self._usage()
            for turn, share in self._open:
                self._recent[turn, _USAGE] += share * (now - self._since)
            self._since = now

    def _exchange(self) -> None:
        """Add what the trainers have counted; a collective."""
        self._add_usage()
        recent = np.zeros_like(self._total)
        recent[self._job.world.machine] = self._recent
        self._total += self._job.cluster.sum(recent)
        self._recent[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the buckets of an open epoch; empty without any. A collective."""
        self._exchange()
        places = np.argwhere(self._total.any(axis=2)).tolist()
        rows = [[*place, *self._total[tuple(place)].tolist()] for place in places]
        return {"epoch": self._epoch, "rows": rows} if rows else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from sums of the open epoch."""
        self._epoch = int(state["epoch"])
        self._total[:] = self._recent[:] = 0
        for machine, turn, *values in state["rows"]:
            # An epoch that was left on other machines is not continued.
            if machine < self._total.shape[0] and turn < self._total.shape[1]:
                self._total[machine, turn] = values

    def records(self, ended: Sequence[Pass], num_sets: int, num_chunks: int) -> list[dict[str, Any]]:
        """Return the records of the buckets that ended in passes; a collective.

        The last one of a pass has the mean over its held-out triples before their buckets were trained.

        Parameters
        ----------
        num_sets, num_chunks : int
            Edge sets of an epoch, and chunks of each.
        """
        self._exchange()
        walk, num_machines = self._batches.walk, len(self._total)
        num_buckets = walk.num_buckets // num_sets * num_machines
        records = []
        for part in ended:
            place = pass_fields(self._epoch, part.edge_set, part.chunk)
            number = ((self._epoch * num_sets + part.edge_set) * num_chunks + part.chunk) * num_buckets
            before = np.zeros(1 + len(SUMMED))
            for turn, machine in np.argwhere(self._total[:, :, _ENDED].T > 0).tolist():
                edge_set, ranges = walk.bucket(self._epoch, turn)
                if edge_set != part.edge_set:
                    continue
                sums = self._total[machine, turn]
                named = {"machine": machine} if num_machines > 1 else {}
                records.append({**_record(sums, ranges, number), **place, **named})
                before += sums[_BEFORE]
                sums[:] = 0
                number += 1
            # In the last of them: PyTorch-BigGraph 1.0.0 reads no record without ``stats``.
            if before[0]:
                records[-1]["eval_stats_chunk_avg"] = described(before)
        return records


def _record(sums: Doubles, ranges: tuple[int, int], index: int) -> dict[str, Any]:
    """Return the record of a bucket, without its place."""
    count, (seconds, *usage) = round(sums[1]), sums[_USAGE].tolist()
    moved = usage[0] + usage[1]
    metrics = {"loss": float(sums[0] / max(count, 1)), **means_of(sums[_TRAINED])}
    ranked = {"eval_stats_before": sums[_BEFORE], "eval_stats_after": sums[_AFTER]}
    return {
        "lhs_partition": ranges[0],
        "rhs_partition": ranges[1],
        "index": index,
        "stats": {"count": count, "metrics": metrics},
        **{name: described(ranking_sums) for name, ranking_sums in ranked.items() if ranking_sums[0]},
        "seconds": seconds,
        **dict(zip(USAGE[1:], map(int, usage))),
        "mb_per_second": moved / 1e6 / seconds if seconds else 0.0,
    }


@dataclass
class Passes:
    """The passes of a run's epochs.

    Parameters
    ----------
    passes : sequence of Pass
        Of an epoch, with rising batches.
    held_out : HeldOutEvaluator, optional
        Ranks the held-out triples of a pass before and after it.
    buckets : BucketStatistics, optional
        A record of each bucket, which ranks its own, takes the place of that of a pass.

    Attributes
    ----------
    earlier : list of dict
        Records of the passes that were committed before this start of the job; on rank 0.
    """

    passes: Sequence[Pass]
    held_out: HeldOutEvaluator | None = None
    buckets: BucketStatistics | None = None

    def __post_init__(self) -> None:
        self._num_sets, self._num_chunks = 1 + self.passes[-1].edge_set, 1 + self.passes[-1].chunk
        self.earlier: list[dict[str, Any]] = []
        # Sums of the epoch that its records have already.
        self._recorded = np.zeros(NUM_SUMS)
        self._before: dict[str, Any] | None = None

    def resume(self, folder: Path, epoch: int, batches_done: int) -> None:
        """Read the records of earlier starts of the job from a version's folder; on rank 0.

        The epoch is the open or the next one, with so many batches done.
        """
        done = self.passes[: self.num_ended(batches_done)]
        last = (epoch, done[-1].edge_set, done[-1].chunk) if done else (epoch, -1, -1)
        # A save that was killed may have left records of passes that are trained again.
        self.earlier = [record for record in read_stats(folder) if pass_of(record) <= last]
        self._recorded = np.zeros(NUM_SUMS)
        for record in self.earlier:
            if pass_of(record)[0] == epoch and "stats" in record:
                self._recorded += _sums_of(record["stats"])

    def before(self, batches_done: int) -> None:
        """Rank the held-out triples of a pass that begins after so many batches; a collective then.

        A pass that a former start of the job began is not ranked: its record has no ``eval_stats_before``.
        """
        if batches_done == 0:
            self._recorded = np.zeros(NUM_SUMS)  # the epoch before may have been left by `break`
        if self.held_out is not None:
            for part in self.passes:
                if part.first_batch == batches_done < part.end_batch:
                    self._before = self.held_out.evaluate(part.edge_set, part.chunk)

    def num_ended(self, batches_done: int) -> int:
        """Return the number of passes that have ended after so many batches of an epoch."""
        return sum(part.end_batch <= batches_done for part in self.passes) if batches_done else 0

    def ending(self, batches_done: int) -> list[Pass]:
        """Return the passes that end with a batch; several where chunks are shorter than batches."""
        # An empty set at the beginning has a record too.
        first = 0 if batches_done == 1 else batches_done
        return [part for part in self.passes if first <= part.end_batch <= batches_done]

    def end(self, epoch: int, ended: Sequence[Pass], sums: Doubles) -> list[dict[str, Any]]:
        """Return the records of passes that ended; a collective where triples are held out.

        ``sums`` are over the triples that all trainers have trained in the epoch so far.
        """
        sums_of_passes = sums - self._recorded
        records = []
        if self.buckets is not None:
            records = self.buckets.records(ended, self._num_sets, self._num_chunks)
        for part in ended if self.buckets is None else ():
            # One of them has batches of its own; its record has the triples of all.
            has_batches = part.first_batch < part.end_batch
            pass_sums = sums_of_passes if has_batches else np.zeros(NUM_SUMS)
            index = (epoch * self._num_sets + part.edge_set) * self._num_chunks + part.chunk
            count, loss = int(pass_sums[1]), float(pass_sums[0] / max(pass_sums[1], 1))
            place = epoch, part.edge_set, part.chunk
            record = epoch_record(place, index, count, loss, means_of(pass_sums))
            if self.held_out is not None:
                if has_batches and self._before is not None:
                    record["eval_stats_before"] = self._before
                record["eval_stats_after"] = self.held_out.evaluate(part.edge_set, part.chunk)
            records.append(record)
        self._before = None
        self._recorded = sums
        return records


def _sums_of(stats: Mapping[str, Any]) -> Doubles:
    """Return the sums of a record's pass, without its bytes."""
    count, metrics = stats["count"], stats["metrics"]
    measured = count if all(name in metrics for name in MEASURES) else 0
    sums = (measured * metrics.get(name, 0.0) for name in MEASURES)
    return np.array([count * metrics["loss"], count, 0, measured, *sums])
