"""Passes of an epoch over chunks of edge sets, and a record of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.checkpoint.bigraph import epoch_record, pass_of, read_stats
from dglkge.sampling.triple_order import Pass
from dglkge.step.contracts import MEASURES
from dglkge.training.statistics.bucket_stats import BucketStatistics
from dglkge.training.statistics.held_out import HeldOutEvaluator
from dglkge.training.statistics.stats import NUM_SUMS, Sums, means_of


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

    def __init__(
        self,
        passes: Sequence[Pass],
        held_out: HeldOutEvaluator | None = None,
        buckets: BucketStatistics | None = None,
    ) -> None:
        self._passes = list(passes)
        self._held_out, self.buckets = held_out, buckets
        self._num_sets = 1 + max(one.edge_set for one in passes)
        self._num_chunks = 1 + max(one.chunk for one in passes)
        self.earlier: list[dict[str, Any]] = []
        # Sums of the epoch that its records have already.
        self._recorded = np.zeros(NUM_SUMS)
        self._before: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._passes)

    def resume(self, folder: Path, epoch: int, batches_done: int) -> None:
        """Read the records of earlier starts of the job from a version's folder; on rank 0.

        The epoch is the open or the next one, with so many batches done.
        """
        done = [one for one in self._passes if one.end_batch <= batches_done] if batches_done else []
        open_pass = (epoch, done[-1].edge_set, done[-1].chunk) if done else (epoch, -1, -1)
        # A save that was killed may have left records of passes that are trained again.
        self.earlier = [record for record in read_stats(folder) if pass_of(record) <= open_pass]
        self._recorded = np.zeros(NUM_SUMS)
        for record in self.earlier:
            if pass_of(record)[0] == epoch and "stats" in record:
                self._recorded += _sums_of(record["stats"])

    def begin(self, batches_done: int) -> None:
        """Rank the held-out triples of the pass that begins; a collective where triples are held out.

        A pass that a former start of the job began is not ranked: its record has no ``eval_stats_before``.
        """
        if batches_done == 0:
            self._recorded = np.zeros(NUM_SUMS)  # the epoch before may have been left by `break`
        if self._held_out is not None:
            for one in self._passes:
                if one.first_batch == batches_done < one.end_batch:
                    self._before = self._held_out.evaluate(one.edge_set, one.chunk)

    def num_ended(self, batches_done: int) -> int:
        """Return the number of passes that have ended after so many batches of an epoch."""
        return sum(one.end_batch <= batches_done for one in self._passes) if batches_done else 0

    def ending(self, batches_done: int) -> list[Pass]:
        """Return the passes that end with a batch; several where chunks are shorter than batches."""
        # An empty set at the beginning has a record too.
        first = 0 if batches_done == 1 else batches_done
        return [one for one in self._passes if first <= one.end_batch <= batches_done]

    def end(self, epoch: int, ended: Sequence[Pass], sums: Sums) -> list[dict[str, Any]]:
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
            own = sums_of_passes if has_batches else np.zeros(NUM_SUMS)
            place = (part.edge_set, part.chunk, self._num_sets, self._num_chunks)
            record = epoch_record(epoch, int(own[1]), float(own[0] / max(own[1], 1)), *place, means_of(own))
            if self._held_out is not None:
                if has_batches and self._before is not None:
                    record["eval_stats_before"] = self._before
                record["eval_stats_after"] = self._held_out.evaluate(part.edge_set, part.chunk)
            records.append(record)
        self._before = None
        self._recorded = sums
        return records


def _sums_of(stats: Mapping[str, Any]) -> Sums:
    """Return the sums of a record's pass, without its bytes."""
    count, metrics = stats["count"], stats["metrics"]
    measured = count if all(name in metrics for name in MEASURES) else 0
    means = [metrics.get(name, 0.0) for name in MEASURES]
    return np.array([count * metrics["loss"], count, 0, measured, *(measured * mean for mean in means)])
