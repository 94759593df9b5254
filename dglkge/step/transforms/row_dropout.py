"""Dropout of the numbers of rows (Srivastava et al. 2014), the same for any number of trainers.

In each batch the numbers of a row are set to 0 with some probability and the others are divided by the
probability to keep them, as LibKGE's embedders do it. Which ones is a function of (seed, table, epoch,
batch, original id, column): a row is the same in a batch wherever it occurs, as the entity given, as answer,
negative or candidate, and on every trainer. A batch therefore trains the table times a mask. Regularizers
take the rows after dropout.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from dglkge.kernels.hashing import column_bits, drop_numbers, row_keys, stream_key
from dglkge.step.contracts import TableTransform

_BLOCK_WORDS = 1 << 16
"""Random words drawn at a time: the working arrays stay in cache."""

_LEVELS = 1 << 16
"""A number takes 16 random bits, so that probabilities are multiples of 2^-16."""


class RowDropout(TableTransform):
    """Masks of the rows of a batch.

    Parameters
    ----------
    rates : mapping of str to float
        By table: probability that a number is dropped; at least 0 and below 1. Tables with 0 may be absent.
    original_ids : mapping of str to (n,) int64 tensor
        By table: original id of each node id.
    seed : int
    kernels : {"auto", "reference"}
        "auto": a compiled loop where rows are in memory; "reference": its plain twin, the same bit for bit.
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        original_ids: Mapping[str, torch.Tensor],
        seed: int,
        kernels: str = "auto",
    ) -> None:
        # At most _LEVELS - 1: something is kept.
        limits = {name: min(round(rate * _LEVELS), _LEVELS - 1) for name, rate in rates.items()}
        self._limits = {name: limit for name, limit in limits.items() if limit}
        self._original_ids = {name: original_ids[name].numpy() for name in self._limits}
        self._seed = seed
        self._is_reference = kernels == "reference"
        self._batch = 0

    @property
    def tables(self) -> list[str]:
        """Tables of which rows are dropped."""
        return list(self._limits)

    def start_batch(self, number: int) -> None:
        """Take the masks of a batch."""
        self._batch = number

    def backward(self, table: str, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Multiply gradients by their masks: a dropped number is the stored one times its mask."""
        self.forward(table, ids, gradients)

    def forward(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Multiply rows (n, D) of a table by their masks, in place."""
        limit = self._limits[table]
        node_ids = ids.numpy()
        scale = _LEVELS / (_LEVELS - limit)
        key = stream_key(self._seed, "dropout", table, self._batch)
        original_ids, dim = self._original_ids[table], rows.shape[1]
        if rows.device.type == "cpu" and not self._is_reference:
            drop_numbers(rows.numpy(), original_ids[node_ids], key[0], np.uint16(limit), np.float32(scale))
            return
        num_words = -(-dim // 4)
        step = max(1, _BLOCK_WORDS // num_words)
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            bits = column_bits(row_keys(key, original_ids[node_ids[block]]), num_words)
            # Four numbers of 16 bits from each word, the lowest bits first.
            numbers = bits.astype("<u8", copy=False).view("<u2")[:, :dim]
            rows[block].mul_(torch.from_numpy(numbers >= limit).to(rows.device)).mul_(scale)
