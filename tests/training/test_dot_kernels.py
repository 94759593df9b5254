"""Rows in bfloat16: rounded as torch rounds them, and gathered in either type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.embeddings.row_lookup import FoundRows
from dglkge.kernels import dot as dot_kernels
from dglkge.kernels.rows import narrow, widen
from dglkge.model.functions.autograd import words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_gathered_in_either_type(dtype: torch.dtype) -> None:
    table = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    numbers = np.array([6, 0, 0, 3])
    operand = torch.full((4, 5), torch.nan, dtype=dtype)
    dot_kernels.gather(FoundRows.in_array(table.numpy(), numbers).addresses, words(operand))
    assert torch.equal(operand, table[torch.from_numpy(numbers)].to(dtype))


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    draw = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint32)
    halves = np.arange(0, 1 << 16, 7, dtype=np.uint32)
    ties = np.concatenate([halves << 16 | np.uint32(low) for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    numbers = np.concatenate([draw, ties]).astype(np.uint32).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    got = np.array([narrow(number) for number in numbers], np.uint16)
    assert np.array_equal(got, words(torch.from_numpy(numbers).bfloat16()))
    assert np.isnan(widen(narrow(np.float32(np.nan))))
    assert [widen(narrow(np.float32(x))) for x in (np.inf, -np.inf, 1.5)] == [np.inf, -np.inf, 1.5]
