"""What a training script calls: the entry into its job, and the elastic loop over epochs.

The loop resumes after the last committed state of the job. The semantics are AdaptDL's
(``adaptdl.torch.epoch``; Qiao et al. 2021, "Pollux"): the state is one integer, the number of finished
epochs. Separate from the rest of training, which servers do not import.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.distributed.dgl_memory import standalone_tables
from dglkge.distributed.preemption import Preempted
from dglkge.distributed.runtime import Cluster, is_server, use_log_format, verifies_dataset
from dglkge.distributed.runtime import join_cluster as join_graph
from dglkge.distributed.world import World
from dglkge.launch.table_storage import TableFolder, roomy_folder, usual_folders
from dglkge.planning.memory import plan_memory

logger = logging.getLogger(__name__)

_opened: dict[str, Dataset] = {}
"""The data set of the job that this process is in, by the path in the configuration."""


def opened_dataset(config: Config) -> Dataset:
    """Return the data set that :func:`join_cluster` opened, or open it outside of a job."""
    return _opened.get(config.dataset) or Dataset.open(config.dataset)


@contextlib.contextmanager
def join_cluster(config: Config) -> Iterator[Cluster]:
    """Join the job that ``dglkge-launch`` started, or train alone where nothing was launched.

    In a server process this serves the graph and the tables, and does not return.

    Raises
    ------
    InputError
        If the configuration cannot be trained, the data set cannot be read, has not as many partitions as
        there are machines, its tables do not fit into the machine, or this process is in a job already.
    """
    use_log_format()
    if not is_server():
        world = World.detect()
        # Imported here, not above: servers skip it, and trainers import while the servers load the graph.
        trainer = importlib.import_module("dglkge.training.trainer")
        trainer.checks.check_config(config, world)
    # Kept for build_trainer, so that the descriptions are read once.
    dataset = _opened[config.dataset] = Dataset.open(config.dataset)
    try:
        if verifies_dataset():
            dataset.verify()
        if not is_server():
            trainer.checks.check_dataset(config, dataset, world)
        part_config = str(dataset.graph_config_path)
        joined = join_graph(dataset.graph_name, part_config, dataset.num_parts)
        with own_tables(config), joined as cluster:
            try:
                yield cluster
            finally:
                # Drops a loop that an exception left open, and the listener, which refers to the trainer and
                # its tables.
                JOB.forget()
    finally:
        _opened.clear()


@contextlib.contextmanager
def own_tables(config: Config) -> Iterator[None]:
    """Let a process alone keep its tables as files, where that is configured: no launcher made a folder."""
    if config.tables.storage != "disk" or is_server() or World.detect().launched:
        yield
        return
    planned = plan_memory(config, opened_dataset(config).size(), 1, 0)[0]
    path = config.tables.folder
    folders = [Path(path)] if path else usual_folders(on_disk=True)
    base = roomy_folder(folders, planned.file_bytes, "tables.storage is disk; ")
    folder = TableFolder(base, secrets.token_hex(8))
    try:
        with standalone_tables(str(folder.path)):
            yield
    finally:
        folder.remove()


class ElasticEpochs:
    """Counts finished epochs.

    Attributes
    ----------
    finished : int
        Epochs that are finished, those of a former run of the job among them.
    current : int or None
        The running epoch; None between and outside loops.
    goal : int
        Epochs after which the last loop ends.
    """

    def __init__(self, finished: int = 0) -> None:
        self.finished = finished
        self.current: int | None = None
        self._has_ended = self._is_restored = False
        self._listeners: list[Callable[[], None]] = []
        # An abandoned generator runs its `finally` when it is collected, maybe after restore(): the number
        # of its generation is then an old one, and it counts no epoch.
        self._generation = self.goal = 0

    def restore(self, finished: int) -> None:
        """Start from a number of finished epochs, with no loop open and no listeners."""
        self.finished, self._has_ended, self._is_restored = finished, False, True
        self.forget()

    def forget(self) -> None:
        """Drop an open loop and the listeners; the count stays."""
        self.stop()
        self._listeners = []

    def stop(self) -> None:
        """Close the open loop by a stop: its epoch is not finished, and the next loop goes on in it."""
        self._generation += 1
        self.current = None

    def preempt(self, epochs_done: int, batches_done: int, is_first: bool) -> NoReturn:
        """Leave the loop by a stop, after the commit; the first trainer logs the place.

        Raises
        ------
        Preempted
        """
        if is_first:
            text = "stopped as asked: %d epochs and %d batches done, committed"
            logger.info(text, epochs_done, batches_done)
        self.stop()
        raise Preempted

    def end(self, finished: int) -> None:
        """Leave no epoch to train; the count is that of the version that was restored as the best.

        An open loop ends with its body, which is not counted.
        """
        self._generation += 1
        self.finished, self.current, self._has_ended = finished, None, True

    def when_finished(self, listener: Callable[[], None]) -> None:
        """Register a function that is called after each epoch with a body that ran to its end."""
        self._listeners.append(listener)

    def remaining_until(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left until ``num_epochs`` are finished.

        An epoch is finished when its body is left, also by ``break`` or an exception other than a stop. While
        one is open, ``current == finished``.

        Raises
        ------
        RuntimeError
            At the first epoch, if another loop is open.
        """
        if self.current is not None:
            raise RuntimeError("overlapping epoch loops detected")
        self.goal = num_epochs
        if self.finished >= num_epochs or self._has_ended:
            logger.info("epochs until %d are finished already: nothing to do", num_epochs)
        else:
            logger.info("starting at epoch %d", self.finished)
        while self.finished < num_epochs and not self._has_ended:
            self.current = self.finished
            generation = self._generation
            try:
                yield self.current
            finally:
                if generation == self._generation:
                    self.finished += 1
                    self.current = None
            # Not in the `finally`: listeners are collectives, and after break or an exception trainers may be
            # at different places.
            for listener in self._listeners:
                listener()

    def require_current(self) -> int:
        """Return the running epoch, for batches; RuntimeError where there is none."""
        if self.current is None:
            raise RuntimeError("batches() must run inside 'for epoch in remaining_epochs_until(n)'")
        return self.current

    def warn_if_fresh(self) -> None:
        """Warn once if nothing has restored the count in a process that a launcher has started."""
        if not self._is_restored and World.detect().launched:
            self._is_restored = True
            remedy = "call dglkge.elastic, or dglkge.build_trainer, before the loop over epochs"
            logger.warning("epochs are counted from 0: nothing restores them after a restart; %s", remedy)


JOB = ElasticEpochs()
"""This process's job; :func:`dglkge.elastic` or :func:`dglkge.build_trainer` restores it."""


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Yield the epochs of this job that are left until ``num_epochs`` are finished.

    Code in the body before and between batch loops runs again after a restart and must be idempotent;
    code after the last batch loop of an epoch does not run again. The script's variables are not saved: what
    depends on the epoch has to follow from its number, or to be among the objects of :func:`dglkge.elastic`
    or of ``trainer.register(name, object)``.
    """
    JOB.warn_if_fresh()
    return JOB.remaining_until(num_epochs)


def current_epoch() -> int | None:
    """Return the running epoch, None outside an epoch loop."""
    JOB.warn_if_fresh()
    return JOB.current


def finished_epochs() -> int:
    """Return the number of epochs that this job has finished."""
    JOB.warn_if_fresh()
    return JOB.finished
