"""The model, loss and regularizer that a configuration names; DGL is not imported here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.errors import unknown_name
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import LOSSES, Loss
from dglkge.model.regularizers import (
    REGULARIZERS,
    Regularizer,
    check_regularizer,
    chosen_regularizer,
)
from dglkge.model.score_functions import SCORE_FUNCTIONS

REFERENCE = "reference"
"""``training.kernels`` of the plain path: autograd, torch and numpy, no compiled loop."""


def configured_model(config: Config) -> KgeModel:
    """Make the model.

    Raises
    ------
    InputError
        If the score function is unknown, has no rows of that dimension, lacks an option that is set, or needs
        reciprocal relations.
    """
    chosen = config.model
    made = SCORE_FUNCTIONS.get(chosen.score_function.name)(chosen.score_function)
    return KgeModel(made, chosen.dimension, chosen.reciprocal_relations, config.seed)


def configured_loss(config: Config) -> Loss:
    """Make the loss."""
    return LOSSES.get(config.loss.name)(config.loss)


def configured_regularizer(config: Config, model: KgeModel) -> Regularizer | None:
    """Make the regularizer; None where its weight is 0.

    Raises
    ------
    InputError
        If it is unknown or not defined for the model, a number is out of range or has no effect, or it takes
        no weight and has one.
    """
    score_function = config.model.score_function.name
    chosen = chosen_regularizer(config.regularizer, score_function)
    check_regularizer(chosen.name, score_function)
    made = REGULARIZERS.get(chosen.name)(chosen, model.score_function.complex_valued)
    return made if made.weight else None


def relation_weights(config: Config, dataset: Dataset) -> npt.NDArray[np.float32] | None:
    """Return the weight of every relation (R,), by original id; None if all are 1.

    A name that joins several pairs of entity types is several relations, which all have its weight.

    Raises
    ------
    InputError
        If a name is none of a relation.
    """
    weights = config.loss.relation_weights
    names = [relation.name for relation in dataset.relations.relations]
    for name in weights:
        if name not in names:
            raise unknown_name("relation", name, sorted(set(names)))
    return np.array([weights.get(name, 1.0) for name in names], np.float32) if weights else None
