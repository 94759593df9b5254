"""One of several processes that share dense parameters out; ends with status 0 if all it finds is right."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dglkge.config.schema import DenseConfig
from dglkge.distributed.process_group import DeviceGroups, end_process_group, start_process_group
from dglkge.errors import StorageError
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
    module, rank = Module(dist.get_rank()), dist.get_rank()
    make = functools.partial(dense_optimizer, settings)
    dense = DenseParameters(module, make, DeviceGroups(60), rank == 0, clip_value, shards_in=folder)
    assert all(values.numel() == 0 for values in module.parameters())
    return module, dense


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
        dense.start_batch(step)
        for parameter, gradient in rank_gradients[dist.get_rank()].items():
            for share in (0.25, 0.75):  # by two backward passes, of which none runs `forward`
                (getattr(module, parameter) * share * gradient).sum().backward()
        np.testing.assert_allclose(dense.sum_gradients([]), squares, rtol=1e-6)
        dense.update(0.5)
    with dense.whole():
        for parameter, values in reference.named_parameters():
            # A numpy view of a whole parameter would keep FSDP from freeing it.
            got, label = getattr(module, parameter), f"{name} {parameter}"
            torch.testing.assert_close(got, values, rtol=2e-5, atol=1e-6, msg=label)
    assert all(values.numel() == 0 for values in module.parameters())


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

    full = OSError(28, "No space left on device")
    with mock.patch.object(dense_shards.os, "posix_fallocate", side_effect=full):
        check_storage_error(dense, "No space left on device")
    dense._shards._folder = folder / "absent"
    check_storage_error(dense, "absent: No such file")


def check_storage_error(dense: DenseParameters, words: str) -> None:
    is_writer = dist.get_rank() == 0
    with pytest.raises(StorageError, match=words) if is_writer else contextlib.nullcontext():
        dense.state_dict()
    dist.barrier()


def main() -> None:
    rank, size, port, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dense_shards.BLOCK_NUMBERS = 5
    start_process_group(("127.0.0.1", port), rank, size, 60)
    for name in known_optimizers():
        if works_by_number(DenseConfig(optimizer=name, lr=0.1)):
            check_optimizer(name, folder)
    check_failures(folder)
    end_process_group()


if __name__ == "__main__":
    main()
