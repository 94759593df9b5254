"""The benchmark of bucket order: its runs, its row, its refusals."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError


def test_one_range_comes_first(benchmark_module):
    bucket_order = benchmark_module("bucket_order")
    assert bucket_order.kinds("4,1,8", "inside_out,random") == [
        (1, ""), (4, "inside_out"), (4, "random"), (8, "inside_out"), (8, "random"),
    ]  # fmt: skip
    with pytest.raises(InputError, match="unknown order 'inside'; did you mean 'inside_out'"):
        bucket_order.kinds("4", "inside")


def test_row_has_the_loss_of_quality(benchmark_module):
    bucket_order = benchmark_module("bucket_order")
    figures = {"edges_per_second": 12345.6, "wall_seconds": 61.23}
    one = {"num_ranges": 1, "order": "", "metrics": {"mrr": 0.35, "hits@10": 0.5}, **figures}
    four = {"num_ranges": 4, "order": "random", "metrics": {"mrr": 0.342, "hits@10": 0.5}, **figures}
    cells = [cell.strip() for cell in bucket_order.row(four, one).strip("|").split("|")]
    assert cells == ["4", "random", cells[2], "0.3420", "+0.0080", "0.5000", "12,346", "61.2"]
    assert int(cells[2]) >= 4
    assert len(cells) == len(bucket_order.HEADER.splitlines()[0].strip("|").split("|"))
