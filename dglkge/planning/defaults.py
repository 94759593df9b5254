"""Defaults that follow the size of the data: trainers of a machine, and settings that nobody has given.

The settings are one rule for the default objective, found on the valid splits of eight graphs
(docs/quality.md): smaller batches, a higher learning rate, whose noise averages of the rows take out, and a
stronger penalty where there are more entities, for as many epochs as the data takes. Nothing in it must know
the end: a run may go on with more epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.config import Config
from dglkge.config.load import load_config, read_tree
from dglkge.config.refusals import refuse
from dglkge.config.schema import value_at
from dglkge.data.dataset_files import DESCRIPTION, TRAIN, DatasetSize, Field, read_description
from dglkge.errors import InputError
from dglkge.model.regularizers import AUTO, chosen_regularizer
from dglkge.planning.host import MOST_DEFAULT_TRAINERS
from dglkge.planning.memory import is_compiled, is_sampled
from dglkge.typing import RELATION, STAGED_CPU_DEVICE

POSITIVES_A_TRAINER = 500
"""Positives of a trainer, of a larger chunk, at least.

Each trainer reads all negatives of its chunk and sends their gradients to the owners of their rows, which
takes as long as to score some 230 queries. A positive has two queries.
"""


def most_trainers(config: Config, size: DatasetSize) -> int:
    """Return how many trainers a machine has at most without the user's choice.

    Where loops and matmuls have threads of their own, as many as share out a batch in whole chunks, or in
    parts that are worth it; two at least, as what is not in loops has one thread. A graph of several entity
    types has small matmuls, which have no threads.
    """
    num_types = len(size.num_rows.keys() - {RELATION})
    has_threads = is_sampled(config) and is_compiled(config) and config.training.device != STAGED_CPU_DEVICE
    if num_types > 1 or not has_threads:
        return MOST_DEFAULT_TRAINERS
    share = config.training.batch_size // len(size.parts)
    parts = max(-(-share // config.negatives.chunk_size), share // POSITIVES_A_TRAINER, 2)
    return min(MOST_DEFAULT_TRAINERS, parts)


EPOCHS_OF_ONE = 550
"""Epochs fall with the fourth root of the number of triples."""

MOST_TRIPLES = 10_000_000
"""Larger graphs have the defaults: averages take the memory of a second table."""

WEIGHT_OF_ONE, LEAST_WEIGHT, MOST_WEIGHT = 0.0004, 0.01, 0.05
"""The weight of the regularizer grows with the root of the number of entities, within limits."""

BATCH_SIZE, LEARNING_RATE, AVERAGING = 500, 0.2, 4.0

_ABSENT = object()


def adapted(file: str | Path | None, overrides: Sequence[str], dataset: Path) -> list[str]:
    """Return overrides (``key=value``) for the fields that are not given.

    Nothing is adapted with a file of settings, or where the folder of the data set is not here.
    """
    if file is not None or not (dataset / DESCRIPTION).is_file():
        return []
    config = load_config(None, [*overrides, f"dataset={dataset}"])
    tree = read_tree(None, overrides)
    defaults = _values_of_rule(config, read_description(dataset))
    # Neither the field is given, nor a component in its place.
    is_free = {key: value_at(tree, tuple(key.split(".")), _ABSENT) is _ABSENT for key in defaults}
    settings = [f"{key}={value}" for key, value in defaults.items() if is_free[key]]
    try:
        refuse(load_config(None, [*overrides, f"dataset={dataset}", *settings]))
    except InputError:
        return []  # something given goes without averages, say
    return settings


def num_epochs(num_triples: int) -> int:
    """Return the epochs of a graph.

    Examples
    --------
    >>> [num_epochs(count) for count in (3_000, 30_000, 300_000, 3_000_000)]
    [74, 42, 24, 13]
    """
    return round(EPOCHS_OF_ONE / max(1, num_triples) ** 0.25)


def regularizer_weight(num_entities: int) -> float:
    """Return the weight of DURA for a graph.

    Examples
    --------
    >>> [regularizer_weight(count) for count in (100, 2_500, 10_000, 1_000_000)]
    [0.01, 0.02, 0.04, 0.05]
    """
    return round(min(MOST_WEIGHT, max(LEAST_WEIGHT, WEIGHT_OF_ONE * math.sqrt(num_entities))), 4)


def describe(settings: Sequence[str]) -> str:
    """Return the line that says what was chosen."""
    return f"chosen for this data set (docs/quality.md): {' '.join(settings)}"


def _values_of_rule(config: Config, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the rule has for a data set, by dotted key."""
    num_triples = description[Field.SPLITS][TRAIN]
    regularizer = chosen_regularizer(config.regularizer, config.model.score_function.name)
    fits = (
        num_triples <= MOST_TRIPLES
        and config.training.objective.name == "negative_sampling"
        and config.loss.name == "softmax"
        # Where DURA is the default scores are inner products.
        and config.regularizer.name == AUTO
        and regularizer.name == "dura"
        and config.optimizer.name == "sparse_adagrad"
        and config.tables.storage != "device"  # no averages
    )
    if not fits:
        return {}
    return {
        "training.num_epochs": num_epochs(num_triples),
        "training.batch_size": BATCH_SIZE,
        "training.averaging": AVERAGING,
        "optimizer.lr": LEARNING_RATE,
        "regularizer.weight": regularizer_weight(sum(description[Field.ENTITY_TYPES].values())),
    }
