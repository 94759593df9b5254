"""Dense parameters of a score function's module: their gradients, optimizer, files and resume.

Every trainer holds the module and makes the same updates, or holds and updates a slice of each parameter
(``dense.sharding``). A trainer's gradient is that of its share of the global batch, divided by the size of
the whole, so the sum over the trainers is the gradient of the batch, whatever the shares are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from dglkge.checkpoint.hdf5_format import DENSE_GROUP, dense_parameters, dense_path
from dglkge.distributed.process_group import DeviceGroups
from dglkge.model.dense_modules import load_parameters
from dglkge.model.device import LossScale, is_finite
from dglkge.step.contracts import Parameters, RowGradients
from dglkge.step.dense_shards import ParameterShards

STATE, NUMBERS = "optimizer", "optimizer_numbers"
"""Groups of the optimizer's state: tensors, and Python's numbers."""

SCALE = "loss_scale"
"""Group of the numbers of the loss scale."""


@dataclass
class DenseParameters(Parameters):
    """The module of a score function, on one trainer.

    Attributes
    ----------
    module : torch.nn.Module
        On the device that computes the batches: gradients are summed and updates made there.
    make_optimizer : callable
        Returns an optimizer of torch of some parameters.
    groups : DeviceGroups
        Of the trainers.
    is_first : bool
        Whether this is the trainer whose initial values all take.
    clip_value : float
        Limit of the size of each number of the summed gradient; 0: none.
    shards_in : Path, optional
        Share the parameters and the optimizer's state out among the trainers; rank 0 joins them in a
        temporary file in this folder when they are saved. Without it every trainer has all of them.
    loss_scale : LossScale, optional
        Factor on the gradients that a batch leaves with the parameters in `scaled`.
    penalty : callable
        Returns a penalty of the parameters, (), which each batch adds to its loss; None: none.
    """

    module: torch.nn.Module
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    groups: DeviceGroups
    is_first: bool = True
    clip_value: float = 0.0
    shards_in: Path | None = None
    loss_scale: LossScale | None = None
    scaled: Collection[str] = ()
    penalty: Callable[[], Tensor | None] = lambda: None
    num_trainers: int = 1

    def __post_init__(self) -> None:
        parameters = self.module.named_parameters()
        self._parameters = {name: values for name, values in parameters if values.requires_grad}
        # A user's module may draw other numbers with another version of torch: the first trainer's count.
        with torch.no_grad():
            for values in self.module.parameters():
                self.groups.sum(values if self.is_first else values.zero_())
        # Parameters that the optimizer updates, by name: the module's own, or this trainer's slices of them.
        self._updated = self._parameters
        self._shards: ParameterShards | None = None
        if self.shards_in is not None:
            self._shards = ParameterShards(dict(self.module.named_parameters()), self.groups, self.shards_in)
            self._updated = {name: self._shards.slices[name] for name in self._parameters}
        self.optimizer = self.make_optimizer(list(self._updated.values()))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer, whose learning rates a schedule changes."""
        return self.optimizer.param_groups

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Let the module have its parameters in a block of code; a collective where they are sharded."""
        return contextlib.nullcontext() if self._shards is None else self._shards.whole()

    def start_batch(self, number: int = 0) -> None:
        """Drop the gradients of the batch before.

        A collective where they are sharded: the module has its parameters until :meth:`sum_gradients`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self._shards is not None:
            self._shards.gather()
        if (penalty := self.penalty()) is not None:
            # Gradients are summed over the trainers; a batch then adds its own.
            (penalty / self.num_trainers).backward()

    def sum_gradients(self, gradients: Sequence[RowGradients] = ()) -> float | None:
        """Sum the gradients of all trainers, and clip them by value; see :class:`Parameters`.

        With a loss scale the step is skipped where a gradient of any trainer is not finite, of rows or of
        dense parameters. A FloatingPointError on every trainer, if the sum is not finite, or the loss scale
        becomes too small.
        """
        rows_are_finite = self.loss_scale is None or all(is_finite(rows) for _, _, rows in gradients)
        parameters = list(self._updated.values())
        self._unscale()
        sums, num_asking = self._sums(rows_are_finite)
        are_finite = [torch.isfinite(gradient).all() for gradient in sums]
        narrow = [gradient.float() for gradient in sums]
        for parameter, gradient in zip(parameters, narrow):
            parameter.grad = gradient
        if self.clip_value:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_value)
        squares = [gradient.double().square().sum() for gradient in narrow]
        # Of each parameter whether its gradient is not finite, whether rows are not, and the sum of squares.
        # The first numbers that are read: a device has computed all of them until then.
        are_bad = [float(not is_all) for is_all in are_finite]
        verdict = torch.tensor([*are_bad, num_asking, sum(map(float, squares))], dtype=torch.float64)
        if self._shards is not None:
            # Each trainer has seen its slices: the norm and the verdict are those of all of them.
            verdict = self.groups.sum(verdict)
        if self.loss_scale is not None:
            # Equal on all trainers, as the sums are.
            overflows = bool(verdict[:-1].any())
            self.loss_scale.update(overflows)
            if overflows:
                return None
        for name, num_bad in zip(self._updated, verdict.tolist()):
            if num_bad:
                problem = f"the gradient of the dense parameter {name!r} is not finite"
                raise FloatingPointError(f"{problem}; nothing was updated")
        return float(verdict[-1])

    def _sums(self, rows_are_finite: bool) -> tuple[list[Tensor], float]:
        """Return the gradients summed over the trainers, and how many ask to skip; a collective.

        Where parameters are sharded: those of the slices of this trainer, and whether it asks.
        """
        parameters = list(self._parameters.values())
        if self._shards is not None:
            sums = self._shards.summed(self._parameters)
            for parameter in parameters:
                parameter.grad = None
            self._shards.release()
            return sums, not rows_are_finite
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            # A trainer without triples, or a parameter that a batch does not use, has no gradient.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            by_device.setdefault(parameter.device, []).append(gradient.detach().reshape(-1))
        by_place: dict[torch.device, Iterator[Tensor]] = {}
        num_asking = 0.0
        for device, flat in by_device.items():
            asks = torch.tensor([not rows_are_finite], dtype=torch.float32, device=device)
            # One round of messages: the request to skip is one number more.
            *totals, asking = self.groups.sum_gradients(torch.cat([*flat, asks])).split([*map(len, flat), 1])
            by_place[device], num_asking = iter(totals), float(asking)
        return [next(by_place[parameter.device]).view_as(parameter) for parameter in parameters], num_asking

    def _unscale(self) -> None:
        """Divide the gradients of this trainer's batch by the loss scale."""
        if self.loss_scale is not None:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None and name in self.scaled:
                    parameter.grad /= self.loss_scale.scale

    def statistics(self) -> dict[str, float]:
        """Return the fields of a line of statistics: of the loss scale, where there is one."""
        scale = self.loss_scale
        return {} if scale is None else {"loss_scale": scale.scale, "skipped_batches": scale.num_skipped}

    def update(self, factor: float = 1.0) -> None:
        if factor != 1:
            for parameter in self._updated.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the parameters and of the optimizer's state, by dataset of a model file.

        A collective where they are sharded; rank 0 then has them mapped from a temporary file, the others
        nothing that is whole. A CheckpointError or StorageError on rank 0, if that file cannot be written.
        """
        parameters = dict(self.module.named_parameters()) if self._shards is None else self._shards.slices
        datasets: dict[str, Tensor] = {}
        slices = {}
        for name, parameter in parameters.items():
            path = dense_path("parameters", name)
            datasets[path], slices[path] = parameter, (name, parameter.detach())
        for name, parameter in self._updated.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                path = dense_path(STATE, name, key)
                if isinstance(value, Tensor):
                    datasets[path] = value
                    if value.ndim:  # numbers of the whole parameter, as the count of steps, are equal
                        slices[path] = (name, value)
                elif isinstance(value, (bool, int, float)):
                    datasets[dense_path(NUMBERS, name, key)] = torch.tensor(value, dtype=torch.float64)
        if self.loss_scale is not None:
            for key, number in self.loss_scale.state().items():
                datasets[dense_path(SCALE, key)] = torch.tensor(number, dtype=torch.float64)
        joined = {} if self._shards is None else self._shards.joined(slices)
        kept = [path for path in datasets if self._shards is None or path not in slices]
        return {**joined, **{path: datasets[path].detach().to("cpu", copy=True) for path in kept}}

    def take(self, values: Mapping[str, Tensor], where: str) -> None:
        """Take the parameters of another run, by name; see :meth:`take_state` for the optimizer's state.

        An InputError if one is missing, has another shape, or is none of the module's.
        """
        if self._shards is None:
            load_parameters(self.module, values, where)
        else:
            self._shards.load(values, where)

    @property
    def is_collective(self) -> bool:
        return self._shards is not None

    def load_state_dict(self, state: h5py.File) -> None:
        # Where they are sharded only this trainer's slice of each dataset is read, however many wrote it.
        datasets = state.get(dense_path("parameters"), {})
        self.take(dense_parameters(state) if self._shards is None else datasets, state.filename)
        self.take_state(state)
        if self.loss_scale is not None:
            scale = {key: float(dataset[()]) for key, dataset in state.get(dense_path(SCALE), {}).items()}
            # A run that was trained in another type has none, and starts with a new one.
            if scale:
                self.loss_scale.load(scale)

    def take_state(self, file: h5py.File, changed: Callable[[Any], Any] = lambda dataset: dataset) -> None:
        """Take the state of the same optimizer in a model file; it has none before its first step.

        ``changed`` returns the numbers of a dataset in the shape that this run has.
        """
        group: Mapping[str, Any] = file.get(DENSE_GROUP, {})
        for name, parameter in self._updated.items():
            state: dict[str, Any] = {}
            for key, saved in group.get(f"{STATE}/{name}", {}).items():
                dataset = changed(saved)
                if self._shards is not None and dataset.shape == self._shards.shapes[name]:
                    state[key] = self._shards.own_part(name, dataset)
                else:
                    numbers = torch.from_numpy(np.asarray(dataset[()]))
                    # torch keeps the count of steps on the host.
                    state[key] = numbers.to(parameter.device) if numbers.ndim else numbers
            for key, dataset in group.get(f"{NUMBERS}/{name}", {}).items():
                number = float(dataset[()])
                state[key] = int(number) if number.is_integer() else number
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state
