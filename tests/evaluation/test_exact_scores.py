"""A pair's float64 score depends on its two rows only, bit by bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dglkge.evaluation.queries import exact_scores, pairs_per_block
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from tests.model.dense_oracle import FORWARD_ONLY
from tests.model.score_oracle import fitting_dim


@pytest.mark.parametrize("name", sorted(SCORE_FUNCTIONS))
def test_place_and_company_do_not_matter(name):
    for dim in [2, 6, 50, 400]:
        dim = fitting_dim(name, dim)
        model = build_model(name, dim, name in FORWARD_ONLY)
        random = torch.Generator().manual_seed(0)
        width = model.query_dim
        query = torch.randn(5, width, generator=random, dtype=torch.float64)
        rows = torch.randn(8, dim, generator=random)
        rows[6] = rows[1]
        num_pairs = 2 * pairs_per_block(width) + 37
        queries = torch.randint(5, (num_pairs,), generator=random)
        places = torch.randint(8, (num_pairs,), generator=random)
        together = exact_scores(model, query, queries, rows, places)
        table = torch.stack(
            [
                torch.cat(
                    [exact_scores(model, query, torch.tensor([q]), rows, torch.tensor([r])) for r in range(8)]
                )
                for q in range(5)
            ]
        )
        assert torch.equal(together, table[queries, places])
        assert torch.equal(table[:, 6], table[:, 1])
        torch.testing.assert_close(together, model.compare_pairs(query[queries], rows[places].double()))


@pytest.mark.parametrize("num_pairs", [1, 512, 1200])
def test_all_blocks_have_one_shape(num_pairs):
    model = build_model("distmult", 4, False)
    shapes = set()

    def compare_pairs(query, candidates):
        shapes.update([tuple(query.shape), tuple(candidates.shape)])
        return model.score_function.compare_pairs(query, candidates)

    index = torch.arange(num_pairs)
    rows = torch.arange(4.0 * num_pairs).reshape(num_pairs, 4)
    with mock.patch.object(model, "compare_pairs", compare_pairs):
        found = exact_scores(model, rows.double(), index, rows, index)
    assert shapes == {(512, 4)}
    assert found.tolist() == rows.double().square().sum(1).tolist()


def test_no_pairs():
    model = build_model("distmult", 4, False)
    none = torch.zeros(0, dtype=torch.long)
    found = exact_scores(model, torch.zeros(2, 4, dtype=torch.float64), none, torch.zeros(3, 4), none)
    assert found.shape == (0,) and found.dtype == torch.float64


def test_equal_with_any_number_of_threads():
    model = build_model("complex", 400, False)
    random = torch.Generator().manual_seed(1)
    query, rows = torch.randn(9, 400, generator=random).double(), torch.randn(9, 400, generator=random)
    index = torch.arange(9).repeat(100)
    before = torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.append(exact_scores(model, query, index, rows, index.flip(0)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
