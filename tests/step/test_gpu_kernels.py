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
from dglkge.step import gpu_kernels
from dglkge.step.reductions import share_in_one_pass, share_scores, sum_in_order
length, COLUMNS = 8, gpu_kernels.COLUMNS.value
gpu_kernels.LENGTH = constexpr(length)
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
assert sum_in_order(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 2).tolist() == [[0.0] * 3] * 2
print("done")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dglkge.step.gpu_kernels import share_row, sum_runs
from dglkge.step.reductions import MOST_COLUMNS

def compiled(kernel, types, values, num_warps):
    made = triton.compile(
        ASTSource(kernel, types, values), target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
    )
    assert len(made.asm["cubin"]) > 1000

rows = "*fp32"
types = dict(rows=rows, order="*i64", places="*i32", sums=rows, parts=rows, num_rows="i32", width="i32",
             adds="constexpr")
for adds in (False, True):
    compiled(sum_runs, types, dict(adds=adds), 4)
for scores in ("*fp32", "*bf16"):
    types = dict(scores=scores, logs="*fp32", width="i32", num_columns="constexpr")
    for num_columns, num_warps in ((1024, 4), (MOST_COLUMNS, 16)):
        compiled(share_row, types, dict(num_columns=num_columns), num_warps)
print("done")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["interpreted", "compiled"])
def test_kernels_give_what_their_twins_give_and_compile_for_a_gpu_that_is_not_here(script: str) -> None:
    environment = {"TRITON_INTERPRET": "1"} if script is INTERPRETED else {}
    options = {"cwd": REPOSITORY, "env": {**os.environ, **environment}, "timeout": 200}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, **options)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
