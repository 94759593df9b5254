"""Model, loss, regularizer and optimizer of dense parameters that a configuration names; without DGL.

``dglkge plan`` refuses what training refuses.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dglkge.config import Config
from dglkge.config.schema import DenseConfig
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError, one_line, require_known
from dglkge.model.kge_model import KgeModel
from dglkge.model.losses import LOSSES, Loss
from dglkge.model.regularizers import REGULARIZERS, Regularizer, chosen_regularizer
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.settings import FreeSettings

REFERENCE = "reference"
"""``training.kernels`` of the plain path: autograd, torch and numpy, no compiled loop."""


def configured_model(config: Config) -> KgeModel:
    """Make the model."""
    settings = config.model
    made = SCORE_FUNCTIONS.get(settings.score_function.name)(settings.score_function)
    return KgeModel(made, settings.dimension, settings.reciprocal_relations, config.seed)


def with_num_times(config: Config, dataset: Dataset) -> Config:
    """Return the configuration with the number of times of the data set, if the score function has times."""
    settings: Any = config.model.score_function
    if not SCORE_FUNCTIONS.get(settings.name).has_times:
        return config
    if not dataset.relations.times:
        problem = f"model.score_function is {settings.name}, and the triples of {dataset.path} have no times"
        allowed = "another score function, or a data set built with --columns head,relation,tail,time"
        raise InputError(f"{problem}; allowed: {allowed}")
    if settings.num_times not in (0, dataset.num_times):
        problem = f"model.score_function.num_times is {settings.num_times}"
        raise InputError(f"{problem}, and {dataset.path} has {dataset.num_times} times; allowed: 0")
    made = settings.changed(num_times=dataset.num_times)
    return config.changed(model=config.model.changed(score_function=made))


def configured_loss(config: Config) -> Loss:
    """Make the loss."""
    return LOSSES.get(config.loss.name)(config.loss)


def configured_regularizer(config: Config, model: KgeModel) -> Regularizer | None:
    """Make the regularizer; None where its weight is 0."""
    score_function = config.model.score_function.name
    settings = chosen_regularizer(config.regularizer, score_function)
    member = REGULARIZERS.get(settings.name)
    if not member.fits(SCORE_FUNCTIONS.get(score_function)):
        fitting = [name for name in SCORE_FUNCTIONS if member.fits(SCORE_FUNCTIONS.get(name))]
        allowed = f"regularizer.name {settings.name} takes model.score_function {' or '.join(fitting)}"
        reason = "it is defined for products of entity and relation compared by an inner product"
        raise InputError(f"{allowed}: {reason}; got {score_function}")
    made = member(settings, model.score_function.complex_valued)
    return made if made.weight else None


def relation_weights(config: Config, dataset: Dataset) -> np.ndarray | None:
    """Return the weight of every relation (R,), by original id; None if all are 1.

    A name that joins several pairs of entity types is several relations, which all have its weight.
    """
    weights = config.loss.relation_weights
    names = _relation_names(dataset, weights)
    return np.array([weights.get(name, 1.0) for name in names], np.float32) if weights else None


def relation_operators(config: Config, dataset: Dataset) -> tuple[str, ...]:
    """Return the operator of each relation, by original id; empty where the model has one for all."""
    score_function, named = config.model.score_function.name, config.model.relation_operators
    operators = SCORE_FUNCTIONS.get(score_function).operators
    names = _relation_names(dataset, named)
    for name, operator in named.items():
        if operator not in operators:
            problem = f"model.relation_operators has {name}: {operator}"
            allowed = f"and model.score_function is {score_function}; allowed: {', '.join(operators)}"
            raise InputError(f"{problem}, {allowed}")
    return tuple(named.get(name, operators[0]) for name in names) if operators else ()


def entity_dimensions(config: Config, dataset: Dataset) -> dict[str, int]:
    """Return the width of the rows of entity types where it is not ``model.dimension``."""
    named, dim = config.model.entity_dimensions, config.model.dimension
    function = SCORE_FUNCTIONS.get(config.model.score_function.name)(config.model.score_function)
    for name, width in named.items():
        require_known("entity type of model.entity_dimensions", name, dataset.entity_types)
        allowed = f"at most {dim}, which is model.dimension" if width > dim else function.other_dims(width)
        if allowed:
            raise InputError(f"model.entity_dimensions has {name}: {width}; allowed: {allowed}")
    if all(named.get(name, dim) < dim for name in dataset.entity_types):
        greatest = max(named.values())
        raise InputError(f"model.dimension is {dim}, and all entity types have less; allowed: {greatest}")
    return {name: width for name, width in named.items() if width < dim}


def _relation_names(dataset: Dataset, named: Collection[str]) -> list[str]:
    """Return the name of each relation, by original id; some that are named are among them."""
    names = [relation.name for relation in dataset.relations.relations]
    for name in named:
        require_known("relation", name, set(names))
    return names


def torch_classes(module: Any, base: type, unfit: Collection[str]) -> dict[str, Any]:
    """Return the subclasses that this version of torch has in a module, but for some, by name."""
    members = inspect.getmembers(module, lambda item: isinstance(item, type) and issubclass(item, base))
    return {name: kind for name, kind in members if name[0] != "_" and name not in unfit}


def named_class(
    field: str, settings: FreeSettings, known: Mapping[str, Any], reserved: Collection[str]
) -> tuple[Any, list[str]]:
    """Return the class of torch that settings name, and its options: parameters that are not ``reserved``."""
    require_known(field, settings.name, known)
    kind = known[settings.name]
    allowed = [name for name in inspect.signature(kind).parameters if name not in reserved]
    for name in settings.options:
        require_known(f"option of {field} {settings.name}", name, allowed)
    return kind, allowed


@contextlib.contextmanager
def tried_on_torch(field: str, settings: FreeSettings) -> Iterator[None]:
    """Raise an InputError for a class of torch that does not take its options."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{field} {settings}: torch refuses it: {one_line(error)}") from None


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizers of this version of torch that a configuration can name."""
    # The base class; one that computes the loss several times a step; one for gradients of single rows.
    return torch_classes(torch.optim, torch.optim.Optimizer, ("Optimizer", "LBFGS", "SparseAdam"))


def dense_optimizer(settings: DenseConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of some parameters."""
    field, reserved = "dense.optimizer", ("self", "params", "lr", "capturable", "differentiable")
    kind, _ = named_class(field, settings.optimizer, known_optimizers(), reserved)
    options = dict(settings.optimizer.options)
    # betas: [0.9, 0.98]
    options |= {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    with tried_on_torch(field, settings.optimizer):
        made: torch.optim.Optimizer = kind(list(parameters), lr=settings.lr, **options)
    return made


def dense_problems(config: Config, model: KgeModel) -> Iterator[str]:
    """Yield settings of dense parameters that have no effect, or that torch refuses."""
    settings, module = config.dense, model.module
    if settings.compile and module is not None and type(module).forward is torch.nn.Module.forward:
        module_name = f"the module of model.score_function {config.model.score_function}"
        reason = "has no forward to compile, as it is matrix products alone"
        yield f"dense.compile is true and {module_name} {reason}; allowed: false"
    if settings == type(settings)():
        return  # torch takes it; to try it imports torch's compiler, which takes a second
    tried = torch.nn.Parameter(torch.zeros(2, 2))
    tried.grad = torch.ones(2, 2)
    try:
        with tried_on_torch("dense.optimizer", settings.optimizer):
            dense_optimizer(settings, [tried]).step()
    except InputError as error:
        yield str(error)
        return
    # Slices of parameters: torch must make them, and the optimizer must need no whole ones.
    if settings.sharding == "fsdp" and not has_slices_on_processors():
        problem = f"dense.sharding is fsdp, and torch {torch.__version__} has no FSDP2 on processors"
        yield f"{problem}; allowed: replicated, or a newer torch (2.13 is tested)"
    elif settings.sharding == "fsdp" and not works_by_number(settings):
        problem = f"dense.optimizer is {settings.optimizer.name} and dense.sharding is fsdp"
        reason = "which gives each trainer a slice of a parameter: this optimizer's step depends on the whole"
        allowed = "optimizers that work number by number, e.g. Adam, or dense.sharding replicated"
        yield f"{problem}, {reason}; allowed: {allowed}"


def has_slices_on_processors() -> bool:
    """Return whether FSDP2 runs on processors: it records events on a stream, which torch 2.6 cannot."""
    return hasattr(torch.cpu.Stream, "record_event")


def works_by_number(settings: DenseConfig) -> bool:
    """Return whether an optimizer updates two halves of a parameter as it updates the whole, by trying it."""
    # Not a list of names: torch adds optimizers, and options may change the answer.
    numbers = torch.linspace(-1, 1, 24).view(6, 4)
    whole = torch.nn.Parameter(numbers.clone())
    halves = [torch.nn.Parameter(part.clone()) for part in numbers.split(3)]
    whole_optimizer, halves_optimizer = dense_optimizer(settings, [whole]), dense_optimizer(settings, halves)
    for step in range(1, 4):
        whole.grad = (step * 7 * numbers).sin()
        for half, gradient in zip(halves, whole.grad.split(3)):
            half.grad = gradient.clone()
        whole_optimizer.step()
        halves_optimizer.step()
    state = [value for value in whole_optimizer.state[whole].values() if isinstance(value, torch.Tensor)]
    # Files have the state of the whole: it is a number, or has one for each number of the parameter.
    has_state_by_number = all(value.ndim == 0 or value.shape == whole.shape for value in state)
    return has_state_by_number and torch.allclose(whole, torch.cat(list(halves)), rtol=1e-5, atol=1e-7)
