"""Builds a trainer from a configuration, and runs training: batches, commits, rankings of the live tables."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.checkpoint.conversion import dataset_fields
from dglkge.checkpoint.layout import BEST, RUN_CONFIG_FILE, RUN_JOB_FILE, Progress
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import VALID
from dglkge.distributed.runtime import Cluster
from dglkge.errors import require_known
from dglkge.evaluation.metrics import BOTH, RankingResult
from dglkge.kernels.rows import widen_rows
from dglkge.sampling.query_batches import TrainingBatch
from dglkge.step.contracts import Stateful
from dglkge.step.train_step import TrainStep
from dglkge.training import cadence, state
from dglkge.training.building import checks, components, given_vectors, warm_start
from dglkge.training.building.batches import build_batches, build_passes
from dglkge.training.building.step import build_step
from dglkge.training.callbacks import CALLBACKS, Callback
from dglkge.training.job import Job, describe_optimizer, open_job
from dglkge.training.learning_rates import LearningRates
from dglkge.training.live_evaluator import LiveEvaluator
from dglkge.training.script import JOB, ElasticEpochs, opened_dataset
from dglkge.training.statistics.passes import Passes
from dglkge.training.statistics.stats import Statistics, describe_job, open_trackers

logger = logging.getLogger(__name__)


class Trainer:
    """One trainer of a job; :func:`build_trainer` makes it.

    ``meta`` describes the run in every version of the checkpoint; its progress is updated.
    """

    def __init__(
        self,
        job: Job,
        train_step: TrainStep,
        evaluator: LiveEvaluator,
        checkpoints: CheckpointManager,
        meta: CheckpointMeta,
        epochs: ElasticEpochs,
        passes: Passes,
    ) -> None:
        self._job, self._meta, self._epochs, self._passes = job, meta, epochs, passes
        self._train_step, self._edge_batches = train_step, train_step.look_ahead
        self._evaluator, self._checkpoints, self._buckets = evaluator, checkpoints, passes.buckets
        config, cluster = job.config, job.cluster
        self.config, self.cluster, self.tables, self.optimizer = config, cluster, job.tables, job.optimizer
        self._cadence = cadence.Cadence(config, cluster, len(self._edge_batches))
        dense_groups = [] if job.dense is None else job.dense.param_groups
        self._rates = LearningRates(config, job.optimizer.param_groups, len(self._edge_batches), dense_groups)
        self._patience = cadence.EarlyStopping(config.training.early_stopping)
        # Whether a ranking of the valid split changes the training that follows.
        self._uses_ranking = self._patience.is_on or self._rates.follows_ranking
        cluster.on_leave(self._leave)
        cluster.on_exit(checkpoints.finish)
        self._position = state.Position(config, epochs, self._edge_batches)
        trackers = open_trackers(config, cluster, checkpoints.records)
        self._statistics = Statistics(job, self._edge_batches, self._position, checkpoints.records, trackers)
        items: dict[str, Stateful] = {"learning_rates": self._rates, "early_stopping": self._patience}
        items |= {"statistics": self._statistics, **({"buckets": passes.buckets} if passes.buckets else {})}
        self._state = state.TrainingState(items)
        # A schedule that cannot be saved is refused now, not at the first commit.
        self._state.to_bytes()
        self._versions = state.Versions(job.averaged, checkpoints, self._state)
        self._resume()
        job.load_devices()
        if cluster.world.rank == 0:
            checkpoints.records.write_json(RUN_JOB_FILE, describe_job(job.output))
        self._versions.reserve()
        epochs.when_finished(self._end_epoch)
        self._callbacks: list[Callback] = []
        for name in config.training.callbacks:
            self.add_callback(CALLBACKS.get(name)(), name)
        trackers.start(self._position.steps_done, self._position.committed is not None)

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
        epoch = self._epochs.require_current()
        # The epoch before, if it was left by `break`: its listener did not run.
        self._end_epoch()
        if self._epochs.current is None:
            return  # that epoch ended the training
        num_batches, clock = len(self._edge_batches), self._job.clock
        done = self._position.batches_done
        self._statistics.begin(epoch)
        self._call("on_epoch_start", epoch)
        try:
            self._drain()
            self.stop_if_asked()
            if self._buckets is not None:
                self._buckets.begin(epoch, done)
            while done < num_batches:
                self._passes.before(done)
                if self._buckets is not None:
                    self._buckets.before(done)
                batch = self._edge_batches.batch(epoch, done, clock.enter)
                clock.enter("other")
                yield batch
                # After the yield: the body has trained the batch, and all trainers are at the same boundary.
                done += 1
                clock.enter("waiting")
                self._position.batch = (epoch, done)
                if self._buckets is not None:
                    self._buckets.after(done - 1, self._statistics.sums_of(done))
                self._checkpoints.check()
                ends_pass = self._end_pass(epoch, done)
                must_stop, must_commit = self._cadence.after_batch(done, self._checkpoints.is_writing)
                if must_stop:
                    self.stop_if_asked()
                # A commit after each pass; the epoch's last one is at the cadence of epochs.
                if must_commit or (ends_pass and len(self._passes.passes) > 1 and done < num_batches):
                    clock.stop()
                    self._commit()
        finally:
            clock.stop()
            self._statistics.close()

    def _end_pass(self, epoch: int, done: int) -> bool:
        """Record the passes that end with a batch; a collective then. Returns whether there are any."""
        if ended := self._passes.ending(done):
            self._drain()
            records = self._passes.end(epoch, ended, self._statistics.sums())
            for record in records:
                self._checkpoints.add_stats(record)
                if self.cluster.world.rank == 0:
                    self._call("on_pass", record, False)
            if self._buckets is not None:
                self._statistics.add_buckets(epoch, records)
        return bool(ended)

    def step(self, batch: TrainingBatch) -> float:
        """Train one batch; returns the summed loss of this trainer's triples."""
        self._rates.before_batch()
        flags = self._cadence.flags(batch.index + 1, self._checkpoints.is_writing)
        result = self._train_step(batch, flags)
        self._rates.after_batch()
        self._job.clock.enter("other")
        reported = self._statistics.count(batch.index + 1, result, len(batch), flags)
        # An asynchronous step on one machine exchanges nothing: the flags are summed by the reports alone.
        steps_agree = self.config.training.synchronous or self._job.is_lagged
        self._cadence.flag_sum = result.flag_sum if steps_agree else reported
        self._call("on_batch_end", batch, result.loss)
        return result.loss

    def add_callback(self, callback: Callback, name: str = "") -> None:
        """Call a callback of yours from now on; every trainer adds it, before the loop over epochs.

        Parameters
        ----------
        name : str
            Under which its state is saved, if it has ``state_dict``; by default that of its class.
        """
        if hasattr(callback, "state_dict"):
            self.register(f"callback {name or type(callback).__name__}", callback)
        self._callbacks.append(callback)
        callback.on_fit_start(self)
        for record in self._passes.earlier:
            callback.on_pass(self, record, True)

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self, *arguments)

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
        self._state.register(name, item)

    def commit(self) -> None:
        """Write a version of the checkpoint, unless one holds this state; it is published on return."""
        self._commit()
        self._checkpoints.finish_together()

    def _drain(self) -> None:
        """Apply all gradients, and receive all rows that are on their way, where machines do not wait."""
        self.optimizer.drain()
        if self._job.is_lagged:
            self._job.tables.lookup.finish()

    def _commit(self) -> None:
        """Write a version, unless one holds this state; a collective."""
        self._drain()
        position = finished, batches_done = self._position.now
        self._job.average(finished)
        if position != self._position.committed:
            if self._buckets is not None:
                self._buckets.pause()
            validates = self._cadence.validates_after_epoch(finished)
            progress = self._position.progress(self._passes.num_ended(batches_done), validates)
            meta = dataclasses.replace(self._meta, progress=progress)
            # Only the commit at an epoch's end is kept under its name, not one inside the next epoch.
            is_end = self._position.ended < finished
            pointers = self._cadence.pointers_after_epoch(finished) if is_end else {}
            version = self._versions.write(meta, pointers)
            self._position.committed = position
            self._call("on_commit", version)
        self._cadence.committed()

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
        is_first = self.cluster.world.rank == 0
        self._epochs.preempt(self._epochs.finished, self._position.batches_done, is_first)

    def evaluate(self, split: str) -> RankingResult:
        """Rank a split with the live tables; rank 0 adds the result to ``metrics.json``. A collective."""
        # The epoch may have been left by `break`, or its validation may have been stopped.
        self._end_epoch()
        return self._evaluate(split)[0]

    def _evaluate(self, split: str) -> tuple[RankingResult, dict[str, Any]]:
        """Return a ranking, and its record: with the measures of callbacks beside those of both sides."""
        self._drain()
        with self._job.ranking():
            result = self._evaluator.evaluate(split, self._statistics.has_bar, self.stop_if_asked)
        measures = result.figures()
        for callback in self._callbacks:
            measures |= callback.on_ranking(self, split, result) or {}
        record = {**result.to_dict(), BOTH: measures}
        self._statistics.add_ranking(split, record)
        return result, record

    def _end_epoch(self) -> None:
        """Commit and rank the valid split after an epoch, at their cadence, unless this was done already.

        A collective. It runs at once after an epoch with a body that ran to its end. After ``break`` trainers
        may be at different places, so it runs at their next collective: batches, ranking or leaving.
        """
        done = self._epochs.finished
        if self._position.ended >= done:
            return
        self._drain()
        self._rates.after_epochs(done)
        if self._job.device_tables is not None:
            self._job.settle()
        self._job.average(done)
        if self._cadence.due_after_epoch(done):
            self._commit()
        if self._cadence.validates_after_epoch(done):
            self._validate(done)
        self._position.ended = done
        self._call("on_epoch_end", done - 1)
        if self._patience.is_on and (self._patience.is_over or done >= self.config.training.num_epochs):
            self._restore_best(done)

    def _validate(self, done: int) -> None:
        """Rank the valid split after some epochs, and keep the version if it is the best; a collective."""
        record = self._evaluate(VALID)[1]
        measures = record[BOTH]
        metric, is_first = self.config.evaluation.metric, self.cluster.world.rank == 0
        require_known("measure in evaluation.metric:", metric, measures)
        score = measures[metric]
        if self._uses_ranking:
            # Rank 0's number decides for all.
            self._count_ranking(float(self.cluster.sum(np.array([score if is_first else 0.0]))[0]))
        if self._cadence.keeps_best:
            self._checkpoints.finish_together()
        if is_first:
            logger.info("epoch %d: valid %s %.4f", done, "MRR" if metric == "mrr" else metric, score)
            if self._cadence.keeps_best:
                # Its metrics are written again where it is restored.
                metrics = {VALID: record} if self._patience.is_on else {}
                self._checkpoints.keep_best(score, {Progress.FINISHED_EPOCHS: done, **metrics})
            self._statistics.add_validation(done, measures)

    def _count_ranking(self, score: float) -> None:
        self._patience.add(score)
        self._rates.after_ranking(score)

    def _restore_best(self, ended_after: int) -> None:
        """End training with the version that has the best score, and commit it as the newest."""
        # The pointer is written by rank 0 once its version is published.
        self._checkpoints.finish_together()
        # Rank 0's reading of it decides: a shared disk may show it to other hosts with a delay.
        own_note = json.dumps(self._checkpoints.storage.read_pointer(BEST))
        note, is_first = json.loads(self.cluster.gather_texts(own_note)[0]), self.cluster.world.rank == 0
        finished = int(note.get(Progress.FINISHED_EPOCHS, ended_after))
        if is_first:
            text = "training ended after %d epochs; the best version is that after %d"
            logger.info(text, ended_after, finished)
        if finished != ended_after:
            num_bytes = self._checkpoints.num_bytes()
            self.cluster.agree(functools.partial(self._checkpoints.bring, BEST), num_bytes)
            self.cluster.agree(functools.partial(self._versions.restore, BEST), num_bytes)
            self._job.load_devices()
            # The version was committed before its valid split was ranked.
            self._count_ranking(note["score"])
            if is_first and VALID in note:
                self._statistics.write_metrics(VALID, note[VALID])
        self._position.end(finished, ended_after)
        # The same rows under another description, if the last epoch was the best: a resume finds the end.
        self._position.committed = None
        self.commit()

    def _leave(self) -> None:
        """Commit an epoch that the script left by ``break``, and wait for the last version."""
        if self._position.ended < self._epochs.finished:
            self._commit()
            self._end_epoch()
        self._checkpoints.finish_together()
        self._checkpoints.push_records()
        self._call("on_fit_end")

    def _resume(self) -> None:
        """Fill the tables from the newest version, if there is one."""
        # JOB is shared by all trainers of a process: drop the state of an earlier one.
        self._epochs.restore(0)
        if self.config.checkpoint.fallback:
            self._checkpoints.fall_back(self.cluster.barrier)
        saved, position = self._checkpoints.latest(), self._position
        if saved is None:
            warm_start.warm_start(self._job, self._meta, self._checkpoints.names)
            dataset, records = self._job.dataset, self._checkpoints.records
            given_vectors.fill_from_vectors(dataset, self.config, self.cluster, self.tables, records)
            return
        saved = state.resumable(self.config, self._meta, saved, self._checkpoints.storage.path)
        # Where the version has no state of the learning rates, they start anew after its epochs.
        self._rates.num_epochs = saved.progress[Progress.FINISHED_EPOCHS]
        # One trainer of a machine reads while the others wait: a failure must reach all of them.
        self.cluster.agree(self._versions.restore, self._checkpoints.num_bytes())
        position.resume(saved, self._meta.config)
        if position.ended_after is None:
            # Committed before its valid split was ranked: the ranking is done after the resume. It is done
            # again if training depends on it: the version does not have its result.
            is_open = self._uses_ranking or not self._statistics.is_validated(position.ended)
            is_pending = bool(saved.progress.get(Progress.VALIDATION_PENDING)) and is_open
            # Stopped before the best version was restored.
            at_end = self._patience.is_over or 0 < self.config.training.num_epochs <= position.ended
            is_last = self._patience.is_on and at_end and not position.batches_done
            position.ended -= is_pending or is_last
        if self.cluster.world.rank == 0:
            self._passes.resume(self._checkpoints.find()[0], *position.now)
            logger.info("resumed: %d epochs and %d batches done", *position.now)


# Before the first call of a loop numba looks up its own functions for .3 s: here once, before forks.
widen_rows(np.zeros((1, 1), np.uint16), np.zeros(1, np.int64), False, np.zeros((1, 1), np.float32))


def build_trainer(config: Config, cluster: Cluster) -> Trainer:
    """Build a trainer; it resumes from the newest checkpoint in ``config.output``.

    A collective: every trainer calls it. SIGTERM, SIGINT and SIGHUP end it at once: nothing is trained yet.

    Raises
    ------
    InputError
        For an unknown component, values that do not fit each other, or a checkpoint that
        does not fit the configuration.
    Preempted
        If this trainer received a signal to stop.
    """
    with cluster.stop.leaving_at_once():
        checks.check_config(config, cluster.world)
        dataset, output = opened_dataset(config), Path(config.output)
        checks.check_dataset(config, dataset)
        config = components.with_num_times(config, dataset)
        meta = _describe_run(config, dataset)
        # Only the trainer that writes a machine's files needs names, and only in the first version of a run.
        writes = cluster.world.is_machine_leader
        names = {name: dataset.mapped_vocabulary(name) for name in dataset.entity_types if writes}
        fits = functools.partial(state.resumable, config, meta)
        # Creates the folder and excludes other jobs from here on.
        more = (fits, names, dataset.num_parts)
        checkpoints = state.open_checkpoints(output, config.checkpoint, cluster, *more)
        job = open_job(config, cluster, meta)
        batches = build_batches(job)
        step, passes = build_step(job, batches), build_passes(job, batches, LiveEvaluator(job).gather)
        run = _describe_run(job.config, dataset)
        trainer = Trainer(job, step, LiveEvaluator(job.averaged), checkpoints, run, JOB, passes)
        # Last: the Trainer has checked by now that the folder's checkpoint belongs to this run.
        if job.world.rank == 0:
            checkpoints.records.write_json(RUN_CONFIG_FILE, job.config.to_dict())
        return trainer


def _describe_run(config: Config, dataset: Dataset) -> CheckpointMeta:
    """Return the description of a run that every version of its checkpoint holds."""
    return CheckpointMeta(
        config=config.to_dict(),
        **dataset_fields(dataset),
        seed=config.seed,
        score_function=config.model.score_function.name,
        score_options=components.configured_model(config).score_function.options,
        dim=config.model.dimension,
        reciprocal=config.model.reciprocal_relations,
        optimizer=describe_optimizer(config.optimizer),
        operators=components.relation_operators(config, dataset),
        dims=components.entity_dimensions(config, dataset),
        **state.new_run(config.training.batch_size),
    )
