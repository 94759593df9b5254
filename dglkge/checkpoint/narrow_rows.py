"""Rows of 16-bit tables in checkpoints: files have float32, which holds each of their numbers exactly.

By numpy and compiled loops alone: torch's threads would compete with training for cores.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from dglkge.kernels.narrow_rows import nearest_words, widen_rows

NARROW_DTYPES = (torch.bfloat16, torch.float16)


def is_narrow(values: torch.Tensor) -> bool:
    """Return whether rows are bfloat16 or float16, which files never have."""
    return values.dtype in NARROW_DTYPES


def stored_array(values: torch.Tensor) -> np.ndarray:
    """View a tensor as an array, numbers of 16 bits as uint16 words."""
    if is_narrow(values):
        words: np.ndarray = values.detach().view(torch.int16).numpy().view(np.uint16)
        return words
    return values.detach().numpy()


def file_dtype(values: torch.Tensor) -> np.dtype:
    """Return the type in which a tensor is written."""
    if is_narrow(values):
        return np.dtype(np.float32)
    # A slice of no rows: nothing is copied, whatever device the tensor is on.
    return values.detach()[:0].cpu().numpy().dtype


def take_rows(values: torch.Tensor, order: np.ndarray, out: np.ndarray) -> None:
    """Write rows in a given order (n,) to an array (n, ...) of the type in which they are written."""
    array = stored_array(values)
    if is_narrow(values):
        width = math.prod(array.shape[1:])
        is_half = values.dtype == torch.float16
        widen_rows(array.reshape(len(array), width), order, is_half, out.reshape(len(order), width))
    else:
        np.take(array, order, axis=0, out=out, mode="clip")  # "raise" would copy once more


def put_rows(values: torch.Tensor, places: np.ndarray, block: np.ndarray) -> None:
    """Write rows of a file to some places (n,); rows of 16 bits get the nearest number, ties to even.

    What such a table was saved as is read back bit for bit.
    """
    array = stored_array(values)
    array[places] = nearest_words(block, values.dtype == torch.float16) if is_narrow(values) else block
