"""Place of a run in its epochs, and the rules by which it goes on from a version of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
from dglkge.config import Config, refused_changes
from dglkge.errors import CheckpointError, InputError
from dglkge.sampling.edge_batches import EpochBatches
from dglkge.training.epochs import ElasticEpochs


class Position:
    """Place of a run in its epochs.

    Attributes
    ----------
    ended : int
        Epochs with commit and validation done; at most those that are finished.
    ended_after : int or None
        Epochs after which training ended with its best version; None while it goes on.
    committed : (int, int) or None
        Epochs and batches of the newest version.
    """

    def __init__(self, config: Config, epochs: ElasticEpochs, batches: EpochBatches) -> None:
        self._config, self._epochs, self._batches = config, epochs, batches
        # An epoch, and the number of its batches that are done.
        self._batch = (0, 0)
        self.ended = 0
        self.ended_after: int | None = None
        self.committed: tuple[int, int] | None = None

    @property
    def batches_done(self) -> int:
        """Batches done of the epoch that is open or comes next; an epoch may be left at any place."""
        epoch, done = self._batch
        return done if epoch == self._epochs.finished() else 0

    @property
    def now(self) -> tuple[int, int]:
        """Finished epochs, and batches done of the next one."""
        return self._epochs.finished(), self.batches_done

    @property
    def steps_done(self) -> int:
        """Global batches of all epochs that are done, in batches of the present size."""
        return self._epochs.finished() * len(self._batches) + self.batches_done

    def move(self, epoch: int, batches_done: int) -> None:
        """Note the batches of an epoch that are done."""
        self._batch = (epoch, batches_done)

    def end(self, finished: int, ended_after: int) -> None:
        """Leave no epoch to train: the best version, that of so many finished epochs, was restored."""
        self._epochs.end(finished)
        self._batch, self.ended, self.ended_after = (finished, 0), finished, ended_after

    def progress(self, passes_done: int, validates: bool) -> dict[str, Any]:
        """Describe the place for a version; ``validates``: the valid split is ranked after this epoch."""
        finished, batches_done = self.now
        described = {
            Progress.FINISHED_EPOCHS: finished,
            Progress.BATCHES_DONE: batches_done,
            Progress.GLOBAL_BATCH_SIZE: self._config.training.batch_size,
        }
        further = {
            Progress.VALIDATION_PENDING: int(validates and self.ended < finished),
            Progress.ENDED_AFTER: self.ended_after,
            Progress.PASSES_DONE: passes_done,
            Progress.ORDER_MARK: self._batches.order_mark if batches_done else 0,
        }
        return {**described, **{name: value for name, value in further.items() if value}}

    def resume(self, saved: CheckpointMeta, now: Mapping[str, Any]) -> None:
        """Go on from a version that was restored; ``now`` is the present configuration."""
        finished = saved.progress[Progress.FINISHED_EPOCHS]
        self._epochs.restore(finished)
        self._batch = (finished, self._resumed_batches(saved.progress))
        self.ended, self.committed = finished, self.now
        if self._is_over(saved, now):
            self.end(finished, saved.progress[Progress.ENDED_AFTER])

    def _is_over(self, saved: CheckpointMeta, now: Mapping[str, Any]) -> bool:
        """Return whether a version is the end of training: its best version, restored, and nothing to add.

        More epochs, if the last ones were reached, or another patience continue from the best version.
        """
        ended_after = saved.progress.get(Progress.ENDED_AFTER)
        training = self._config.training
        if ended_after is None or training.early_stopping is None:
            return False
        before, now = saved.config.get("training", {}), now.get("training", {})
        stopped_early = ended_after < before.get("num_epochs", 0)
        is_same = before.get("early_stopping") == now.get("early_stopping")
        return bool(ended_after >= training.num_epochs or (stopped_early and is_same))

    def _resumed_batches(self, progress: Mapping[str, Any]) -> int:
        """Return the batches done in the open epoch, in batches of this run's size."""
        size, expected = self._config.training.batch_size, self._batches.order_mark
        saved_size = progress[Progress.GLOBAL_BATCH_SIZE]
        # Progress is recorded in batches of the saved size. The order of triples does not depend on the batch
        # size, so another size may continue if it divides the position.
        done = progress[Progress.BATCHES_DONE] * saved_size
        if done % size:
            raise InputError(
                f"training.batch_size is {size}; the checkpoint stands {done} triples into an epoch: "
                f"allowed are {saved_size} and what else divides {done}"
            )
        # In an order of the machines an epoch depends on the partitions: other triples would be left.
        mark = progress.get(Progress.ORDER_MARK, 0)
        if done and mark != expected and not mark:
            raise InputError(
                f"the checkpoint stands {done} triples into an epoch in the order of the whole graph, and "
                "here each machine has an order of its own; allowed: sampling.order global, at least until "
                "the epoch's end"
            )
        if done and mark != expected:
            raise InputError(
                f"the checkpoint stands {done} triples into an epoch in the order of its machines, which "
                f"other partitions and sampling.order global cannot continue (checksum {mark}, here "
                f"{expected}): finish the epoch on the partitions that it began on, or resume from an "
                "epoch's end (checkpoint.keep_every_epochs)"
            )
        return int(done // size)


def resumable(
    config: Config, saved: CheckpointMeta, meta: CheckpointMeta, where: Path | str
) -> CheckpointMeta:
    """Return what a version says of itself, if a run may go on from it.

    Raises
    ------
    CheckpointError
        If it is another run's, or the run has other settings now: each is named with both values.
    """
    check_same_run(saved, meta)
    settings = dict(meta.config)
    if settings.get("training", {}).get("matmul_dtype") == "auto":
        # Chosen later, as the run has recorded it.
        settings["training"] = {k: v for k, v in settings["training"].items() if k != "matmul_dtype"}
    is_finished = saved.progress[Progress.FINISHED_EPOCHS] >= config.training.num_epochs
    changes = refused_changes(saved.config, settings, is_finished)
    if changes:
        raise CheckpointError(
            f"{where} is of a run with other settings: {'; '.join(changes)}; "
            "take another output folder, or the settings that the run was started with"
        )
    return saved
