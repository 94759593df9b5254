"""Every score function under the autocast of the training step: values and gradients near float32's."""

from __future__ import annotations

import pytest
import torch

from dglkge.errors import InputError
from dglkge.model.functions.bigraph_scores import NAMES
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import Side

DIM = 32


def scores_and_gradients(model, side, is_narrow):
    random = torch.Generator().manual_seed(0)
    given, candidates = (torch.randn(n, DIM, generator=random, requires_grad=True) for n in (12, 40))
    relations = (0.3 * torch.randn(12, model.relation_width, generator=random)).requires_grad_()
    query = model.query(given, relations, side, torch.arange(12) % 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        scores = model.compare(query, candidates).to(query.dtype)
    weights = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    rows = (given, relations, candidates)
    return scores, torch.autograd.grad((scores * weights).sum(), rows, materialize_grads=True)


@pytest.mark.parametrize("name", [*SCORE_FUNCTIONS, *NAMES])
def test_scores_and_gradients_are_near_those_of_float32(name):
    for reciprocal in (True, False):
        try:
            model = build_model(name, DIM, reciprocal)
        except InputError:
            # A few have reciprocal relations only.
            assert not reciprocal
            continue
        for side in Side:
            expected, of_expected = scores_and_gradients(model, side, is_narrow=False)
            found, of_found = scores_and_gradients(model, side, is_narrow=True)
            assert (found - expected).abs().max() < 0.02 * expected.abs().max()
            for got, wanted in zip(of_found, of_expected):
                assert (got - wanted).norm() <= 0.05 * wanted.norm()
