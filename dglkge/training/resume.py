"""Rules by which a run goes on from a version of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.config import Config, refused_changes
from dglkge.errors import CheckpointError, InputError
from dglkge.step.objectives.measures import MEASURES
from dglkge.training.stats import LossSoFar, num_epoch_sums

EPOCH_MEASURES = (Progress.EPOCH_MEASURED, *(Progress.epoch_measure(name) for name in MEASURES))


def is_over(config: Config, saved: CheckpointMeta, now: Mapping[str, Any]) -> bool:
    """Return whether a version is the end of training: its best version, restored, and nothing to add.

    More epochs, if the last ones were reached, or another patience continue from the best version.
    """
    ended_after = saved.progress.get(Progress.ENDED_AFTER)
    if ended_after is None or not config.training.early_stopping_patience:
        return False
    before, now = saved.config.get("training", {}), now.get("training", {})
    names = ("early_stopping_patience", "early_stopping_min_gain")
    stopped_early = ended_after < before.get("num_epochs", 0)
    is_same = all(before.get(name) == now.get(name) for name in names)
    return bool(ended_after >= config.training.num_epochs or (stopped_early and is_same))


def check_settings(config: Config, saved: CheckpointMeta, now: Mapping[str, Any], where: Path) -> None:
    """Refuse to resume with other settings than those that the run was started with.

    Raises
    ------
    CheckpointError
        Naming each of them with both values.
    """
    is_finished = saved.progress[Progress.FINISHED_EPOCHS] >= config.training.num_epochs
    changes = refused_changes(saved.config, now, is_finished)
    if changes:
        raise CheckpointError(
            f"{where} is of a run with other settings: {'; '.join(changes)}; "
            "take another output folder, or the settings that the run was started with"
        )


def resumed_batches(meta: CheckpointMeta, size: int, expected: int) -> int:
    """Return the batches done in the open epoch, in batches of this run's size."""
    done = meta.progress[Progress.BATCHES_DONE] * meta.progress[Progress.GLOBAL_BATCH_SIZE]
    # Progress is recorded in batches of the saved size. The order of triples does not depend on the batch
    # size, so another size may continue if it divides the position.
    if done % size:
        raise InputError(
            f"training.batch_size is {size}; the checkpoint stands {done} triples into an epoch: "
            f"allowed are {meta.progress[Progress.GLOBAL_BATCH_SIZE]} and what else divides {done}"
        )
    # In an order of the machines an epoch depends on the partitions: other triples would be left.
    mark = meta.progress.get(Progress.ORDER_MARK, 0)
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
    return done // size


def loss_so_far(meta: CheckpointMeta, has_measures: bool) -> LossSoFar | None:
    """Return the recorded loss of a checkpoint's open epoch, None if absent."""
    progress = meta.progress
    if not progress[Progress.BATCHES_DONE] or Progress.EPOCH_LOSS not in progress:
        return None
    total = np.zeros(num_epoch_sums(has_measures))
    total[:2] = progress[Progress.EPOCH_LOSS], progress[Progress.EPOCH_TRIPLES]
    # Batches that were trained without statistics are not in these.
    total[3:] = [progress.get(name, 0.0) for name in EPOCH_MEASURES[: len(total) - 3]]
    return LossSoFar(progress[Progress.FINISHED_EPOCHS], total, np.zeros_like(total))
