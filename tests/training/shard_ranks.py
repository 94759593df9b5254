"""One of several processes that share dense parameters out; ends with status 0 if all it finds is right."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist

from dglkge.config.schema import DenseConfig
from dglkge.distributed.process_group import DeviceGroups, end_process_group, start_process_group
from dglkge.errors import InputError, StorageError
from dglkge.step import dense_shards
from dglkge.step.dense_parameters import DenseParameters
from dglkge.training.building.components import dense_optimizer, known_optimizers, works_by_number

SHAPES = {"matrix": (7, 4), "vector": (5,), "one": (1,), "cube": (2, 3, 2), "unused": (4,), "fixed": (3, 2)}
"""Seven rows, five and one among three trainers; `fixed` takes no gradients."""


class Module(torch.nn.Module):
    """Parameters of all these shapes, different on every rank until the first one's are taken."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=name != "fixed"))


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return what a rank adds: rank 1 has no triples in batch 1, and no rank uses one of the parameters."""
    if (rank, step) == (1, 1):
        return {}
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
        if name not in ("unused", "fixed")
    }


def sharded(settings: DenseConfig, folder: Path, clip_value: float = 0.0) -> tuple[Module, DenseParameters]:
    """Return parameters of which this rank has slices."""
    module, rank = Module(dist.get_rank()), dist.get_rank()
    make = functools.partial(dense_optimizer, settings)
    dense = DenseParameters(module, make, DeviceGroups(60), rank == 0, clip_value, shards_in=folder)
    assert all(values.numel() == 0 for values in module.parameters())
    return module, dense


def train(module: Module, dense: DenseParameters, steps: range, factor: float = 1.0) -> float | None:
    """Add the gradients of this rank, by two backward passes of which none runs `forward`.

    Returns the sum of the squares of the last step's.
    """
    squares: float | None = None
    for step in steps:
        dense.start_batch(step)
        for name, gradient in gradients(dist.get_rank(), step).items():
            for half in (0.25, 0.75):
                (getattr(module, name) * half * gradient).sum().backward()
        squares = dense.sum_gradients([])
        dense.update(factor)
    return squares


def check_optimizer(name: str, folder: Path) -> None:
    """Compare slices with torch's optimizer of whole parameters and the sums in float64."""
    settings = DenseConfig(optimizer=name, lr=0.1)
    module, dense = sharded(settings, folder, clip_value=1.5)
    reference = Module(0)
    trained = {key: values for key, values in reference.named_parameters() if values.requires_grad}
    optimizer = dense_optimizer(settings, list(trained.values()))
    for step in range(3):
        rank_gradients = [gradients(rank, step) for rank in range(dist.get_world_size())]
        for parameter, values in trained.items():
            parts = [part[parameter].double() for part in rank_gradients if parameter in part]
            summed = torch.stack(parts).sum(0) if parts else torch.zeros(SHAPES[parameter])
            values.grad = summed.clamp(-1.5, 1.5).float()
        squares = sum(float(parameter.grad.double().square().sum()) for parameter in trained.values())
        for parameter in trained.values():
            parameter.grad *= 0.5
        optimizer.step()
        sharded_squares = train(module, dense, range(step, step + 1), 0.5)
        np.testing.assert_allclose(sharded_squares, squares, rtol=1e-6)
    with dense.whole():
        for parameter, values in reference.named_parameters():
            # A numpy view of a whole parameter would keep FSDP from freeing it.
            got, label = getattr(module, parameter), f"{name} {parameter}"
            torch.testing.assert_close(got, values, rtol=2e-5, atol=1e-6, msg=label)
    assert all(values.numel() == 0 for values in module.parameters())


def check_files(folder: Path) -> None:
    """Slices are joined for a file, from which other slices and replicated parameters go on alike."""
    settings, rank, path = DenseConfig(lr=0.1), dist.get_rank(), folder / "model.h5"
    module, dense = sharded(settings, folder)
    train(module, dense, range(2))
    saved = dense.state_dict()
    assert rank == 0 or all(values.numel() == 1 for values in saved.values()), saved.keys()
    if rank == 0:
        assert len(saved) == 6 + 3 * 5 and not list(folder.iterdir())
        with h5py.File(path, "w") as file:
            for place, values in saved.items():
                file.create_dataset(place, data=values.numpy())
    dist.barrier()
    train(module, dense, range(2, 3))
    whole = Module(0)
    make = functools.partial(dense_optimizer, settings)
    replicated = DenseParameters(whole, make, DeviceGroups(60), rank == 0)
    again, other = sharded(settings, folder)
    for target in (replicated, other):
        with h5py.File(path) as file:
            parameters = file["dense/parameters"]
            target.take({name: torch.from_numpy(parameters[name][()]) for name in parameters}, "here")
            target.take_state(file)
    train(whole, replicated, range(2, 3))
    train(again, other, range(2, 3))
    with dense.whole(), other.whole():
        for name, values in module.named_parameters():
            assert torch.equal(values, getattr(again, name)), name
            torch.testing.assert_close(values, getattr(whole, name), rtol=1e-6, atol=1e-7)
    with pytest.raises(InputError, match="'matrix' is missing"):
        other.take({}, "here")


def check_failures(folder: Path) -> None:
    """A gradient that is not finite is found by all ranks; what rank 0 cannot write ends nobody's waiting."""
    module, dense = sharded(DenseConfig(), folder)
    before = {name: values.clone() for name, values in dense._updated.items()}
    dense.start_batch(0)
    if dist.get_rank() == 0:
        # In the slice of the last rank.
        module.matrix.grad = torch.zeros(7, 4)
        module.matrix.grad[6, 3] = float("inf")
    words = "^the gradient of the dense parameter 'matrix' is not finite; nothing was updated$"
    with pytest.raises(FloatingPointError, match=words):
        dense.sum_gradients([])
    assert all(torch.equal(values, before[name]) for name, values in dense._updated.items())

    full = mock.Mock()
    full.write.side_effect = OSError(28, "No space left on device")
    with mock.patch.object(dense_shards.tempfile, "TemporaryFile", return_value=full):
        check_storage_error(dense, "No space left on device")
    dense._shards._folder = folder / "absent"
    check_storage_error(dense, "absent: No such file")


def check_storage_error(dense: DenseParameters, words: str) -> None:
    """Hold that rank 0 tells an error, and that no rank waits for it."""
    is_writer = dist.get_rank() == 0
    with pytest.raises(StorageError, match=words) if is_writer else contextlib.nullcontext():
        dense.state_dict()
    dist.barrier()


def main() -> None:
    """Run all checks as one rank."""
    rank, size, port, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dense_shards.BLOCK_NUMBERS = 5
    start_process_group(("127.0.0.1", port), rank, size, 60)
    for name in known_optimizers():
        if works_by_number(DenseConfig(optimizer=name, lr=0.1)):
            check_optimizer(name, folder)
    check_files(folder)
    check_failures(folder)
    end_process_group()


if __name__ == "__main__":
    main()
