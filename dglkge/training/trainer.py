"""Runs training: batches in order, commits at batch boundaries, evaluation of the live tables."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.checkpoint.layout import (
    BEST_SNAPSHOT,
    RUN_JOB_FILE,
    RUN_METRICS_FILE,
    RUN_STATS_FILE,
    RUN_VALIDATION_FILE,
    RUN_VECTORS_FILE,
    Progress,
)
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
from dglkge.data.dataset_files import VALID
from dglkge.distributed.preemption import Preempted
from dglkge.distributed.runtime import num_servers
from dglkge.evaluation.metrics import RankingResult
from dglkge.planning.memory import saves_in_background
from dglkge.sampling.query_batches import EpochBatches, TrainingBatch
from dglkge.step.train_step import TrainStep
from dglkge.training.building.given_vectors import fill_from_vectors
from dglkge.training.building.run_files import open_trackers
from dglkge.training.building.warm_start import warm_start
from dglkge.training.control import TrainingControl
from dglkge.training.epochs import COMMIT, STOP, CommitPolicy, ElasticEpochs
from dglkge.training.job import Job
from dglkge.training.live_evaluator import LiveEvaluator
from dglkge.training.live_state import LiveState
from dglkge.training.passes import Passes, StatsHandler
from dglkge.training.process_usage import ProcessUsage
from dglkge.training.resume import EPOCH_MEASURES, check_settings, is_over, loss_so_far, resumed_batches
from dglkge.training.stats import (
    EpochReport,
    LossSoFar,
    append_validation,
    describe_job,
    reports_apart,
    wants_bar,
)

logger = logging.getLogger(__name__)


class Trainer:
    """One trainer of a job; :func:`dglkge.training.build.build_trainer` makes it.

    Parameters
    ----------
    job : Job
    edge_batches : EpochBatches
    train_step : TrainStep
    evaluator : LiveEvaluator
    checkpoints : CheckpointManager
    meta : CheckpointMeta
        Description of the run in every version of the checkpoint; its progress is updated.
    epochs : ElasticEpochs
    passes : Passes
        Those of an epoch.
    """

    def __init__(
        self,
        job: Job,
        edge_batches: EpochBatches,
        train_step: TrainStep,
        evaluator: LiveEvaluator,
        checkpoints: CheckpointManager,
        meta: CheckpointMeta,
        epochs: ElasticEpochs,
        passes: Passes,
    ) -> None:
        config, cluster = job.config, job.cluster
        self._job = job
        self._dense = dense = job.dense
        self._clock = job.clock
        self.config = config
        self.cluster = cluster
        self.tables = job.tables
        self.optimizer = optimizer = job.optimizer
        self.output = Path(config.output)
        self.bar = wants_bar(config.training.progress, cluster.world)
        self._edge_batches = edge_batches
        self._train_step = train_step
        self._evaluator = evaluator
        self._checkpoints = checkpoints
        self._meta = meta
        self._epochs = epochs
        # An epoch, and the number of its batches that are done.
        self._position = (0, 0)
        # Losses of the epoch that was trained last.
        self._so_far: LossSoFar | None = None
        # Number of epochs with commit and validation done, see _end_epoch; at most finished().
        self._ended = 0
        self._report: EpochReport | None = None
        # Sum of all trainers' flags in the last step; None: no message since the last check had it.
        self._flag_sum: int | None = None
        self._committed: tuple[int, int] | None = None
        # Epochs after which training ended with its best version; None while it goes on.
        self._ended_after: int | None = None
        self._policy = CommitPolicy(config, cluster)
        self._usage = ProcessUsage(cluster.world, num_servers() if cluster.world.launched else 0)
        self._passes = passes
        self._control = TrainingControl(
            config,
            getattr(optimizer, "param_groups", []),
            len(edge_batches),
            [] if dense is None else dense.param_groups,
        )
        self._live = LiveState(job, checkpoints, self._control)
        cluster.on_leave(self._leave)
        cluster.on_exit(self._checkpoints.finish)
        self._resume()
        self._live.load_devices()
        if cluster.world.rank == 0:
            checkpoints.records.write_json(RUN_JOB_FILE, describe_job(self.output))
        self._in_background = saves_in_background(config)
        if self._in_background:
            checkpoints.reserve(self._live.parts())
        epochs.when_finished(self._end_epoch)
        self._trackers = open_trackers(config, cluster, checkpoints.records)
        self._trackers.start(self._steps_done, self._committed is not None)

    def batches(self) -> Iterator[TrainingBatch]:
        """Yield this trainer's share of each global batch that the current epoch has left.

        A batch counts as done when the loop requests the next one (step 7 of a batch). Must run inside an
        epoch loop.

        Raises
        ------
        RuntimeError
            Outside of ``for epoch in remaining_epochs_until(n)``.
        Preempted
            At a batch boundary, on all trainers, if one of them received a signal to stop.
        """
        epoch = self._epochs.current()
        if epoch is None:
            raise RuntimeError("batches() must run inside 'for epoch in remaining_epochs_until(n)'")
        # The epoch before, if it was left by `break`: its listener did not run.
        self._end_epoch()
        if self._epochs.current() is None:
            return  # that epoch ended the training
        num_batches = len(self._edge_batches)
        total = self.config.training.num_epochs
        path = self.output / RUN_STATS_FILE
        done = self._batches_done
        # The sums of this epoch's earlier batches: from the checkpoint, or from a loop that was left.
        before = self._so_far if done and self._so_far is not None and self._so_far.epoch == epoch else None
        self._report = EpochReport(
            self.cluster, path, epoch, total, done, num_batches, self.bar, self._clock, before,
            self._checkpoints.records.check_lease, self._track, self._usage,
            functools.partial(self._fields, epoch), self.config.training.batch_statistics,
        )  # fmt: skip
        try:
            self.stop_if_asked()
            self._begin_pass(done)
            while done < num_batches:
                batch = self._edge_batches.batch(epoch, done, self._clock.enter)
                self._clock.enter("other")
                yield batch
                # After the yield: the body has trained the batch, and all trainers are at the same boundary.
                done += 1
                self._clock.enter("waiting")
                self._position = (epoch, done)
                self._checkpoints.check()
                ends_pass = self._end_pass(epoch, done, num_batches)
                flags = self._summed_flags(done)
                if flags % COMMIT:
                    self.stop_if_asked()
                if flags >= COMMIT or (
                    # A commit after each pass; the epoch's last one is at the cadence of epochs.
                    ends_pass and len(self._passes) > 1 and done < num_batches
                ):
                    self._clock.stop()
                    self._commit()
                if ends_pass and done < num_batches:
                    self._begin_pass(done)
        finally:
            self._clock.stop()
            self._so_far = self._report.so_far(self._batches_done)
            self._report.close()
            self._report = None

    def _fields(self, epoch: int, done: int) -> dict[str, Any]:
        """Return fields of a line of statistics: the place in the order, and the loss scale."""
        of_dense = {} if self._dense is None else self._dense.statistics()
        return {**self._edge_batches.place(epoch, done), **of_dense}

    def _begin_pass(self, done: int) -> None:
        """Rank the held-out triples of the pass that begins, if there are any; a collective."""
        if self._passes.ranks_held_out:
            self._live.settle()
        with self._live.whole_dense(self._passes.ranks_held_out):
            self._passes.begin(done)

    def _end_pass(self, epoch: int, done: int, num_batches: int) -> bool:
        """Record the passes that end with a batch; a collective then. Returns whether there are any."""
        ended = self._passes.ending(done)
        if not ended or self._report is None:
            return False
        so_far = self._report.so_far(done)
        # The last batch of an epoch was reported: its sums are those of all trainers.
        recent = np.zeros_like(so_far.recent) if done == num_batches else self.cluster.sum(so_far.recent)
        loss, num_triples, _, *measured = so_far.total + recent
        if self._passes.ranks_held_out:
            self._live.settle()
        with self._live.whole_dense(self._passes.ranks_held_out):
            records = self._passes.end(epoch, ended, [num_triples, loss, *measured])
        for record in records:
            self._checkpoints.add_stats(record)
            if self.cluster.world.rank == 0:
                self._passes.tell(record)
        return True

    def add_stats_handler(self, handler: StatsHandler) -> None:
        """Give every record of a pass to a handler of yours, those of earlier starts of the job first.

        Call it on every trainer before the loop over epochs; the handlers of rank 0 are called.

        Parameters
        ----------
        handler : StatsHandler
            With ``on_stats(record, is_replayed)``.
        """
        if self.cluster.world.rank == 0:
            self._passes.add_handler(handler)

    def _flags(self, batches_done: int) -> int:
        """Return this trainer's flags for the place after a batch of the epoch."""
        is_writing = self._checkpoints.is_writing
        asks = self._policy.asks_after_batch(batches_done, len(self._edge_batches), is_writing)
        return STOP * self.cluster.stop.is_noted + COMMIT * asks

    def _summed_flags(self, done: int) -> int:
        """Return the sum of all trainers' flags after a batch; 0 where they were not exchanged.

        Trained batches have exchanged them: a step, or a report where trainers are asynchronous. A message of
        their own would let those wait for one another, so it is sent only where a commit or a report is due.
        """
        summed, self._flag_sum = self._flag_sum, None
        if summed is None:
            is_due = self._policy.counts(done) or done % reports_apart(len(self._edge_batches)) == 0
            if not (self.config.training.synchronous or is_due):
                return 0
            summed = int(self.cluster.sum(np.array([self._flags(done)], np.int64))[0])
        return summed

    def step(self, batch: TrainingBatch) -> float:
        """Train one batch; returns the summed loss of this trainer's triples."""
        self._control.before_batch()
        flags = self._flags(batch.index + 1)
        result = self._train_step(batch, flags)
        self._control.after_batch()
        self._clock.enter("other")
        reported: int | None = None
        if self._report is not None:
            loss, num_triples, measures = result.loss, len(batch), result.measures
            if result.is_skipped:
                # Its loss may be infinite, and would be the epoch's.
                loss, num_triples, measures = 0.0, 0, np.zeros_like(measures)
            reported = self._report.count(
                batch.index + 1, loss, num_triples, result.sent_bytes, measures, flags
            )
        # An asynchronous step exchanges nothing: the flags are summed by the reports alone.
        self._flag_sum = result.flag_sum if self.config.training.synchronous else reported
        return result.loss

    def register(self, name: str, item: Any) -> None:
        """Save the state of an object of yours with each version, and load it where a version has it.

        Every trainer calls it, before the loop over epochs. A resumed run, and the best version that is
        restored, get the state of rank 0's object as it was then.

        Parameters
        ----------
        name : str
            Under which the state is saved.
        item : object
            With ``state_dict()``, which returns tensors, numbers, texts, and dicts, lists and tuples of them,
            and ``load_state_dict(state)``.

        Raises
        ------
        InputError
            For a name that is taken, an object without these methods, or another state.
        """
        self._control.register(name, item)

    def commit(self) -> None:
        """Write a version of the checkpoint, unless one holds this state; it is published on return."""
        self._commit()
        self._checkpoints.finish()
        self.cluster.barrier()

    def _commit(self) -> None:
        """Write a version, in the background unless the configuration says otherwise; a collective."""
        position = finished, _ = (self._epochs.finished(), self._batches_done)
        if position == self._committed:
            self._policy.committed()
            return
        meta = dataclasses.replace(self._meta, progress=self._progress(*position))
        # Only the commit at an epoch's end is kept under its name, not one inside the next epoch.
        snapshots = self._policy.snapshots_after_epoch(finished) if self._ended < finished else {}
        # After it all rows are final.
        self._live.settle()
        save = self._checkpoints.start if self._in_background else self._checkpoints.save
        save(self._live.parts(), self._live.relation_part(), meta, snapshots, self._control.to_bytes())
        self._committed = position
        self._policy.committed()

    def stop_if_asked(self) -> None:
        """Stop if one of the trainers received a signal; a collective.

        ``batches`` and ``evaluate`` call it between batches. Long code of your own should call it too, at
        places that all trainers reach.

        Raises
        ------
        Preempted
            On every trainer, after the commit.
        """
        if not self.cluster.must_stop():
            return
        self.commit()
        # No trainer may exit while another still writes.
        self.cluster.barrier()
        if self.cluster.world.rank == 0:
            position = (self._epochs.finished(), self._batches_done)
            logger.info("stopped as asked: %d epochs and %d batches done, committed", *position)
        self._epochs.stop()
        raise Preempted

    def evaluate(self, split: str) -> RankingResult:
        """Rank a split with the live tables; rank 0 adds the result to ``metrics.json``. A collective."""
        # The epoch may have been left by `break`, or its validation may have been stopped.
        self._end_epoch()
        return self._evaluate(split)

    def _evaluate(self, split: str) -> RankingResult:
        if self._job.device_tables is not None:
            self._live.settle()
        most = self.config.evaluation.max_triples
        with self._live.whole_dense():
            result = self._evaluator.evaluate(split, most, self.bar, self.stop_if_asked)
        if self.cluster.world.rank == 0:
            self._write_metrics(split, result.to_dict())
            self._trackers.log_result(split, result.both.to_dict(), self._steps_done)
        return result

    @property
    def _steps_done(self) -> int:
        """Global batches of all epochs that are done, in batches of the present size."""
        return self._epochs.finished() * len(self._edge_batches) + self._batches_done

    def _track(self, values: Mapping[str, float], step: int) -> None:
        """Give the numbers of a report to the trackers, with the learning rates."""
        lrs = [group["lr"] for group in getattr(self.optimizer, "param_groups", [])]
        # The group of the relations is the second, where they have one.
        named = dict(zip(("train/lr", "train/relation_lr"), lrs))
        if self._dense is not None:
            named["train/dense_lr"] = self._dense.param_groups[0]["lr"]
        self._trackers.log({**values, **named}, step)

    @property
    def _batches_done(self) -> int:
        """Batches done of the epoch that is open or comes next; an epoch may be left at any place."""
        epoch, done = self._position
        return done if epoch == self._epochs.finished() else 0

    def _end_epoch(self) -> None:
        """Commit and rank the valid split after an epoch, at their cadence, unless this was done already.

        A collective. It runs at once after an epoch with a body that ran to its end. After ``break`` trainers
        may be at different places, so it runs at their next collective: batches, ranking or leaving.
        """
        done = self._epochs.finished()
        # Runs once an epoch, though several places call it.
        if self._ended >= done:
            return
        self._control.after_epochs(done)
        if self._job.device_tables is not None:
            self._live.settle()
        if self._policy.due_after_epoch(done):
            self._commit()
        if self._policy.validates_after_epoch(done):
            result = self._evaluate(VALID)
            mrr = result.both.mrr
            if self._control.uses_mrr:
                # Rank 0's number decides for all.
                mrr = float(self.cluster.sum(np.array([mrr if self.cluster.world.rank == 0 else 0.0]))[0])
                self._control.after_ranking(mrr)
            if self.cluster.world.rank == 0:
                logger.info("epoch %d: valid MRR %.4f", done, mrr)
                if self._policy.keeps_best:
                    # Its metrics are written again where it is restored.
                    metrics = {VALID: result.to_dict()} if self._stops_early else {}
                    self._checkpoints.keep_best(mrr, {Progress.FINISHED_EPOCHS: done, **metrics})
                self._checkpoints.records.check_lease()
                append_validation(self.output / RUN_STATS_FILE, done, result.both.to_dict())
                noted = {Progress.FINISHED_EPOCHS: done, "mrr": mrr}
                self._checkpoints.records.write_json(RUN_VALIDATION_FILE, noted)
        self._ended = done
        if self._stops_early and (self._control.must_stop or done >= self.config.training.num_epochs):
            self._restore_best(done)

    @property
    def _stops_early(self) -> bool:
        return self.config.training.early_stopping_patience > 0

    def _restore_best(self, ended_after: int) -> None:
        """End training with the version that has the best valid MRR, and commit it as the newest."""
        # best/ is written by rank 0 once its version is published.
        self._checkpoints.finish()
        self.cluster.barrier()
        # Rank 0's reading of it decides: a shared disk may show it to other hosts with a delay.
        note = json.loads(self.cluster.gather_texts(json.dumps(self._checkpoints.note_of(BEST_SNAPSHOT)))[0])
        finished = int(note.get(Progress.FINISHED_EPOCHS, ended_after))
        if self.cluster.world.rank == 0:
            text = "training ended after %d epochs; the best version is that after %d"
            logger.info(text, ended_after, finished)
        if finished != ended_after:
            num_bytes = self._checkpoints.num_bytes()
            work = functools.partial(self._live.restore, BEST_SNAPSHOT)
            self.cluster.agree(work, num_bytes)
            self._live.load_devices()
            # The version was committed before its valid split was ranked.
            self._control.after_ranking(note["score"])
            if self.cluster.world.rank == 0 and VALID in note:
                self._write_metrics(VALID, note[VALID])
        self._epochs.end(finished)
        self._position, self._ended = (finished, 0), finished
        self._ended_after = ended_after
        # The same rows under another description, if the last epoch was the best: a resume finds the end.
        self._committed = None
        self.commit()

    def _leave(self) -> None:
        """Commit an epoch that the script left by ``break``, and wait for the last version."""
        if self._ended < self._epochs.finished():
            self._commit()
            self._end_epoch()
        self._checkpoints.finish()
        self._checkpoints.push_records()

    def _resume(self) -> None:
        """Fill the tables from the newest version, if there is one."""
        # JOB is shared by all trainers of a process: drop the state of an earlier one.
        self._epochs.restore(0)
        if self.config.checkpoint.fallback:
            self._checkpoints.fall_back(self.cluster.barrier)
        meta = self._checkpoints.latest()
        if meta is None:
            names = self._checkpoints.names
            warm_start(self.config, self.cluster, self._meta, names, self._live.own_parts, self._dense)
            write = functools.partial(self._checkpoints.records.write_json, RUN_VECTORS_FILE)
            fill_from_vectors(self.config, self.cluster, self._job.dataset, self.tables, write)
            return
        check_same_run(meta, self._meta)
        check_settings(self.config, meta, self._meta.config, self._checkpoints.storage.path)
        num_bytes = self._checkpoints.num_bytes()
        # One trainer of a machine reads while the others wait: a failure must reach all of them.
        self.cluster.agree(self._live.restore, num_bytes)
        self._epochs.restore(meta.progress[Progress.FINISHED_EPOCHS])
        size, mark = self.config.training.batch_size, self._edge_batches.order_mark
        self._position = (self._epochs.finished(), resumed_batches(meta, size, mark))
        self._committed = (self._epochs.finished(), self._batches_done)
        self._so_far = loss_so_far(meta, self.config.training.batch_statistics)
        self._ended = self._epochs.finished()
        if is_over(self.config, meta, self._meta.config):
            self._epochs.end(self._ended)
            self._ended_after = meta.progress[Progress.ENDED_AFTER]
        # Committed before its valid split was ranked: the ranking is done after the resume. It is done again
        # if training depends on it: the version does not have its result.
        elif meta.progress.get(Progress.VALIDATION_PENDING) and (
            self._control.uses_mrr or not self._is_validated(self._ended)
        ):
            self._ended -= 1
        # Stopped before the best version was restored.
        elif self._stops_early and 0 < self.config.training.num_epochs <= self._ended:
            self._ended -= 1
        if self.cluster.world.rank == 0:
            self._passes.resume(self._checkpoints.storage.path, *self._committed)
            logger.info("resumed: %d epochs and %d batches done", *self._committed)

    def _is_validated(self, finished_epochs: int) -> bool:
        """Return whether the valid split was ranked after a number of epochs, from rank 0's file."""
        found = 0
        if self.cluster.world.rank == 0:
            try:
                noted = json.loads((self.output / RUN_VALIDATION_FILE).read_text(encoding="utf-8"))
                found = int(noted[Progress.FINISHED_EPOCHS] == finished_epochs)
            except (OSError, ValueError, KeyError, TypeError):
                # Unreadable or absent: the split is ranked once more, which only takes time.
                pass
        return bool(self.cluster.sum(np.array([found], dtype=np.int64))[0])

    def _progress(self, finished_epochs: int, batches_done: int) -> dict[str, Any]:
        """Describe the progress of the run; a collective in the middle of an epoch."""
        progress: dict[str, Any] = {
            Progress.FINISHED_EPOCHS: finished_epochs,
            Progress.BATCHES_DONE: batches_done,
            Progress.GLOBAL_BATCH_SIZE: self.config.training.batch_size,
        }
        if self._ended < finished_epochs and self._policy.validates_after_epoch(finished_epochs):
            progress[Progress.VALIDATION_PENDING] = 1
        if self._ended_after is not None:
            progress[Progress.ENDED_AFTER] = self._ended_after
        if passes := self._passes.num_ended(batches_done):
            progress[Progress.PASSES_DONE] = passes
        if batches_done and self._edge_batches.order_mark:
            progress[Progress.ORDER_MARK] = self._edge_batches.order_mark
        so_far = self._so_far if self._report is None else self._report.so_far(batches_done)
        if batches_done and so_far is not None and so_far.epoch == finished_epochs:
            loss, num_triples, _, *measured = so_far.total + self.cluster.sum(so_far.recent)
            progress[Progress.EPOCH_LOSS], progress[Progress.EPOCH_TRIPLES] = float(loss), int(num_triples)
            progress.update(zip(EPOCH_MEASURES, map(float, measured)))
        return progress

    def _write_metrics(self, split: str, result: dict[str, Any]) -> None:
        path = self.output / RUN_METRICS_FILE
        metrics = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        metrics[split] = result
        self._checkpoints.records.write_json(RUN_METRICS_FILE, metrics)
