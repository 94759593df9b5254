"""Rounding and widening of 16-bit rows: against torch, against their plain twins, and in the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dglkge.kernels.rows import noise_of, round_rows, round_rows_plain, widen_rows

DTYPES = [torch.bfloat16, torch.float16]
EVERY_WORD = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024)


def meaning(words: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(words.view(np.int16)).view(dtype).float().numpy()


def hard_numbers(num_rows: int, dim: int) -> np.ndarray:
    """Return float32 numbers of all sizes, and of all bit patterns; (2 num_rows, dim)."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, (num_rows, dim), dtype=np.uint64).astype(np.uint32).view(np.float32)
    sizes = 10.0 ** rng.uniform(-13, 6, (num_rows, dim))
    return np.concatenate([bits, (rng.standard_normal((num_rows, dim)) * sizes).astype(np.float32)])


@pytest.mark.parametrize("dtype, key", [(DTYPES[0], 2**64 - 1), (DTYPES[1], 7)])
def test_every_word_is_widened_as_torch_does_and_never_rounded(dtype: torch.dtype, key: int) -> None:
    order, places = np.random.default_rng(0).permutation(64), np.arange(64)
    widened, words = np.empty(EVERY_WORD.shape, np.float32), np.zeros_like(EVERY_WORD)
    widen_rows(EVERY_WORD, order, dtype == torch.float16, widened)
    rows = meaning(EVERY_WORD, dtype)
    round_rows(rows, words, places, places * 10**11, np.uint64(key), dtype == torch.float16)
    for actual, expected in ((widened, rows[order]), (meaning(words, dtype), rows)):
        is_same = actual.view(np.uint32) == expected.view(np.uint32)
        assert (is_same | (np.isnan(actual) & np.isnan(expected))).all()


@pytest.mark.parametrize("dtype, dim", [(DTYPES[0], 1), (DTYPES[1], 4), (DTYPES[0], 33), (DTYPES[1], 200)])
def test_the_loop_and_its_twin_give_the_same_bits(dtype: torch.dtype, dim: int) -> None:
    rows = hard_numbers(150, dim)
    rng = np.random.default_rng(dim)
    places, ids = rng.permutation(400)[: len(rows)], rng.integers(0, 10**12, len(rows))
    words, expected = np.full((2, 400, dim), 5, np.uint16)
    round_rows(rows, words, places, ids, np.uint64(2**63 + dim), dtype == torch.float16)
    round_rows_plain(rows, expected, places, ids, 2**63 + dim, dtype == torch.float16)
    assert np.array_equal(words, expected)
    assert (words[np.setdiff1d(np.arange(400), places)] == 5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_is_rounded_to_one_of_its_neighbours(dtype: torch.dtype) -> None:
    rows = hard_numbers(100, 64)
    rows = rows[np.isfinite(rows).all(axis=1)]
    words = np.zeros(rows.shape, np.uint16)
    places = np.arange(len(rows))
    round_rows(rows, words, places, places, np.uint64(1), dtype == torch.float16)
    rounded = torch.from_numpy(meaning(words, dtype))
    exact = torch.from_numpy(rows)
    nearest = exact.to(dtype)
    up, down = (torch.nextafter(nearest, torch.full_like(nearest, end)).float() for end in (np.inf, -np.inf))
    nearest = nearest.float()
    other = torch.where(nearest < exact, up, torch.where(nearest > exact, down, nearest))
    # Below 2**-40 float16 has fewer random bits than digits, and the nearest of 0 is 0.
    assert bool(((rounded == nearest) | (rounded == other) | (exact.abs() < 2.0**-40) & (rounded == 0)).all())


@pytest.mark.parametrize(
    "dtype, numbers",
    [
        (torch.bfloat16, [1.0 + 2.0**-10, -1.003, 3.14159, -7.7e-20, 1e-39, 1.2e30]),
        (torch.float16, [1.0 + 2.0**-13, -1.0003, 3.14159, 5.1e-5, -1.3e-6, 3e-8, 2e-9, 60001.0]),
    ],
)
def test_the_mean_of_a_rounded_number_is_the_number(dtype: torch.dtype, numbers: list[float]) -> None:
    """Bernoulli's law: a share p of n draws is up, with the variance p (1 - p) / n."""
    numbers, num_draws = np.array(numbers, np.float32), 40000
    rows = np.tile(numbers, (num_draws, 1))
    words, ids = np.zeros(rows.shape, np.uint16), np.arange(num_draws)
    round_rows(rows, words, ids, ids, np.uint64(11), dtype == torch.float16)
    rounded = meaning(words, dtype).astype(np.float64)
    low, high = rounded.min(axis=0), rounded.max(axis=0)
    share = (numbers - low) / (high - low)
    error = (high - low) * np.sqrt(share * (1 - share) / num_draws)
    assert (np.abs(rounded.mean(axis=0) - numbers) < 5 * error).all()
    # Columns and rows are independent of one another.
    is_up = (rounded == high) - share
    spread = np.sqrt(np.outer(share * (1 - share), share * (1 - share)) * num_draws)
    others = ~np.eye(len(numbers), dtype=bool)
    assert (np.abs(is_up.T @ is_up)[others] < 5 * spread[others]).all()


def test_random_bits_are_uniform_and_differ_by_key_row_and_column() -> None:
    noise = noise_of(np.arange(4000), 10, 5)
    assert chisquare(np.bincount(noise.ravel() >> 8, minlength=256)).pvalue > 1e-6
    assert (noise == noise_of(np.arange(4000), 10, 6)).mean() < 0.001
    assert (noise[:, 1:] == noise[:, :-1]).mean() < 0.001
    assert (noise[1:] == noise[:-1]).mean() < 0.001
    assert np.array_equal(noise_of(np.array([17]), 3, 5), noise[17:18, :3])
