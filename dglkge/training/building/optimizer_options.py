"""Hyper-parameters that a configuration gives to the update rules of its tables."""

from __future__ import annotations

from typing import Any

from dglkge.config.schema import OptimizerConfig
from dglkge.model.choices import OPTIMIZERS, RelationSettings
from dglkge.optim.rules import UpdateRule


def clipping_of(chosen: OptimizerConfig) -> dict[str, float]:
    """Return the limits of a step's gradient by name; empty where none is configured."""
    limits = {"norm": chosen.clip_norm, "value": chosen.clip_value}
    return {name: limit for name, limit in limits.items() if limit}


def relation_optimizer(chosen: OptimizerConfig) -> str:
    """Return the name of the relations' optimizer."""
    return chosen.relations.name or chosen.name


def describe_optimizer(chosen: OptimizerConfig) -> dict[str, Any]:
    """Return name and learning rate for a checkpoint, and those of the relations where they differ."""
    described: dict[str, Any] = {"name": chosen.name, "lr": chosen.lr}
    if relation_optimizer(chosen) != chosen.name:
        described["relation_name"] = chosen.relations.name
    if chosen.relations.lr not in (0, chosen.lr):
        described["relation_lr"] = chosen.relations.lr
    return described


def configured_rule(settings: OptimizerConfig | RelationSettings) -> UpdateRule:
    """Return the update rule of the rows of entities or of relations, with its hyper-parameters."""
    rule = OPTIMIZERS.get(settings.name)()
    return rule.of({name: getattr(settings, name) for name in rule.hyper})


def relation_group(chosen: OptimizerConfig) -> dict[str, Any]:
    """Return what differs in the parameter group of the relations; empty if nothing does."""
    lr = chosen.relations.lr or chosen.lr
    group: dict[str, Any] = {} if lr == chosen.lr else {"lr": lr}
    rule = configured_rule(chosen.relations) if chosen.relations.name else configured_rule(chosen)
    return group if rule == configured_rule(chosen) else {**group, "rule": rule}
