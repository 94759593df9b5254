"""The optimizer of dense parameters: a class of torch.optim by name, and the checks of its settings.

DGL is not imported here: ``dglkge plan`` refuses what training refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from dglkge.config import Config
from dglkge.config.schema import DenseConfig
from dglkge.errors import InputError, unknown_name
from dglkge.model.kge_model import KgeModel

_UNFIT = ("Optimizer", "LBFGS", "SparseAdam")
"""The base class; one that computes the loss several times a step; one for gradients of single rows."""

_NOT_OPTIONS = ("self", "params", "lr", "capturable", "differentiable")


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizers of this version of torch that a configuration can name."""
    found = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and not name.startswith("_")
    }
    return {name: kind for name, kind in sorted(found.items()) if name not in _UNFIT}


def dense_optimizer(chosen: DenseConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of some parameters.

    Raises
    ------
    InputError
        If torch has no such optimizer, it has no such option, or it refuses a value or the parameters.
    """
    known = known_optimizers()
    optimizer = chosen.optimizer
    if optimizer.name not in known:
        raise unknown_name("dense.optimizer", optimizer.name, list(known))
    kind: Any = known[optimizer.name]
    allowed = [name for name in inspect.signature(kind).parameters if name not in _NOT_OPTIONS]
    options = optimizer.options
    for name, value in options.items():
        if name not in allowed:
            raise unknown_name(f"option of dense.optimizer {optimizer.name}", name, allowed)
        if isinstance(value, list):
            options[name] = tuple(value)  # betas: [0.9, 0.98]
    try:
        made: torch.optim.Optimizer = kind(list(parameters), lr=chosen.lr, **options)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"dense.optimizer {optimizer}: torch refuses it: {reason}") from None
    return made


def check_dense(config: Config, model: KgeModel) -> None:
    """Refuse settings of dense parameters that have no effect or do not fit.

    Raises
    ------
    InputError
        Naming the field, the value and what is allowed.
    """
    score_function = model.score_function
    if config.dense.compile and type(score_function.module).forward is torch.nn.Module.forward:
        raise InputError(
            f"dense.compile is true and the module of model.score_function {config.model.score_function} has "
            "no forward to compile, as it is matrix products alone; allowed: false"
        )
    tried = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = dense_optimizer(config.dense, [tried])
    tried.grad = torch.ones(2, 2)
    try:
        optimizer.step()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"dense.optimizer {config.dense.optimizer}: torch refuses it: {reason}") from None
    if config.dense.sharding == "fsdp":
        _check_sharding(config.dense)


def _check_sharding(chosen: DenseConfig) -> None:
    """Refuse slices of parameters where torch cannot make them, or the optimizer needs the whole ones.

    Raises
    ------
    InputError
        If this is so.
    """
    if not has_slices_on_processors():
        raise InputError(
            f"dense.sharding is fsdp, and torch {torch.__version__} has no FSDP2 on processors; allowed: "
            "replicated, or a newer torch (2.13 is tested)"
        )
    if not works_by_number(chosen):
        raise InputError(
            f"dense.optimizer is {chosen.optimizer.name} and dense.sharding is fsdp, which gives each "
            "trainer a slice of a parameter: this optimizer's step depends on the whole; allowed: optimizers "
            "that work number by number, e.g. Adam, or dense.sharding replicated"
        )


def has_slices_on_processors() -> bool:
    """Return whether FSDP2 runs on processors: it records events on a stream, which torch 2.6 cannot."""
    return hasattr(torch.cpu.Stream, "record_event")


def works_by_number(chosen: DenseConfig) -> bool:
    """Return whether an optimizer updates two halves of a parameter as it updates the whole, by trying it."""
    # Not a list of names: torch adds optimizers, and options may change the answer.
    numbers = torch.linspace(-1, 1, 24).view(6, 4)
    whole = torch.nn.Parameter(numbers.clone())
    halves = [torch.nn.Parameter(one.clone()) for one in numbers.split(3)]
    of_whole, of_halves = dense_optimizer(chosen, [whole]), dense_optimizer(chosen, halves)
    for step in range(1, 4):
        whole.grad = (step * 7 * numbers).sin()
        for half, gradient in zip(halves, whole.grad.split(3)):
            half.grad = gradient.clone()
        of_whole.step()
        of_halves.step()
    state = [one for one in of_whole.state[whole].values() if isinstance(one, torch.Tensor)]
    # Files have the state of the whole: it is a number, or has one for each number of the parameter.
    has_state_by_number = all(one.ndim == 0 or one.shape == whole.shape for one in state)
    return has_state_by_number and torch.allclose(whole, torch.cat(list(halves)), rtol=1e-5, atol=1e-7)
