"""The benchmark's formulas in plain torch are those of the library."""

from __future__ import annotations

import pytest
import torch

from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import Side
from tests.model.dense_oracle import DENSE

DIM = 8


def test_every_score_function_has_a_peer(benchmark_module):
    peer = benchmark_module("measuring.plain_torch_scores")
    assert set(peer.KINDS) == {
        name
        for name in SCORE_FUNCTIONS
        if SCORE_FUNCTIONS.get(name).__module__.startswith("dglkge") and name not in DENSE
    }


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", [name for name in SCORE_FUNCTIONS if name not in DENSE])
def test_scores_are_equal(benchmark_module, name, side):
    peer = benchmark_module("measuring.plain_torch_scores")
    score_function = build_model(name, DIM, True).score_function
    draw = torch.Generator().manual_seed(0)
    shape = {"generator": draw, "dtype": torch.float64}
    given, candidates = torch.randn(5, DIM, **shape), torch.randn(5, DIM, **shape)
    relation = torch.randn(5, peer.relation_dim(name, DIM), **shape)
    tails = side is Side.TAIL
    expected = score_function.compare_plainly(score_function.query(given, relation, side), candidates)
    query = peer.queries(name, given, relation, tails)
    torch.testing.assert_close(peer.compare(name, query, relation, candidates, tails), expected)
    pairs = peer.compare(name, query, relation, candidates.unsqueeze(1), tails)
    torch.testing.assert_close(pairs.squeeze(1), expected.diagonal())
