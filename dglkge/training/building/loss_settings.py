"""Checks of the sections ``loss`` and ``negatives``: settings that only some losses and objectives have."""

from __future__ import annotations

from typing import Optional

import numpy as np
import numpy.typing as npt

from dglkge.config import Config
from dglkge.config.schema import NEGATIVE_SAMPLING, OBJECTIVES
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError, unknown_name
from dglkge.model.choices import NEGATIVE_SAMPLERS

SUM, K_VS_ALL = "sum", OBJECTIVES[-1]

WEIGHTS_A_BLOCK = 1 << 20
"""Weights that are checked at a time."""

DEFAULTS_OF_NEGATIVES = {
    "num_for_heads": -1,
    "all_entities": False,
    "num_for_tails": -1,
    "degree_power": 0.0,
    "mask_known": False,
}


def check_loss_settings(config: Config) -> None:
    """Refuse settings that the loss or the objective does not have.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    chosen, objective = config.loss, config.training.objective
    if chosen.relation_weights and objective == K_VS_ALL:
        raise InputError(
            f"loss.relation_weights is given, and training.objective is {objective}, which takes no weights; "
            f"allowed: none, or another objective"
        )
    for name, default in (("reduction", "mean"), ("adversarial_weights", False), ("confidences", False)):
        value = getattr(chosen, name, default)
        if value != default and objective != NEGATIVE_SAMPLING:
            raise InputError(
                f"loss.{name} is {_yaml(value)}, and training.objective is {objective}, which does not take "
                f"it; allowed: {_yaml(default)}, or training.objective {NEGATIVE_SAMPLING}"
            )
    if chosen.has_confidences and config.training.relation_prediction:
        raise InputError(
            "loss.confidences is true and training.relation_prediction is "
            f"{config.training.relation_prediction:g}, whose softmax has no label of one answer; allowed "
            "with confidences: 0"
        )
    if chosen.has_adversarial_weights and getattr(chosen, "reduction", "") == SUM:
        raise InputError(
            "loss.adversarial_weights is true and loss.reduction is sum: the weights of a query's negatives "
            "sum to 1; allowed with them: mean"
        )


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


def relation_weights(config: Config, dataset: Dataset) -> Optional[npt.NDArray[np.float32]]:
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


def check_negatives(config: Config) -> None:
    """Refuse negatives of no side, and settings of negatives where none are sampled.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    chosen, objective = config.negatives, config.training.objective
    for name, default in DEFAULTS_OF_NEGATIVES.items():
        value = getattr(chosen, name)
        if value != default and objective != NEGATIVE_SAMPLING:
            raise InputError(
                f"negatives.{name} is {_yaml(value)}, and training.objective is {objective}, which has no "
                f"sampled negatives; allowed: {_yaml(default)}, or training.objective {NEGATIVE_SAMPLING}"
            )
    sampler = NEGATIVE_SAMPLERS.get(chosen.sampler)
    # Samplers that users registered as a plain Choice do not take weights.
    if chosen.degree_power and not getattr(sampler, "takes_weights", False):
        raise InputError(
            f"negatives.degree_power is {chosen.degree_power:g} and negatives.sampler is {chosen.sampler}, "
            "which takes no weights; allowed: 0, or another sampler"
        )
    if chosen.degree_power and chosen.in_batch_share == 1:
        raise InputError(
            f"negatives.degree_power is {chosen.degree_power:g} and negatives.in_batch_share is 1, which has "
            "no effect: negatives of the batch are drawn in proportion to their occurrences; allowed: 0"
        )
    # num_uniform and the shares are not compared: they have defaults that are no request.
    for name in ("num_for_heads", "num_for_tails", "local_share", "in_batch_share", "degree_power"):
        value = getattr(chosen, name)
        if chosen.all_entities and value > 0:
            raise InputError(
                f"negatives.all_entities is true and negatives.{name} is {value:g}, which has no effect; "
                f"allowed with it: {'-1 or 0' if name.startswith('num') else '0'}"
            )
    if not any(chosen.per_side.values()):
        raise InputError(
            "negatives.num_for_heads and negatives.num_for_tails are both 0: no side is trained; allowed is "
            "0 for one of them"
        )


def _yaml(value: object) -> str:
    """Return a value as a configuration file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
