"""Dense parameters of a score function's module: their gradients, optimizer, files and resume.

Every trainer holds the module and makes the same updates. A trainer's gradient is that of its share of the
global batch, divided by the size of the whole, so the sum over the trainers is the gradient of the batch,
whatever the shares are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import h5py
import numpy as np
import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.relation_layout import DENSE_GROUP, dense_parameters, dense_path
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError
from dglkge.model.dense_modules import load_parameters
from dglkge.model.precision import LossScale, is_finite
from dglkge.typing import RELATION

STATE, NUMBERS = "optimizer", "optimizer_numbers"
"""Groups of the optimizer's state: tensors, and Python's numbers."""

SCALE = "loss_scale"
"""Group of the numbers of the loss scale."""


class DenseParameters:
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
    clips_norm : bool
        Whether the norm of the gradient of rows and dense parameters together is limited.
    copy : torch.nn.Module, optional
        A copy of the module, perhaps on a GPU, that computes the batches in its place. It takes the values
        before each batch; the gradients are summed, and the optimizer works, on the CPU.
    loss_scale : LossScale, optional
        Factor on the gradients that a batch leaves with the parameters in `scaled`.
    scaled : collection of str

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
    loss_scale : LossScale or None
    squares : float
        Sum of the squares of the summed gradient; see :meth:`sum_gradients`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        sum_over_trainers: Callable[[np.ndarray], np.ndarray],
        is_first: bool = True,
        clip_value: float = 0.0,
        clips_norm: bool = False,
        copy: torch.nn.Module | None = None,
        loss_scale: LossScale | None = None,
        scaled: Collection[str] = (),
    ) -> None:
        self.loss_scale = loss_scale
        self._scaled = frozenset(scaled)
        self.clips_norm = clips_norm
        self._parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._module = module
        self._copy = copy
        computing = dict(module.named_parameters()) | ({} if copy is None else dict(copy.named_parameters()))
        self._computing = [computing[name] for name in self._parameters]
        self._sum = sum_over_trainers
        self._clip_value = clip_value
        self.squares = 0.0
        self.optimizer = make_optimizer(list(self._parameters.values()))
        # A user's module may draw other numbers with another version of torch: the first trainer's count.
        with torch.no_grad():
            for values in module.parameters():
                mine = values.numpy() if is_first else np.zeros(tuple(values.shape), np.float32)
                values.copy_(torch.from_numpy(sum_over_trainers(mine)))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer, whose learning rates a schedule changes."""
        return self.optimizer.param_groups

    def start_batch(self) -> None:
        """Drop the gradients of the batch before; the module's copy takes the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._copy is not None:
            self._copy.zero_grad(set_to_none=True)
            values = dict(self._module.named_parameters())
            with torch.no_grad():
                for name, taken in self._copy.named_parameters():
                    taken.copy_(values[name])

    def sum_gradients(self, rows_are_finite: bool = True) -> bool:
        """Sum the gradients of all trainers, and clip them by value; a collective.

        Parameters
        ----------
        rows_are_finite : bool
            Whether the gradients of this trainer's rows are; it counts with a loss scale.

        Returns
        -------
        bool
            Whether the step is to be made, equal on all trainers. With a loss scale it is skipped where a
            gradient of any trainer is not finite, of rows or of dense parameters.

        Raises
        ------
        FloatingPointError
            On every trainer, if the sum is not finite, or the loss scale becomes too small.
        """
        parameters = self._parameters.values()
        self._unscale()
        # In float64, so that the order of trainers shows in the last bit of float32 only. With a loss scale
        # the last number is how many trainers ask to skip the step.
        flat = np.zeros(sum(one.numel() for one in parameters) + (self.loss_scale is not None))
        start = 0
        for one in self._computing:
            # A trainer without triples, or a parameter that a batch does not use, has no gradient.
            if one.grad is not None:
                flat[start : start + one.numel()] = one.grad.reshape(-1).cpu().numpy()
            start += one.numel()
        if self.loss_scale is not None:
            flat[-1] = not rows_are_finite
        total = torch.from_numpy(self._sum(flat))
        if self.loss_scale is not None:
            # Equal on all trainers, as the sums are.
            overflows = bool(total[-1] > 0) or not is_finite(total)
            self.loss_scale.update(overflows)
            if overflows:
                self.squares = 0.0
                return False
        start = 0
        for name, one in self._parameters.items():
            part = total[start : start + one.numel()]
            start += one.numel()
            if not bool(torch.isfinite(part).all()):
                raise FloatingPointError(
                    f"the gradient of the dense parameter {name!r} is not finite; nothing was updated"
                )
            one.grad = part.float().view_as(one)
        if self._clip_value:
            torch.nn.utils.clip_grad_value_(parameters, self._clip_value)
        self.squares = sum(
            float(one.grad.double().square().sum()) for one in parameters if one.grad is not None
        )
        return True

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
            for one in self._parameters.values():
                if one.grad is not None:
                    one.grad.mul_(factor)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and of the optimizer's state, by dataset of a model file."""
        found: dict[str, torch.Tensor] = {
            dense_path("parameters", name): one for name, one in self._module.named_parameters()
        }
        for name, one in self._parameters.items():
            for key, value in self.optimizer.state.get(one, {}).items():
                if isinstance(value, torch.Tensor):
                    found[dense_path(STATE, name, key)] = value
                elif isinstance(value, (bool, int, float)):
                    found[dense_path(NUMBERS, name, key)] = torch.tensor(value, dtype=torch.float64)
        if self.loss_scale is not None:
            for key, number in self.loss_scale.state().items():
                found[dense_path(SCALE, key)] = torch.tensor(number, dtype=torch.float64)
        return {path: value.detach().clone() for path, value in found.items()}

    def take(self, values: Mapping[str, torch.Tensor], where: str) -> None:
        """Take the parameters of another run, by name; the optimizer's state stays as it is.

        Raises
        ------
        InputError
            If one is missing, has another shape, or is none of the module's.
        """
        load_parameters(self._module, values, where)

    def restore(self, storage: CheckpointStorage) -> None:
        """Take the parameters and the optimizer's state of the newest version.

        Raises
        ------
        CheckpointError
            If there is none, or a parameter is missing or has another shape.
        """
        manifest = storage.published()
        if manifest is None:
            raise CheckpointError(f"{storage.path} holds no checkpoint")
        path = storage.path / manifest.of_table(RELATION)[0].name
        with hdf5_format.open_file(path) as file:
            load_parameters(self._module, dense_parameters(file), str(path))
            self._restore_state(file)
            if self.loss_scale is not None:
                state = {key: float(one[()]) for key, one in file.get(dense_path(SCALE), {}).items()}
                # A run that was trained in another type has none, and starts with a new one.
                if state:
                    self.loss_scale.load(state)

    def _restore_state(self, file: h5py.File) -> None:
        """Take the optimizer's state; it has none before its first step."""
        found: Mapping[str, Any] = file.get(DENSE_GROUP, {})
        for name, one in self._parameters.items():
            state: dict[str, Any] = {}
            for key, dataset in found.get(f"{STATE}/{name}", {}).items():
                state[key] = torch.from_numpy(np.asarray(dataset[()]))
            for key, dataset in found.get(f"{NUMBERS}/{name}", {}).items():
                number = float(dataset[()])
                state[key] = int(number) if number.is_integer() else number
            if state:
                self.optimizer.state[one] = state
            else:
                self.optimizer.state.pop(one, None)
