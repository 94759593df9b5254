"""Dense parameters of a score function's module: their gradients, optimizer, files and resume.

Every trainer holds the module and makes the same updates, or holds and updates a slice of each parameter
(``dense.sharding``). A trainer's gradient is that of its share of the global batch, divided by the size of
the whole, so the sum over the trainers is the gradient of the batch, whatever the shares are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from dglkge.checkpoint.relation_layout import DENSE_GROUP, dense_parameters, dense_path
from dglkge.model.dense_modules import load_parameters
from dglkge.model.precision import LossScale, is_finite
from dglkge.step.contracts import Parameters, RowGradients
from dglkge.step.parameters.dense_shards import ParameterShards

STATE, NUMBERS = "optimizer", "optimizer_numbers"
"""Groups of the optimizer's state: tensors, and Python's numbers."""

SCALE = "loss_scale"
"""Group of the numbers of the loss scale."""


class DenseParameters(Parameters):
    """The module of a score function, on one trainer.

    Parameters
    ----------
    module : torch.nn.Module
    make_optimizer : callable
        Returns an optimizer of torch of some parameters.
    sum_over_trainers : callable
        Sums an array over all trainers; a collective.
    is_first : bool
        Whether this is the trainer whose initial values all take.
    clip_value : float
        Limit of the size of each number of the summed gradient; 0: none.
    copy : torch.nn.Module, optional
        A copy of the module, perhaps on a GPU, that computes the batches in its place. It takes the values
        before each batch; the gradients are summed, and the optimizer works, on the CPU.
    shards_in : Path, optional
        Share the parameters and the optimizer's state out among the trainers; rank 0 joins them in a
        temporary file in this folder when they are saved. Without it every trainer has all of them.
    loss_scale : LossScale, optional
        Factor on the gradients that a batch leaves with the parameters in `scaled`.
    scaled : collection of str

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
    loss_scale : LossScale or None
    """

    def __init__(
        self,
        module: torch.nn.Module,
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        sum_over_trainers: Callable[[np.ndarray], np.ndarray],
        is_first: bool = True,
        clip_value: float = 0.0,
        copy: torch.nn.Module | None = None,
        shards_in: Path | None = None,
        loss_scale: LossScale | None = None,
        scaled: Collection[str] = (),
    ) -> None:
        self.loss_scale = loss_scale
        self._scaled = frozenset(scaled)
        self._parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._module = module
        self._copy = copy
        computing = dict(module.named_parameters()) | ({} if copy is None else dict(copy.named_parameters()))
        self._computing = [computing[name] for name in self._parameters]
        self._sum = sum_over_trainers
        self._clip_value = clip_value
        # A user's module may draw other numbers with another version of torch: the first trainer's count.
        with torch.no_grad():
            for values in module.parameters():
                mine = values.numpy() if is_first else np.zeros(tuple(values.shape), np.float32)
                values.copy_(torch.from_numpy(sum_over_trainers(mine)))
        # Parameters that the optimizer updates, by name: the module's own, or this trainer's slices of them.
        self._updated = self._parameters
        self._shards: ParameterShards | None = None
        if shards_in is not None:
            self._shards = ParameterShards(dict(module.named_parameters()), shards_in)
            self._updated = {name: self._shards.own[name] for name in self._parameters}
        self.optimizer = make_optimizer(list(self._updated.values()))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer, whose learning rates a schedule changes."""
        return self.optimizer.param_groups

    @property
    def is_sharded(self) -> bool:
        """Whether each trainer has a slice of the parameters only, but during batches and rankings."""
        return self._shards is not None

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Let the module have its parameters in a block of code; a collective where they are sharded."""
        return contextlib.nullcontext() if self._shards is None else self._shards.whole()

    def start_batch(self, number: int = 0) -> None:
        """Drop the gradients of the batch before; the module's copy takes the parameters.

        A collective where they are sharded: the module has its parameters until :meth:`sum_gradients`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self._shards is not None:
            self._shards.gather()
        if self._copy is not None:
            self._copy.zero_grad(set_to_none=True)
            values = dict(self._module.named_parameters())
            with torch.no_grad():
                for name, taken in self._copy.named_parameters():
                    taken.copy_(values[name])

    def sum_gradients(self, gradients: Sequence[RowGradients] = ()) -> float | None:
        """Sum the gradients of all trainers, and clip them by value; see :class:`Parameters`.

        With a loss scale the step is skipped where a gradient of any trainer is not finite, of rows or of
        dense parameters.

        Raises
        ------
        FloatingPointError
            On every trainer, if the sum is not finite, or the loss scale becomes too small.
        """
        rows_are_finite = self.loss_scale is None or all(is_finite(rows) for _, _, rows in gradients)
        parameters = list(self._updated.values())
        self._unscale()
        total = self._sums(rows_are_finite)
        start = 0
        # Of each parameter whether its gradient is not finite, whether rows are not, and the sum of squares.
        found = np.zeros(len(parameters) + 2)
        for place, one in enumerate(parameters):
            part = total[start : start + one.numel()]
            start += one.numel()
            found[place] = not bool(torch.isfinite(part).all())
            one.grad = part.float().view_as(one)
        if self._clip_value:
            torch.nn.utils.clip_grad_value_(parameters, self._clip_value)
        found[-1] = sum(float(one.grad.double().square().sum()) for one in parameters if one.grad is not None)
        if self._shards is not None:
            # Each trainer has seen its slices: the norm and the verdict are those of all of them.
            found[-2] = not rows_are_finite
            found = self._sum(found)
        elif self.loss_scale is not None:
            found[-2] = total[-1]
        if self.loss_scale is not None:
            # Equal on all trainers, as the sums are.
            overflows = bool(found[:-1].any())
            self.loss_scale.update(overflows)
            if overflows:
                return None
        for name, num_bad in zip(self._updated, found.tolist()):
            if num_bad:
                raise FloatingPointError(
                    f"the gradient of the dense parameter {name!r} is not finite; nothing was updated"
                )
        return float(found[-1])

    def _sums(self, rows_are_finite: bool) -> torch.Tensor:
        """Return the gradients, one after the other, summed over the trainers: (n,) float64; a collective.

        Those of the slices of this trainer where parameters are sharded. Else, with a loss scale, one number
        more: how many trainers ask to skip the step.
        """
        if self._shards is not None:
            total = self._shards.summed(list(self._parameters), [one.grad for one in self._computing])
            for one in self._computing:
                one.grad = None
            self._shards.release()
            return total
        # In float64, so that the order of trainers shows in the last bit of float32 only.
        num_numbers = sum(one.numel() for one in self._parameters.values())
        flat = np.zeros(num_numbers + (self.loss_scale is not None))
        start = 0
        for one in self._computing:
            # A trainer without triples, or a parameter that a batch does not use, has no gradient.
            if one.grad is not None:
                flat[start : start + one.numel()] = one.grad.reshape(-1).cpu().numpy()
            start += one.numel()
        if self.loss_scale is not None:
            flat[-1] = not rows_are_finite
        return torch.from_numpy(self._sum(flat))

    def _unscale(self) -> None:
        """Divide the gradients of this trainer's batch by the loss scale."""
        if self.loss_scale is not None:
            for name, one in zip(self._parameters, self._computing):
                if one.grad is not None and name in self._scaled:
                    one.grad /= self.loss_scale.scale

    def statistics(self) -> dict[str, float]:
        """Return the fields of a line of statistics: of the loss scale, where there is one."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.loss_scale.scale, "skipped_batches": self.loss_scale.num_skipped}

    def update(self, factor: float = 1.0) -> None:
        """Update the parameters by the summed gradients times a factor."""
        if factor != 1:
            for one in self._updated.values():
                if one.grad is not None:
                    one.grad.mul_(factor)
        self.optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and of the optimizer's state, by dataset of a model file.

        A collective where they are sharded; rank 0 then has them mapped from a temporary file, the others
        nothing that is whole.

        Raises
        ------
        CheckpointError, StorageError
            On rank 0, if that file cannot be written.
        """
        every = dict(self._module.named_parameters()) if self._shards is None else self._shards.own
        found: dict[str, torch.Tensor] = {dense_path("parameters", name): one for name, one in every.items()}
        slices = {path: (name, every[name].detach()) for name, path in zip(every, found)}
        for name, one in self._updated.items():
            for key, value in self.optimizer.state.get(one, {}).items():
                path = dense_path(STATE, name, key)
                if isinstance(value, torch.Tensor):
                    found[path] = value
                    if value.ndim:  # numbers of the whole parameter, as the count of steps, are equal
                        slices[path] = (name, value)
                elif isinstance(value, (bool, int, float)):
                    found[dense_path(NUMBERS, name, key)] = torch.tensor(value, dtype=torch.float64)
        if self.loss_scale is not None:
            for key, number in self.loss_scale.state().items():
                found[dense_path(SCALE, key)] = torch.tensor(number, dtype=torch.float64)
        if self._shards is None:
            return {path: value.detach().clone() for path, value in found.items()}
        numbers = {path: value.detach().clone() for path, value in found.items() if path not in slices}
        return {**self._shards.joined(slices), **numbers}

    def take(self, values: Mapping[str, torch.Tensor], where: str) -> None:
        """Take the parameters of another run, by name; the optimizer's state stays as it is.

        Raises
        ------
        InputError
            If one is missing, has another shape, or is none of the module's.
        """
        if self._shards is None:
            load_parameters(self._module, values, where)
        else:
            self._shards.load(values, where)

    @property
    def is_collective(self) -> bool:
        return self.is_sharded

    def load_state_dict(self, state: h5py.File) -> None:
        """Take the parameters and the optimizer's state of a model file.

        Raises
        ------
        CheckpointError
            If a parameter is missing or has another shape.
        """
        if self._shards is None:
            load_parameters(self._module, dense_parameters(state), state.filename)
        else:
            # Of each dataset only this trainer's slice is read, however many trainers wrote it.
            self._shards.load(state.get(dense_path("parameters"), {}), state.filename)
        self._restore_state(state)
        if self.loss_scale is not None:
            scale = {key: float(one[()]) for key, one in state.get(dense_path(SCALE), {}).items()}
            # A run that was trained in another type has none, and starts with a new one.
            if scale:
                self.loss_scale.load(scale)

    def _restore_state(self, file: h5py.File) -> None:
        """Take the optimizer's state; it has none before its first step."""
        found: Mapping[str, Any] = file.get(DENSE_GROUP, {})
        for name, one in self._updated.items():
            state: dict[str, Any] = {}
            for key, dataset in found.get(f"{STATE}/{name}", {}).items():
                if self._shards is not None and dataset.shape == self._shards.shapes[name]:
                    state[key] = self._shards.own_part(name, dataset)
                else:
                    state[key] = torch.from_numpy(np.asarray(dataset[()]))
            for key, dataset in found.get(f"{NUMBERS}/{name}", {}).items():
                number = float(dataset[()])
                state[key] = int(number) if number.is_integer() else number
            if state:
                self.optimizer.state[one] = state
            else:
                self.optimizer.state.pop(one, None)
