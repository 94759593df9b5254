"""Kernels for a GPU, run by Triton's interpreter beside their plain twins, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.toy_kg import REPOSITORY

INTERPRETED = """
import torch
from triton.language import constexpr
import numpy as np
from dglkge.kernels import gpu, hashing
from dglkge.sampling import device_batches, triple_order
from dglkge.step import reductions
from dglkge.step.reductions import share_in_one_pass, share_scores, sum_in_order
torch.manual_seed(1)
length, COLUMNS = 8, gpu.COLUMNS.value
gpu.LENGTH = constexpr(length)
random = torch.Generator().manual_seed(1)
for num, num_sums, width in [(1, 1, 1), (5, 5, 3), (length, 1, 2), (3 * length + 7, 1, 4), (3 * length, 3, 5),
                             (6 * length + 1, 15, COLUMNS + 3), (2 * length, 2 * length, 2)]:
    # Skewed, so that there are runs within a program and over many, and one that ends with a program.
    places = (torch.rand(num, generator=random) ** 4 * num_sums).long()
    rows = torch.randn(num, width, generator=random)
    expected = torch.zeros(num_sums, width, dtype=torch.float64).index_add_(0, places, rows.double())
    found = sum_in_order(rows, places, num_sums)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, sum_in_order(rows, places, num_sums))
for dtype, tolerance in [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)]:
    scores = 5 * torch.randn(3, 37)
    scores[0, :36] = -1e30
    shares, expected = scores.to(dtype, copy=True), scores.to(dtype, copy=True)
    logs, expected_logs = share_in_one_pass(shares), share_scores(expected)
    torch.testing.assert_close(shares.float(), expected.float(), rtol=0, atol=tolerance)
    torch.testing.assert_close(logs, expected_logs)

# Chunks: blocks with rests, one that is longer than a block, a query whose candidates are all its answer.
for options in reductions.AVERAGE, reductions.GRADIENTS:
    options.update(queries_a_block=16, candidates_a_block=16)
for num, size, num_candidates, dim, num_ids in [(50, 20, 37, 10, 40), (40, 20, 16, 16, 500), (7, 9, 3, 5, 1)]:
    num_chunks = -(-num // size)
    queries, candidates = torch.randn(num, dim), torch.randn(num_chunks, num_candidates, dim)
    answers, ids = (torch.randint(num_ids, shape, dtype=torch.int32)
                    for shape in ((num,), (num_chunks, num_candidates)))
    answers[1:] += num_ids == 1
    chunks = reductions.ChunkedScores(queries, candidates, answers, ids, size)
    true, factors, results = torch.randn(num), torch.rand(num), []
    for differentiate in reductions.differentiate_fused, reductions.differentiate_chunks:
        kept, gradients = torch.empty(num), torch.ones_like(candidates)

        def weigh(run, logs):
            kept[run] = logs
            return (logs - torch.logaddexp(logs, true[run])).exp() * factors[run]

        results.append((differentiate(chunks, torch.float32, weigh, gradients), gradients, kept))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
device_batches.BLOCK = 64
for num in [1, 2, 3, 10, 97, 12345, 10**6, 3 * 10**9]:
    keys, window = torch.from_numpy(triple_order.round_keys(5, 3).view("i8")), range(max(0, num - 300), num)
    rows = device_batches.window_there(window, num, triple_order.halves(num), keys)
    assert (rows.numpy() == triple_order.inverse_permute(np.array(window), num, 5, 3)).all(), num
for limit in [1, 2, 5_000]:
    for before in hashing.combine(7), hashing.combine(8):
        drawn, keys = device_batches.draw_there(torch.arange(limit) + 3, before, 2, 20, 100), [before] * 20
        for parts in range(20), [2] * 20:
            words = [(key + int(hashing.GOLDEN_GAMMA) + part) % 2**64 for key, part in zip(keys, parts)]
            keys = [int(hashing.mix_word(np.uint64(word))) for word in words]
        assert (drawn.numpy() == 3 + np.stack([hashing.below(key, 100, limit) for key in keys])).all()
assert sum_in_order(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 2).tolist() == [[0.0] * 3] * 2
print("done")
"""

COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from dglkge.kernels import gpu
from dglkge.step.reductions import AVERAGE, GRADIENTS, MOST_COLUMNS

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, device=None: 0

driver.set_active(Hopper())

def compiled(kernel, *arguments, **options):
    made = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    assert len(made.asm["cubin"]) > 1000

rows, words, narrow = torch.empty(16), torch.empty(16, dtype=torch.int64), torch.empty(16, dtype=torch.int32)
half = rows.bfloat16()
for adds in (False, True):
    compiled(gpu.sum_runs, rows, words, narrow, rows, rows, 20, 3, adds=adds)
for scores in (rows, half):
    for num_columns, num_warps in ((1024, 4), (MOST_COLUMNS, 16)):
        compiled(gpu.share_row, scores, rows, 37, num_columns=num_columns, num_warps=num_warps)
chunks, sizes = (half, half, narrow, narrow), (30, 10, 1, 100)
for width in (16, 128):
    compiled(gpu.average_candidates, chunks, rows, rows, sizes, width=width, **AVERAGE)
    compiled(gpu.add_candidate_gradients, chunks, rows, rows, rows, sizes, width=width, **GRADIENTS)
for num, halves in ((1, (1, 1)), (1000, (31, 33)), (3 * 10**9, (54772, 54773))):
    compiled(gpu.walk_back, words, words, num - 1, 1, num, halves, num_rounds=6, block=1024)
    compiled(gpu.draw_ids, words, words, num - 2**62, 1, num, 1, num, block=1024)
print("done")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["interpreted", "compiled"])
def test_kernels_give_what_their_twins_give_and_compile_for_a_gpu_that_is_not_here(script: str) -> None:
    environment = {"TRITON_INTERPRET": "1"} if script is INTERPRETED else {}
    options = {"cwd": REPOSITORY, "env": {**os.environ, **environment}, "timeout": 200}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, **options)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
