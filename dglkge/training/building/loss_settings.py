"""Settings of the loss that depend on the data set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError, unknown_name

WEIGHTS_A_BLOCK = 1 << 20
"""Weights that are checked at a time."""


def check_data_of_loss(config: Config, dataset: Dataset) -> None:
    """Refuse settings of the loss that do not fit a data set.

    Raises
    ------
    InputError
        For an unknown relation, or weights that are missing or no confidences.
    """
    relation_weights(config, dataset)
    if not config.loss.has_confidences:
        return
    weights = dataset.train_weights()
    if weights is None:
        raise InputError(
            f"loss.confidences is true, and the triples of {dataset.path} have no weights; allowed: false, "
            "or a data set with a column of weights"
        )
    # In blocks: the weights are mapped, not read as a whole.
    for start in range(0, len(weights), WEIGHTS_A_BLOCK):
        block = weights[start : start + WEIGHTS_A_BLOCK]
        if block.max() > 1:
            place = int(block.argmax())
            raise InputError(
                f"loss.confidences is true, and training triple {start + place} of {dataset.path} has the "
                f"weight {block[place]:g}; allowed: weights in [0, 1]"
            )


def relation_weights(config: Config, dataset: Dataset) -> npt.NDArray[np.float32] | None:
    """Return the weight of every relation (R,), by original id; None if all are 1.

    A name that joins several pairs of entity types is several relations, which all have its weight.

    Raises
    ------
    InputError
        If a name is none of a relation.
    """
    given = config.loss.relation_weights
    names = [relation.name for relation in dataset.relations.relations]
    for name in given:
        if name not in names:
            raise unknown_name("relation", name, sorted(set(names)))
    return np.array([given.get(name, 1.0) for name in names], np.float32) if given else None
