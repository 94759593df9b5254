"""Early stopping on the valid MRR: how many rankings in a row have brought no gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dglkge.config import Config
from dglkge.distributed.world import World
from dglkge.errors import InputError


def check_common_disk(config: Config, world: World) -> None:
    """Refuse early stopping where machines share no disk: only the first one has the best version.

    Raises
    ------
    InputError
        If it is configured.
    """
    patience = config.training.early_stopping_patience
    if patience and world.has_own_disk and world.num_machines > 1:
        raise InputError(
            f"training.early_stopping_patience is {patience} and the {world.num_machines} machines share no "
            "disk, so they cannot read the best version; allowed: 0 (with checkpoint.keep_best), or a disk "
            "that all machines see"
        )


class EarlyStopping:
    """Counts rankings without a gain since the best one.

    A ranking gains if its MRR is more than ``min_gain`` above the best of those that gained; the first one
    does, and NaN never does.

    Parameters
    ----------
    patience : int
        Training ends after so many rankings in a row without a gain.
    min_gain : float

    Attributes
    ----------
    best : float or None
        MRR of the last ranking that gained.
    num_without_gain : int
        Rankings since then.
    """

    def __init__(self, patience: int, min_gain: float) -> None:
        self._patience = patience
        self._min_gain = min_gain
        self.best: float | None = None
        self.num_without_gain = 0

    def add(self, mrr: float) -> None:
        """Count one ranking."""
        # A comparison with NaN is false, so NaN is no gain; as the first one it must not become the best.
        if mrr == mrr and (self.best is None or mrr > self.best + self._min_gain):
            self.best, self.num_without_gain = mrr, 0
        else:
            self.num_without_gain += 1

    @property
    def is_over(self) -> bool:
        """Whether training is to end."""
        return self.num_without_gain >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best MRR and the rankings since."""
        return {"best": self.best, "num_without_gain": self.num_without_gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`; patience and gain are those of now."""
        self.best, self.num_without_gain = state["best"], int(state["num_without_gain"])
