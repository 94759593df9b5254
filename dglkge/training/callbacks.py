"""Callbacks: functions of yours that training calls (``training.callbacks``, ``trainer.add_callback``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dglkge.registry import Registry


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
