"""Components of other packages that a configuration chooses by name: optimizers and negative samplers.

``dglkge.optim`` is used alone by other projects, without a registry, and imports torch and DGL; the samplers
compile loops. An entry here has the facts that a plan needs before any of that is imported, and the place of
the class.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

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
        return _load(self.place)


def _load(place: str) -> Any:
    """Return what lies at ``"package.module:name"``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class OptimizerChoice(Choice):
    """An optimizer: a class with the constructor of :class:`dglkge.optim.SparseAdagrad`.

    Attributes
    ----------
    state_widths : callable
        Takes the width of a table's rows; returns how many float32 numbers a row has in each tensor of the
        optimizer's state.
    bigraph_state : bool
        Whether the one tensor of the state is Adagrad's sum of squares, which PyTorch-BigGraph reads.
    hyper : mapping of str to object
        Hyper-parameters apart from lr and weight_decay, with the defaults of the class.
    rule : str
        Place of its :class:`dglkge.optim.rules.UpdateRule`, a class without arguments. A table can have it
        beside tables with another rule; without it the optimizer is one for all tables.
    """

    state_widths: Callable[[int], tuple[int, ...]]
    bigraph_state: bool = False
    hyper: Mapping[str, Any] = field(default_factory=lambda: {"eps": 1e-10})
    rule: str = ""

    def load_rule(self) -> Any:
        """Return the update rule."""
        return _load(self.rule)()


BIGRAPH_OPTIMIZER = "row_adagrad"
"""The optimizer that PyTorch-BigGraph trains entities with."""

# Places are texts: loading `dglkge.optim` imports torch and DGL, which `dglkge plan` must not need.
OPTIMIZERS: Registry[OptimizerChoice] = Registry("optimizer")
OPTIMIZERS.register("sparse_adagrad")(
    OptimizerChoice(
        "Adagrad, a sum of squares for each number (Duchi et al. 2011)",
        "dglkge.optim:SparseAdagrad",
        lambda width: (width,),
        bigraph_state=True,
        rule="dglkge.optim.optimizers:AdagradRule",
    )
)
OPTIMIZERS.register(BIGRAPH_OPTIMIZER)(
    OptimizerChoice(
        "Adagrad with one sum of squares for a row (as PyTorch-BigGraph's)",
        "dglkge.optim:RowAdagrad",
        lambda width: (1,),
        bigraph_state=True,
        rule="dglkge.optim.optimizers:RowAdagradRule",
    )
)
OPTIMIZERS.register("sparse_adam")(
    OptimizerChoice(
        "Adam on the rows of a batch, with a step count for each row (Kingma and Ba 2015)",
        "dglkge.optim:SparseAdam",
        # Step count, first moment, second moment: the order of the class's state tensors.
        lambda width: (1, width, width),
        hyper={"eps": 1e-8, "betas": (0.9, 0.999), "decoupled_weight_decay": False},
        rule="dglkge.optim.optimizers:AdamRule",
    )
)


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
