"""A device in the host's place whose memory is its own: what mixes the two without an explicit copy fails.

Tensors there wrap tensors of the host. Copies by ``to``, ``cpu`` and ``copy_`` work, and a number may be read
from a tensor of one; any other operation with tensors of both, and a view of numpy, is an error, as on a GPU.

As a program it checks that, trains small runs on the host and there, and prints a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from dglkge.model.device import ComputeDevice
from dglkge.training.building import computing
from tests.training.live import trained

NAME = "separate"

_LIBRARY = torch.library.Library("aten", "IMPL")
"""How tensors on the device are made; must live as long as the process."""

_COPIES = ("aten::copy_", "aten::_to_copy")


class SeparateTensor(torch.Tensor):
    """A tensor of the device; `inner` is its memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SeparateTensor:
        options: Any = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        options |= {"dtype": inner.dtype, "device": torch.device(NAME, 0)}
        made: SeparateTensor = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **options)
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the memory of its tensors; the result is where they are."""
    tensors = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, SeparateTensor)]
    name = func._schema.name
    target = kwargs.get("device")
    is_there = bool(there) if target is None else torch.device(target).type == NAME
    if name not in _COPIES:
        mixed = [tensor for tensor in tensors if not isinstance(tensor, SeparateTensor) and tensor.ndim]
        if there and mixed:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise RuntimeError(f"{name} got tensors of two devices: {shapes}")
        if there and not is_there:
            raise RuntimeError(f"{name} would copy from the device")
    elif name == "aten::copy_":
        is_there = isinstance(args[0], SeparateTensor)
    inner_kwargs = {**kwargs, "device": torch.device("cpu")} if target is not None else kwargs

    def unwrap(value: Any) -> Any:
        return value.inner if isinstance(value, SeparateTensor) else value

    # An operation in place returns its argument itself.
    known = {id(tensor.inner): tensor for tensor in there}

    def wrap(value: Any) -> Any:
        is_new = isinstance(value, torch.Tensor) and id(value) not in known
        return SeparateTensor(value) if is_new else known.get(id(value), value)

    inner_args, inner_kwargs = pytree.tree_map(unwrap, (args, inner_kwargs))
    result = func(*inner_args, **inner_kwargs)
    return pytree.tree_map(wrap, result) if is_there else result


def _on_host(make: Callable[..., torch.Tensor]) -> Callable[..., SeparateTensor]:
    """Return a function that makes a tensor as torch does, in the host's memory."""

    def made(*shape: Any, **options: Any) -> SeparateTensor:
        return SeparateTensor(make(*shape, **{**options, "device": "cpu", "pin_memory": False}))

    return made


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to, memory = (part.inner if isinstance(part, SeparateTensor) else part for part in (target, source))
    to.copy_(memory)
    return target


class _Backend:
    """What ``torch.cuda`` is for a GPU: everything is computed at once, and nothing waits."""

    Stream = Event = mock.Mock
    current_stream = staticmethod(mock.Mock)
    stream = staticmethod(contextlib.nullcontext)
    synchronize = staticmethod(lambda: None)
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def open_separate_device() -> ComputeDevice:
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())
    _LIBRARY.impl("empty.memory_format", _on_host(torch.empty), "PrivateUse1")
    _LIBRARY.impl("empty_strided", _on_host(torch.empty_strided), "PrivateUse1")
    _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    # The code of a GPU asks for the name "cuda"; the tensors are here.
    return ComputeDevice("cuda", torch.device(NAME, 0))


def check_mixed_operations(device: torch.device) -> None:
    rows, host = torch.ones(2, 3, device=device), torch.ones(2, 3)
    for mixed in (lambda: rows + host, lambda: rows.numpy(), lambda: rows[torch.tensor([0, 1])]):
        with pytest.raises(RuntimeError):
            mixed()
    assert (rows + 1).cpu().tolist() == [[2.0] * 3] * 2


def main() -> None:
    """Train the cases that are given as arguments, after a folder."""
    separate = open_separate_device()
    check_mixed_operations(separate.device)

    def opened(name: str, *_: Any) -> ComputeDevice:
        return ComputeDevice(name) if name == "cpu" else separate

    with mock.patch.object(computing.devices, "open_device", opened):
        for number, case in enumerate(sys.argv[2:]):
            gc.freeze()  # what is imported, out of the collections after each run
            folder, sets = Path(sys.argv[1]) / str(number), ["training.batch_size=40", *case.split()]
            on_host = [setting for setting in sets if not setting.startswith("tables.storage")]
            losses, tables, _ = trained(folder / "host", "reference", *on_host)
            staged = trained(folder / "device", "reference", "training.device=cpu_staged", *sets)
            difference = max(np.abs(staged[1][name] - rows).max() for name, rows in tables.items())
            loss_difference = np.abs(np.divide(staged[0], losses) - 1).max()
            print(json.dumps([case, len(losses), float(loss_difference), float(difference)]), flush=True)


if __name__ == "__main__":
    main()
