"""The model, loss and regularizer that a configuration names, and the checks that need no data set.

``dglkge plan`` and training call the same checks, so that neither approves what the other refuses. DGL is not
imported here: a plan does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable

from dglkge.config import Config
from dglkge.errors import InputError, unknown_name
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.losses import Loss, build_loss
from dglkge.model.regularizers import Regularizer, build_regularizer
from dglkge.sampling.shares import split_count

OPTIMIZER_CLASSES = {
    "sparse_adagrad": "SparseAdagrad",
    "row_adagrad": "RowAdagrad",
    "sparse_adam": "SparseAdam",
}
"""Name in the configuration to class of ``dglkge.optim``."""

LOSS_OPTIONS = {
    "margin_ranking": ("margin",),
    "self_adversarial": ("margin", "adversarial_temperature"),
}
"""Which fields of the loss's configuration each loss takes."""

NO_REGULARIZER = "none"


def check_config(config: Config, optimizers: Iterable[str] = OPTIMIZER_CLASSES) -> None:
    """Refuse names that no component has, and values that do not fit each other.

    Parameters
    ----------
    config : Config
    optimizers : iterable of str
        The known optimizers.

    Raises
    ------
    InputError
        Naming the first of them.
    """
    model = configured_model(config)
    configured_loss(config)
    if config.regularizer.name != NO_REGULARIZER:
        configured_regularizer(config, model)
    if config.optimizer.name not in set(optimizers):
        raise unknown_name("optimizer", config.optimizer.name, optimizers)
    chosen = config.negatives
    split_count(chosen.num_uniform, (chosen.global_share, chosen.local_share, chosen.in_batch_share))
    check_lookup(config)


def check_lookup(config: Config) -> None:
    """Refuse stale rows where the kvstore brings them.

    Raises
    ------
    InputError
        If they are configured so.
    """
    if config.training.lookup == "kvstore" and config.training.staleness:
        raise InputError(
            "training.staleness is 1 and training.lookup is kvstore: only lookup exchange reads ahead"
        )


def check_machines(config: Config, num_machines: int) -> None:
    """Refuse what several machines cannot do.

    Raises
    ------
    InputError
        If trainers of several machines are not to wait for one another.
    """
    if not config.training.synchronous and num_machines > 1:
        raise InputError(
            "training.synchronous: false is for trainers that share one machine's memory, "
            f"got {num_machines} machines"
        )


def configured_model(config: Config) -> KgeModel:
    """Make the model.

    Raises
    ------
    InputError
        If the score function is unknown or has no rows of that dimension.
    """
    chosen = config.model
    return build_model(chosen.score_function, chosen.dimension, chosen.reciprocal_relations)


def configured_loss(config: Config) -> Loss:
    """Make the loss.

    Raises
    ------
    InputError
        If it is unknown, or an option of it is out of range.
    """
    options = {name: getattr(config.loss, name) for name in LOSS_OPTIONS.get(config.loss.name, ())}
    return build_loss(config.loss.name, **options)


def configured_regularizer(config: Config, model: KgeModel) -> Regularizer:
    """Make the regularizer, whatever its weight.

    Raises
    ------
    InputError
        If it is unknown, or its weight or power is out of range.
    """
    chosen = config.regularizer
    return build_regularizer(chosen.name, chosen.weight, chosen.p, model.score_function.complex_valued)
