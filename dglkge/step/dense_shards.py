"""Dense parameters shared out among the trainers by FSDP2: each holds a slice, and the whole for a batch.

``torch.distributed.fsdp.fully_shard`` cuts each parameter by its first dimension, gathers the whole and frees
it again. It is applied to a module that only holds the parameters, and not to the score function's, because
its hooks fit neither what is computed nor how:

* They gather and reduce where ``forward`` and the backward pass run. Trainers run a module unequally often in
  a batch, one without triples never, and TuckER's core is read without a ``forward``. Here every trainer
  gathers once and sums once in each batch, whatever it computes between them.
* They sum in the gradients' type, and gloo's reduce-scatter is an all-reduce underneath (torch 2.13). Here
  the slices of a gradient are sent to their owners in float32, who add them up in float64 in the order of
  ranks: half the bytes, and the sum over trainers that replicated parameters have.

The score function's module stays as it is. Its parameters borrow the memory of the whole ones while there are
any, and have no numbers otherwise. A numpy view of a whole parameter keeps FSDP from freeing it: an error.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dglkge.distributed.process_group import DeviceGroups
from dglkge.errors import InputError, write_error
from dglkge.model.dense_modules import values_of

BLOCK_NUMBERS = 1 << 20
"""Numbers that are sent to each trainer at a time; also in ``planning/memory.py``."""


def _sharded(holder: nn.ParameterList, device: torch.device, group: Any) -> Any:
    """Cut the parameters of a holder by FSDP."""
    # Imported here: importing FSDP takes a second.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # One group: everything is gathered at once, since one batch uses all of it.
    mesh = DeviceMesh.from_group(group, device.type)
    sharded: Any = fully_shard(holder, mesh=mesh, reshard_after_forward=False)
    if device.type == "cpu" and hasattr(sharded, "set_custom_all_gather"):  # newer than fully_shard itself
        sharded.set_custom_all_gather(_BlockGather())
    # FSDP may move a slice when it starts, which is at the first gathering.
    sharded.unshard()
    sharded.reshard()
    return sharded


class _BlockGather:
    """FSDP's all-gather, block by block into memory that stays.

    gloo copies all that one call gathers to memory of its own threads, which glibc does not give back.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory that the slices of all trainers are gathered in."""
        if self._memory.shape != torch.Size(size):
            self._memory = torch.empty(*size, dtype=dtype, device=device)
        return self._memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Gather; FSDP asks for no other than a blocking call here."""
        slices = output_tensor.view(-1, len(input_tensor))
        for start in range(0, len(input_tensor), BLOCK_NUMBERS):
            stop = start + BLOCK_NUMBERS
            # FSDP has put this trainer's slice in the output already; gloo takes no input that is its output.
            dist.all_gather([part[start:stop] for part in slices], input_tensor[start:stop].clone(), group)


def _room(folder: Path, num_bytes: int) -> np.ndarray:
    """Map a temporary file without a name: a killed process leaves none, its pages can leave the memory."""
    with tempfile.TemporaryFile(dir=folder) as file:
        # Now, as a full disk would end the process where it writes to the mapped pages.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return np.memmap(file, np.uint8, "r+", shape=(num_bytes,))


def _cut(parts: Sequence[Tensor], start: int) -> list[Tensor]:
    """Return the numbers of a block, from a place on, of tensors (n,) that are laid end to end."""
    pieces = []
    for part in parts:
        pieces.append(part[max(0, start) : max(0, start + BLOCK_NUMBERS)])
        start -= len(part)
    return pieces


class ParameterShards:
    """This trainer's slices of all parameters, equal on all trainers; made by all trainers together.

    The parameters have no numbers afterwards, but between :meth:`gather` and :meth:`release`. Rank 0 joins
    the slices in a temporary file in ``folder``, see :meth:`joined`. An InputError if a parameter has no
    dimensions.

    Attributes
    ----------
    slices : dict of str to nn.Parameter
        The slices, which an optimizer may update.
    shapes : dict of str to tuple of int
        Of the whole parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: DeviceGroups, folder: Path) -> None:
        self._whole = dict(parameters)
        self._folder = folder
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._whole.items()}
        for name, shape in self.shapes.items():
            if not shape:
                raise InputError(
                    f"dense.sharding is fsdp and the dense parameter {name!r} is a single number without a "
                    "dimension to cut; allowed: replicated, or a parameter of shape (1,)"
                )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        by_device: dict[torch.device, dict[str, nn.Parameter]] = {}
        for name, parameter in self._whole.items():
            by_device.setdefault(parameter.device, {})[name] = parameter
        self._groups = {device: groups.group(device) for device in by_device}
        self._names = {device: list(members) for device, members in by_device.items()}
        holders: dict[torch.device, nn.ParameterList] = {}
        self._gathered: dict[str, tuple[nn.ParameterList, str]] = {}
        for device, members in by_device.items():
            parts = (nn.Parameter(part.detach(), part.requires_grad) for part in members.values())
            holders[device] = nn.ParameterList(parts)
            self._gathered |= {name: (holders[device], str(number)) for number, name in enumerate(members)}
        self._let_go()
        self._sharded = [_sharded(holder, device, self._groups[device]) for device, holder in holders.items()]
        self._is_whole = False
        self.slices = {}
        for name, parameter in self._whole.items():
            slice_ = getattr(*self._gathered[name]).to_local()
            if tuple(slice_.shape) != self._slice_shape(name, self.rank):
                raise RuntimeError(f"FSDP has cut {name!r} to {tuple(slice_.shape)}")
            # The same memory: what an optimizer writes to it is gathered in the next batch. Plain tensors,
            # because an optimizer that works number by number needs no DTensor, whose operations are slow.
            self.slices[name] = nn.Parameter(slice_.detach(), parameter.requires_grad)

    def rows(self, name: str, rank: int | None = None) -> slice:
        """Return the place of a trainer's slice (default: this one's) in the first dimension."""
        place, num_rows = self.rank if rank is None else rank, self.shapes[name][0]
        # As torch.chunk cuts: the last trainers may have fewer rows, or none.
        step = -(-num_rows // self.size)
        return slice(min(place * step, num_rows), min((place + 1) * step, num_rows))

    def _slice_shape(self, name: str, rank: int) -> tuple[int, ...]:
        rows = self.rows(name, rank)
        return (rows.stop - rows.start, *self.shapes[name][1:])

    def gather(self) -> None:
        """Give the module's parameters all their numbers; a collective, unless they have them already."""
        if self._is_whole:
            return
        for sharded in self._sharded:
            sharded.unshard()
        for name, parameter in self._whole.items():
            parameter.data = getattr(*self._gathered[name]).data
        self._is_whole = True

    def release(self) -> None:
        """Free the whole parameters; what was written to them is lost, see :meth:`load`."""
        if self._is_whole:
            self._let_go()
            for sharded in self._sharded:
                sharded.reshard()
            self._is_whole = False

    def _let_go(self) -> None:
        """Leave the module's parameters without numbers."""
        for parameter in self._whole.values():
            # Not the freed memory: an operation on it would crash, on this it fails by its shape.
            parameter.data = torch.empty(0, device=parameter.device)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the parameters for a block of code that all trainers run, unless they are gathered."""
        was_whole = self._is_whole
        self.gather()
        try:
            yield
        finally:
            if not was_whole:
                self.release()

    def summed(self, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """Sum the gradients of some of the whole parameters over all trainers; a collective.

        No gradient counts as 0: a trainer may have no triples, or not use a parameter. Returns the float64
        sums of this trainer's slices, on the parameters' devices.
        """
        sums: dict[str, Tensor] = {}
        for device, group in self._groups.items():
            names = [name for name in self._names[device] if name in parameters]
            pairs = [(name, parameters[name].grad) for name in names]
            slices = [[self._slice_of(*pair, rank, device) for pair in pairs] for rank in range(self.size)]
            sums |= zip(names, self._summed(slices, device, group).split([*map(len, slices[self.rank])]))
        return [sums[name].view(self._slice_shape(name, self.rank)) for name in parameters]

    def _summed(self, slices: Sequence[Sequence[Tensor]], device: torch.device, group: Any) -> Tensor:
        """Return the sums of this trainer's slices, one after the other, from the slices of each trainer."""
        # Numbers of each trainer's slices, in the order of ranks.
        counts = [sum(map(len, parts)) for parts in slices]
        total = torch.zeros(counts[self.rank], dtype=torch.float64, device=device)
        # In blocks: the messages take 2 * size * BLOCK_NUMBERS numbers, not two copies of all gradients.
        for start in range(0, max(counts), BLOCK_NUMBERS):
            blocks = [_cut(parts, start) for parts in slices]
            lengths = [sum(map(len, block)) for block in blocks]
            mine = lengths[self.rank]
            received = torch.empty(self.size * mine, device=device)
            sent = torch.cat(list(itertools.chain(*blocks)))
            dist.all_to_all_single(received, sent, [mine] * self.size, lengths, group=group)
            for part in received.split(mine) if mine else ():
                total[start : start + mine] += part
        return total

    def _slice_of(self, name: str, gradient: Tensor | None, rank: int, device: torch.device) -> Tensor:
        """Return the numbers (n,) of a trainer's slice of a gradient; 0 where there is none."""
        if gradient is None:
            return torch.zeros(1, device=device).expand(math.prod(self._slice_shape(name, rank)))
        return gradient.detach()[self.rows(name, rank)].reshape(-1)

    def load(self, values: Mapping[str, Any], where: str) -> None:
        """Take this trainer's slices of whole parameters, tensors or datasets by name; no collective.

        Of a dataset only the slice is read. An InputError if one is missing, has another shape, or is none of
        the module's.
        """
        whole = values_of(self.shapes, values, where)
        with torch.no_grad():
            for (name, slice_), value in zip(self.slices.items(), whole):
                slice_.copy_(self.own_part(name, value))

    def own_part(self, name: str, values: Any) -> Tensor:
        """Return a copy of this trainer's slice of a tensor or dataset of a parameter's shape."""
        return torch.from_numpy(np.array(values[self.rows(name)]))

    def joined(self, slices: Mapping[str, tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Join slices on rank 0, in a file and not in memory; a collective.

        By any key, in the same order on all trainers: the name of the parameter, and a tensor of the shape of
        its slice. Returns the whole tensors by key, mapped from a file without a name; nothing on other
        ranks. A CheckpointError or StorageError on rank 0, if the file cannot be written.
        """
        if self.rank:
            for _, mine in slices.values():
                flat = mine.detach().reshape(-1).cpu()
                for start in range(0, len(flat), BLOCK_NUMBERS):
                    dist.send(flat[start : start + BLOCK_NUMBERS], 0)
            return {}
        sizes = [math.prod(self.shapes[name]) * mine.element_size() for name, mine in slices.values()]
        # Each tensor begins at a multiple of 8 bytes, whatever its type is.
        starts = np.cumsum([0, *(-(-size // 8) * 8 for size in sizes)]).tolist()
        problem: OSError | None = None
        try:
            room = _room(self._folder, max(8, starts[-1]))
        except OSError as error:
            # Raised when everything has been received that other trainers send in any case.
            problem = error
        for start, (name, mine) in zip(starts, slices.values()):
            for block in self._blocks(name, mine.detach()):
                if problem is None:
                    room[start : start + block.nbytes] = block.view(np.uint8)
                start += block.nbytes
        if problem is not None:
            raise write_error(f"cannot write to {self._folder}", problem) from problem
        parts = [torch.from_numpy(room[start : start + size]) for start, size in zip(starts, sizes)]
        whole = zip(slices.items(), parts)
        return {key: part.view(mine.dtype).view(self.shapes[name]) for (key, (name, mine)), part in whole}

    def _blocks(self, name: str, mine: Tensor) -> Iterator[np.ndarray]:
        """Yield the numbers of all trainers' slices of a parameter, in the order of ranks; on rank 0."""
        yield mine.contiguous().reshape(-1).cpu().numpy()
        for rank in range(1, self.size):
            count = math.prod(self._slice_shape(name, rank))
            for start in range(0, count, BLOCK_NUMBERS):
                block = torch.empty(min(BLOCK_NUMBERS, count - start), dtype=mine.dtype)
                dist.recv(block, rank)
                yield block.numpy()
