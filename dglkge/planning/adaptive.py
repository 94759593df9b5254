"""Settings that follow the size of the data, where neither a file nor the user says otherwise.

One rule for the default objective, found on the valid splits of six graphs (docs/quality.md): smaller batches
with a learning rate that a cosine brings to 0, and a stronger penalty, for as many epochs as the data takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dglkge.config import Config
from dglkge.config.load import load_config, read_tree
from dglkge.data.dataset_files import DESCRIPTION, TRAIN, Field, read_description
from dglkge.model.regularizers import AUTO, chosen_regularizer
from dglkge.settings import Tree

EPOCHS_OF_ONE, LEAST_EPOCHS = 550, 2
"""Epochs fall with the fourth root of the number of triples."""

BATCH_SIZE, LEARNING_RATE, WEIGHT = 500, 0.2, 0.02


def adapted(file: str | Path | None, overrides: Sequence[str], dataset: Path) -> list[str]:
    """Return overrides for the fields that are not given.

    Parameters
    ----------
    file : str, Path or None
        File of settings; with one nothing is adapted.
    overrides : sequence of str
        ``key=value``.
    dataset : Path
        Folder of the data set; where it is not here nothing is adapted.

    Returns
    -------
    list of str
        ``key=value``.
    """
    if file is not None or not (dataset / DESCRIPTION).is_file():
        return []
    config = load_config(None, [*overrides, f"dataset={dataset}"])
    given = read_tree(None, overrides)
    wanted = _wanted(config, given, read_description(dataset)[Field.SPLITS][TRAIN])
    return [f"{key}={json.dumps(value)}" for key, value in wanted.items()]


def num_epochs(num_triples: int) -> int:
    """Return the epochs of a graph.

    Examples
    --------
    >>> [num_epochs(count) for count in (30_000, 300_000, 3_000_000, 10**9)]
    [42, 24, 13, 3]
    """
    return max(LEAST_EPOCHS, round(EPOCHS_OF_ONE / max(1, num_triples) ** 0.25))


def describe(settings: Sequence[str]) -> str:
    """Return the line that says what was chosen."""
    return f"chosen for this data set (docs/quality.md): {' '.join(settings)}"


def _wanted(config: Config, given: Tree, num_triples: int) -> dict[str, Any]:
    """Return the values of the fields that are not given, by dotted key."""
    training, optimizer = config.training, config.optimizer
    regularizer = chosen_regularizer(config.regularizer, config.model.score_function.name)
    fits = training.objective.name == "negative_sampling" and config.loss.name == "softmax"
    # Where DURA is the default scores are inner products; the optimizer's state bounds its steps.
    if not fits or regularizer.name != "dura" or optimizer.name not in ("sparse_adagrad", "row_adagrad"):
        return {}
    wanted: dict[str, Any] = {}
    if not _is_given(given, "training.num_epochs"):
        wanted["training.num_epochs"] = num_epochs(num_triples)
    if not _is_given(given, "training.batch_size"):
        wanted["training.batch_size"] = BATCH_SIZE
    if not (_is_given(given, "optimizer.lr") or _is_given(given, "optimizer.schedule")):
        epochs = wanted.get("training.num_epochs", training.num_epochs)
        wanted["optimizer.lr"] = LEARNING_RATE
        wanted["optimizer.schedule"] = {"name": "CosineAnnealingLR", "T_max": max(1, epochs)}
    if config.regularizer.name == AUTO and not _is_given(given, "regularizer.weight"):
        wanted["regularizer.weight"] = WEIGHT
    return wanted


def _is_given(tree: Tree, key: str) -> bool:
    """Return whether a field, or a component in its place, is given."""
    found: Any = tree
    for name in key.split("."):
        if not isinstance(found, Tree):
            return True
        if name not in found:
            return False
        found = found[name]
    return True
