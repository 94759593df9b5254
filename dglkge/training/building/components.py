"""The model, loss and regularizer that a configuration names, and the checks that need no data set.

``dglkge plan`` and training call the same checks, so that neither approves what the other refuses. DGL is not
imported here: a plan does not need it.
"""

from __future__ import annotations

from pathlib import Path

from dglkge.checkpoint.stores import is_url, open_store
from dglkge.config import Config
from dglkge.config.refusals import refuse
from dglkge.errors import InputError
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import LOSSES, Loss
from dglkge.model.regularizers import (
    REGULARIZERS,
    Regularizer,
    check_regularizer,
    chosen_regularizer,
)
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.sampling.shares import split_count
from dglkge.training.building.dense_optimizer import check_dense
from dglkge.training.learning_rates import check_schedule
from dglkge.training.trackers import check_loggers

REFERENCE = "reference"
"""``training.kernels`` of the plain path: autograd, torch and numpy, no compiled loop."""


def check_config(config: Config, num_machines: int = 1, num_disks: int = 1) -> None:
    """Refuse values that do not fit each other.

    Raises
    ------
    InputError
        Naming them.
    """
    model = configured_model(config)
    configured_regularizer(config, model)
    refuse(config, num_machines, num_disks)
    split_count(config.negatives.num_uniform, config.negatives.shares)
    check_schedule(config)
    check_dense(config, model)
    check_loggers(config.training.loggers)
    check_storage(config)


def check_storage(config: Config) -> None:
    """Refuse a URL in place of the run's folder, and one that cannot be opened; nothing is read.

    Raises
    ------
    InputError
        Naming the field.
    """
    if is_url(config.output):
        raise InputError(
            f"output is {config.output!r}; expected a folder of this machine: checkpoint.storage takes the "
            "URL to which versions are committed as well"
        )
    url = config.checkpoint.storage
    if not url:
        return
    try:
        open_store(url)
    except InputError as error:
        raise InputError(f"checkpoint.storage: {error}") from None
    if url.startswith("file:") and Path("/" + url[5:].lstrip("/")).resolve() == Path(config.output).resolve():
        raise InputError(
            f"checkpoint.storage is {url!r}, which is the run's own folder; expected another one"
        )


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
