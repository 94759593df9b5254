"""Components of other packages that a configuration chooses by name: optimizers and negative samplers.

An optimizer is an update rule; its class states the facts that a plan needs, and imports neither torch nor
DGL. The samplers compile loops: an entry here has the facts, and the place of the class.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

from dglkge.optim.rules import Adagrad, Adam, RowWiseAdagrad, UpdateRule
from dglkge.registry import Registry


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
