"""Edges, their order and their negatives on one device: what a trainer draws that is alone with its tables.

The order and the negatives are those of :mod:`.triple_order` and :mod:`.negatives`, number by number: the
functions of :mod:`dglkge.kernels.hashing` by torch's operations. Numbers of 64 bits without a sign are kept
in int64: sums and products wrap around alike, and shifts are made logical ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dglkge.data.partition_layout import EdgeTable
from dglkge.kernels.hashing import GOLDEN_GAMMA, combine
from dglkge.sampling import triple_order
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions, ignore_phase
from dglkge.sampling.negatives import UniformNegatives


def signed(word: int) -> int:
    """Return 64 bits without a sign as the number that int64 has for them."""
    return word - (1 << 64) if word >> 63 else word


_GAMMA, _FIRST, _SECOND = map(signed, (int(GOLDEN_GAMMA), 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_HALF, _LOW_BITS = 32, (1 << 32) - 1


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift words to the right and fill up with zeros."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def split_mix(states: Tensor) -> Tensor:
    """Return SplitMix64's output for each state; see :func:`dglkge.kernels.hashing.split_mix`."""
    states = (states ^ _shifted(states, 30)) * _FIRST
    states = (states ^ _shifted(states, 27)) * _SECOND
    return states ^ _shifted(states, 31)


def extended(keys: Tensor, part: Tensor | int) -> Tensor:
    """Return keys after one more whole number; see :func:`dglkge.kernels.hashing.combine`."""
    return split_mix(keys + _GAMMA + part)


def below(keys: Tensor, count: int, limit: int) -> Tensor:
    """Draw numbers (C, count) from [0, limit) by keys (C,); see :func:`dglkge.kernels.hashing.below`."""
    counters = torch.arange(count, device=keys.device) * _GAMMA
    bits = split_mix(counters + keys[:, None])
    high, low = _shifted(bits, _HALF), bits & _LOW_BITS
    limit_high, limit_low = limit >> _HALF, limit & _LOW_BITS
    first, second = high * limit_low, low * limit_high
    carried = _shifted(low * limit_low, _HALF) + (first & _LOW_BITS) + (second & _LOW_BITS)
    return high * limit_high + _shifted(first, _HALF) + _shifted(second, _HALF) + _shifted(carried, _HALF)


def inverse_walk(values: Tensor, num: int, a: int, b: int, keys: list[int]) -> Tensor:
    """Return the inverse permutation of values; see :func:`dglkge.kernels.hashing.walk_all`."""
    left, right = values % a, values // a
    for number in reversed(range(len(keys))):
        key = signed(keys[number])
        if number % 2 == 0:
            left = (left + a - _draw(key, right, a)) % a
        else:
            right = (right + b - _draw(key, left, b)) % b
    walked = right * a + left
    is_outside = walked >= num
    if is_outside.any():
        # Cycle walking, as there: seldom more than a few values.
        walked[is_outside] = inverse_walk(walked[is_outside], num, a, b, keys)
    return walked


def _draw(key: int, values: Tensor, limit: int) -> Tensor:
    return _shifted(split_mix(values * _GAMMA + key), 1) % limit


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
        positions = torch.arange(index * size, min((index + 1) * size, num), device=self._there.device)
        halves = triple_order.halves(num)
        keys = triple_order.round_keys(self._options.seed, epoch).tolist()
        rows = inverse_walk(positions, num, *halves, keys)
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
        self.num_negatives = sampler.num_negatives
        self._node_ids = torch.from_numpy(np.array(sampler.node_ids[entity_type])).to(device)
        self._key_of = sampler.key_before_chunk
        self._number = sampler.number_of_type(entity_type)

    def sample(self, epoch: int, batch: int, num_chunks: int) -> Tensor:
        """Return the node ids (C, N) of the negatives of the chunks of a batch."""
        before = signed(combine(*self._key_of(epoch, batch)))
        chunks = torch.arange(num_chunks, device=self._node_ids.device)
        keys = extended(extended(chunks * 0 + before, chunks), self._number)
        drawn = below(keys, self.num_negatives, len(self._node_ids))
        return self._node_ids[drawn]


def find_equal(ids: Tensor, negative_ids: Tensor) -> Tensor:
    """Find the negatives that are the true answer itself.

    Parameters
    ----------
    ids : (C * c,) int64 tensor
        Of c queries of each chunk.
    negative_ids : (C, N) int64 tensor

    Returns
    -------
    (M,) int64 tensor
        Places in the scores (C, c, N), row by row.
    """
    num_chunks, num_negatives = negative_ids.shape
    ordered, order = negative_ids.sort(dim=1)
    chunk_ids = ids.view(num_chunks, -1)
    first, stop = (torch.searchsorted(ordered, chunk_ids, right=right).view(-1) for right in (False, True))
    counts = stop - first
    queries = torch.repeat_interleave(counts)
    turns = torch.arange(len(queries), device=ids.device) - (counts.cumsum(0) - counts)[queries]
    chunks = queries // chunk_ids.shape[1]
    return queries * num_negatives + order[chunks, first[queries] + turns]
