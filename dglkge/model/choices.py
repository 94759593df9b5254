"""Components of other packages that a configuration chooses by name: optimizers and negative samplers.

An optimizer is an update rule; its class states the facts that a plan needs, and imports neither torch nor
DGL. The samplers compile loops: an entry here has the facts, and the place of the class.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Annotated, Any, Callable, Literal, Optional, TypeVar

from pydantic import AfterValidator, create_model

from dglkge.optim.rules import Adagrad, Adam, RowWiseAdagrad, UpdateRule
from dglkge.registry import Registry
from dglkge.settings import ComponentSettings, FreeSettings, setting


@dataclass(frozen=True)
class Choice:
    """A class that is imported when it is chosen.

    Attributes
    ----------
    help : str
        One line for the configuration's help.
    place : str
        ``"package.module:Class"``.
    """

    help: str
    place: str

    def load(self) -> Any:
        """Return the class."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)


BIGRAPH_OPTIMIZER = "row_adagrad"
"""The optimizer that PyTorch-BigGraph trains entities with."""

OPTIMIZERS: Registry[type[UpdateRule]] = Registry("optimizer")
OPTIMIZERS.register("sparse_adagrad")(Adagrad)
OPTIMIZERS.register(BIGRAPH_OPTIMIZER)(RowWiseAdagrad)
OPTIMIZERS.register("sparse_adam")(Adam)


class ScheduleSettings(FreeSettings):
    """A class of ``torch.optim.lr_scheduler`` with its options."""

    every: Literal["epoch", "batch"] = setting(
        "epoch",
        "it goes one step further after each epoch, or after each batch; ReduceLROnPlateau after each "
        "ranking of the valid split",
    )


class RelationSettings(ComponentSettings):
    """The optimizer of the rows of relations."""

    lr: float = setting(0.0, "learning rate of the relations; 0: that of the entities", ge=0)


class OptimizerSettings(ComponentSettings):
    """Settings of every optimizer; further ones are the fields of its rule."""

    lr: float = setting(0.1, "learning rate", gt=0)
    weight_decay: float = setting(
        0.0,
        "multiple of a row that is added to its gradient, as in torch's Adagrad and Adam; rows that a batch "
        "does not touch do not decay",
        ge=0,
    )
    decoupled_weight_decay: bool = setting(
        False, "multiply a touched row by 1 - lr * weight_decay instead, as torch's AdamW does"
    )
    clip_norm: float = setting(
        0.0,
        "limit of the 2-norm of a batch's gradient, over all rows of all tables and trainers, and dense "
        "parameters; 0: none",
        ge=0,
    )
    clip_value: float = setting(
        0.0,
        "limit of the size of each number of a row's or dense parameter's gradient, before the norm is "
        "taken; 0: none",
        ge=0,
    )
    schedule: Optional[ScheduleSettings] = setting(
        None,
        "class of torch.optim.lr_scheduler that changes the learning rates, with its options, e.g. "
        "{name: CosineAnnealingLR, T_max: 20}; every: batch steps it after each batch, not epoch; null: none",
    )
    warmup_batches: int = setting(
        0, "batches in which the learning rates grow linearly to those of the schedule; 0: none", ge=0
    )


Family = TypeVar("Family", bound=ComponentSettings)


def rule_settings(family: type[Family]) -> Callable[[type[UpdateRule]], type[Family]]:
    """Return a function that adds the fields of an update rule to a class of settings."""

    @functools.cache
    def make(rule: type[UpdateRule]) -> type[Family]:
        fields: dict[str, Any] = {}
        for name, value in rule().hyper.items():
            # betas: a list of numbers, of which the rule checks the length.
            kind: Any = tuple[float, ...] if isinstance(value, tuple) else type(value)
            checked = Annotated[kind, AfterValidator(functools.partial(_checked, rule, name))]
            fields[name] = (checked, setting(value, "as in the rule's class, dglkge.optim"))
        return create_model(f"{rule.__name__}{family.__name__}", __base__=family, **fields)

    return make


def _checked(rule: type[UpdateRule], name: str, value: Any) -> Any:
    """Return a hyper-parameter that its rule takes; a ValueError says what is wrong."""
    rule(**{name: value})
    return value


def state_widths(optimizer: str, width: int) -> tuple[int, ...]:
    """Return how many float32 numbers of state a row of that width has in each tensor of an optimizer."""
    return tuple(math.prod(shape) for shape in OPTIMIZERS.get(optimizer)().state_shapes(width).values())


@dataclass(frozen=True)
class SamplerChoice(Choice):
    """A negative sampler: a class with the constructor of ``dglkge.sampling.negatives.MixedNegatives``.

    Attributes
    ----------
    takes_weights : bool
        Whether the constructor takes ``weights``, those of ``negatives.degree_power``.
    """

    takes_weights: bool = False


NEGATIVE_SAMPLERS: Registry[Choice] = Registry("negative sampler")
NEGATIVE_SAMPLERS.register("mixed")(
    SamplerChoice(
        "uniform over the graph, the machine's partition and the batch, by the three shares",
        "dglkge.sampling.negatives:MixedNegatives",
        takes_weights=True,
    )
)
