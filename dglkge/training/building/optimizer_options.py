"""Hyper-parameters that a configuration gives to the update rules of its tables, and their checks.

DGL is not imported here: ``dglkge plan`` refuses what training refuses.
"""

from __future__ import annotations

from typing import Any

from dglkge.config import Config
from dglkge.config.schema import OptimizerConfig
from dglkge.errors import InputError
from dglkge.model.choices import OPTIMIZERS
from dglkge.optim.rules import UpdateRule

_DEFAULTS = OptimizerConfig()


def check_optimizer(config: Config) -> None:
    """Refuse unknown optimizers, and settings that none of the chosen ones has.

    Raises
    ------
    InputError
        Naming the field, its value and what is allowed.
    """
    chosen = config.optimizer
    names = list(dict.fromkeys([chosen.name, relation_optimizer(chosen)]))
    known = {key for name in names for key in OPTIMIZERS.get(name)().hyper}
    for field, key in (("eps", "eps"), ("beta1", "betas"), ("beta2", "betas")):
        value = getattr(chosen, field)
        if value != getattr(_DEFAULTS, field) and key not in known:
            able = ", ".join(name for name in OPTIMIZERS if key in OPTIMIZERS.get(name)().hyper)
            raise InputError(
                f"optimizer.{field} is {value}, which has no effect with optimizer.name "
                f"{' and '.join(names)}; it takes {able}"
            )
    if chosen.clip_norm and not config.training.synchronous:
        raise InputError(
            f"optimizer.clip_norm is {chosen.clip_norm:g} and training.synchronous is false: no trainer has "
            "the gradients of all; allowed: clip_norm 0, or training.synchronous true"
        )
    if chosen.decoupled_weight_decay and not chosen.weight_decay:
        raise InputError(
            "optimizer.decoupled_weight_decay is true and optimizer.weight_decay is 0, so nothing decays; "
            "allowed with it: a weight_decay above 0"
        )


def clipping_of(chosen: OptimizerConfig) -> dict[str, float]:
    """Return the limits of a step's gradient by name; empty where none is configured."""
    limits = {"norm": chosen.clip_norm, "value": chosen.clip_value}
    return {name: limit for name, limit in limits.items() if limit}


def relation_optimizer(chosen: OptimizerConfig) -> str:
    """Return the name of the relations' optimizer."""
    return chosen.relation_name or chosen.name


def describe_optimizer(chosen: OptimizerConfig) -> dict[str, Any]:
    """Return name and learning rate for a checkpoint, and those of the relations where they differ."""
    described: dict[str, Any] = {"name": chosen.name, "lr": chosen.lr}
    if relation_optimizer(chosen) != chosen.name:
        described["relation_name"] = chosen.relation_name
    if chosen.relation_lr not in (0, chosen.lr):
        described["relation_lr"] = chosen.relation_lr
    return described


def configured_rule(chosen: OptimizerConfig, name: str) -> UpdateRule:
    """Return the update rule of a name, with the hyper-parameters that are configured."""
    rule = OPTIMIZERS.get(name)()
    given: dict[str, Any] = {"eps": chosen.eps} if chosen.eps else {}
    if (chosen.beta1, chosen.beta2) != (_DEFAULTS.beta1, _DEFAULTS.beta2):
        given["betas"] = (chosen.beta1, chosen.beta2)
    return rule.of(given)


def relation_group(chosen: OptimizerConfig) -> dict[str, Any]:
    """Return what differs in the parameter group of the relations; empty if nothing does."""
    name, lr = relation_optimizer(chosen), chosen.relation_lr or chosen.lr
    group: dict[str, Any] = {} if lr == chosen.lr else {"lr": lr}
    return group if name == chosen.name else {**group, "rule": configured_rule(chosen, name)}
