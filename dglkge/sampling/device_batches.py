"""Edges, their order and their negatives on one device: what a trainer draws that is alone with its tables.

The order and the negatives are those of :mod:`.triple_order` and :mod:`.negatives`, number by number: on a
GPU the functions of :mod:`dglkge.kernels.hashing` are kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dglkge.data.partition_layout import EdgeTable
from dglkge.kernels.hashing import combine
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions, ignore_phase
from dglkge.sampling.negatives import UniformNegatives

BLOCK = 1024
"""Numbers that a program of a kernel computes."""


def signed(word: int) -> int:
    """Return 64 bits without a sign as the number that int64 has for them."""
    return word - (1 << 64) if word >> 63 else word


def window_rows(window: range, num: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    """Return the triples (B,) int64 at consecutive positions, as of :func:`triple_order.inverse_permute`.

    On a GPU by a kernel.
    """
    if device.type != "cuda":
        positions = np.arange(window.start, window.stop)
        return torch.from_numpy(triple_order.inverse_permute(positions, num, seed, epoch))
    keys = torch.from_numpy(triple_order.round_keys(seed, epoch).view(np.int64)).to(device)
    return window_there(window, num, triple_order.halves(num), keys)


def window_there(window: range, num: int, halves: tuple[int, int], keys: Tensor) -> Tensor:
    """Return :func:`window_rows` by the kernel."""
    # Here and below: Triton comes with torch for GPUs only.
    from dglkge.kernels.gpu import walk_back

    rows = keys.new_empty(len(window))
    grid = (-(-len(window) // BLOCK),)
    walk_back[grid](rows, keys, window.start, len(window), num, halves, num_rounds=len(keys), block=BLOCK)
    return rows


def draw_there(node_ids: Tensor, before: int, number: int, num_chunks: int, num_negatives: int) -> Tensor:
    """Return the negatives (C, N) of :class:`ChunkNegatives` by the kernel."""
    from dglkge.kernels.gpu import draw_ids

    drawn = node_ids.new_empty(num_chunks, num_negatives)
    counts = drawn.numel(), num_negatives, len(node_ids)
    draw_ids[(-(-drawn.numel() // BLOCK),)](drawn, node_ids, signed(before), number, *counts, block=BLOCK)
    return drawn


@dataclass(frozen=True)
class DeviceBatch:
    """A global batch on a device: node ids (B,), and weights (B,) if there are any."""

    epoch: int
    index: int
    heads: Tensor
    relations: Tensor
    tails: Tensor
    weights: Tensor | None

    def __len__(self) -> int:
        return len(self.heads)


class DeviceBatches(EdgeBatches):
    """Selects the triples of each global batch, all on a device.

    Of one trainer, one edge type and one set of edges, of which none is held out.
    """

    def __init__(self, edges: EdgeTable, options: EdgeOptions, device: torch.device) -> None:
        super().__init__(edges, options)
        self._there = torch.from_numpy(np.ascontiguousarray(self._all_edges)).to(device)
        self._weights_there = None if self._weights is None else torch.from_numpy(self._weights).to(device)
        weights = options.relation_weights
        self._relation_weights = None if weights is None else torch.from_numpy(weights).to(device)

    def batch(  # type: ignore[override]
        self, epoch: int, index: int, enter: Callable[[str], None] = ignore_phase
    ) -> DeviceBatch:
        enter("order")
        num, size = self.order.num_positions, self._options.batch_size
        window = range(index * size, min((index + 1) * size, num))
        rows = window_rows(window, num, self._options.seed, epoch, self._there.device)
        enter("edges")
        heads, relations, tails = self._there[rows].T.to(torch.int64).contiguous()
        weights = None if self._weights_there is None else self._weights_there[rows]
        if self._relation_weights is not None:
            relation_weights = self._relation_weights[relations]
            weights = relation_weights if weights is None else weights * relation_weights
        return DeviceBatch(epoch, index, heads, relations, tails, weights)


class ChunkNegatives:
    """Uniform negatives of all chunks of a batch at once, as of a sampler without weights."""

    def __init__(self, sampler: UniformNegatives, entity_type: str, device: torch.device) -> None:
        self._sampler, self._type = sampler, entity_type
        self._node_ids = torch.from_numpy(np.array(sampler.node_ids[entity_type])).to(device)

    def sample(self, epoch: int, batch: int, num_chunks: int) -> Tensor:
        """Return the node ids (C, N) of the negatives of the chunks of a batch."""
        sampler, node_ids = self._sampler, self._node_ids
        if not node_ids.is_cuda:
            drawn = [sampler.sample(self._type, epoch, batch, chunk) for chunk in range(num_chunks)]
            return torch.from_numpy(np.stack(drawn))
        before, number = combine(*sampler.key_before_chunk(epoch, batch)), sampler.number_of_type(self._type)
        return draw_there(node_ids, before, number, num_chunks, sampler.num_negatives)
