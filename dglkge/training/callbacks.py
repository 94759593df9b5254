"""What training calls beside its own work: callbacks (``training.callbacks``), and trackers of experiments.

Trackers (``training.loggers``) are TensorBoard, Weights & Biases, MLflow, and those of users. Rank 0 gives
them the numbers of a run. Each has a thread of its own, so a slow network or disk never holds training up; a
tracker that fails is dropped with one warning. Its packages are imported in that thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import EVENTS_FOLDER, RUN_TRACKERS_FILE
from dglkge.data.dataset_files import load_json
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import InputError, one_line
from dglkge.registry import Registry
from dglkge.train_arguments import flat

logger = logging.getLogger(__name__)


class Callback:
    """Base of all callbacks: override what you need; a subclass is registered in :data:`CALLBACKS`.

    ``trainer`` is the :class:`dglkge.training.trainer.Trainer`, ``batch`` one of ``trainer.batches()``. Every
    trainer makes one and calls it in the thread that trains, at the same places, so it may use collectives
    (``trainer.cluster``), ``trainer.evaluate``, ``trainer.commit`` and ``trainer.stop_if_asked``. What it
    raises ends the job. With ``state_dict`` and ``load_state_dict`` its state is saved with each version, as
    that of ``trainer.register``.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    """

    help = ""

    def on_fit_start(self, trainer: Any) -> None:
        """Follow the resume from the newest version, before the first epoch."""

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        """Come before the batches that an epoch has left, also after a restart inside of it."""

    def on_batch_end(self, trainer: Any, batch: Any, loss: float) -> None:
        """Follow a step; the loss is the sum over this trainer's triples."""

    def on_pass(self, trainer: Any, record: Mapping[str, Any], is_replayed: bool) -> None:
        """Follow a pass, or a bucket with ranges of rows; on rank 0 only.

        The record is its line of ``training_stats.json``: ``epoch_idx``, ``edge_path_idx``,
        ``edge_chunk_idx``, ``index``, ``stats`` and, with ``evaluation.held_out``, ``eval_stats_before`` and
        ``eval_stats_after``. After a resume those of earlier starts of the job come first (``is_replayed``).
        """

    def on_ranking(self, trainer: Any, split: str, result: Any) -> Mapping[str, float] | None:
        """Return measures of your own beside a ranking's, by name.

        They stand with the others in ``metrics.json``, statistics and trackers, and ``evaluation.metric`` may
        be one of them. ``result`` is the :class:`dglkge.evaluation.metrics.RankingResult`.
        """
        return None

    def on_commit(self, trainer: Any, version: int) -> None:
        """Follow the copy of the rows for a version, which a thread may still be writing."""

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Follow an epoch, its commit and its ranking of the valid split."""

    def on_fit_end(self, trainer: Any) -> None:
        """Follow the last epoch and the script's own work, when the last version is published."""


CALLBACKS: Registry[type[Callback]] = Registry("callback")


START_SECONDS = 30.0
"""Time that training waits for trackers to start."""
FINISH_SECONDS = 60.0
"""Time that trackers get at the end of a run for what they have not written or sent yet."""
STOP_SECONDS = 10.0
"""The same after a signal or a failure: whoever stops a job kills it soon after."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run when it starts.

    Attributes
    ----------
    folder : Path
    settings : dict
        Every field of the configuration by dotted name; lists are texts.
    earlier_id : str
        ``Tracker.id`` of an earlier start of the same run; empty for a new run.
    first_step : int
        Steps that are done.
    """

    folder: Path
    settings: dict[str, Any]
    earlier_id: str
    first_step: int


class Tracker:
    """Base of all trackers: a subclass is registered in :data:`LOGGERS`.

    Every method runs in the tracker's own thread; whatever it raises ends the tracker and not the training.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    package : str
        Name of the package that it imports; empty: none beyond dglkge's own.
    extra : str
        Extra of dglkge that installs the package.
    id : str
        Name of the run in the tracker; a resumed run is told it.
    """

    help = ""
    package = ""
    extra = ""
    id = ""

    def __init__(self, run: TrackedRun) -> None:
        pass

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers by name, for example ``train/loss``, after so many global batches."""
        raise NotImplementedError

    def finish(self, is_complete: bool) -> None:
        """End: after the last epoch and the evaluation, or earlier."""


LOGGERS: Registry[type[Tracker]] = Registry("logger")


@LOGGERS.register("tensorboard")
class TensorBoard(Tracker):
    """Event files in the run's folder ``tensorboard``."""

    help = "TensorBoard: event files in RUN/tensorboard"
    package = extra = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run.folder / EVENTS_FOLDER
        self.id = folder.name
        # TensorBoard hides events of these steps that an earlier start had written after its last commit.
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step + 1 if run.earlier_id else 0)
        # Not add_hparams, which makes a further run in a folder of its own.
        start, session, self._end = hparams(run.settings, {"valid/mrr": 0.0, "test/mrr": 0.0})
        self._summaries = self._writer._get_file_writer()
        for summary in () if run.earlier_id else (start, session):
            self._summaries.add_summary(summary)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, is_complete: bool) -> None:
        if is_complete:
            self._summaries.add_summary(self._end)
        self._writer.close()


@LOGGERS.register("wandb")
class WeightsAndBiases(Tracker):
    """A run of Weights & Biases; ``WANDB_MODE``, ``WANDB_PROJECT`` and others are read by its package."""

    help = "Weights & Biases: WANDB_PROJECT, WANDB_MODE=offline and others as its package reads them"
    package = extra = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        project = wandb.setup().settings.project or "dglkge"
        self.id = run.earlier_id or secrets.token_hex(4)
        name = run.folder.absolute().name
        place: dict[str, Any] = {"project": project, "name": name, "dir": str(run.folder)}
        quiet = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(id=self.id, resume="allow", config=run.settings, settings=quiet, **place)
        # A resumed run may repeat steps; the package's own counter only grows.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def finish(self, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)
        # Ends the package's own process, which nothing else does where a trainer ends without exit handlers.
        self._wandb.teardown()


@LOGGERS.register("mlflow")
class Mlflow(Tracker):
    """A run of MLflow, in the experiment ``dglkge`` unless ``MLFLOW_EXPERIMENT_NAME`` names another."""

    help = "MLflow: at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME or dglkge"
    package = extra = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        if run.earlier_id:
            try:
                self._client.update_run(run.earlier_id, status="RUNNING")
                self.id = run.earlier_id
                return
            except MlflowException as error:
                logger.warning("mlflow: no run %s: %s; a new one is made", run.earlier_id, one_line(error))
        name = MLFLOW_EXPERIMENT_NAME.get() or "dglkge"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self.id = self._client.create_run(experiment, run_name=run.folder.absolute().name).info.run_id
        params = [Param(key, str(value)) for key, value in run.settings.items()]
        # A request has at most 100 parameters.
        for start in range(0, len(params), 100):
            self._client.log_batch(self.id, params=params[start : start + 100])

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def finish(self, is_complete: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if is_complete else "KILLED")


@dataclass
class Trackers:
    """The trackers of a run, on rank 0; on other trainers, and without ``training.loggers``, nothing.

    Attributes
    ----------
    names : sequence of str
        Members of :data:`LOGGERS`.
    settings : mapping
        The configuration as nested dicts.
    records : LeasedFolder
        The run's folder, which has the ids of the trackers' runs, by tracker.
    """

    names: Sequence[str]
    settings: Mapping[str, Any]
    records: LeasedFolder

    def __post_init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._lock = threading.Lock()
        self._threads: list[_Thread] = []

    def start(self, first_step: int, is_resumed: bool) -> None:
        """Start the trackers after so many batches; a resumed run goes on in its earlier runs there."""
        if is_resumed and self.names:
            # An InputError: no earlier start had a tracker, or the file is damaged: its run is a new one.
            with contextlib.suppress(InputError):
                self._ids = load_json(self.records.path / RUN_TRACKERS_FILE)
        # Every tracker shows texts.
        settings = {
            name: json.dumps(value) if isinstance(value, (list, dict)) else value
            for name, value in flat(self.settings)
        }
        for name in self.names:
            run = TrackedRun(self.records.path, settings, self._ids.get(name, ""), first_step)
            self._threads.append(_Thread(name, run, self._started))
        # A tracker may start a process of its own. Until it runs its program, a copy of this process keeps
        # all files open, and HDF5 refuses a file that another process holds: no checkpoint is written now.
        deadline = time.monotonic() + START_SECONDS
        for thread in self._threads:
            thread.has_started.wait(max(0.0, deadline - time.monotonic()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Give numbers to all trackers; returns at once."""
        for thread in self._threads:
            if thread.is_alive():
                thread.queue.put((dict(values), step))

    def finish(self) -> None:
        """Wait, within limits, until the trackers have written everything, and end them."""
        # Called on the way out: an exception that ends the training is still being handled.
        is_complete = sys.exc_info()[0] is None
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.queue.put(is_complete)
        deadline = time.monotonic() + (FINISH_SECONDS if is_complete else STOP_SECONDS)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s has not finished in time: its last numbers may be lost", thread.tracker)

    def _started(self, name: str, id_: str) -> None:
        """Record the id of a tracker's run."""
        with self._lock:
            self._ids[name] = id_
            self.records.write_json(RUN_TRACKERS_FILE, self._ids)


class _Thread(threading.Thread):
    """One tracker and its thread; the queue has what it logs, and then whether the run is complete."""

    def __init__(self, tracker: str, run: TrackedRun, started: Callable[[str, str], None]) -> None:
        # A daemon: one that hangs does not keep the process.
        super().__init__(name=f"dglkge-{tracker}", daemon=True)
        self.tracker, self._run, self._started_as = tracker, run, started
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.has_started = threading.Event()
        self.start()

    def run(self) -> None:
        """Make the tracker, and give it what comes."""
        try:
            tracker = LOGGERS.get(self.tracker)(self._run)
            self._started_as(self.tracker, tracker.id)
            self.has_started.set()
            while not isinstance(item := self.queue.get(), bool):
                tracker.log(*item)
            tracker.finish(item)
        except (Exception, SystemExit) as error:  # packages of others, and the user's code: anything
            kind, text = type(error).__name__, one_line(error)
            logger.warning("%s: %s: %s; training goes on without it", self.tracker, kind, text)
        finally:
            self.has_started.set()
